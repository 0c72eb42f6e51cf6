"""A device -> the Machine around it, measured in a few seconds.

No random number is drawn and no setting of torch stays changed, so a training that follows is
the same with and without it.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from lowtide._errors import BadInput
from lowtide._ir import Link, Machine
from lowtide._machine.cache import remember, remembered
from lowtide._machine.disk import measure_disk, rising
from lowtide._machine.host import available_bytes, total_bytes
from lowtide._machine.link import share_together
from lowtide._units import format_bytes

_SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_REPEATS = 8
_SHARE = 0.8  # of free host memory or disk; the rest is the user's
_HOLD_CYCLES = 4_000_000  # some ms in which everything timed is queued, so no launch is timed
_LONGEST_PRODUCT = 0.05  # seconds; slower cards get smaller matrices
_FELT = 0.6  # of what copies cost kernels at the memory's speed: what trainings were seen to feel
_SIDES = (2048, 4096, 8192)
_PRECISIONS = (
    ("float32", torch.float32, "ieee"),
    ("tfloat32", torch.float32, "tf32"),
    ("bfloat16", torch.bfloat16, "ieee"),
    ("float16", torch.float16, "ieee"),
)

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    pass


def machine_here(
    device: torch.device | str,
    progress: Progress = _silent,
    *,
    folder: Path | None = None,
    again: bool = False,
    only_link: bool = False,
) -> Machine:
    """The machine as remembered, or else measured and remembered.

    What changes by the hour, the free bytes of the tier below, is always today's. With
    `only_link` a machine that is not remembered yet gets only its link measured, in a moment
    and a few MiB: for use in the middle of a training.
    """
    known = None if again else remembered(machine_name(device, folder))
    if known is None:
        machine = measure(device, progress, folder=folder, only_link=only_link)
        if not only_link:
            remember(machine)
        return machine
    return dataclasses.replace(known, host_bytes=_host_bytes(torch.device(device), folder))


def machine_name(device: torch.device | str, folder: Path | None = None) -> str:
    """The name a measured machine gets; files elsewhere make another machine."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"main memory of {_processor()}, files in {_place(folder)}"


