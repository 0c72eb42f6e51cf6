"""Trace, drops and reruns -> the step as it then is: a trace with the reruns in it.

Whatever can be asked of a trace can be asked of that one: its load, its swaps, how long it takes.
A value keeps its number as long as it is the original; what is made again is a value of its own on
a storage of its own, numbered after all that the trace had.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide._analyze.fusable import again_seconds
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
        values = trace.values
        self._old = [ValueId(i) for i in range(len(values))]
        # Of each value, as it is in the new step. Made into values only at the end: quicker by far.
        self._first = [int(value.first) for value in values]
        self._ends = [int(value.end) for value in values]
        self._after = [value.after for value in values]
        self._storage = [int(value.storage) for value in values]
        self._version = [value.version for value in values]
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
            self._ends[now] = len(self._ops)
            self._after[now] = trace.values[number].after
        values = tuple(self._value(number, lead) for number in range(len(self._old)))
        new = replace(trace, ops=tuple(self._ops), values=values)
        return Remade(new, tuple(lead), tuple(at), tuple(self._old))

    def _value(self, number: int, lead: Sequence[int]) -> Value:
        old = self._trace.values[self._old[number]]
        original = number < len(self._trace.values)
        first, end = OpIndex(self._first[number]), OpIndex(self._ends[number])
        saves: tuple[Save, ...] = ()
        if original and old.saves:
            saves = _saved_at(old.saves, first, end, lead, self._read_again.get(number, ()))
        return Value(
            StorageId(self._storage[number]),
            self._version[number],
            old.bytes,
            old.kind,
            first,
            end,
            original and old.before,
            self._after[number],
            old.device,
            old.name,
            old.module,
            saves,
        )

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
        values = self._trace.values
        there = [number for number in op.reads if number in self._now or values[number].bytes]
        reads = tuple(ValueId(self._now[number]) for number in there)
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
            again = len(self._old)
            self._old.append(number)
            for row in (self._first, self._ends, self._storage, self._version):
                row.append(0)
            self._after.append(False)
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
                seconds=again_seconds(op),
                again_seconds=None,
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
        same = reads == op.reads and updates == op.updates
        self._ops.append(op if same else replace(op, reads=reads, updates=updates))

    def _begin(self, number: int, now: int) -> None:
        """On a storage of its own, unless it takes the place of the version before."""
        here = len(self._ops)
        value = self._trace.values[number]
        before = self._newest.get((value.storage, value.version - 1))
        if now == number and before is not None and self._ends[before] == here:
            storage, version = self._storage[before], self._version[before] + 1
        elif now == number and not value.version:
            storage, version = int(value.storage), 0
        else:
            storage, version = self._storages, 0
            self._storages += 1
        self._now[number] = self._newest[value.storage, value.version] = now
        self._storage[now], self._version[now] = storage, version
        self._first[now], self._ends[now] = here, here + 1

    def _end(self, number: int) -> None:
        now = self._now.pop(number, None)
        if now is not None:
            self._ends[now] = len(self._ops)
            self._after[now] = False


def _saved_at(
    old: Sequence[Save], first: int, end: int, lead: Sequence[int], reruns: Sequence[int]
) -> tuple[Save, ...]:
    """Saves where they are now; who runs an op again asks for what that reads, too."""
    saves: list[Save] = []
    for save in old:
        if lead[save.packed] > end:
            continue  # what is saved later is what was made again
        packed = OpIndex(max(lead[save.packed], first))
        asked = {lead[unpacked] for unpacked in save.unpacked}
        if not saves:
            asked.update(at for at in reruns if at >= packed)
        saves.append(Save(None, save.node, packed, tuple(OpIndex(at) for at in sorted(asked))))
    return tuple(saves)
