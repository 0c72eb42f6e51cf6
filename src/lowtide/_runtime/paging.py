"""A recorded step -> the pages its allocations are to have when it is made again.

A block of several pages need not lie in one piece: pages from anywhere are shown side by side (a
*window*). So there is a place for it whenever enough pages are free, and the step takes no more
than its load. Windows cost time when they are made, so a block lies in one piece where it can.

What a step leaves behind is there when the next one begins. Its pages are taken first, where it
lies already if it does, and others may have them in between, if they are done with them in time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import numpy as np
import numpy.typing as npt

from lowtide._ir import CUDA_GRANULARITY_BYTES
from lowtide._layout.buffers import Buffer, rounded
from lowtide._layout.pack import Packing, pack
from lowtide._runtime.core import StepRecord
from lowtide._runtime.pages_by_length import place_by_length

Left = Mapping[int, tuple[int, tuple[int, ...]]]  # by allocation: its offset, and its pages
_Found = npt.NDArray[np.int64]
_Trade = tuple[int, int, int]  # who, instead of which page, has which

_FOREVER = np.iinfo(np.int64).max
_SECONDS = 0.5  # for the layout of what is odd
_MANY = 4000  # blocks: to place more by their length takes too long between steps
_FEW = 16  # pages; and a block may waste one part in so many
_SPARE, _SPARE_PAGES = (
    1.02,
    16,
)  # times the load, and besides: with a little more, more lies in one piece


class _Way(Enum):
    """How places are looked for."""

    RUNS = auto()  # one after the other, side by side where that can be
    LONGEST = auto()  # likewise, in pages that are free for longest
    LENGTH = auto()  # those that live longest first


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Where each allocation lies: at an offset, in pages that are shown side by side, or anywhere.

    An offset is -1 where there are pages, or where it may lie anywhere.
    """

    offsets: list[int]
    pages: dict[int, tuple[int, ...]]  # by allocation
    height: int  # bytes, a multiple of a page
    filled: int  # ... that need memory; what is above has it
    load: int
    missing: int  # bytes, if not all had a place: with so much more room they would have


