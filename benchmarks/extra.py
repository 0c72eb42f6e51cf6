"""Where the time goes that a step under a budget takes longer than a plain one: a profile of both.

python benchmarks/extra.py --out extra.json Llama:autoswap:0.9 GPT-2:tide:14.9GiB

Each case is a work (or how its name begins), a policy and a budget. Plain steps and steps that have
settled are profiled in one process, and their kernels compared (kernels.py): how much longer they
take, and beside which copies; what runs besides; and what the device waits for, host or copy.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels import (
    Steps,
    by_call,
    by_copies,
    by_gap,
    by_name,
    longest_gaps,
    read_steps,
    spent,
)
from machine import machine_facts
from pareto_works import WORKS, build, settle, step_of
from swap import WARM, learn, plain_times, timed
from turns import write_results

import lowtide

PROFILED = 3  # steps
SETTLED = {"tide": settle, "autoswap": learn}  # what to wait with until steps have


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", metavar="WORK:POLICY:BUDGET")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases: dict[str, tuple[str, str, str]] = {}
    for case in options.cases:
        parts: list[str] = case.split(":")
        if len(parts) != 3 or parts[1] not in SETTLED:
            parser.error(f"{case}: give WORK:POLICY:BUDGET, by {' or '.join(SETTLED)}")
        begins, policy, budget = parts
        name = next((one for one in WORKS if one.startswith(begins)), None)
        if name is None:
            parser.error(f"no work begins like {begins}: there are {', '.join(WORKS)}")
        cases[case] = name, policy, budget
    torch.backends.cuda.matmul.allow_tf32 = True
    results: dict[str, Any] = {"machine": machine_facts(), "cases": {}}
    for case, what in cases.items():
        row = results["cases"][case] = compare(*what)
        show(case, row)
        if options.out:
            write_results(options.out, results)
        gc.collect()
        torch.cuda.empty_cache()


def compare(name: str, policy: str, budget: str) -> dict[str, Any]:
    """One case."""
    subject = build(name)
    step = step_of(name, subject)
    plain_seconds = median(plain_times(step))
    plain = profiled(step)
    with lowtide.fit(subject.model, subject.optimizer, policy=policy, budget=budget) as tide:
        SETTLED[policy](tide, step)
        seconds = median(timed(step))
        other = profiled(step)
    return {
        "plain_seconds": plain_seconds,
        "seconds": seconds,
        "plain": spent(plain),
        "other": spent(other),
        "by_copies": by_copies(plain, other),
        "by_name": by_name(plain, other),
        "by_call": by_call(plain, other),
        "by_gap": {"plain": by_gap(plain), "other": by_gap(other)},
        "longest_gaps": longest_gaps(other),
        "summary": tide.summary(),
    }


def profiled(step: Callable[[], None]) -> Steps:
    """A few steps, and what the device did meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return read_steps(json.loads(Path(file.name).read_text())["traceEvents"], PROFILED)


def show(case: str, row: dict[str, Any]) -> None:
    """A few lines."""
    print(
        f"{case}: {row['plain_seconds'] * 1e3:.1f} ms -> {row['seconds'] * 1e3:.1f} ms,"
        f" x{row['seconds'] / row['plain_seconds']:.3f}"
    )
    for part, seconds in row["other"].items():
        print(f"  {part:8} {row['plain'][part] * 1e3:8.2f} -> {seconds * 1e3:8.2f} ms")
    for ways, one in row["by_copies"].items():
        print(
            f"  beside {ways:8} {one['plain_seconds'] * 1e3:8.2f} ms of kernels"
            f" {one['slower']:+.2%}"
        )
    for one, other in zip(row["by_gap"]["plain"], row["by_gap"]["other"], strict=True):
        print(
            f"  waits from {one['from_seconds'] * 1e6:5.0f} us"
            f" {one['times']:6.0f} -> {other['times']:6.0f}"
            f" {one['seconds'] * 1e3:8.2f} -> {other['seconds'] * 1e3:8.2f} ms"
        )
    for one in row["longest_gaps"]:
        print(
            f"  gap at {one['at'] * 1e3:8.2f} ms of {one['seconds'] * 1e3:7.3f} ms,"
            f" host {one['host'] * 1e3:7.3f}, before {one['before'][:70]}"
        )
    for one in (*row["by_call"], *row["by_name"]):
        print(
            f"  {one['plain_calls']:6.0f} -> {one['calls']:6.0f} calls"
            f" {one['plain_seconds'] * 1e3:8.2f} -> {one['seconds'] * 1e3:8.2f} ms"
            f" {one['name'][:90]}"
        )
    print(flush=True)


if __name__ == "__main__":
    main()