def measure(
    device: torch.device | str,
    progress: Progress = _silent,
    *,
    folder: Path | None = None,
    only_link: bool = False,
) -> Machine:
    """What `device` and its link to the tier below can do.

    On CUDA that tier is pinned host memory; otherwise the device is main memory and the tier a
    file in `folder`, by default the one for temporary files.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _measure_main_memory(device, _place(folder), progress)
    if device.type != "cuda":
        raise BadInput(f"lowtide cannot measure a {device.type} device: use cuda or cpu")
    try:
        with torch.cuda.device(device):
            return _measure_cuda(device, progress, only_link=only_link)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise BadInput(
            f"{device} has {format_bytes(free)} free, too little to measure it: end what uses it"
        ) from error


def _measure_main_memory(device: torch.device, folder: Path, progress: Progress) -> Machine:
    progress("measuring the file tier")
    disk = measure_disk(folder)
    progress("measuring main memory")
    count = max(1 << 20, min(16 << 20, available_bytes() // 8))
    source, target = (torch.zeros(count, dtype=torch.uint8, device="cpu") for _ in range(2))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    through = "measured: a temporary file, through the system's file cache"
    return Machine(
        name=machine_name(device, folder),
        device_bytes=total_bytes(),
        host_bytes=int(_SHARE * disk.free_bytes),
        out=disk.out,
        back=disk.back,
        together=disk.together,
        memory_bytes_per_second=2 * count / statistics.median(times),
        sources=(
            ("device_bytes", "main memory, or the container's limit"),
            ("host_bytes", "80 % of the free bytes in the folder"),
            ("out", through),
            ("back", through),
            ("together", "measured: a write and a read at once"),
            ("memory_bytes_per_second", "measured: a copy inside main memory, read and write"),
        ),
    )


def _measure_cuda(device: torch.device, progress: Progress, *, only_link: bool) -> Machine:
    progress("measuring the link")
    out, back, together = _measure_link(device)
    drag = _measure_drag(device)
    bandwidth = 0.0
    rates: tuple[tuple[str, float], ...] = ()
    if not only_link:
        progress("measuring the device's memory")
        bandwidth = _measure_memory(device)
        progress("measuring matrix products")
        rates = _measure_products(device)
    _, total = torch.cuda.mem_get_info(device)
    _give_back()
    return Machine(
        name=machine_name(device),
        device_bytes=total,
        host_bytes=_host_bytes(device, None),
        out=out,
        back=back,
        together=together,
        drag=drag,
        memory_bytes_per_second=bandwidth,
        flops_per_second=rates,
        sources=(
            ("device_bytes", "what the driver reports"),
            ("host_bytes", "80 % of the main memory that was available"),
            ("out", "measured: copies to pinned memory"),
            ("back", "measured: copies from pinned memory"),
            ("together", "measured: copies both ways at once"),
            ("drag", "60 % of what kernels at the memory's speed were measured to feel"),
            ("memory_bytes_per_second", "measured: a copy inside the device, read and write"),
            ("flops_per_second", "measured: a product of square matrices"),
        ),
    )


def _measure_link(device: torch.device) -> tuple[Link, Link, float]:
    largest = _SIZES[-1]
    host = torch.zeros(largest, dtype=torch.uint8, device="cpu", pin_memory=True)
    card = torch.zeros(largest, dtype=torch.uint8, device=device)
    one, other = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copies_out(size: int) -> Callable[[], object]:
        return lambda: host[:size].copy_(card[:size], non_blocking=True)

    def copies_back(size: int) -> Callable[[], object]:
        start = largest - size  # apart from what `copies_out` touches, up to half of it
        return lambda: card[start:].copy_(host[start:], non_blocking=True)

    one.wait_stream(torch.cuda.current_stream(device))  # the zeros are written
    out = [_seconds(one, copies_out(size)) for size in _SIZES]
    back = [_seconds(one, copies_back(size)) for size in _SIZES]
    half = largest // 2
    alone_out, alone_back = (_seconds(one, make(half)) for make in (copies_out, copies_back))
    both = _seconds_together(one, other, copies_out(half), copies_back(half))
    return (
        Link(_SIZES, rising(out)),
        Link(_SIZES, rising(back)),
        share_together(_REPEATS * alone_out, _REPEATS * alone_back, both),
    )


def _seconds(stream: torch.cuda.Stream, work: Callable[[], object]) -> float:
    """The median time of `work` on `stream`, once it is warm."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 2)]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_HOLD_CYCLES)
        for mark in marks:
            stream.record_event(mark)
            if mark is not marks[-1]:
                work()
    stream.synchronize()
    times: list[float] = [start.elapsed_time(end) for start, end in pairwise(marks)]
    return statistics.median(times[1:]) / 1e3  # the first was the warm-up


def _seconds_together(
    one: torch.cuda.Stream,
    other: torch.cuda.Stream,
    first: Callable[[], object],
    second: Callable[[], object],
) -> float:
    """From the start of both streams' copies to the end of the later."""
    start, end_one, end_other = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    with torch.cuda.stream(one):
        torch.cuda._sleep(_HOLD_CYCLES)
    one.record_event(start)
    other.wait_event(start)  # so that both begin at once
    for stream, work, end in ((one, first, end_one), (other, second, end_other)):
        with torch.cuda.stream(stream):
            for _ in range(_REPEATS):
                work()
        stream.record_event(end)
    one.synchronize()
    other.synchronize()
    times: list[float] = [start.elapsed_time(end) for end in (end_one, end_other)]
    return max(times) / 1e3


