"""The tier below a CUDA device: pinned main memory, and a stream for each way."""

import threading
from typing import cast

import torch

from lowtide._runtime.swap import cuda_driver
from lowtide._runtime.swap.populate import populate
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.ranges import Ranges
from lowtide._runtime.swap.tier import Copy, Place, rounded_place

_CHUNK = 256 << 20  # by which it grows where no plan said how much


class _Chunk:
    """Page-locked memory: PyTorch's own pinned allocator would round up to a power of two."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        with quiet():
            self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        populate(self.bytes.data_ptr(), size)
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(self.bytes.data_ptr(), size, 0)
        if int(error):
            raise OSError(f"no {size} bytes could be page-locked: {error}")
        self.address = cuda_driver.device_address(self.bytes.data_ptr())

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())


_kept: list[_Chunk] = []  # somebody looks at them


class _Way:
    """A stream of copies, one after the other.

    Each wait holds up the device's queue for some microseconds, so none is made twice: what has
    waited for a copy has waited for all before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # not to be destroyed before this
        self.handle: int = self._stream.cuda_stream
        self.copies = 0
        self.waited: dict[int, int] = {}  # for how many of them, by the stream that did
        self.caught_up = 0  # the paused stream that it has waited for, or 0


class _StreamCopy:
    __slots__ = ("_event", "_number", "_tier", "_way")

    def __init__(self, event: int, way: _Way, tier: "PinnedTier") -> None:
        self._event = event
        self._way = way
        self._tier = tier
        self._number = way.copies = way.copies + 1

    def wait(self) -> None:
        stream = self._tier.stream()
        if self._way.waited.get(stream, 0) < self._number:
            cuda_driver.wait(stream, self._event)
            self._way.waited[stream] = self._number
            self._tier.moved_on()
        self._tier.events.give(self._event)


class PinnedTier:
    """A slab of pinned memory, as large as the plan says, or else growing in large chunks."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._limit = limit
        self.events = cuda_driver.Events(device)
        self._ranges = Ranges()
        self._chunks: list[_Chunk] = []
        self._lock = threading.Lock()
        self._out = _Way(device)
        self._back = _Way(device)
        self._paused = False

    def stream(self) -> int:
        """The current one of the device."""
        return torch._C._cuda_getCurrentRawStream(self._index)

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

    def trim(self, count: int) -> None:
        """Unlock chunks, from the last on; all of them for one, if nothing is in them.

        Planned places do not heed where chunks end, and what lies across goes elsewhere.
        """
        count = rounded_place(count)
        with self._lock:
            if not self._ranges.taken and self._ranges.size > count:
                self._drop()
                if count:
                    self._grow(count)
            while self._chunks and self._chunks[-1].start >= count:
                if not self._ranges.shrink(self._chunks[-1].start):
                    return
                self._settle()
                self._chunks.pop().close()

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
        last = self._chunks[-1]
        if last.start <= start:
            return last
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
        self._settle()
        for chunk in self._chunks:
            chunk.close()
        self._chunks = []
        self._ranges = Ranges()

    def _settle(self) -> None:
        """Copies have been waited for, and views looked at, by the device only."""
        torch.cuda.synchronize(self._device)

    def give(self, place: Place) -> None:
        """Free for another: copies one way go in order, and both ways have been waited for."""
        with self._lock:
            self._ranges.give(place.start, place.count)

    def out(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """On its own stream, when what has been asked for so far is done."""
        return self._copy(self._out, self._address(place), storage.data_ptr(), storage.nbytes())

    def back(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """On its own stream, when whoever had the bytes before is done with them."""
        return self._copy(self._back, storage.data_ptr(), self._address(place), storage.nbytes())

    def _copy(self, way: _Way, to: int, of: int, count: int) -> Copy:
        event = self.events.take()
        stream = self.stream()
        if not self._paused or way.caught_up != stream + 1:
            cuda_driver.record(event, stream)
            cuda_driver.wait(way.handle, event)
            way.caught_up = stream + 1  # the default stream's number is 0
        cuda_driver.copy(to, of, count, way.handle)
        cuda_driver.record(event, way.handle)
        return _StreamCopy(event, way, self)

    def pause(self) -> None:
        """What copies wait for is now the same for all of one way."""
        self.moved_on()
        self._paused = True

    def resume(self) -> None:
        """Something may compute again."""
        self._paused = False

    def moved_on(self) -> None:
        """What computes waits for something more: copies have to, as well."""
        self._out.caught_up = self._back.caught_up = 0

    def _address(self, place: Place) -> int:
        chunk = self._chunk(place.start)
        return chunk.address + place.start - chunk.start

    def view(self, place: Place) -> torch.UntypedStorage:
        """On the device, which reads and writes them where they are, over the link."""
        shown = torch._C._construct_storage_from_data_pointer(
            self._address(place), self._device, place.count
        )
        return cast("torch.UntypedStorage", shown)

    def held_bytes(self) -> int:
        """What is page-locked."""
        return self._ranges.size

    def close(self) -> None:
        """Unlock it all, but for what somebody still looks at: that stays for good."""
        with self._lock:
            if self._ranges.taken:
                _kept.extend(self._chunks)
            else:
                self._drop()
