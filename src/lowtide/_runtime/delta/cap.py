"""The budget as PyTorch's own allocator holds it: in bytes reserved, whatever lowtide counts."""

import os
from collections.abc import Callable
from typing import Protocol

import torch

_FIRST_MARGIN, _MORE_MARGIN, _MOST_MARGIN = 0.02, 0.01, 0.1  # of the budget
_SPARE = 0.01  # ... that a plan leaves

_PAGE = 20 << 20  # bytes that the allocator takes at once, beyond its limit if need be
_SMALLEST = 256 << 20  # ... so that a smaller budget is not held by it
_failures = 0
_is_watching = False


class Giver(Protocol):
    """What gives memory in pages, if it can."""

    def use_pages(self, device: int, most: Callable[[], int | None] | None = None) -> bool:
        """Whether it does, from now on, within PyTorch's limit; `most`: or within less."""

    def free_pages(self, device: int) -> int:
        """Those that are free, and those that there may still be."""

    def pages_of(self, count: int) -> int:
        """That a block of so many bytes may need."""

    def guard(self, device: int, most: int, sound: Callable[[], bool] | None) -> bool:
        """Call `sound` where a step holds nearly `most`, or is about to.

        None: nobody is called, and steps are counted if there is something to hold. False: no whole
        step is known yet, and it may be called too late.
        """

    def guarded(self) -> int:
        """Bytes that the step so far has held at most, as far as it is guarded."""


