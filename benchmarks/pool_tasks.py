"""What benchmarks/pool.py measures, one task a process: pool_tasks.py '["case", "VGG-16", ...]'.

A task says that its imports are done, waits for the line that gives it the GPU, and prints its
figures.
"""

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM, MEASURED, TIMED, ROUNDS = 8, 3, 3, 10
HERE = Path(__file__).parent


def ready() -> None:
    """The imports are done: wait for the GPU, which one process has at a time."""
    print("ready", flush=True)
    sys.stdin.readline()


def timed(step: Callable[[], object], count: int) -> list[tuple[float, float]]:
    """Seconds of each of `count` steps, and how many of them Python needed to ask for it all."""
    import torch

    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        asked = time.perf_counter()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began, asked - began))
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
        rounds: dict[Mode, list[float]] = {Mode.PASS: [], Mode.REPLAY: []}
        asked: list[float] = []
        for _ in range(ROUNDS):  # in turn, so that what drifts drifts for both
            for mode, found in rounds.items():
                core.set_mode(mode)
                timed(step, 2)
                times = timed(step, TIMED)
                found.append(statistics.median(total for total, _ in times))
                asked += (share for _, share in times)
    figures["plain_rounds"], figures["step_rounds"] = rounds.values()
    figures["plain_seconds"], figures["step_seconds"] = map(statistics.median, rounds.values())
    figures["python_seconds"] = statistics.median(asked)
    figures["step_ratio"] = statistics.median(
        ours / plain for plain, ours in zip(*rounds.values(), strict=True)
    )
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


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "case": case,
    "same": same_numbers,
    "alternating": alternating,
    "out_of_memory": out_of_memory,
    "cost": cost,
}

if __name__ == "__main__":
    _name, *_arguments = json.loads(sys.argv[1])
    print(json.dumps(TASKS[_name](*_arguments)))
