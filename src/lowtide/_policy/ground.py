"""What recomputing has to know of a step, whatever the limit: who is made from what, and when."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from lowtide._analyze.access import producers
from lowtide._analyze.fusable import again_seconds
from lowtide._analyze.load import rounded_bytes
from lowtide._analyze.recompute import obstacles
from lowtide._ir import Op, OpIndex, Trace, ValueId

_LONGEST = 48  # ops that are looked at to make one value again
_MOST_HELD = 256  # ops between the moment at which backward asks for a value and its use


@dataclass(frozen=True, slots=True)
class Runtime:
    """What can be done in a live step.

    Only `repeatable` ops run again. Only `droppable` values can be dropped and only `movable` ones
    swapped, either not before the position from which on nobody else refers to them (`held`). What
    backward asks for has to be there from then on until it is used. Copies start and bytes are
    freed at `positions`.
    """

    repeatable: Container[int]  # ops that can run again
    droppable: Container[ValueId]
    movable: Container[ValueId]
    held: Mapping[ValueId, OpIndex]
    positions: tuple[int, ...]


class Ground:
    """All that does not depend on the limit."""

    def __init__(self, trace: Trace, runtime: Runtime | None = None) -> None:
        count = len(trace.values)
        self.trace = trace
        self.ops = len(trace.ops)
        self.size = [
            rounded_bytes(trace, value) if value.device == trace.device else 0
            for value in trace.values
        ]
        made_by = producers(trace)
        self.maker = [int(made_by.get(ValueId(i), -1)) for i in range(count)]
        self.again = [again_seconds(op) for op in trace.ops]
        self.reads = [tuple(dict.fromkeys((*op.reads, *op.updates))) for op in trace.ops]
        self.sources = [  # to run it again; what has no bytes is always there
            tuple(dict.fromkeys(value for value in op.reads if trace.values[value].bytes))
            for op in trace.ops
        ]
        self.made = [_made_again(trace, op) for op in trace.ops]  # ... and what that makes
        self.uses: list[list[int]] = [[] for _ in range(count)]
        for i, reads in enumerate(self.reads):
            for source in reads:
                self.uses[source].append(i)
        self.wants = self.reads  # what has to be there while an op runs
        if runtime is not None:
            self._want_what_is_asked_for()
        for i, value in enumerate(trace.values):
            if value.after:
                self.uses[i].append(self.ops)
        self.can = self._recomputable(runtime)
        self.from_on = [0 if can else self.ops for can in self.can]  # ... it can be dropped
        if runtime is not None:
            for i, can in enumerate(self.can):
                able = can and i in runtime.droppable
                self.from_on[i] = runtime.held.get(ValueId(i), self.ops) if able else self.ops
        events = range(self.ops) if runtime is None else runtime.positions
        self.chances = _next_of(events, self.ops)  # from each position on, when something can go
        before = {value.storage: i for i, value in enumerate(trace.values) if value.before}
        self.found_as = {  # what a step leaves in a storage -> what the next one finds
            i: before[value.storage]
            for i, value in enumerate(trace.values)
            if value.after and value.storage in before
        }
        self.appearing: list[list[int]] = [[] for _ in range(self.ops)]
        self.overwritten: list[list[int]] = [[] for _ in range(self.ops)]
        self.ending: list[list[int]] = [[] for _ in range(self.ops)]
        for i, value in enumerate(trace.values):
            if value.after:
                continue
            if value.end < self.ops and i in self.reads[value.end]:
                self.overwritten[value.end].append(i)
            elif value.end:
                self.ending[value.end - 1].append(i)
        for i, value in enumerate(trace.values):
            lives = value.end > value.first or i in self.reads[value.first]
            if not value.before and self.maker[i] < 0 and lives:
                self.appearing[value.first].append(i)
        self.holdable = self._holdable(runtime)
        self._seconds: dict[frozenset[int], list[float]] = {}
        self.starts = [*accumulate((op.seconds for op in trace.ops), initial=0.0)]
        near: list[set[int]] = [set() for _ in range(count)]
        for i, op in enumerate(trace.ops):
            for made in op.writes:
                near[made].update(self.sources[i])
                for source in self.sources[i]:
                    near[source].add(made)
        self.near = [  # what is made from it, and what it is made from
            tuple(other for other in others if self.can[other] and other != i)
            for i, others in enumerate(near)
        ]

    def seconds(self, holds: frozenset[int] = frozenset()) -> list[float]:
        """Of each value, what it takes to make it again when all is there that lives so long.

        What is over by the time of its next use after a while has to be made first, unless it is
        held.
        """
        found = self._seconds.get(holds)
        if found is None:
            self._seconds.clear()
            found = self._seconds[holds] = [self._chain(v, holds) for v in range(len(self.size))]
        return found

    def until(self, value: int) -> int:
        """The use after which it was not used for longest."""
        uses = [self.maker[value], *self.uses[value]]
        return max(pairwise(uses), key=lambda gap: gap[1] - gap[0], default=(0, uses[-1]))[1]

    def _chain(self, value: int, holds: frozenset[int]) -> float:
        """Added up in the order in which ops are found, not by `sum`: as it is done natively."""
        if self.maker[value] < 0:
            return 0.0
        values = self.trace.values
        until = self.until(value)
        ops = {self.maker[value]}
        stack = [self.maker[value]]
        seconds = self.again[self.maker[value]]
        while stack and len(ops) < _LONGEST:
            for source in self.sources[stack.pop()]:
                over = not values[source].after and values[source].end <= until
                if over and source not in holds and self.can[source]:
                    maker = self.maker[source]
                    if maker not in ops:
                        ops.add(maker)
                        stack.append(maker)
                        seconds += self.again[maker]
        return seconds

    def _want_what_is_asked_for(self) -> None:
        """Saved values are used when backward asks for them, and held until its op runs."""
        wants = [list(reads) for reads in self.reads]
        for i, value in enumerate(self.trace.values):
            asked = {u for save in value.saves for u in save.unpacked if u < self.ops}
            if not asked:
                continue
            for at in asked:
                later = [use for use in self.uses[i] if at <= use <= at + _MOST_HELD]
                for op in range(at, min(later, default=at) + 1):
                    if op < min(value.end, self.ops) and i not in wants[op]:
                        wants[op].append(ValueId(i))
            self.uses[i] = sorted({*self.uses[i], *asked})
        self.wants = [tuple(values) for values in wants]

    def _holdable(self, runtime: Runtime | None) -> dict[int, int]:
        """What could stay beyond its end, for what is made from it -> until when that is needed."""
        found: dict[int, int] = {}
        values = self.trace.values
        overwritten = {value for some in self.overwritten for value in some}
        for made, maker in enumerate(self.maker):
            if self.from_on[made] >= self.ops or not self.can[made]:
                continue
            for source in self.sources[maker]:
                if values[source].after or source in overwritten or not self.size[source]:
                    continue
                if runtime is not None and (values[source].saves or source in runtime.movable):
                    continue  # it is saved itself
                until = self.uses[made][-1] if self.uses[made] else 0
                if until > values[source].end:
                    found[source] = max(found.get(source, 0), until)
        return found

    def _recomputable(self, runtime: Runtime | None) -> list[bool]:
        """Which values can be made again up to their last use, from what is there or can be, too.

        What came from outside the step and is let go within it is not held on to.
        """
        values = self.trace.values
        until = [inf if value.after else float(value.end) for value in values]
        can = [False] * len(values)
        lawful = [obstacle is None for obstacle in obstacles(self.trace)]
        for value in sorted(range(len(values)), key=lambda i: (self.maker[i], i)):
            maker = self.maker[value]
            if maker < 0 or not lawful[value] or value not in self.made[maker]:
                continue
            if runtime is not None and maker not in runtime.repeatable:
                continue
            sources = self.sources[maker]
            reach = min((until[source] for source in sources), default=inf)
            if reach > max(self.uses[value], default=0):
                can[value] = self.size[value] > 0
                until[value] = max(until[value], reach)
        return can


def _next_of(positions: Sequence[int], ops: int) -> list[int]:
    """For each position the next of `positions`, itself included; `ops` where there is none."""
    found = [ops] * (ops + 2)
    for at in positions:
        found[at] = at
    for at in range(ops - 1, -1, -1):
        found[at] = min(found[at], found[at + 1])
    return found


def _made_again(trace: Trace, op: Op) -> tuple[ValueId, ...]:
    """What it makes when it runs again: running statistics are updated once."""
    updated = {trace.values[value].storage for value in op.updates}
    return tuple(value for value in op.writes if trace.values[value].storage not in updated)
