"""Trace, drops and reruns -> the step as it then is: a trace with the reruns in it.

Whatever can be asked of a trace can be asked of that one: its load, its swaps, how long it takes.
A value keeps its number as long as it is the original; what is made again is a value of its own on
a storage of its own, numbered after all that the trace had.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide._ir import (
    Drop,
    Hold,
    Op,
    OpIndex,
    Phase,
    Remake,
    Save,
    StorageId,
    Trace,
    Value,
    ValueId,
)


@dataclass(frozen=True, slots=True)
class Remade:
    """`lead` is where the reruns before each op of the old step begin, and `at` that op itself.

    Both have one more entry, for the step's end. `old` are the values' numbers in the old trace.
    """

    trace: Trace
    lead: tuple[int, ...]
    at: tuple[int, ...]
    old: tuple[ValueId, ...]

    def position(self, old: int) -> int:
        """Where the new step is when the old one is at `old`; that may be in the next step."""
        step, place = divmod(old, len(self.at) - 1)
        return step * len(self.trace.ops) + self.lead[place]


def remade(trace: Trace, remakes: Sequence[Remake]) -> Remade:
    """The step with them. They must be lawful: see `run_remakes`."""
    return _Writer(trace).write(remakes)


class _Writer:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ops: list[Op] = []
        self._values = list(trace.values)
        self._old = [ValueId(i) for i in range(len(trace.values))]
        self._now: dict[int, int] = {}  # what is there -> which value that is now
        self._newest: dict[tuple[int, int], int] = {}  # storage and version -> which it was last
        self._held: set[int] = set()
        self._read_again: dict[int, list[int]] = defaultdict(list)  # values -> by which reruns
        self._storages = max((value.storage for value in trace.values), default=-1) + 1

    def write(self, remakes: Sequence[Remake]) -> Remade:
        trace = self._trace
        todo: dict[int, list[Remake]] = defaultdict(list)
        for remake in remakes:
            todo[remake.before].append(remake)
        made = {value for op in trace.ops for value in op.writes}
        appearing: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        for number, value in enumerate(trace.values):
            ends[value.end].append(number)
            if value.before:
                self._now[number] = self._newest[value.storage, value.version] = number
            elif number not in made:
                appearing[value.first].append(number)
        touched = [{*op.reads, *op.updates} for op in trace.ops] + [set()]
        for number in ends[0]:
            if number not in touched[0]:
                self._end(number)  # the step begins with other bytes in its place
        lead, at = [], []
        for position, op in enumerate(trace.ops):
            lead.append(len(self._ops))
            overwritten_at_once = [n for n in appearing[position] if n in ends[position]]
            for number in appearing[position]:
                if number not in overwritten_at_once:
                    self._begin(number, number)
            for remake in todo[position]:
                self._do(remake, op.phase)
            at.append(len(self._ops))
            for number in overwritten_at_once:
                self._begin(number, number)
                if number not in touched[position]:
                    self._end(number)
            self._run(op, [n for n in ends[position] if n in touched[position]])
            for number in ends[position + 1]:
                stays = trace.values[number].after or number in self._held
                if not stays and number not in touched[position + 1]:
                    self._end(number)
        lead.append(len(self._ops))
        for remake in todo[len(trace.ops)]:
            self._do(remake, trace.ops[-1].phase)
        at.append(len(self._ops))
        for number, now in self._now.items():
            after = trace.values[number].after
            self._values[now] = replace(self._values[now], end=OpIndex(len(self._ops)), after=after)
        values = (
            _saved_at(value, lead, self._read_again[number])
            for number, value in enumerate(self._values)
        )
        new = replace(trace, ops=tuple(self._ops), values=tuple(values))
        return Remade(new, tuple(lead), tuple(at), tuple(self._old))

    def _do(self, remake: Remake, phase: Phase) -> None:
        if isinstance(remake, Drop):
            self._held.discard(remake.value)
            self._end(remake.value)
            return
        if isinstance(remake, Hold):
            self._held.add(remake.value)
            return
        op = self._trace.ops[remake.op]
        grain = self._trace.granularity_bytes
        reads = tuple(ValueId(self._now[number]) for number in op.reads)
        for number in reads:
            self._read_again[number].append(len(self._ops))
        updated = {self._trace.values[number].storage for number in op.updates}
        writes, copies = [], 0
        for number in op.writes:
            value = self._trace.values[number]
            if value.storage in updated:
                continue  # running statistics are updated once
            if number in self._now:
                if value.device == self._trace.device:
                    copies += -(-value.bytes // grain) * grain
                continue
            again = len(self._values)
            self._values.append(replace(value, saves=(), before=False))
            self._old.append(number)
            self._begin(number, again)
            writes.append(ValueId(again))
        self._ops.append(
            replace(
                op,
                reads=reads,
                updates=(),
                writes=tuple(writes),
                operands=(),
                results=(),
                workspace_bytes=op.workspace_bytes + copies,
                phase=phase,
            )
        )

    def _run(self, op: Op, overwritten: Sequence[int]) -> None:
        """An op of the old step, on what is there now."""

        def now(numbers: Sequence[ValueId]) -> tuple[ValueId, ...]:
            return tuple(ValueId(self._now[number]) for number in numbers)

        reads, updates = now(op.reads), now(op.updates)
        if any(self._now.get(o.value, -1) != o.value for o in op.operands):
            op = replace(op, operands=(), args="")
        for number in overwritten:
            self._end(number)
        for number in op.writes:
            self._begin(number, number)
        self._ops.append(replace(op, reads=reads, updates=updates))

    def _begin(self, number: int, now: int) -> None:
        """On a storage of its own, unless it takes the place of the version before."""
        here = OpIndex(len(self._ops))
        value = self._trace.values[number]
        before = self._newest.get((value.storage, value.version - 1))
        if now == number and before is not None and self._values[before].end == here:
            storage, version = self._values[before].storage, self._values[before].version + 1
        elif now == number and not value.version:
            storage, version = value.storage, 0
        else:
            storage, version = StorageId(self._storages), 0
            self._storages += 1
        self._now[number] = self._newest[value.storage, value.version] = now
        self._values[now] = replace(
            self._values[now], storage=storage, version=version, first=here, end=OpIndex(here + 1)
        )

    def _end(self, number: int) -> None:
        now = self._now.pop(number, None)
        if now is not None:
            self._values[now] = replace(self._values[now], end=OpIndex(len(self._ops)), after=False)


def _saved_at(value: Value, lead: Sequence[int], reruns: Sequence[int]) -> Value:
    """With its saves where they are now; who runs an op again asks for what that reads, too."""
    if not value.saves:
        return value
    saves: list[Save] = []
    for save in value.saves:
        if lead[save.packed] > value.end:
            continue  # what is saved later is what was made again
        packed = OpIndex(max(lead[save.packed], value.first))
        asked = {lead[unpacked] for unpacked in save.unpacked}
        if not saves:
            asked.update(at for at in reruns if at >= packed)
        saves.append(Save(None, save.node, packed, tuple(OpIndex(at) for at in sorted(asked))))
    return replace(value, saves=tuple(saves))
