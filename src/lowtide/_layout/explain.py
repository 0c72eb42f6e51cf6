"""Why a capacity cannot be met: the fewest buffers that show it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide._layout.buffers import Buffer, copies, pieces, rounded
from lowtide._layout.engine import search

_NODES = 20_000  # what proving one subset may cost


@dataclass(frozen=True, slots=True)
class Conflict:
    """Buffers that do not fit together below the capacity, whatever becomes of the others.

    `moment`: all of them are alive then, and too large. None: they meet at different moments,
    and every arrangement was tried.
    """

    buffers: tuple[Buffer, ...]
    moment: int | None


def crowded(
    buffers: Sequence[Buffer], capacity: int, *, align: int = 1, period: int | None = None
) -> Conflict | None:
    """The smallest set of buffers alive at one moment that needs more than the capacity.

    Buffers of different lanes never share bytes, so where no lane is too much for itself the
    heaviest moment of one counts at every moment of the other.
    """
    if period is not None:
        buffers = copies(buffers, period)
    spare = max((rounded(b.size, align) - b.size for b in buffers), default=0)
    # The topmost need not be rounded up; or, should it round little, without any rounding.
    ways = [(align, capacity + spare), (1, capacity)]
    lanes = [[b for b in buffers if b.lane == lane] for lane in (0, 1)]
    found = [_smallest(lane, room, grain, period) for grain, room in ways for lane in lanes]
    if not any(found) and all(lanes):
        for grain, room in ways:
            for own, other in (lanes, lanes[::-1]):
                heaviest = _heaviest(other, grain, period)
                left = room - sum(rounded(b.size, grain) for b in heaviest)
                rest = _smallest(own, left, grain, period)
                if rest is not None:
                    found.append(Conflict((*rest.buffers, *heaviest), None))
    conflicts = [conflict for conflict in found if conflict is not None]
    return min(conflicts, key=lambda conflict: len(conflict.buffers), default=None)


def tangled(
    buffers: Sequence[Buffer],
    capacity: int,
    *,
    align: int = 1,
    period: int | None = None,
    seconds: float = 10.0,
) -> Conflict | None:
    """Buffers of which none can be spared for the capacity to be too small, if time allows.

    Only for one lane, and only where the search can prove that they do not fit; that it found no
    layout is not enough.
    """
    end = time.monotonic() + seconds
    left = list(buffers) if period is None else copies(buffers, period)
    if len({b.lane for b in left}) > 1 or not _impossible(left, capacity, align, period, end):
        return None
    step = max(1, len(left) // 2)
    while True:
        for start in range(len(left) - step, -1, -step):
            fewer = left[:start] + left[start + step :]
            if fewer and _impossible(fewer, capacity, align, period, end):
                left = fewer
        if step == 1 or time.monotonic() > end:
            return Conflict(tuple(left), None)
        step //= 2


def _impossible(
    buffers: Sequence[Buffer], capacity: int, align: int, period: int | None, end: float
) -> bool:
    left = end - time.monotonic()
    if left <= 0:
        return False
    found = search(buffers, align=align, period=period, goal=capacity, nodes=_NODES, seconds=left)
    return found.bound > capacity


def _heaviest(buffers: Sequence[Buffer], align: int, period: int | None) -> list[Buffer]:
    """The buffers alive at the moment with the highest load."""
    load, best = 0, (0, 0)
    for moment, starts, i in _events(buffers, period):
        load += rounded(buffers[i].size, align) * (1 if starts else -1)
        best = max(best, (load, -moment))
    return [b for b in buffers if _alive(b, -best[1], period)]


def _smallest(
    buffers: Sequence[Buffer], room: int, align: int, period: int | None
) -> Conflict | None:
    """The fewest buffers alive at one moment that need more than `room`."""
    sizes = [rounded(b.size, align) for b in buffers]
    alive = _Largest(sizes)
    best: tuple[int, int] | None = None  # how many, when
    for moment, starts, i in _events(buffers, period):
        alive.change(sizes[i], 1 if starts else -1)
        if starts and alive.total > room:
            count = alive.fewest_above(room)
            if best is None or count < best[0]:
                best = (count, moment)
    if best is None:
        return None
    named = [b for b in buffers if _alive(b, best[1], period)]
    named.sort(key=lambda b: (-rounded(b.size, align), b.lower))
    return Conflict(tuple(named[: best[0]]), best[1])


class _Largest:
    """A multiset of sizes that knows how many of its largest exceed a sum: a Fenwick tree."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(set(sizes), reverse=True)
        self._place = {size: place for place, size in enumerate(self._sizes, start=1)}
        self._sums = [(0, 0)] * (len(self._sizes) + 1)  # count, bytes
        self.total = 0

    def change(self, size: int, count: int) -> None:
        self.total += size * count
        place = self._place[size]
        while place < len(self._sums):
            number, total = self._sums[place]
            self._sums[place] = (number + count, total + size * count)
            place += place & -place

    def fewest_above(self, room: int) -> int:
        """How many of the largest it takes to exceed `room`; all of them must."""
        if room < 0:
            return 0
        place = number = total = 0
        step = 1 << len(self._sums).bit_length()
        while step:
            if place + step < len(self._sums) and total + self._sums[place + step][1] <= room:
                place += step
                number += self._sums[place][0]
                total += self._sums[place][1]
            step >>= 1
        return number + (room - total) // self._sizes[place] + 1


def _events(buffers: Sequence[Buffer], period: int | None) -> list[tuple[int, int, int]]:
    """Moment, 0 ends or 1 starts, buffer; in order."""
    events = []
    for i, buffer in enumerate(buffers):
        for lower, upper in pieces(buffer, period):
            events += [(lower, 1, i), (upper, 0, i)]
    return sorted(events)


def _alive(buffer: Buffer, moment: int, period: int | None) -> bool:
    return any(lower <= moment < upper for lower, upper in pieces(buffer, period))
