"""The tree search at one capacity. Mirrors native/layout/tree.cc.

Any layout can be rebuilt by placing its buffers in order of offset, each as low as those already
placed allow; so the tree branches over which buffer comes next. After each placement the search
looks ahead: in every watched section what is still to come fills upwards from the offsets it
could have at best, and if that ends above the capacity the branch is dead. Sections that kill
branches are counted, for the next attempt to take their buffers first.
"""

import sys
from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from lowtide._layout.reference.clock import Clock
from lowtide._layout.reference.problem import Problem, fixed_neighbours, settle

Item = tuple[int, int, int]  # lowest offset it can have, rank, buffer


class Outcome(Enum):
    """How an attempt ended."""

    SOLVED = auto()
    IMPOSSIBLE = auto()  # no layout fits the capacity
    SPENT = auto()


class _Spent(Exception):
    pass


class Tree:
    """One problem's tree; `watched` are the sections to look ahead at, ascending."""

    def __init__(self, problem: Problem, watched: Sequence[int]) -> None:
        self._problem = problem
        self._fixed_of = fixed_neighbours(problem)
        before = np.searchsorted(watched, np.arange(problem.sections + 1)).tolist()
        self.view = [[(before[b], before[e]) for b, e in span] for span in problem.span]
        self.kills = [0] * len(watched)
        self.offsets = [-1] * problem.count
        self.nodes = 0

    def run(self, rank: Sequence[int], capacity: int, limit: int, clock: Clock) -> Outcome:
        """Try at most `limit` placements, lower ranks first where offsets are equal."""
        self._rank, self._capacity, self._limit, self._clock = rank, capacity, limit, clock
        self.kills = [0] * len(self.kills)
        self.nodes = 0
        items = sorted(
            (f if f >= 0 else settle(self._problem, self._fixed_of[i], i, 0), rank[i], i)
            for i, f in enumerate(self._problem.fixed)
        )
        if not self._look_ahead(items):
            return Outcome.IMPOSSIBLE
        # three calls a buffer; never lowered again, another thread may be as deep
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 3 * len(items) + 1000))
        try:
            return Outcome.SOLVED if self._groups(items, (-1, -1)) else Outcome.IMPOSSIBLE
        except _Spent:
            return Outcome.SPENT

    def _groups(self, items: list[Item], floor: tuple[int, int]) -> bool:
        """Solve what falls into groups that never meet group by group, smallest first."""
        for group in self._split(items):  # noqa: SIM110 - a generator would recurse through C
            if not self._place(group, floor):
                return False
        return True

    def _place(self, items: list[Item], floor: tuple[int, int]) -> bool:
        """Place one of `items`, and then the others.

        Nothing comes below `floor`, the (offset, rank) of the placement before. Nor does anything
        come at or above the top that some item could have: that one could go underneath.
        """
        lowest_top = min(offset + self._problem.size[i] for offset, _, i in items)
        for offset, rank, i in items:
            if offset >= lowest_top:
                break
            if offset == floor[0] and rank < floor[1]:
                continue
            if self.nodes == self._limit:
                raise _Spent
            self.nodes += 1
            if self.nodes % 16 == 0 and self._clock.out():
                raise _Spent
            rest = self._after(items, i, offset)
            if rest is not None and self._look_ahead(rest):
                self.offsets[i] = offset
                if not rest or self._groups(rest, (offset, rank)):
                    return True
        return False

    def _after(self, items: list[Item], placed: int, floor: int) -> list[Item] | None:
        """The others once `placed` lies at `floor`; None if one of them cannot give way."""
        problem = self._problem
        top = floor + problem.size[placed]
        rest = []
        for offset, rank, i in items:
            if i == placed:
                continue
            base = top if problem.meet(placed, i) else floor
            if offset < base:
                if problem.fixed[i] >= 0:
                    return None
                rest.append((settle(problem, self._fixed_of[i], i, base), rank, i))
            else:
                rest.append((offset, rank, i))
        return sorted(rest)

    def _look_ahead(self, items: list[Item]) -> bool:
        top = np.zeros(len(self.kills), dtype=np.int64)
        for offset, _, i in items:
            size = self._problem.size[i]
            for begin, end in self.view[i]:
                if begin == end:
                    continue
                top[begin:end] = np.maximum(top[begin:end], offset) + size
                over = np.flatnonzero(top[begin:end] > self._capacity)
                if len(over):
                    self.kills[begin + int(over[0])] += 1
                    return False
            if offset + size > self._capacity:
                return False
        return True

    def _split(self, items: list[Item]) -> list[list[Item]]:
        if self._problem.wraps or len(items) < 2:
            return [items] if items else []
        span = self._problem.span
        groups: list[list[Item]] = []
        end = -1
        for item in sorted(items, key=lambda item: span[item[2]][0][0]):
            begin = span[item[2]][0][0]
            if begin >= end:
                groups.append([])
            groups[-1].append(item)
            end = max(end, span[item[2]][0][1])
        return sorted((sorted(group) for group in groups), key=len)
