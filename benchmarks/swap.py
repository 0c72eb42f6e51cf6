"""Swapping beside what there is: peak and step time, planned and measured.

python benchmarks/swap.py --out benchmarks/results/swap.json [--only GPT-2,...] [--budgets 0.8,0.6]

One process for each work and method. In lowtide's, plain steps are timed before and after each
budget. Works are measured side by side, and use the GPU in turns (turns.py), but for those whose
steps wait for the host. A file that is there is added to, so that a run may be parted with --only,
or cut off and gone on with by --resume.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from measurers import Measurer
from turns import Turn, table, write_results

SIDE_BY_SIDE = 2  # works: what they pin has to fit in main memory
WARM, TIMED, MOST_TIMED = 3, 6, 200
TIMED_SECONDS = 1.0  # of short steps, as many as take so long: the host is not always as fast
LEARNING, PATIENCE, FOLLOWED = 8, 36, 2  # steps before: at least, at most, where they are to lie
BUDGETS = ("free", "0.95", "0.9", "0.8", "0.6", "0.4")
AIMED = {"Llama-1B-like 4x2048": ("30GiB",)}  # besides
OTHERS = ("plain", "offload_activations", "save_on_cpu")
LONGEST_FIRST = (  # so that none is left to itself in the end
    "GPT-2 medium 16x1024",
    "Llama-1B-like 4x2048",
    "ResNet-50 256 tf32",
)
ALONE = ("VGG-16 32x32 100",)  # its steps wait for the host, which others that plan hold up


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="works whose names begin like one of these")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--methods", default=",".join(["plain", "lowtide", *OTHERS[1:]]))
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--side-by-side", type=int, default=SIDE_BY_SIDE, help="works at once")
    parser.add_argument("--traces", default="", help="write each traced step into this folder")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        import torch  # noqa: F401 - before the turn

        for found in measure(Turn(), *json.loads(options.task)):
            print(json.dumps(found), flush=True)
        return
    from machine import machine_facts
    from subjects import TIDY

    results: dict[str, Any] = {"works": {}}
    if options.out and options.out.exists():
        results = json.loads(options.out.read_text())
    results["machine"] = machine_facts()
    began = time.perf_counter()
    lock = threading.Lock()

    def measure_work(name: str, also: Mapping[str, str]) -> None:
        for method in options.methods.split(","):
            budgets = options.budgets.split(",") if method == "lowtide" else []
            if options.budgets == ",".join(BUDGETS) and budgets:
                budgets[3:3] = AIMED.get(name, ())
            if options.resume:
                there = results["works"].get(name, {}).get(method, {})
                budgets = [one for one in budgets if one not in there]
                if not budgets and there:
                    continue
            for row in run(name, method, budgets, options.traces, also):
                row["commit"] = results["machine"]["commit"]  # a file may have rows of several
                show(name, method, row)
                with lock:
                    work = results["works"].setdefault(name, {})
                    if method != "lowtide":
                        work[method] = row
                    elif "budget" in row:  # else it has failed as a whole, and what was there stays
                        work.setdefault("lowtide", {})[row["budget"]] = row
                    if options.out:
                        write_results(options.out, results)

    begins = tuple(options.only.split(",")) if options.only else ("",)
    assert {*LONGEST_FIRST, *ALONE} == set(TIDY)
    for together, names in ((options.side_by_side, LONGEST_FIRST), (1, ALONE)):
        some = [name for name in names if name.startswith(begins)]
        with table() as also, ThreadPoolExecutor(together) as pool:
            for name, done in [(one, pool.submit(measure_work, one, also)) for one in some]:
                if done.exception() is not None:
                    print(f"{name:22} failed: {done.exception()!r}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


def run(
    name: str, method: str, budgets: list[str], traces: str, also: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """One method in a process of its own: a row for each budget, as they come."""
    task = json.dumps([name, method, budgets, traces])
    command = [sys.executable, "-W", "ignore", __file__, "--task", task]
    yield from Measurer(command, {**os.environ, **also}).rows()


def show(name: str, method: str, row: Mapping[str, Any]) -> None:
    """A line for each result."""
    budget = row.get("budget", "")
    if "error" in row:
        print(f"{name:22} {method:20} {budget} failed: {row['error'][:160]}", flush=True)
        return
    line = f"{name:22} {method:20} {row['seconds'] * 1e3:7.1f} ms"
    line += f" {row['peak_bytes'] / 2**30:6.2f} GiB (reserved {row['reserved_bytes'] / 2**30:.2f})"
    if "plan" in row:
        plan = row["plan"]
        line += (
            f" {budget:5} x{row['ratio']:.3f}"
            f" planned x{plan['seconds'] / plan['plain_seconds']:.3f}"
            f" {plan['seconds'] * 1e3:.1f} ms {plan['peak_bytes'] / 2**30:.2f} GiB"
            f" hidden {row['hidden']:.2f} (planned {plan['hidden']:.2f})"
            f" pinned {row['pinned_bytes'] / 2**30:.2f}"
        )
    print(line, flush=True)


def measure(
    turn: Turn, name: str, method: str, budgets: list[str], traces: str
) -> Iterator[dict[str, Any]]:
    """In this process."""
    import torch
    from subjects import TIDY

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    turn.have(alone=False)
    entry = TIDY[name]
    subject = entry.make()

    def step() -> None:
        subject.step(entry.batch)

    if method == "lowtide":
        observed: list[Any] = []
        plain: list[list[float]] = []
        turn.have(alone=True)
        for budget in budgets:
            yield under(budget, subject, step, observed, plain, turn, trace_path(traces, name))
        return
    around = context_of(method)

    def step_inside() -> None:
        with around():
            step()

    for _ in range(WARM):
        step_inside()
    torch.cuda.synchronize()
    turn.have(alone=True)
    yield measured(step_inside)


def context_of(method: str) -> Callable[[], AbstractContextManager[Any]]:
    """What a method puts around each step."""
    import torch

    if method == "save_on_cpu":
        return lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)
    if method == "offload_activations":
        from accelerate import PartialState
        from trl.models.activation_offloading import OffloadActivations

        PartialState()  # without it TRL cannot say what it has to say
        offload: AbstractContextManager[Any] = OffloadActivations()
        return lambda: offload
    return nullcontext


def timed(step: Callable[[], None]) -> list[float]:
    """Seconds of a few steps, one after the other as they are trained: from the end of one, on the
    stream that computes, to the end of the next. What is copied meanwhile goes on.
    """
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    enough = round(TIMED_SECONDS / (time.perf_counter() - began))
    count = min(max(TIMED, enough), MOST_TIMED)
    step()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends)]


def measured(step: Callable[[], None]) -> dict[str, Any]:
    """Time and peak of warmed-up steps, after emptying the cache."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = timed(step)
    return {
        "seconds": statistics.median(times),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def trace_path(folder: str, name: str) -> Path | None:
    """Where the traced step of a work goes, if it is to be kept."""
    return Path(folder) / name.lower().replace(" ", "-").replace("/", "-") if folder else None


def write_trace(observed: Any, machine: Any, path: Path) -> None:
    """The traced step, how its values are known to the runtime, and the machine it ran on."""
    import lowtide
    from lowtide._machine.file import save_machine

    path.parent.mkdir(parents=True, exist_ok=True)
    lowtide.save_trace(observed.trace, path.with_suffix(".trace"))
    save_machine(machine, path.with_suffix(".machine"))
    known = {}
    for part in fields(observed):
        of = getattr(observed, part.name)
        if isinstance(of, Mapping):
            known[part.name] = [[key, other] for key, other in of.items()]
        elif part.name != "trace":
            known[part.name] = sorted(of) if isinstance(of, frozenset) else list(of)
    path.with_suffix(".json").write_text(json.dumps(known))


def under(
    budget: str,
    subject: Any,
    step: Callable[[], None],
    observed: list[Any],
    plain: list[list[float]],
    turn: Turn,
    path: Path | None,
) -> dict[str, Any]:
    """One budget, with plain steps before it and after it; the first traced step goes to `path`."""
    import torch

    import lowtide
    from lowtide._simulate.simulate import simulate

    before = plain[-1] if plain else plain_times(step)
    try:
        with lowtide.fit(
            subject.model, subject.optimizer, policy="autoswap", budget=budget
        ) as tide:
            keep_observed(tide, observed)
            assert tide._budgeted is not None
            tide._budgeted._speed()  # is measured now, while nobody else uses the link
            # While it plans, and locks the pages of main memory: a second for 1.6 GB.
            turn.lend_during(tide._budgeted._driver, "_learn", torch.cuda.synchronize)
            learn(tide, step)
            row: dict[str, Any] = {"budget": budget, **measured(step)}
            script = tide._budgeted._driver.following.scripts[0]
            row["pinned_bytes"] = tide._budgeted.summary().below_bytes
            row["swapped_bytes"] = script.swapped_bytes
            row["modes"] = list(tide._budgeted._driver.modes)
            assert tide._budgeted._machine is not None
            outcome = simulate(observed[-1].trace, tide._budgeted._machine, script.plan.swaps)
            if path is not None and not plain:
                write_trace(observed[0], tide._budgeted._machine, path)
    except (RuntimeError, IndexError, lowtide.LowtideError) as error:
        return {"budget": budget, "error": str(error) or type(error).__name__}
    plain.append(plain_times(step))
    row["plain_seconds"] = statistics.median([*before, *plain[-1]])
    row["ratio"] = row["seconds"] / row["plain_seconds"]
    waited = max(0.0, row["seconds"] - row["plain_seconds"])
    copies = outcome.copy_seconds
    row["hidden"] = 1.0 if not copies else max(0.0, 1 - waited / copies)
    row["plan"] = {
        "peak_bytes": script.plan.peak_bytes,
        "seconds": script.plan.seconds,
        "plain_seconds": script.plan.plain_seconds,
        "plain_peak_bytes": script.plan.plain_peak_bytes,
        "copy_seconds": copies,
        "hidden": outcome.hidden,
        "swaps": len(script.plan.swaps),
    }
    return row


def learn(tide: Any, step: Callable[[], None]) -> None:
    """Until steps go by their last plan, and lie where they are planned to."""
    script, replayed = None, 0
    for count in range(1, PATIENCE + 1):
        step()
        now = 0 if tide._pool is None else tide._pool.summary().replayed
        following = tide._budgeted._driver.following
        if following.script is not script:
            script, replayed = following.script, now
        if count >= LEARNING and script is not None and now - replayed >= FOLLOWED:
            return


def plain_times(step: Callable[[], None]) -> list[float]:
    """Seconds of steps without lowtide."""
    for _ in range(WARM):
        step()
    return timed(step)


def keep_observed(tide: Any, kept: list[Any]) -> None:
    """Also keep the traced step that the plan is made from."""
    make_plan = tide._budgeted._driver._make_plan

    def plan(observed: Any, most: int | None) -> Any:
        kept.append(observed)
        return make_plan(observed, most)

    tide._budgeted._driver._make_plan = plan


if __name__ == "__main__":
    main()