class Cap:
    """A limit to what the allocator of a GPU reserves; beyond it, ops run out of memory.

    What lies between allocated blocks cannot be used at will, so lowtide leaves a margin, and a
    wider one after every step in which the allocator had to give back its cache to go on. Its
    segments are made to grow and shrink page by page: where blocks of ever other sizes come and go
    within a limit, others leave too much between them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: float | None = None  # the limit that was there
        self._settings = ""  # ... and the allocator's settings
        self._limit = 0  # ... and the one there is, in bytes
        self._budget: int | None = None
        self._index = device.index or 0
        if device.type == "cuda" and device.index is None:
            self._index = torch.cuda.current_device()
        self._margin = _FIRST_MARGIN
        self._giver: Giver | None = None  # of memory in pages
        self._flushes = 0  # when the margin was last looked at
        self._at_first = 0  # ... and when there was no limit yet
        self.flushes = 0  # how often the allocator gave back its cache because of the limit

    def put(self, budget: int) -> None:
        """Reserve no more than that from now on."""
        self._budget = budget
        if self._device.type != "cuda" or self._before is not None or budget < _SMALLEST:
            return
        total = torch.cuda.get_device_properties(self._device).total_memory
        _watch_failures()
        self._before = torch.cuda.get_per_process_memory_fraction(self._device)
        self._settings = _settings()
        _set(f"{self._settings},expandable_segments:True")
        limit = min(self._before, (budget - _PAGE) / total)
        self._limit = int(limit * total)
        torch.cuda.set_per_process_memory_fraction(limit, self._device)
        torch.cuda.empty_cache()
        before, now = self.flushes, self.count()
        self._flushes, self._at_first, self.flushes = now, now - before, before

    def lift(self) -> None:
        """As it was before."""
        before, self._before = self._before, None
        if before is not None:
            torch.cuda.set_per_process_memory_fraction(before, self._device)
            _set(self._settings or "expandable_segments:False")

    @property
    def holds(self) -> bool:
        """Whether the allocator is held to the budget."""
        return self._before is not None

    def reserved(self) -> int:
        """Bytes that the allocator has taken from the device; 0 where nobody tells."""
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def use_pages(self, giver: Giver | None) -> bool:
        """Whether memory is given in pages from now on: then nothing is lost to fragments."""
        if giver is None:
            self._giver = None
            return False
        if self._before is None or self._giver is not None:
            return self.paged
        # Steps are laid out within the budget also where nothing else holds them to it.
        if giver.use_pages(self._index, lambda: self._budget):
            self._giver = giver
        return self.paged

    @property
    def paged(self) -> bool:
        """Whether memory is given in pages."""
        return self._giver is not None

    def guard(self, most: int, sound: Callable[[], bool]) -> bool:
        """Have `sound` called where a step holds nearly `most`, or is about to.

        From the next step on, until it returns True. False: not surely in time.
        """
        return self._giver is not None and self._giver.guard(self._index, most, sound)

    def count_steps(self, most: int) -> None:
        """So that one that comes to hold nearly `most` can be told of, some day."""
        if self._giver is not None:
            self._giver.guard(self._index, most, None)

    def dismiss_guard(self) -> None:
        """Nobody is called."""
        if self._giver is not None:
            self._giver.guard(self._index, 0, None)

    def guarded(self) -> int:
        """Bytes that the step so far has held at most, as far as it is guarded."""
        return self._giver.guarded() if self._giver is not None else 0

    def clear(self, count: int) -> None:
        """Give back what is cached, unless so many bytes can be had besides."""
        if self._before is not None and self._giver is None:
            stats = torch._C._cuda_memoryStats(self._index)
            if stats["reserved_bytes"]["all"]["current"] + count > self._limit:
                torch.cuda.empty_cache()

    def could_give(self, *counts: int) -> bool:
        """Whether blocks of these sizes can be had at once; if need be, the cache is given back.

        That they were had and put back is all: what asks for them next finds them, or pages for
        them.
        """
        global _failures
        if self._before is None:
            return True
        if self._giver is not None:
            wanted = sum(map(self._giver.pages_of, counts))
            if self._giver.free_pages(self._index) >= wanted:
                return True
            torch.cuda.empty_cache()  # what is cached beside them could be pages
            return self._giver.free_pages(self._index) >= wanted
        failures, had = _failures, []
        try:
            for count in counts:
                had.append(torch.cuda.caching_allocator_alloc(count, self._index))
        except torch.OutOfMemoryError:
            _failures = failures  # nothing was computed with less
            return False
        finally:
            for block in had:
                torch.cuda.caching_allocator_delete(block)
        return True

    def margin(self, budget: int) -> int:
        """Bytes to leave to the allocator; asked once a step."""
        if self._before is None:
            return 0
        flushes = self.count()
        if flushes > self._flushes:
            self._flushes = flushes
            self._margin = min(_MOST_MARGIN, self._margin + _MORE_MARGIN)
        return int(self._margin * budget)

    def left_to_plans(self, budget: int, margin: int) -> tuple[int, int | None]:
        """Bytes that steps by a plan may hold, and how high their layout may be.

        In pages hardly any are lost, so there is no `margin`: where blocks are so odd that more
        are, their layout says how many, and the steps are planned anew. None: nothing lies between
        blocks, or nobody tells.
        """
        most = int((1 - _SPARE) * (budget - (_PAGE if self.paged else margin)))
        return most, int((1 - _SPARE) * budget) if self.holds and not self.paged else None

    def failures(self) -> int:
        """How often the allocator had nothing to give, also where a library made do without."""
        return _failures

    def count(self) -> int:
        """How often the allocator has given back its cache to go on, in all."""
        if self._before is None:
            return 0
        count = int(torch._C._cuda_memoryStats(self._index)["num_alloc_retries"])
        self.flushes = count - self._at_first
        return count


def _watch_failures() -> None:
    global _is_watching
    if not _is_watching:  # for good: PyTorch knows no way back
        _is_watching = True
        torch._C._cuda_attach_out_of_memory_observer(_failed)  # type: ignore[attr-defined]


def _failed(_device: int, _wanted: int, _total: int, _free: int) -> None:
    global _failures
    _failures += 1


def _settings() -> str:
    """Of the allocator. Before PyTorch 2.12 it did not tell: those it began with."""
    tell = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if tell is not None:
        return str(tell())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _set(settings: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:  # before PyTorch 2.10
        change = torch.cuda.memory._set_allocator_settings
    change(settings.strip(","))