def plan_pages(
    step: StepRecord,
    page: int,
    room: int,
    lasting: Sequence[int] = (),
    here: Left | None = None,
) -> PagePlan:
    """Place one step of those that repeat it within `room` bytes; `lasting` pages are in use.

    What such a step has left behind is `here` now, and stays.
    """
    known = {
        i
        for i, (start, end) in enumerate(zip(step.made, step.freed, strict=True))
        if 0 <= end <= start + step.ticks
    }
    here = here or {}
    # What goes before anything else happens is here as well.
    stays = {i: at for i, at in here.items() if i in known and step.freed[i] >= step.ticks}
    small = [i for i in known if is_odd(step.sizes[i], page)]
    crowded = {*lasting, *(one for i in small if i in stays for one in stays[i][1])}
    # Who knows how long the rest stays.
    crowded.update(one for i in here if i not in stays for one in here[i][1])
    own = {  # but for a last page in which something small lies
        i: np.array([one for one in stays[i][1] if one not in crowded], dtype=np.int64)
        for i in known.difference(small)
        if i in stays
    }
    packing = _pack_small(step, [i for i in small if i not in stays])
    large = sorted(i for i in known.difference(small) if i in own or i not in stays)
    shared = sum(len(stays[i][1]) - len(row) for i, row in own.items())  # are counted there
    load = _most_pages(step, large, page) + -(-packing.height // page) + len(crowded) - shared
    fixed = crowded.union(*own.values())
    most = room // page - len(fixed)  # that others may have
    some = min(most, int(_SPARE * load) + _SPARE_PAGES)
    place = partial(_place, step, large, own, crowded, packing, page)
    best: _Placed | None = None
    ways = [(most, way) for way in _Way]
    for count, way in [(some, _Way.RUNS), *ways] if some < most else ways:
        if way is _Way.LENGTH and (len(large) > _MANY or load > room // page):
            break
        placed = place(max(0, count), way)
        if best is None or placed.left_out < best.left_out:
            best = placed
        if not best.left_out:
            break
    assert best is not None
    found, bottom = best.found, best.bottom
    offsets = [-1] * len(step.sizes)
    for i, (offset, _) in stays.items():
        offsets[i] = offset
    for buffer in packing.buffers if bottom >= 0 else ():
        assert buffer.offset is not None
        offsets[int(buffer.name)] = bottom * page + buffer.offset
    scattered: dict[int, tuple[int, ...]] = {}
    for i, row in found.items():
        if i in own:
            continue
        if (np.diff(row) == 1).all():
            offsets[i] = int(row[0]) * page
        else:
            scattered[i] = tuple(map(int, row))
    height = max(best.top, int(max(fixed, default=-1)) + 1) * page
    missing = _missing(place, most, load - room // page) if best.left_out else 0
    return PagePlan(offsets, scattered, height, best.top * page, load * page, missing * page)


def _missing(place: Callable[[int, _Way], "_Placed"], most: int, least: int) -> int:
    """How many pages more all of it needs: at least so many, and an eighth too many at most.

    Where there is too little it is large blocks that find no place, and many more pages are left
    out than are missing.
    """

    def fits(more: int) -> bool:
        return most + more >= 0 and not place(most + more, _Way.LONGEST).left_out

    low, high = 0, max(1, least, -most)
    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1 + high // 8 and low:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class _Placed:
    found: dict[int, _Found]
    top: int  # beyond the highest page that was ever taken, but for somebody's own
    bottom: int  # where what is packed begins, or -1
    left_out: int  # pages for which there was no place, at most at once


def _place(
    step: StepRecord,
    large: Sequence[int],
    own: Mapping[int, _Found],
    crowded: Collection[int],
    packing: Packing,
    page: int,
    count: int,
    way: _Way,
) -> _Placed:
    """In `count` pages besides the `own` ones, without those that are `crowded`."""
    pages = _Pages(count, crowded, [one for row in own.values() for one in row])
    packed = -(-packing.height // page)
    bottom = pages.take_run(packed)
    if way is _Way.LENGTH:
        found = _place_by_length(step, large, pages, page, own)
    else:
        found = _place_large(step, large, pages, page, own, longest=way is _Way.LONGEST)
    left_out = _most_pages(step, [i for i in large if i not in found], page)
    return _Placed(found, pages.top, bottom, left_out + (packed if bottom < 0 else 0))


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

    def __init__(self, count: int, crowded: Collection[int], own: Collection[int]) -> None:
        """The lowest `count` that are neither `crowded` nor somebody's `own`, which are taken."""
        size = count + len(crowded) + len(own)
        free = np.ones(size, dtype=bool)
        free[[one for one in (*crowded, *own) if one < size]] = False
        free[np.flatnonzero(free)[count:]] = False
        size = max([size, *(one + 1 for one in own)])
        self._needed = np.full(size, _FOREVER)
        self._until = np.full(size, -1)  # as long each may be had; -1: it is taken
        self._until[np.flatnonzero(free)] = _FOREVER
        self._other = self._until >= 0
        self._who = np.full(size, -1)  # who may make way for others, if somebody has it
        self._since = np.full(size, -1)  # when it was given last, or had been before that
        self._free = count
        self.top = 0  # beyond the highest that was ever taken, but for somebody's own

    def take_run(self, count: int) -> int:
        """The first of so many side by side, or -1: they are nobody else's any more."""
        top = self.top
        found = self.take(count, _FOREVER) if count else None
        if found is None or (np.diff(found) == 1).all():
            return -1 if found is None else int(found[0])
        self.give(found)
        self.top = top
        return -1

    def take(self, count: int, until: int, *, longest: bool = False) -> _Found | None:
        """So many that are free until then; side by side in the smallest gap, if there is one.

        `longest`: or those that are free for longest, wherever they are.
        """
        if count > self._free:
            return None
        free = self._until >= until
        if longest:
            found = np.flatnonzero(self._until == _FOREVER)[:count]
            if len(found) < count:
                some = np.flatnonzero(free)
                found = np.sort(some[np.argsort(-self._until[some], kind="stable")[:count]])
            if len(found) < count:
                return None
            self._mark(found)
            return found
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

    def rest(self) -> list[int]:
        """Those that are free for good."""
        return [int(one) for one in np.flatnonzero(self._until == _FOREVER)]

    def reach(self, pages: _Found) -> None:
        """They are taken, some time or other."""
        others = pages[self._other[pages]]
        self.top = max(self.top, int(others.max(initial=-1)) + 1)

    def keep(self, pages: _Found, at: int) -> None:
        """They are needed again then."""
        self._needed[pages] = at

    def lend(self, pages: _Found, who: int) -> None:
        """Who has them may as well have others."""
        self._who[pages] = who

    def trade(self, until: int, count: int, made: _Found, freed: _Found) -> Iterator[_Trade]:
        """Have so many more that are free until then, by giving others to those who have them.

        They are gone soon enough, and others were free all the time since they came.
        """
        free = np.flatnonzero((self._until >= 0) & (self._until < until))
        held = np.flatnonzero((self._who >= 0) & (self._needed >= until))
        came, goes = made[self._who[held]], freed[self._who[held]]
        for page in free[np.argsort(self._until[free], kind="stable")]:
            if not count:
                return
            fits = (came > self._since[page]) & (goes <= self._until[page])
            if not fits.any():
                continue
            at = int(np.argmax(np.where(fits, goes, -1)))
            other, who = int(held[at]), int(self._who[held[at]])
            self._who[page], self._who[other] = who, -1
            self._until[page], self._until[other] = -1, self._needed[other]
            came[at] = -2  # it has none that could be had
            self.reach(np.array([page]))
            count -= 1
            yield who, other, int(page)

    def take_again(self, pages: _Found) -> None:
        """Those that are needed again."""
        assert (self._until[pages] >= 0).all()
        self._until[pages] = -1
        self._free -= len(pages)

    def _mark(self, pages: _Found) -> None:
        self._until[pages] = -1
        self._free -= len(pages)
        self.reach(pages)

    def give(self, pages: _Found, now: int = -1) -> None:
        """Others may have them."""
        self._until[pages] = self._needed[pages]
        self._who[pages] = -1
        self._since[pages] = now
        self._free += len(pages)

    def lacking(self, count: int, until: int) -> int:
        """Of so many, how many are free, but not until then; 0: they are, or too few are free."""
        enough = int((self._until >= until).sum())
        return count - enough if enough < count <= self._free else 0


def _place_large(
    step: StepRecord,
    large: Sequence[int],
    pages: _Pages,
    page: int,
    own: Mapping[int, _Found],
    *,
    longest: bool,
) -> dict[int, _Found]:
    """Those that are not odd, in order; one for which there is no place is left out.

    Those that have their `own` pages, which are taken, keep them. Where those that are left are
    needed again too soon, others that are gone by then have them instead of their own.
    """
    found: dict[int, _Found] = dict(own)

    made, freed = np.array(step.made), np.array(step.freed)

    def place(i: int, until: int) -> None:
        count = -(-step.sizes[i] // page)
        lacking = pages.lacking(count, until)
        for who, old, new in pages.trade(until, lacking, made, freed) if lacking else ():
            found[who] = np.sort(np.where(found[who] == old, new, found[who]))
        taken = pages.take(count, until, longest=longest)
        if taken is not None:
            found[i] = taken

    left = {i for i in large if step.freed[i] >= step.ticks}
    for i in sorted(left, key=lambda i: -step.sizes[i]):
        if i not in own:
            place(i, 0)
        if i in found:
            pages.keep(found[i], step.made[i])
    behind = {i for i in left if i in found}
    events = sorted(
        [(step.made[i], 1, i) for i in large if i not in left or i in behind]
        + [(step.freed[i] - (step.ticks if i in behind else 0), 0, i) for i in large]
    )
    for now, comes, i in events:
        if not comes:
            if i in found:
                pages.give(found[i], now)
        elif i in behind:
            pages.take_again(found[i])
        else:
            place(i, step.freed[i])
            if i in found:
                pages.lend(found[i], i)
    return found


def _place_by_length(
    step: StepRecord,
    large: Sequence[int],
    pages: _Pages,
    page: int,
    own: Mapping[int, _Found],
) -> dict[int, _Found]:
    """The same, those first that are hardest to place."""
    blocks = {i: (-(-step.sizes[i] // page), step.made[i], step.freed[i]) for i in large}
    theirs = {i: row.tolist() for i, row in own.items()}
    placed = place_by_length(blocks, step.ticks, theirs, pages.rest())
    found = {i: np.array(row, dtype=np.int64) for i, row in placed.items()}
    for row in found.values():
        pages.reach(row)
    return {**found, **own}
