"""Buffers over sections, and the reductions that make them. Mirrors native/layout/problem.cc."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Range = tuple[int, int]  # sections begin <= k < end; (0, 0) is none
Span = tuple[Range, Range]  # body, and tail if it wraps round the end of the step
NOTHING: Range = (0, 0)
_PASSES = 16  # over the buffers, to find dominated ones
_PAIRS = 100_000_000  # of open and fixed buffers a bound may look at


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes and offsets in units, lives in sections.

    A section is a set of buffers alive together that no larger such set contains, so two buffers
    meet in time exactly when they meet in a section.
    """

    size: list[int]
    fixed: list[int]  # or -1
    span: list[Span]
    load: list[int]  # per section
    peak: list[int]  # per buffer: the heaviest load it takes part in
    wraps: bool

    @property
    def count(self) -> int:
        """How many buffers."""
        return len(self.size)

    @property
    def sections(self) -> int:
        """How many sections."""
        return len(self.load)

    def width(self, i: int) -> int:
        """Sections in which buffer i lives."""
        return sum(end - begin for begin, end in self.span[i])

    def meet(self, i: int, j: int) -> bool:
        """Whether two buffers are ever alive together."""
        return any(a < d and c < b for a, b in self.span[i] for c, d in self.span[j])


def compress(
    lives: Sequence[tuple[int, int, int]], size: Sequence[int], fixed: Sequence[int]
) -> Problem:
    """Time compression; a life is (lower, upper, end of its tail or 0)."""
    events = []  # ends sort before starts: the bytes are free again at that moment
    for i, (lower, upper, tail) in enumerate(lives):
        events += [(lower, True, i, 0), (upper, False, i, 0)]
        if tail > 0:
            events += [(0, True, i, 1), (tail, False, i, 1)]
    events.sort()
    ranges = [[NOTHING, NOTHING] for _ in lives]
    section = 0
    grown = False
    for _, starts, i, piece in events:
        if starts:
            ranges[i][piece] = (section, section)
            grown = True
        else:
            # A section is complete when the first buffer ends after one has started.
            section += grown
            grown = False
            ranges[i][piece] = (ranges[i][piece][0], section)
    span: list[Span] = []
    for body, tail_range in ranges:
        whole = tail_range[1] and tail_range[1] >= body[0]  # it lives all round: one piece
        span.append(((0, section), NOTHING) if whole else (body, tail_range))
    load = np.zeros(section + 1, dtype=np.int64)
    for i, pieces in enumerate(span):
        for begin, end in pieces:
            load[begin] += size[i]
            load[end] -= size[i]
    load = np.cumsum(load)[:-1]
    peak = [max(int(load[b:e].max()) for b, e in pieces if e > b) for pieces in span]
    wraps = any(tail_range[1] for _, tail_range in span)
    return Problem(list(size), list(fixed), span, load.tolist(), peak, wraps)


def restrict_to(problem: Problem, ids: Sequence[int]) -> Problem:
    """The buffers of `ids` alone, with sections of their own."""
    return compress(
        [(*problem.span[i][0], problem.span[i][1][1]) for i in ids],
        [problem.size[i] for i in ids],
        [problem.fixed[i] for i in ids],
    )


def parts(problem: Problem) -> list[list[int]]:
    """Groups of buffers such that no two of different groups ever meet."""
    change = [0] * (problem.sections + 1)
    for span in problem.span:
        for begin, end in span:
            if end - begin >= 2:
                change[begin + 1] += 1
                change[end] -= 1
    part_of = []
    part = -1
    crossing = 0
    for k in range(problem.sections):
        crossing += change[k]
        part += crossing == 0
        part_of.append(part)
    groups: list[list[int]] = [[] for _ in range(part + 1)]
    for i, (body, _) in enumerate(problem.span):
        own = part_of[body[0]]
        # whatever wraps ties the first part to the last
        groups[0 if problem.wraps and own == part else own].append(i)
    return [group for group in groups if group]


def fixed_neighbours(problem: Problem) -> list[list[int]]:
    """For each open buffer the fixed ones it meets, by offset."""
    pinned = _pinned(problem)
    return [
        [j for j in pinned if problem.meet(i, j)] if problem.fixed[i] < 0 else []
        for i in range(problem.count)
    ]


def settle(problem: Problem, pinned: Sequence[int], i: int, at: int) -> int:
    """The lowest offset >= `at` where i clears `pinned`, by offset, as far as it meets them."""
    for j in pinned:
        if problem.fixed[j] >= at + problem.size[i]:
            break
        if problem.meet(i, j):
            at = max(at, problem.fixed[j] + problem.size[j])
    return at


def lower_bound(problem: Problem) -> int:
    """No layout is lower: with fixed buffers, what cannot go under them has to go above."""
    pinned = _pinned(problem)
    highest = max([0, *problem.load, *(problem.fixed[i] + problem.size[i] for i in pinned)])
    if not pinned or len(pinned) * problem.count > _PAIRS:
        return highest
    starts = [
        (fixed if fixed >= 0 else settle(problem, pinned, i, 0), i)
        for i, fixed in enumerate(problem.fixed)
    ]
    top: npt.NDArray[np.int64] = np.zeros(problem.sections, dtype=np.int64)
    for offset, i in sorted(starts):
        for begin, end in problem.span[i]:
            top[begin:end] = np.maximum(top[begin:end], offset) + problem.size[i]
    return max(highest, int(top.max()))


def _pinned(problem: Problem) -> list[int]:
    return [i for _, i in sorted((f, i) for i, f in enumerate(problem.fixed) if f >= 0)]


def dominated(problem: Problem, capacity: int) -> list[int]:
    """Buffers that find room below `capacity` however all others lie below it.

    In the order in which to leave them out; they come back in reverse, after those.
    """
    out: dict[int, None] = {}
    before = -1
    for _ in range(_PASSES):
        if before == len(out):
            break
        before = len(out)
        # what begins before a section, and what ends at it or before: bytes and pieces
        begun = np.zeros((problem.sections + 1, 2), dtype=np.int64)
        ended = np.zeros((problem.sections + 1, 2), dtype=np.int64)
        for i in range(problem.count):
            if i not in out:
                for begin, end in problem.span[i]:
                    if end > begin:
                        begun[begin + 1] += problem.size[i], 1
                        ended[end] += problem.size[i], 1
        begun = np.cumsum(begun, axis=0)
        ended = np.cumsum(ended, axis=0)
        for i, size in enumerate(problem.size):
            if i in out or problem.fixed[i] >= 0:
                continue
            forbidden = 0  # a neighbour of size s forbids at most s + size - 1 of the offsets
            for begin, end in problem.span[i]:
                if end > begin:
                    alive, count = (int(x) for x in begun[end] - ended[begin])
                    forbidden += alive - size + (count - 1) * (size - 1)
            if forbidden <= capacity - size:
                out[i] = None
    return list(out)
