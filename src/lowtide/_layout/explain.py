"""Why a capacity cannot be met: the fewest buffers that show it."""

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide._layout import native
from lowtide._layout.buffers import Buffer, copies, pieces, rounded
from lowtide._layout.native import NoNative, Request
from lowtide._layout.reference.search import search as reference_search

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

    Buffers of another lane take their bytes at every moment, so the heaviest moment of each
    lane counts together.
    """
    if period is not None:
        buffers = copies(buffers, period)
    peaks = [
        _heaviest([b for b in buffers if b.lane != lane], align, period) for lane in (0, 1)
    ]  # of the other lane
    best: Conflict | None = None
    for lane in (0, 1):
        other = peaks[lane]
        others = sum(rounded(b.size, align) for b in other)
        own = [b for b in buffers if b.lane == lane]
        found = _smallest(own, capacity - others, align, period)
        if found is None:
            continue
        conflict = Conflict((*found.buffers, *other), None if other else found.moment)
        if best is None or len(conflict.buffers) < len(best.buffers):
            best = conflict
    return best


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
    first = 0 if period is not None else min(b.lower for b in buffers)
    request = Request(
        lower=[b.lower - first for b in buffers],
        upper=[b.upper - first for b in buffers],
        size=[b.size for b in buffers],
        fixed=[-1 if b.offset is None else b.offset for b in buffers],
        period=period or 0,
        align=align,
        goal=capacity,
        nodes=_NODES,
        seconds=left,
    )
    try:
        answer = native.search(request)
    except NoNative:
        answer = reference_search(request)
    spare = max(rounded(b.size, align) - b.size for b in buffers)
    return answer.bound - spare > capacity


def _heaviest(buffers: Sequence[Buffer], align: int, period: int | None) -> list[Buffer]:
    """The buffers alive at the moment with the highest load."""
    best: tuple[int, int] = (0, 0)
    for moment, load in _loads(buffers, align, period):
        best = max(best, (load, -moment))
    return [b for b in buffers if _alive(b, -best[1], period)] if best[0] else []


def _smallest(
    buffers: Sequence[Buffer], capacity: int, align: int, period: int | None
) -> Conflict | None:
    """The fewest buffers alive at one moment that need more than the capacity."""
    spare = max((rounded(b.size, align) - b.size for b in buffers), default=0)
    room = capacity + spare  # the topmost need not be rounded up
    sizes: list[int] = []  # of those alive, ascending
    events = []
    for buffer in buffers:
        size = rounded(buffer.size, align)
        for lower, upper in pieces(buffer, period):
            events += [(lower, 1, size), (upper, 0, size)]
    best: tuple[int, int] | None = None  # how many, when
    load = 0
    for moment, starts, size in sorted(events):
        if not starts:
            load -= size
            del sizes[bisect.bisect_left(sizes, size)]
            continue
        load += size
        bisect.insort(sizes, size)
        if load <= room:
            continue
        count = total = 0
        while total <= room and (best is None or count < best[0]):
            count += 1
            total += sizes[-count]
        if total > room and (best is None or count < best[0]):
            best = (count, moment)
    if best is None:
        return None
    alive = [b for b in buffers if _alive(b, best[1], period)]
    alive.sort(key=lambda b: (-rounded(b.size, align), b.lower))
    return Conflict(tuple(alive[: best[0]]), best[1])


def _loads(buffers: Sequence[Buffer], align: int, period: int | None) -> list[tuple[int, int]]:
    change: dict[int, int] = {}
    for buffer in buffers:
        for lower, upper in pieces(buffer, period):
            change[lower] = change.get(lower, 0) + rounded(buffer.size, align)
            change[upper] = change.get(upper, 0) - rounded(buffer.size, align)
    load = 0
    result = []
    for moment in sorted(change):
        load += change[moment]
        result.append((moment, load))
    return result


def _alive(buffer: Buffer, moment: int, period: int | None) -> bool:
    return any(lower <= moment < upper for lower, upper in pieces(buffer, period))
