"""The tier below a CUDA device: pinned main memory, and a stream for each way."""

import threading

import torch

from lowtide._runtime.swap.ranges import Ranges
from lowtide._runtime.swap.tier import Copy, Place, as_bytes, rounded_place

_CHUNK = 256 << 20  # by which it grows where no plan said how much


class _Chunk:
    """Page-locked memory: PyTorch's own pinned allocator would round up to a power of two."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.bytes = torch.empty(size, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(self.bytes.data_ptr(), size, 0)
        if int(error):
            raise OSError(f"no {size} bytes could be page-locked: {error}")

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


class _StreamCopy:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


class PinnedTier:
    """A slab of pinned memory, as large as the plan says, or else growing in large chunks."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self._limit = limit
        self._ranges = Ranges()
        self._chunks: list[_Chunk] = []
        self._lock = threading.Lock()
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def stream(self) -> int:
        """The current one of the device."""
        return torch.cuda.current_stream(self._device).cuda_stream

    def prepare(self, count: int) -> None:
        """One chunk of that size, if nothing is in the present ones; else what is missing."""
        count = rounded_place(count)
        with self._lock:
            if self._ranges.size == count:
                return
            if not self._ranges.taken:
                self._drop()
            if self._ranges.size < count:
                self._grow(count - self._ranges.size)

    def take(self, count: int, at: int | None = None) -> Place | None:
        """At the planned place, or else the lowest in one chunk."""
        count = rounded_place(count)
        with self._lock:
            if at is not None and self._within(at, count) and self._ranges.take_at(at, count):
                return Place(at, count)
            start = self._take_within(count)
            if start is None and self._grow(max(count, _CHUNK)):
                start = self._take_within(count)
        return None if start is None else Place(start, count)

    def _take_within(self, count: int) -> int | None:
        """A place never reaches over the end of a chunk."""
        refused: list[tuple[int, int]] = []
        start = self._ranges.take(count)
        while start is not None and not self._within(start, count):
            end = self._chunk(start)
            rest = end.start + end.bytes.numel() - start
            self._ranges.give(start, count)
            self._ranges.take_at(start, rest)
            refused.append((start, rest))
            start = self._ranges.take(count)
        for place in refused:
            self._ranges.give(*place)
        return start

    def _within(self, start: int, count: int) -> bool:
        if start + count > self._ranges.size:
            return False
        chunk = self._chunk(start)
        return start + count <= chunk.start + chunk.bytes.numel()

    def _chunk(self, start: int) -> _Chunk:
        return next(chunk for chunk in reversed(self._chunks) if chunk.start <= start)

    def _grow(self, count: int) -> bool:
        size = self._ranges.size + count
        if self._limit is not None and size > self._limit:
            return False
        try:
            self._chunks.append(_Chunk(self._ranges.size, count))
        except (OSError, RuntimeError):
            return False
        self._ranges.grow(size)
        return True

    def _drop(self) -> None:
        if not self._chunks:
            return
        self._out.synchronize()
        self._back.synchronize()
        for chunk in self._chunks:
            chunk.close()
        self._chunks = []
        self._ranges = Ranges()

    def give(self, place: Place) -> None:
        """Free for another: copies one way go in order, and both ways have been waited for."""
        with self._lock:
            self._ranges.give(place.start, place.count)

    def out(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """On its own stream, when what has been asked for so far is done."""
        row = self._row(place, storage.nbytes())
        return self._copy(self._out, row, as_bytes(storage))

    def back(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """On its own stream, when whoever had the bytes before is done with them."""
        row = self._row(place, storage.nbytes())
        return self._copy(self._back, as_bytes(storage), row)

    def _copy(self, stream: torch.cuda.Stream, to: torch.Tensor, of: torch.Tensor) -> Copy:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            to.copy_(of, non_blocking=True)
            return _StreamCopy(stream.record_event(), self._device)

    def _row(self, place: Place, count: int) -> torch.Tensor:
        chunk = self._chunk(place.start)
        return chunk.bytes.narrow(0, place.start - chunk.start, count)

    def view(self, place: Place) -> torch.Tensor:
        """The bytes as they are there."""
        return self._row(place, place.count)

    def held_bytes(self) -> int:
        """What is page-locked."""
        return self._ranges.size

    def close(self) -> None:
        """Unlock it all."""
        with self._lock:
            self._drop()
