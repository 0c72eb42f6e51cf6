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
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ALLOCATORS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "lowtide": "",
}
WARM, MEASURED, TIMED, ROUNDS = 8, 3, 5, 4
HERE = Path(__file__).parent


def ready() -> None:
    """The imports are done: wait for the GPU, which one process has at a time."""
    print("ready", flush=True)
    sys.stdin.readline()


def timed(step: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` steps."""
    import torch

    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times


def memory_after(step: Callable[[], object]) -> dict[str, int]:
    """What a few steps reserve and allocate at most, once the cache has been emptied."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(MEASURED):
        step()
    torch.cuda.synchronize()
    return {
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
    }


def case(name: str, allocator: str, steps_folder: str) -> dict[str, Any]:
    """One model with one allocator, in this process."""
    import torch
    import torchvision  # noqa: F401 - imported before the GPU is waited for
    import transformers  # noqa: F401
    from subjects import SUBJECTS

    import lowtide
    from lowtide._runtime.core import Mode

    entry = SUBJECTS[name]
    ready()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    subject = entry.make()
    kept: list[Any] = [None]

    def step() -> None:
        kept[0] = subject.step(entry.batch)

    for _ in range(WARM):
        step()
    if allocator != "lowtide":
        return memory_after(step)
    with lowtide.fit(subject.model, subject.optimizer) as tide:
        for _ in range(WARM):
            step()
        assert tide._pool is not None
        assert tide._place is not None
        core = tide._place.core
        figures: dict[str, Any] = memory_after(step)
        summary = tide._pool.summary()
        figures["summary"] = {key: getattr(summary, key) for key in summary.__slots__}
        if steps_folder:
            record = core.step(0, 1)
            write_step(record, Path(steps_folder), name)
        times: dict[Mode, list[float]] = {Mode.PASS: [], Mode.REPLAY: []}
        for _ in range(ROUNDS):  # in turn, so that what drifts drifts for both
            for mode, found in times.items():
                core.set_mode(mode)
                timed(step, 2)
                found += timed(step, TIMED)
    figures["plain_seconds"], figures["step_seconds"] = map(statistics.median, times.values())
    figures["step_ratio"] = figures["step_seconds"] / figures["plain_seconds"]
    return figures


def write_step(record: Any, folder: Path, name: str) -> None:
    """A recorded step, in the form that the fuzzer and the tests read."""
    rows = zip(record.sizes, record.made, record.freed, strict=True)
    lines = [str(record.ticks), *(f"{size} {made} {freed}" for size, made, freed in rows)]
    file = name.lower().replace("/", "-").replace(" ", "-") + ".step"
    (folder / file).write_text("\n".join(lines) + "\n")


def same_numbers(name: str, steps: int = 50) -> dict[str, Any]:
    """Losses of plain training and of training in the pool, dropout and all."""
    import torch
    import torchvision  # noqa: F401
    import transformers  # noqa: F401
    from subjects import SUBJECTS

    import lowtide

    ready()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as deterministic algorithms want it
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)  # their backward differs from run to run
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    batch = max(2, SUBJECTS[name].batch // 8)

    def losses(pool: bool) -> list[float]:
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        subject = SUBJECTS[name].make()
        subject.model.train()
        if not pool:
            found = [subject.step(batch) for _ in range(steps)]
        else:
            with lowtide.fit(subject.model, subject.optimizer):
                found = [subject.step(batch) for _ in range(steps)]
        return [loss.item() for loss in found]

    plain, again, pool = losses(False), losses(False), losses(True)
    return {"steps": steps, "plain_repeats": plain == again, "identical": plain == pool}


def alternating(steps: int = 1000) -> dict[str, Any]:
    """Batches of three sizes in turn, with an evaluation now and then: does anything grow?"""
    import torch
    import torchvision  # noqa: F401
    from subjects import SUBJECTS

    import lowtide

    ready()
    subject = SUBJECTS["ResNet-18"].make()
    images = torch.randn(64, 3, 224, 224, device="cuda")
    reserved = {}
    with lowtide.fit(subject.model, subject.optimizer) as tide:
        for i in range(steps + 1):
            subject.step((64, 48, 23)[i % 3])
            if i % 50 == 0:
                subject.model.eval()
                with torch.no_grad():
                    for _ in range(3):
                        subject.model(images)
                subject.model.train()
            if i in (100, steps):
                torch.cuda.synchronize()
                reserved[i] = torch.cuda.memory_reserved()
        assert tide._pool is not None
        summary = tide._pool.summary()
    first, last = reserved.values()
    return {
        "steps": steps,
        "reserved_bytes_at_100": first,
        "reserved_bytes_at_end": last,
        "plans": summary.plans,
        "planned_share": summary.planned / summary.allocations,
    }


def out_of_memory() -> dict[str, Any]:
    """A step that fits nowhere is refused as ever, and afterwards training goes on in the pool."""
    import torch
    import torchvision  # noqa: F401
    from subjects import SUBJECTS

    import lowtide

    ready()
    subject = SUBJECTS["ResNet-18"].make()
    with lowtide.fit(subject.model, subject.optimizer) as tide:
        for _ in range(WARM):
            subject.step(64)
        reserved = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((reserved + (256 << 20)) / total)
        raised = 0
        try:
            subject.step(1024)
        except torch.OutOfMemoryError:
            raised += 1
        subject.optimizer.zero_grad()
        # Fits only where the arena has room: its step is over, its blocks are gone.
        odd = torch.empty(reserved // 2, dtype=torch.uint8, device="cuda")
        del odd
        losses = [subject.step(64).item() for _ in range(6)]
        assert tide._pool is not None
        replayed = tide._pool.summary().replayed
    return {"raised": raised, "went_on": all(x == x for x in losses), "replayed": replayed}


def cost(rounds: int = 41) -> dict[str, Any]:
    """Nanoseconds for an allocation and its free, on recorded steps: native and pool."""
    import torch

    import lowtide
    from lowtide._native import Recipe, built
    from lowtide._runtime.core import StepRecord
    from lowtide._runtime.torch_build import recipe

    how = recipe()
    path = built(Recipe("pool-cost", "the timing loop", (HERE / "cost",), how.flags, how.links))
    library = ctypes.CDLL(str(path))
    library.lowtide_cost.restype = ctypes.c_double
    callback = ctypes.CFUNCTYPE(None)
    ready()
    torch.ones(1, device="cuda")

    def measure(step: StepRecord, mark: Callable[[], None]) -> float:
        columns = [
            (ctypes.c_int64 * len(step.sizes))(*c) for c in (step.sizes, step.made, step.freed)
        ]
        found = library.lowtide_cost(
            ctypes.c_int64(len(step.sizes)), *columns, ctypes.c_int32(rounds), callback(mark)
        )
        return float(found)

    figures = {}
    for file in sorted((HERE.parent / "tests" / "data" / "steps").glob("*.step")):
        ticks, *rows = file.read_text().splitlines()
        sizes, made, freed = zip(*(map(int, row.split()) for row in rows), strict=True)
        step = StepRecord(list(sizes), list(made), list(freed), [], [], int(ticks))
        native = measure(step, lambda: None)
        torch.cuda.empty_cache()
        with lowtide.fit() as tide:
            assert tide._pool is not None
            measure(step, tide._pool.mark)  # it is planned
            pool = measure(step, tide._pool.mark)
            planned = tide._pool.summary().planned
        figures[file.stem] = {"native_ns": native, "pool_ns": pool, "planned": planned}
    return figures


def run(task: tuple[str, ...]) -> subprocess.Popen[str]:
    """The script again, in a process of its own that prints one line of JSON."""
    settings = ALLOCATORS.get(task[2], "") if task[0] == "case" else ""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    if not settings:
        del environment["PYTORCH_CUDA_ALLOC_CONF"]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(HERE / "pool.py"), "--task", json.dumps(task)],
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


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "case": case,
    "same": same_numbers,
    "alternating": alternating,
    "out_of_memory": out_of_memory,
    "cost": cost,
}
DROPOUT = ("GPT-2 medium", "BERT-large", "EfficientNet-b0", "T5-base")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="these models, or these other tasks")
    parser.add_argument("--steps", type=Path, help="write each recorded step here")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        name, *arguments = json.loads(options.task)
        print(json.dumps(TASKS[name](*arguments)))
        return

    from machine import machine_facts
    from subjects import SUBJECTS

    from lowtide._runtime.torch_build import build_pool

    began = time.perf_counter()
    build_pool()
    build_seconds = time.perf_counter() - began
    chosen = options.only.split(",") if options.only else [*SUBJECTS, *TASKS]
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
    alone += [(name,) for name in ("alternating", "out_of_memory", "cost") if name in chosen]
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
