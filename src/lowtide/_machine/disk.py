"""A folder -> how fast its files are written and read, as the tier below main memory."""

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lowtide._errors import BadInput
from lowtide._ir import Link
from lowtide._machine.link import share_together

_SIZES = tuple(mebibytes << 20 for mebibytes in (1, 4, 16))  # a budget may be small
_REPEATS = 5
_PIECE = 4 << 20  # of the copies that run both ways at once


@dataclass(frozen=True, slots=True)
class Disk:
    """What a folder's files can do, through the system's file cache as any program sees it."""

    free_bytes: int
    out: Link
    back: Link
    together: float


def measure_disk(folder: Path) -> Disk:
    """Write and read a file in `folder` that has no name there, so that none can stay behind."""
    try:
        free = shutil.disk_usage(folder).free
        largest = max((size for size in _SIZES if 4 * size <= free), default=0)
        if largest < _SIZES[1]:
            raise BadInput(f"{folder} has {free} bytes free: name a folder with at least 16 MiB")
        with tempfile.TemporaryFile(dir=folder, prefix="lowtide-") as file:
            return _measure(file.fileno(), free, largest)
    except OSError as error:
        raise BadInput(f"cannot measure files in {folder}: {error.strerror}") from error


def _measure(file: int, free: int, largest: int) -> Disk:
    content = memoryview(bytearray(os.urandom(1 << 20) * (largest >> 20)))
    taken = memoryview(bytearray(largest))
    sizes = tuple(size for size in _SIZES if size <= largest)
    _write(file, content, 0)  # the blocks are found once, as in a file that is used again
    out = [_median(partial(_write, file, content[:size], 0)) for size in sizes]
    back = [_median(partial(_read, file, taken[:size], 0)) for size in sizes]

    piece = min(_PIECE, largest // 2)

    def write() -> None:
        for _ in range(_REPEATS):
            _write(file, content[:piece], 0)

    def read() -> None:
        for _ in range(_REPEATS):
            _read(file, taken[:piece], piece)

    alone = _median(write), _median(read)
    both = _median(lambda: _side_by_side(write, read))
    return Disk(
        free,
        Link(sizes, rising(out)),
        Link(sizes, rising(back)),
        share_together(*alone, both),
    )


def rising(times: list[float]) -> tuple[float, ...]:
    """`times` of growing sizes without noise that would make a larger copy the faster one."""
    return tuple(max(times[: k + 1]) for k in range(len(times)))


def _median(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _side_by_side(one: Callable[[], None], other: Callable[[], None]) -> None:
    failures: list[OSError] = []

    def run() -> None:
        try:
            one()
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        other()
    finally:
        thread.join()
    if failures:
        raise failures[0]


def _write(file: int, content: memoryview, at: int) -> None:
    while content:
        count = os.pwrite(file, content, at)
        content, at = content[count:], at + count


def _read(file: int, into: memoryview, at: int) -> None:
    while into:
        count = os.preadv(file, [into], at)
        if not count:
            raise OSError(0, "a file ended early")
        into, at = into[count:], at + count
