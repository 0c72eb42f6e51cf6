"""One pass: the buffers in some order, each into a gap. Mirrors native/layout/greedy.cc."""

import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowtide._layout.buffers import Fit
from lowtide._layout.reference.clock import Clock
from lowtide._layout.reference.problem import Problem

# the passes worth making: an order, and the way to choose a gap
PASSES = (
    ("TWS", Fit.BEST),
    ("TSW", Fit.BEST),
    ("SWT", Fit.BEST),
    ("WST", Fit.BEST),
    ("SWT", Fit.FIRST),
)


def order_by(problem: Problem, keys: str) -> list[int]:
    """Buffers by descending keys: T heaviest load, W width, S size; ties: earlier, then listed."""

    def key(i: int) -> tuple[int, ...]:
        of = {"T": problem.peak[i], "W": problem.width(i), "S": problem.size[i]}
        return (*(-of[name] for name in keys), problem.span[i][0][0], i)

    return sorted(range(problem.count), key=key)


def height_of(problem: Problem, offsets: Sequence[int]) -> int:
    """The end of the highest buffer."""
    return max(offset + size for offset, size in zip(offsets, problem.size, strict=True))


def fill_gaps(
    problem: Problem, order: Sequence[int], fit: Fit, clock: Clock, offsets: list[int]
) -> bool:
    """Place those of `order` around what has an offset already; False when time ran out first.

    Each takes the smallest gap that holds it, the lowest of equal ones, or by first fit the lowest
    that holds it; else it goes on top.
    """
    shelf = _Shelf(2 * problem.count)
    for i, offset in enumerate(offsets):
        if offset >= 0:
            shelf.insert(problem, i, offset)
    done = 0
    for i in order:
        if offsets[i] >= 0:
            continue
        done += 1
        if done % 64 == 0 and clock.out():
            return False
        offsets[i] = shelf.find(problem, i, fit)
        shelf.insert(problem, i, offsets[i])
    return True


def allocate_in_time(problem: Problem, *, backwards: bool) -> list[int]:
    """What an allocator does that knows nothing of the future, or, backwards, of the past.

    Each buffer, when it starts, takes the smallest hole, the lowest of equal ones. For problems
    where nothing is fixed and nothing wraps.
    """
    last = problem.sections
    starts: list[list[int]] = [[] for _ in range(last + 1)]
    ends: list[list[int]] = [[] for _ in range(last + 1)]
    for i, ((begin, end), _) in enumerate(problem.span):
        starts[last - end if backwards else begin].append(i)
        ends[last - begin if backwards else end].append(i)
    offsets = [-1] * problem.count
    top = 2**63 - 1
    holes = [(0, top)]  # offset, end; by offset
    for k in range(last):
        for i in ends[k]:
            at = bisect.bisect_left(holes, (offsets[i], 0))
            begin, end = offsets[i], offsets[i] + problem.size[i]
            above = holes[at][0] == end
            below = at > 0 and holes[at - 1][1] == begin
            joined = (holes[at - 1][0] if below else begin, holes[at][1] if above else end)
            holes[at - below : at + above] = [joined]
        for i in starts[k]:
            fitting = [(end - at, at) for at, end in holes if end - at >= problem.size[i]]
            length, at = min(fitting)
            place = bisect.bisect_left(holes, (at, 0))
            rest = (at + problem.size[i], at + length)
            holes[place : place + 1] = [rest] if rest[0] < rest[1] else []
            offsets[i] = at
    return offsets


class _Shelf:
    """Placed pieces by offset: columns offset, end, begin, end of sections."""

    def __init__(self, room: int) -> None:
        self._rows: npt.NDArray[np.int64] = np.zeros((4, room), dtype=np.int64)
        self._count = 0

    def insert(self, problem: Problem, i: int, offset: int) -> None:
        for begin, end in problem.span[i]:
            if end == begin:
                continue
            rows = self._rows
            at = int(np.searchsorted(rows[0, : self._count], offset, side="right"))
            rows[:, at + 1 : self._count + 1] = rows[:, at : self._count]
            rows[:, at] = offset, offset + problem.size[i], begin, end
            self._count += 1

    def find(self, problem: Problem, i: int, fit: Fit) -> int:
        rows = self._rows[:, : self._count]
        meets = np.zeros(self._count, dtype=bool)
        for begin, end in problem.span[i]:
            meets |= (rows[2] < end) & (rows[3] > begin)
        offsets, ends = rows[0, meets], rows[1, meets]
        floors = np.maximum.accumulate(np.concatenate([[0], ends]))
        gaps = offsets - floors[:-1]
        holding = np.flatnonzero(gaps >= problem.size[i])
        if not len(holding):
            return int(floors[-1])
        chosen = 0 if fit is Fit.FIRST else np.argmin(gaps[holding])
        return int(floors[holding[chosen]])
