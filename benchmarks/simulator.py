"""How long does it take to simulate one step with swaps?

python benchmarks/simulator.py --out benchmarks/results/simulator.json

A step of 3,300 ops made like training: forward ops make activations that backward uses in the
opposite order; 400 of the gaps are swapped. Once with swaps inside the step alone, once with
every fourth one a parameter that is away across the boundary, so that the step must settle.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine_facts

from lowtide._ir import Kind, Link, Machine, Op, OpIndex, StorageId, Swap, Trace, Value, ValueId
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.simulate import prepare, simulate, simulate_on

REPEATS = 20
OPS = 3_300
SWAPS = 400


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine_facts(), "ops": OPS, "swaps": SWAPS, "cases": {}}
    trace = make_trace(OPS)
    for name, crossing in (("within the step", 0), ("a quarter across it", SWAPS // 4)):
        swaps = make_swaps(trace, SWAPS, crossing)
        assert find_bad_swap(trace, swaps) is None
        for together in (1.0, 0.8):
            results["cases"][f"{name}, together {together}"] = case = measure(
                trace, make_machine(together), swaps
            )
            print(f"{name:<22} together {together}:", json.dumps(case))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(trace: Trace, machine: Machine, swaps: list[Swap]) -> dict[str, float]:
    """Milliseconds, and enough of the result to see that something was simulated."""
    ground = prepare(trace, machine)
    outcome = simulate(trace, machine, swaps)
    return {
        "simulate_ms": milliseconds(lambda: simulate(trace, machine, swaps)),
        "prepared_ms": milliseconds(lambda: simulate_on(ground, swaps)),
        "check_ms": milliseconds(lambda: find_bad_swap(trace, swaps)),
        "slowdown": round(outcome.seconds / outcome.plain_seconds, 4),
        "hidden": round(outcome.hidden, 4),
    }


def milliseconds(work: Callable[[], object]) -> float:
    """The median of some runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(1e3 * median(times), 3)


def make_trace(count: int) -> Trace:
    """Op i of the first half uses parameter i and makes activation i, op n-1-i uses both."""
    half = count // 2
    last = count - 1
    values = []
    ops = []
    for i in range(half):
        megabytes = 1 + i * 7 % 5
        size = megabytes << 20
        values.append(
            Value(StorageId(2 * i), 0, size, Kind.ACTIVATION, OpIndex(i), OpIndex(count - i))
        )
        values.append(
            Value(
                StorageId(2 * i + 1),
                0,
                size // 2,
                Kind.PARAMETER,
                OpIndex(0),
                OpIndex(count),
                before=True,
                after=True,
            )
        )
    for i in range(count):
        k = min(i, last - i)
        made = (ValueId(2 * k),) if i < half else ()
        used = (ValueId(2 * k + 1),) if i < half else (ValueId(2 * k), ValueId(2 * k + 1))
        ops.append(Op("mm", reads=used, writes=made, seconds=30e-6 + 1e-6 * (i * 13 % 40)))
    return Trace(tuple(ops), tuple(values), granularity_bytes=512)


def make_swaps(trace: Trace, count: int, crossing: int) -> list[Swap]:
    """The activations with the longest gaps, and the parameters of the first layers."""
    ops = len(trace.ops)
    swaps = []
    for i in range(count - crossing):
        until = ops - 1 - i
        swaps.append(_swap(2 * i, i, i + 60, until - 60, until))
    for i in range(crossing):
        k = 4 * i + 2
        after, until = ops - 1 - k, ops + k
        third = (until - after) // 3
        swaps.append(_swap(2 * k + 1, after, after + 1 + third, until - third, until))
    return swaps


def _swap(value: int, after: int, release: int, fetch: int, until: int) -> Swap:
    return Swap(ValueId(value), OpIndex(after), OpIndex(release), OpIndex(fetch), OpIndex(until))


def make_machine(together: float) -> Machine:
    """A link of about 50 GB/s."""
    link = Link((1 << 12, 1 << 20, 1 << 26), (8e-6, 28e-6, 1.3e-3))
    return Machine("made up", 0, 0, link, link, together)


if __name__ == "__main__":
    main()