def _measure_drag(device: torch.device) -> float:
    """How much later kernels are done for each second in which something is copied.

    Measured with kernels that do nothing but read and write; a training has others, too.
    """
    size, count = _SIZES[-1] // 2, 48
    host = torch.zeros(2 * size, dtype=torch.uint8, device="cpu", pin_memory=True)
    card = torch.zeros(4 * size, dtype=torch.uint8, device=device)
    computing = torch.cuda.current_stream(device)
    ways = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def seconds(copies: bool) -> tuple[float, float]:
        """Of the kernels, and of the copies beside them."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        start, *ends = marks
        torch.cuda._sleep(_HOLD_CYCLES)
        computing.record_event(start)
        for way, end in zip(ways, ends[1:], strict=True):
            way.wait_event(start)
            with torch.cuda.stream(way):
                for _ in range(2 if copies else 0):
                    if way is ways[0]:
                        host[:size].copy_(card[:size], non_blocking=True)
                    else:
                        card[size : 2 * size].copy_(host[size:], non_blocking=True)
            way.record_event(end)
        for _ in range(count):
            card[2 * size : 3 * size].copy_(card[3 * size :])
        computing.record_event(ends[0])
        for stream in (computing, *ways):
            stream.synchronize()
        computed, out, back = (start.elapsed_time(end) / 1e3 for end in ends)
        return computed, out + back

    seconds(copies=True)
    alone = statistics.median(seconds(copies=False)[0] for _ in range(5))
    count = max(count, int(count * 1.2 * max(seconds(copies=True)) / 2 / alone))  # outlast them
    alone = statistics.median(seconds(copies=False)[0] for _ in range(5))
    beside = [seconds(copies=True) for _ in range(5)]
    drags = [(computed - alone) / copied for computed, copied in beside]
    return min(0.5, max(0.0, _FELT * statistics.median(drags)))


def _measure_memory(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    count = max(1 << 20, min(64 << 20, free // 8))
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    return 2 * count / _seconds(stream, lambda: target.copy_(source))


def _measure_products(device: torch.device) -> tuple[tuple[str, float], ...]:
    rates = []
    for name, dtype, precision in _PRECISIONS:
        with _precision(precision):
            try:
                rate = _product_rate(device, dtype)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # a card that does not have this dtype
                continue
        rates.append((name, rate))
    return tuple(rates)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    for side in _SIDES:
        free, _ = torch.cuda.mem_get_info(device)
        if best and (2 * side**3 / best > _LONGEST_PRODUCT or 32 * side**2 > free):
            break
        # Not zeros, which take less power and so run faster than a training can.
        row = torch.arange(side, dtype=torch.int32, device=device)
        left = (((row[:, None] * 31 + row * 17) % 251 - 125) / 125).to(dtype)
        result = torch.empty_like(left)
        product = partial(torch.mm, left, left, out=result)
        product()  # libraries are loaded here, not in the time
        seconds = _seconds(torch.cuda.current_stream(device), product)
        best = max(best, 2 * side**3 / seconds)
    return best


@contextmanager
def _precision(name: str) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = name
    try:
        yield
    finally:
        products.fp32_precision = before


def _give_back() -> None:
    """Return the measurement's buffers, which torch would keep for others of their size."""
    torch.cuda.empty_cache()
    give_back_pinned = getattr(torch._C, "_host_emptyCache", None)  # not in every version
    if give_back_pinned is not None:
        give_back_pinned()


def _host_bytes(device: torch.device, folder: Path | None) -> int:
    if device.type == "cuda":
        return int(_SHARE * available_bytes())
    try:
        place = os.statvfs(_place(folder))
    except OSError as error:
        raise BadInput(f"cannot use {_place(folder)}: {error.strerror}") from error
    return int(_SHARE * place.f_bavail * place.f_frsize)


def _place(folder: Path | None) -> Path:
    return Path(tempfile.gettempdir()) if folder is None else folder


def _processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
        return next(row.split(":", 1)[1].strip() for row in rows if row.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return "unknown processor"
