"""The tier below main memory: a temporary file that has no name."""

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from lowtide._runtime.swap.ranges import Ranges
from lowtide._runtime.swap.tier import Copy, Place, rounded_place

_PORTION = 64 << 20  # bytes in one call


class _FileCopy:
    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        error = self._future.exception()
        if error is not None:
            error.__traceback__ = None  # its frames refer to the storage, and it to this
            raise OSError(*error.args)


class FileTier:
    """Storages of main memory in a file. It is unlinked at once: it goes with the process.

    One thread writes and one reads, straight from and into the storages' own memory.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self._file, name = tempfile.mkstemp(prefix="lowtide-", dir=folder)  # for the owner only
        os.unlink(name)
        self._limit = limit
        self._ranges = Ranges()
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "lowtide-out", _begin_worker)
        self._reader = ThreadPoolExecutor(1, "lowtide-back", _begin_worker)

    def stream(self) -> int:
        """There is only one."""
        return 0

    def prepare(self, count: int) -> None:
        """A file grows as it is written."""

    def trim(self, count: int) -> None:
        """A file may stay as long as it was: nothing is locked for it."""

    def take(self, count: int, at: int | None = None) -> Place | None:
        """At the planned place, or else the lowest."""
        count = rounded_place(count)
        with self._lock:
            if at is not None:
                if at + count > self._ranges.size and not self._grow(at + count):
                    return None
                if self._ranges.take_at(at, count):
                    return Place(at, count)
            start = self._ranges.take(count)
            if start is None and self._grow(self._ranges.size + count):
                start = self._ranges.take(count)
        return None if start is None else Place(start, count)

    def _grow(self, size: int) -> bool:
        if self._limit is not None and size > self._limit:
            return False
        try:
            os.ftruncate(self._file, size)  # takes no room on the disk yet
        except OSError:
            return False
        self._ranges.grow(size)
        return True

    def give(self, place: Place) -> None:
        """Free for another."""
        with self._lock:
            self._ranges.give(place.start, place.count)

    def out(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """The caller keeps the storage's bytes until it has waited."""
        memory = _memory(storage.data_ptr(), storage.nbytes())
        return _FileCopy(self._writer.submit(_do, _write, self._file, memory, place, storage))

    def back(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """The caller keeps the storage's bytes until it has waited."""
        memory = _memory(storage.data_ptr(), storage.nbytes())
        return _FileCopy(self._reader.submit(_do, _read, self._file, memory, place, storage))

    def pause(self) -> None:
        """Copies here wait for nothing."""

    def resume(self) -> None:
        """Copies here wait for nothing."""

    def view(self, place: Place) -> torch.UntypedStorage:
        """Mapped: read from the file when looked at, and private to the reader."""
        mapped = mmap.mmap(self._file, place.count, flags=mmap.MAP_PRIVATE, offset=place.start)
        return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()

    def held_bytes(self) -> int:
        """The length of the file."""
        return self._ranges.size

    def close(self) -> None:
        """The file is gone with its descriptor."""
        self._writer.shutdown()
        self._reader.shutdown()
        os.close(self._file)


def is_worker() -> bool:
    """Whether this thread copies: it must not wait for a copy."""
    return getattr(_thread, "copies", False)


_thread = threading.local()


def _begin_worker() -> None:
    _thread.copies = True


def _do(
    copy: Callable[[int, memoryview, int], None],
    file: int,
    memory: memoryview,
    place: Place,
    _storage: torch.UntypedStorage,  # lives for as long as its bytes are at work
) -> None:
    copy(file, memory, place.start)


def _memory(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def _write(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        done = os.pwrite(file, memory[:_PORTION], offset)
        memory, offset = memory[done:], offset + done


def _read(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        done = os.preadv(file, [memory[:_PORTION]], offset)
        if not done:
            raise OSError("the temporary file ends too early")
        memory, offset = memory[done:], offset + done
