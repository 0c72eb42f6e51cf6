"""The pool beside PyTorch's allocators: bytes reserved, step time, cost of a call, same numbers.

python benchmarks/pool.py --out benchmarks/results/pool.json [--only VGG-16,...] [--steps FOLDER]

A file that is there is added to, so that a run may be parted with --only.

Memory: warm up, empty the cache, run a few more steps, and take the most that was reserved and the
most that was allocated in those. A fresh process for each model and allocator; where only memory
is measured, a few share the GPU.
Time: in lowtide's process, alone on the machine: a few steps with the default allocator, to which
the pool then hands everything on, a few with the pool, and so on in turn.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ALLOCATORS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "lowtide": "",
}
HERE = Path(__file__).parent


def run(task: tuple[str, ...]) -> subprocess.Popen[str]:
    """A task of pool_tasks.py in a process of its own, which prints one line of JSON."""
    settings = ALLOCATORS.get(task[2], "") if task[0] == "case" else ""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    if not settings:
        del environment["PYTORCH_CUDA_ALLOC_CONF"]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(HERE / "pool_tasks.py"), json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let the process have the GPU, and take its answer."""
    said, complaint = process.communicate("go\n")
    if process.returncode:
        return {"error": (complaint.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found


def imported(process: subprocess.Popen[str]) -> None:
    """Wait until the process says that it is ready."""
    assert process.stdout is not None
    process.stdout.readline()


Answers = Iterator[tuple[tuple[str, ...], dict[str, Any]]]


def together(tasks: list[tuple[str, ...]], waiting: int = 12, running: int = 5) -> Answers:
    """Each task's answer; a few share the GPU while others load their imports."""
    gpu = threading.Semaphore(running)

    def one(task: tuple[str, ...]) -> dict[str, Any]:
        process = run(task)
        imported(process)
        with gpu:
            return finished(process)

    with ThreadPoolExecutor(waiting) as threads:
        yield from zip(tasks, threads.map(one, tasks), strict=True)


def one_by_one(tasks: list[tuple[str, ...]], batch: int = 8) -> Answers:
    """Each task's answer, alone on the machine: a batch has loaded its imports before."""
    for start in range(0, len(tasks), batch):
        processes = [(task, run(task)) for task in tasks[start : start + batch]]
        for _, process in processes:
            imported(process)
        for task, process in processes:
            yield task, finished(process)


OTHERS = ("alternating", "out_of_memory", "cost")
DROPOUT = ("GPT-2 medium", "BERT-large", "EfficientNet-b0", "T5-base")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="these models, or these other tasks")
    parser.add_argument("--steps", type=Path, help="write each recorded step here")
    options = parser.parse_args()
    from machine import machine_facts
    from subjects import SUBJECTS

    from lowtide._runtime.torch_build import build_pool

    began = time.perf_counter()
    build_pool()
    build_seconds = time.perf_counter() - began
    chosen = options.only.split(",") if options.only else [*SUBJECTS, *OTHERS, "same"]
    names = [name for name in SUBJECTS if name in chosen]
    results: dict[str, Any] = {"models": {}, "same": {}}
    if options.out and options.out.exists():  # measured in several runs
        results = json.loads(options.out.read_text())
    results |= {"machine": machine_facts(), "build_seconds": build_seconds}
    results["models"] |= {name: {"batch": SUBJECTS[name].batch} for name in names}
    beside: list[tuple[str, ...]] = [
        ("case", name, allocator, "")
        for allocator in ALLOCATORS
        for name in names
        if allocator != "lowtide"
    ]
    alone: list[tuple[str, ...]] = [
        ("case", name, "lowtide", str(options.steps or "")) for name in names
    ]
    alone += [(name,) for name in OTHERS if name in chosen]
    alone += [("same", name) for name in DROPOUT if "same" in chosen]
    for task, figures in itertools.chain(together(beside), one_by_one(alone)):
        if task[0] == "case":
            results["models"][task[1]][task[2]] = figures
            if task[2] == "lowtide":
                show(task[1], results["models"][task[1]])
        else:
            if task[0] == "same":
                results["same"][task[1]] = figures
            else:
                results[task[0]] = figures
            print(*task, figures, flush=True)
        if options.out:  # what is there is kept, should the rest fail
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s")


def show(name: str, model: dict[str, Any]) -> None:
    """A line for one model."""
    parts = [f"{name:16}"]
    for allocator in ALLOCATORS:
        figures = model[allocator]
        if "error" in figures:
            parts.append(f"{allocator} failed: {figures['error'][:150]}")
            continue
        over = figures["reserved_bytes"] / figures["allocated_bytes"] - 1
        parts.append(f"{allocator} {figures['reserved_bytes'] / 2**30:.2f} (+{over:.1%})")
    if "step_ratio" in model["lowtide"]:
        parts.append(f"step x{model['lowtide']['step_ratio']:.4f}")
    print(" ".join(parts), flush=True)


if __name__ == "__main__":
    main()
