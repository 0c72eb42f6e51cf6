"""One pass over a step, op by op: the readable form of `native/remake`, which does just the same.

Numbers are added, multiplied, divided and rooted in one order, so that both come to the same bits.
"""

from bisect import bisect_right
from collections import defaultdict
from math import inf

import numpy as np
import numpy.typing as npt

from lowtide._ir import Drop, Hold, OpIndex, Remake, Rerun, ValueId
from lowtide._policy.gone import Gone
from lowtide._policy.ground import Ground
from lowtide._policy.taste import Stays, Stuck, Taste, Weights, quarters

_SOON = 0.02  # of the plain step: what is needed within it is made together
_MOST_RERUNS = 10  # times the ops of the step: then it does not come to an end

_Numbers = npt.NDArray[np.float64]


def run_pass(
    ground: Ground,
    limit: int,
    taste: Taste,
    weights: Weights | None,
    most_seconds: float,
    stays: Stays,
    holds: frozenset[int],
) -> tuple[float, list[Remake]] | None:
    """See `remake`."""
    return _Pass(ground, limit, taste, weights, most_seconds, stays, holds).run()


def power(x: _Numbers, quarters: int) -> _Numbers:
    """To so many quarters, in operations that have one right result each."""
    found = x.copy() if quarters >= 4 else np.ones_like(x)
    for _ in range(2, quarters // 4 + 1):
        found *= x
    if quarters & 2:
        found *= np.sqrt(x)
    if quarters & 1:
        found *= np.sqrt(np.sqrt(x))
    return found


class _Enough(Exception):
    pass


class _Pass:
    def __init__(
        self,
        ground: Ground,
        limit: int,
        taste: Taste,
        weights: Weights | None,
        most_seconds: float,
        stays: Stays,
        holds: frozenset[int],
    ) -> None:
        self._ground = ground
        self._holds = holds
        self._held_until: dict[int, list[int]] = defaultdict(list)
        self._limit = limit - ground.trace.unseen_bytes
        self._taste = taste
        self._most = most_seconds
        count = len(ground.size)
        self._there, self._below = list(stays.there), list(stays.below)
        self._from_on = stays.from_on
        self._releases, self._fetches = stays.releases, stays.fetches
        self._held = sum(
            size for size, there in zip(ground.size, self._there, strict=True) if there
        )
        self._locked = [0] * count
        self._free = np.zeros(count, dtype=bool)  # there, not locked, and can be made again
        self._seconds = ground.seconds(holds)
        self._cost = np.array(self._seconds)
        static = power(np.array(ground.size, dtype=np.float64), quarters(taste.size))
        self._static = 1 / np.maximum(static, 1)
        if weights is not None:
            self._static *= weights
        self._due = np.full(count, np.inf)  # when it is needed next, in plain seconds
        self._gone = Gone(self._seconds)
        self._is_gone = self._gone.is_gone
        self._ends = [value.end for value in ground.trace.values]
        self._opening: dict[int, list[int]] = defaultdict(list)  # what may go from there on
        self._position = 0
        self._reruns = self._looks = 0
        self.seconds = 0.0
        self.done: list[Remake] = []

    def run(self) -> tuple[float, list[Remake]] | None:
        ground, there = self._ground, self._there
        ops = ground.trace.ops
        for value, is_there in enumerate(there):
            if is_there:
                self._arrive(value, -1)
        try:
            for i, op in enumerate(ops):
                self._position = i
                for value in ground.appearing[i]:
                    self._take(value)
                for value in self._opening.pop(i, ()):
                    if self._there[value] and not self._locked[value]:
                        self._free[value] = True
                self._move(i)
                reads = ground.wants[i]
                for value in reads:
                    self._have(value)
                    self._lock(value)
                leaving = sum(ground.size[value] for value in ground.overwritten[i])
                making = sum(ground.size[value] for value in op.writes)
                self._make_room(making + op.workspace_bytes - leaving)
                for value in reads:
                    self._unlock(value, i)
                for value in ground.overwritten[i]:
                    self._end(value)
                for value in op.writes:
                    self._take(value)
                for value in ground.ending[i]:
                    if value in self._holds and self._there[value]:
                        self._hold(value)
                    else:
                        self._end(value)
                for value in self._held_until.pop(i, ()):
                    self._let_go(value)
            self._position = len(ops)
            for value, kept in enumerate(ground.trace.values):
                if kept.after and not self._below[value]:
                    self._have(value)
                    self._lock(value)
        except _Enough:
            return None
        return self.seconds, self.done

    # What is there.

    def _take(self, value: int) -> None:
        self._there[value] = True
        self._held += self._ground.size[value]
        self._arrive(value, self._position)

    def _arrive(self, value: int, position: int) -> None:
        if self._ground.can[value]:
            self._due[value] = self._next(value, position)
            self._free[value] = not self._locked[value] and self._may_go(value)
            if self._position < self._from_on[value] < self._ground.ops:
                self._opening[self._from_on[value]].append(value)

    def _may_go(self, value: int) -> bool:
        """Whether it could be dropped here, if nothing reads it: also if it is there for others."""
        position = self._position
        return position >= self._from_on[value] or position >= self._ends[value]

    def _end(self, value: int) -> None:
        if self._there[value]:
            self._there[value] = False
            self._free[value] = False
            self._held -= self._ground.size[value]

    def _next(self, value: int, position: int) -> float:
        """When it is needed after `position`: itself, or to make what is gone."""
        ground = self._ground
        uses = ground.uses[value]
        at = bisect_right(uses, position)
        due = ground.starts[uses[at]] if at < len(uses) else inf
        if self._taste.around:
            for other in ground.near[value]:
                if self._is_gone[other] and ground.maker[other] > ground.maker[value]:
                    due = min(due, float(self._due[other]))
        return due

    def _lock(self, value: int) -> None:
        self._locked[value] += 1
        self._free[value] = False

    def _unlock(self, value: int, position: int) -> None:
        self._locked[value] -= 1
        if not self._locked[value] and self._there[value] and self._ground.can[value]:
            chance = self._ground.chances[position + 1]
            if chance <= self._position + 1 or self._position >= self._ends[value]:
                self._free[value] = self._may_go(value)
            elif self._from_on[value] < self._ground.ops:
                self._opening[max(chance, self._from_on[value])].append(value)
            self._due[value] = self._next(value, position)

    def _hold(self, value: int) -> None:
        until = self._ground.holdable[value]
        self.done.append(Hold(OpIndex(self._position), ValueId(value)))
        self._lock(value)
        self._held_until[until].append(value)

    def _let_go(self, value: int) -> None:
        self._locked[value] -= 1
        self._position += 1  # after the op
        self._drop(value)
        self._position -= 1

    # What is swapped.

    def _move(self, position: int) -> None:
        for value in self._releases.get(position, ()):
            if self._there[value] and not self._locked[value]:
                self._end(value)
                self._below[value] = True
        for value in self._fetches.get(position, ()):
            if self._below[value]:
                self._return(value)

    def _return(self, value: int) -> None:
        self._make_room(self._ground.size[value])
        self._below[value] = False
        self._take(value)

    # What goes.

    def _make_room(self, count: int) -> None:
        while self._held + count > self._limit:
            candidates = np.flatnonzero(self._free)
            if not len(candidates):
                needed = self._held + count + self._ground.trace.unseen_bytes
                raise Stuck(self._position, needed)
            self._drop(int(candidates[self._scores(candidates).argmin()]))

    def _scores(self, candidates: npt.NDArray[np.intp]) -> _Numbers:
        taste = self._taste
        now = self._ground.starts[self._position]
        cost = power(self._cost[candidates], quarters(taste.cost)) * self._static[candidates]
        distance = np.maximum(self._due[candidates] - now, 1e-9)
        found: _Numbers = cost / power(distance, quarters(taste.distance))
        return found

    def _drop(self, value: int) -> None:
        ground = self._ground
        self.done.append(Drop(OpIndex(self._position), ValueId(value)))
        self._there[value] = self._free[value] = False
        self._held -= ground.size[value]
        if ground.trace.values[value].end <= self._position and not self._wanted(value):
            return  # it was there only for another
        self._gone.add(value)
        for other in ground.near[value]:
            if self._is_gone[other]:
                self._gone.join(value, other)
            elif ground.maker[other] < ground.maker[value] and self._there[other]:
                self._due[other] = min(self._due[other], self._due[value])
        self._reckon(value)

    def _wanted(self, value: int) -> bool:
        uses = self._ground.uses[value]
        return bool(uses) and uses[-1] >= self._position

    def _reckon(self, value: int) -> None:
        """What dropping its neighbours would cost now."""
        if not self._taste.around:
            return
        ground = self._ground
        for other in ground.near[value]:
            if not self._is_gone[other]:
                around = self._gone.seconds_of(ground.near[other])
                self._cost[other] = self._seconds[other] + around

    # What comes back.

    def _have(self, value: int) -> None:
        """Run again what is needed for it."""
        if self._there[value]:
            return
        ground = self._ground
        stack = [[value, 0]]
        while stack:
            self._looks += 1
            if self._looks > 4 * _MOST_RERUNS * ground.ops:
                raise _Enough
            wanted, at = stack[-1]
            if self._below[wanted]:
                self._return(wanted)
            if self._there[wanted]:
                self._leave(stack)
                continue
            sources = ground.sources[ground.maker[wanted]]
            while at < len(sources) and self._there[sources[at]]:
                self._lock(sources[at])
                at += 1
            stack[-1][1] = at
            if at < len(sources):
                stack.append([sources[at], 0])
                continue
            self._rerun(wanted)
            stack.pop()
            for source in sources:
                self._unlock(source, self._position - 1)
            for source in sources:
                if self._is_over(source):
                    self._make_others(source)
            for source in sources:
                if self._is_over(source):
                    self._drop(source)

    def _leave(self, stack: list[list[int]]) -> None:
        wanted, at = stack.pop()
        if not at:
            return
        for source in self._ground.sources[self._ground.maker[wanted]][:at]:
            self._unlock(source, self._position - 1)

    def _is_over(self, value: int) -> bool:
        """Nothing of the step needs it any more, and it was made again for another."""
        over = self._ends[value] <= self._position
        return over and bool(self._free[value]) and not self._wanted(value)

    def _make_others(self, source: int) -> None:
        """What else is made from it and needed soon, as long as it is there, and if there is room.

        Else it would have to be made once more.
        """
        ground = self._ground
        soon = ground.starts[self._position] + _SOON * ground.starts[-1]
        for other in ground.near[source]:
            if not self._is_gone[other] or self._due[other] > soon:
                continue
            maker = ground.maker[other]
            sources = ground.sources[maker]
            if source not in sources or not all(self._there[one] for one in sources):
                continue
            size = sum(ground.size[value] for value in ground.made[maker])
            if self._held + size + ground.trace.ops[maker].workspace_bytes <= self._limit:
                for one in sources:
                    self._lock(one)
                self._rerun(other)
                for one in sources:
                    self._unlock(one, self._position - 1)

    def _rerun(self, wanted: int) -> None:
        ground = self._ground
        maker = ground.maker[wanted]
        op = ground.trace.ops[maker]
        made = ground.made[maker]
        self._make_room(sum(ground.size[value] for value in made) + op.workspace_bytes)
        self.done.append(Rerun(OpIndex(self._position), OpIndex(maker)))
        self.seconds += ground.again[maker]
        self._reruns += 1
        if self.seconds > self._most or self._reruns > _MOST_RERUNS * ground.ops:
            raise _Enough
        for value in made:
            if self._there[value] or self._below[value]:
                continue
            self._take(value)
            if self._is_gone[value]:
                self._gone.remove(value)
                self._reckon(value)
            self._due[value] = self._next(value, self._position - 1)
        for value in made:
            if value != wanted and self._is_over(value):
                self._drop(value)
