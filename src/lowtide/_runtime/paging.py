"""A recorded step -> the pages its allocations are to have when it is made again.

A block of several pages need not lie in one piece: pages from anywhere are shown side by side (a
*window*). So there is a place for it whenever enough pages are free, and the step takes no more
than its load. Windows cost time when they are made, so a block lies in one piece where it can.

What a step leaves behind is there when the next one begins. Its pages are taken first, and
others may have them in between, if they are done with them in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide._ir import CUDA_GRANULARITY_BYTES
from lowtide._layout.buffers import Buffer, rounded
from lowtide._layout.pack import Packing, pack
from lowtide._runtime.core import StepRecord

_Found = npt.NDArray[np.int64]

_FOREVER = np.iinfo(np.int64).max
_SECONDS = 0.5  # for the layout of what is odd
_FEW = 16  # pages; and a block may waste one part in so many
_SPARE, _SPARE_PAGES = (
    1.02,
    16,
)  # times the load, and besides: with a little more, more lies in one piece


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Where each allocation lies: at an offset, in pages that are shown side by side, or anywhere.

    An offset is -1 where there are pages, or where it may lie anywhere.
    """

    offsets: list[int]
    pages: dict[int, tuple[int, ...]]  # by allocation
    height: int  # bytes, a multiple of a page
    load: int


def plan_pages(step: StepRecord, page: int, room: int, lasting: Sequence[int] = ()) -> PagePlan:
    """Place one step of those that repeat it within `room` bytes; `lasting` pages are in use."""
    lives = [
        end - start if end >= 0 else step.ticks + 1
        for start, end in zip(step.made, step.freed, strict=True)
    ]
    known = [i for i, life in enumerate(lives) if life <= step.ticks]
    small = [i for i in known if is_odd(step.sizes[i], page)]
    large = [i for i in known if not is_odd(step.sizes[i], page)]
    offsets = [-1] * len(step.sizes)
    packing = _pack_small(step, small)
    load = _most_pages(step, large, page) + -(-packing.height // page)
    pages = _Pages(min(room // page, int(_SPARE * load) + _SPARE_PAGES + len(lasting)), lasting)
    bottom = pages.take_run(-(-packing.height // page))
    for buffer in packing.buffers if bottom >= 0 else ():
        assert buffer.offset is not None
        offsets[int(buffer.name)] = bottom * page + buffer.offset
    found = _place_large(step, large, pages, page)
    scattered: dict[int, tuple[int, ...]] = {}
    for i, taken in found.items():
        if (np.diff(taken) == 1).all():
            offsets[i] = int(taken[0]) * page
        else:
            scattered[i] = tuple(map(int, taken))
    return PagePlan(offsets, scattered, pages.top * page, load * page)


def is_odd(size: int, page: int) -> bool:
    """Whether whole pages would waste too much, as for what is smaller than one."""
    return size < page or (size < _FEW * page and -size % page > size // _FEW)


def _pack_small(step: StepRecord, small: Sequence[int]) -> Packing:
    """Those that are odd, as if there were no pages."""
    buffers = [
        Buffer(str(i), step.made[i], step.freed[i], rounded(step.sizes[i], CUDA_GRANULARITY_BYTES))
        for i in small
    ]
    return pack(buffers, period=step.ticks, align=CUDA_GRANULARITY_BYTES, seconds=_SECONDS)


def _most_pages(step: StepRecord, large: Sequence[int], page: int) -> int:
    """Of the others, the most that are there at once."""
    change = np.zeros(step.ticks + 1, dtype=np.int64)
    for i in large:
        count = -(-step.sizes[i] // page)
        change[step.made[i]] += count
        change[min(step.freed[i], step.ticks)] -= count
        if step.freed[i] > step.ticks:
            change[0] += count
            change[step.freed[i] - step.ticks] -= count
    return int(np.cumsum(change).max(initial=0))


class _Pages:
    """Pages: which are free, and when those who left them behind need them again."""

    def __init__(self, count: int, lasting: Sequence[int]) -> None:
        self._needed = np.full(max(0, count), _FOREVER)
        self._until = self._needed.copy()  # as long each may be had; -1: it is taken
        self._until[[one for one in lasting if one < count]] = -1
        self._free = int((self._until >= 0).sum())
        self.top = 0  # beyond the highest that was ever taken

    def take_run(self, count: int) -> int:
        """The first of so many side by side, or -1: they are nobody else's any more."""
        top = self.top
        found = self.take(count, _FOREVER) if count else None
        if found is None or (np.diff(found) == 1).all():
            return -1 if found is None else int(found[0])
        self.give(found)
        self.top = top
        return -1

    def take(self, count: int, until: int) -> _Found | None:
        """So many that are free until then; side by side in the smallest gap, if there is one."""
        if count > self._free:
            return None
        free = self._until >= until
        edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        fitting = lengths >= count
        if fitting.any():
            best = starts[fitting][np.argmin(lengths[fitting])]
            found = np.arange(best, best + count)
        else:
            if lengths.sum() < count:
                return None
            order = np.argsort(lengths, kind="stable")  # the smallest gaps are used up first
            runs = [np.arange(starts[i], starts[i] + lengths[i]) for i in order]
            found = np.concatenate(runs)[:count]
        self._mark(found)
        return found

    def keep(self, pages: _Found, at: int) -> None:
        """They are needed again then."""
        self._needed[pages] = at

    def take_again(self, pages: _Found) -> None:
        """Those that are needed again."""
        assert (self._until[pages] >= 0).all()
        self._mark(pages)

    def _mark(self, pages: _Found) -> None:
        self._until[pages] = -1
        self._free -= len(pages)
        self.top = max(self.top, int(pages.max()) + 1)

    def give(self, pages: _Found) -> None:
        """Others may have them."""
        self._until[pages] = self._needed[pages]
        self._free += len(pages)


def _place_large(
    step: StepRecord, large: Sequence[int], pages: _Pages, page: int
) -> dict[int, _Found]:
    """Those that are not odd, in order; one for which there is no place is left out."""
    found: dict[int, _Found] = {}

    def place(i: int, until: int) -> None:
        taken = pages.take(-(-step.sizes[i] // page), until)
        if taken is not None:
            found[i] = taken

    left = {i for i in large if step.freed[i] > step.ticks}
    for i in sorted(left, key=lambda i: -step.sizes[i]):
        place(i, 0)
        if i in found:
            pages.keep(found[i], step.made[i])
    behind = {i for i in left if i in found}
    events = sorted(
        [(step.made[i], 1, i) for i in large if i not in left or i in behind]
        + [(step.freed[i] - (step.ticks if i in behind else 0), 0, i) for i in large]
    )
    for _, made, i in events:
        if not made:
            if i in found:
                pages.give(found[i])
        elif i in behind:
            pages.take_again(found[i])
        else:
            place(i, step.freed[i])
    return found
