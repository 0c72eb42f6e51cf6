"""A step by a plan, with all that is done in it -> a tape: the same, for it to be done natively.

`native/gate/tape.h` says what is done with it.
"""

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.recipe import Call, Look, Value
from lowtide._runtime.fused.groups import Group
from lowtide._runtime.fused.kernel import Kernel


class Do(IntEnum):
    """As in `native/gate/program.h`."""

    DROP = 0
    RUN = 1
    FUSED = 2
    BRING = 3
    LET_GO = 4


@dataclass(frozen=True, slots=True)
class TapedOp:
    """An op that is written down: values by their numbers."""

    number: int  # in the step
    form: int
    reads: tuple[int, ...]  # -1: what does not matter to what it makes
    makes: tuple[tuple[int, int], ...]  # a place among the results, and the value
    writes: tuple[tuple[int, int], ...]  # a place among what it reads, and the value there then
    holds: tuple[int, ...]  # of what it reads, what a plan holds from then on


@dataclass(frozen=True, slots=True)
class TapedKernel:
    """What runs several ops as one, and how it sees what it reads."""

    kernel: Kernel
    looks: tuple[Look, ...]
    dtypes: tuple[torch.dtype, ...]  # of what it makes


@dataclass(frozen=True, slots=True)
class Tape:
    """All that is to be known of a step. `words` is that for the native side."""

    words: tuple[int, ...]
    bytes: tuple[int, ...]  # of each value
    ops: tuple[TapedOp, ...]
    saves: Mapping[int, int]  # that are kept natively: their number in the step -> the value
    lent: frozenset[int]  # saves that Python moves, and from which dropped values are made
    kernels: tuple[TapedKernel, ...]
    lets_go: frozenset[int]  # events at which nothing is made or brought
    seconds: float = field(compare=False)  # that all that runs again takes


class CannotTape(Exception):
    """There is none of that step."""


@dataclass(slots=True, eq=False)
class _Done:
    """Something that was done. `turn`: what is at hand for a while lasts as long as that."""

    what: Do
    turn: int = 0
    cell: DeltaCell | None = None
    value: Value | None = None
    sources: Sequence[Value] = ()
    calls: Sequence[Call] = ()
    seconds: float = 0.0
    made: Sequence[tuple[int, Value, bool]] = ()  # by its place, and whether it was dropped
    written: Sequence[tuple[int, Value, bool]] = ()
    group: Group | None = None
    kernel: Kernel | None = None
    place: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Seen:
    """Of one step."""

    notes: list[tuple[int, Call]] = field(default_factory=list)  # with the form
    done: dict[int, list[_Done]] = field(default_factory=lambda: defaultdict(list))
    cells: dict[int, DeltaCell] = field(default_factory=dict)  # by the save
    holds: list[tuple[int, int]] = field(default_factory=list)  # an op's number, and a source
    why: str = ""  # there is no tape of it


class Rehearsal:
    """While it is on, told of all that is done."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._seen = _Seen()
        self._turn = 0
        self.on = False
        self.at = 0  # the event

    def begin(self) -> None:
        """A step begins."""
        self._seen = _Seen()
        self.on = True

    def end(self, recorded: Collection[int], swapped: Collection[int]) -> Tape:
        """It has ended: ops that had to be `recorded`, saves that a plan has `swapped`."""
        seen, self._seen = self._seen, _Seen()
        self.on = False
        if seen.why:
            raise CannotTape(seen.why)
        return _Writer(seen, swapped).tape(recorded)

    def stop(self) -> None:
        """Of that step there is none."""
        self._seen = _Seen()
        self.on = False

    def refuse(self, why: str) -> None:
        """Something was done that is not to be done again like that."""
        self._seen.why = self._seen.why or why

    def noted(self, form: int, call: Call) -> None:
        """An op has run that looks like that."""
        self._seen.notes.append((form, call))

    def saved(self, number: int, cell: DeltaCell) -> None:
        """A tensor on it is saved."""
        self._seen.cells[number] = cell

    def held(self, number: int, place: int) -> None:
        """What an op read in that place is held."""
        self._seen.holds.append((number, place))

    def let_go(self, number: int, place: int) -> None:
        """... and no longer."""
        self._add(_Done(Do.LET_GO, place=(number, place)))

    def dropped(self, cell: DeltaCell, sources: Sequence[Value]) -> None:
        """It was, and can be made from those."""
        self._add(_Done(Do.DROP, cell=cell, value=cell.value, sources=tuple(sources)))

    def take_turn(self) -> None:
        """What is at hand for a while, is so from here on."""
        self._turn += 1

    def ran(
        self,
        call: Call,
        made: Iterable[tuple[int, Value | None]],
        written: Iterable[tuple[int, Value | None]],
    ) -> None:
        """An op has run again. Before what it has made is kept."""
        self._add(
            _Done(
                Do.RUN,
                calls=(call,),
                seconds=self._costs.seconds(call.cost),
                made=_wanted(made),
                written=_wanted(written),
            )
        )

    def ran_as_one(self, group: Group, kernel: Kernel) -> None:
        """So has a group."""
        outputs = [(j, group.made[j]) for j in group.outputs]
        seconds = sum(self._costs.seconds(call.cost) for call in group.calls)
        self._add(
            _Done(
                Do.FUSED,
                calls=tuple(group.calls),
                seconds=seconds,
                made=_wanted(outputs),
                group=group,
                kernel=kernel,
            )
        )

    def _add(self, done: _Done) -> None:
        done.turn = self._turn
        self._seen.done[self.at].append(done)


def _wanted(made: Iterable[tuple[int, Value | None]]) -> list[tuple[int, Value, bool]]:
    found = []
    for place, value in made:
        if value is not None:
            cell = value.saved()
            found.append((place, value, cell is not None and cell.is_dropped()))
    return found


class _Writer:
    """Numbers what was seen, and writes it in words."""

    def __init__(self, seen: _Seen, swapped: Collection[int]) -> None:
        self._seen = seen
        self._values: dict[int, int] = {}
        self._known: list[Value] = []
        self._by_python = {id(seen.cells[number]) for number in swapped if number in seen.cells}
        self._cell_of = {id(cell.value): cell for cell in seen.cells.values()}
        self._number_of = {id(cell): n for n, cell in reversed(seen.cells.items())}  # the first
        self._lent: set[int] = set()
        self._kernels: list[TapedKernel] = []

    def tape(self, recorded: Collection[int]) -> Tape:
        """All of it."""
        ops = self._ops(recorded)
        made = {value for op in ops for _, value in (*op.makes, *op.writes)}
        saves = {
            number: self._values[id(cell.value)]
            for number, cell in self._seen.cells.items()
            if id(cell) not in self._by_python and self._values.get(id(cell.value), -1) in made
        }
        places = {op.number: i for i, op in enumerate(ops)}
        events: list[int] = []
        for at, done in sorted(self._seen.done.items()):
            written = [row for one in _timely(done) for row in self._written(*one, places)]
            events += [at, len(written), *(word for row in written for word in row)]
        sizes = tuple(value.bytes for value in self._known)
        words = [*_listed(sizes), len(ops)]
        for op in ops:
            words += [op.number, op.form, *_listed(op.reads)]
            for row in (op.makes, op.writes):
                words += [len(row), *(word for place, value in row for word in (place, value, 0))]
            words += _listed(op.holds)
        words.append(len(saves))
        for number, value in saves.items():
            words += [number, value]
        words += [len(self._seen.done), *events]
        kernels, lent = tuple(self._kernels), frozenset(self._lent)
        seconds = sum(one.seconds for done in self._seen.done.values() for one in done)
        lets_go = frozenset(
            at
            for at, done in self._seen.done.items()
            if all(one.what in (Do.DROP, Do.LET_GO) for one in done)
        )
        return Tape(tuple(words), sizes, ops, saves, lent, kernels, lets_go, seconds)

    def _id(self, value: Value) -> int:
        found = self._values.get(id(value))
        if found is None:
            found = self._values[id(value)] = len(self._known)
            self._known.append(value)
        return found

    def _known_id(self, value: Value) -> int:
        found = self._values.get(id(value))
        if found is None:
            raise CannotTape("a value that no op has read or made")
        return found

    def _ops(self, recorded: Collection[int]) -> tuple[TapedOp, ...]:
        held = defaultdict(list)
        for number, place in self._seen.holds:
            held[number].append(place)
        ops = []
        for form, call in self._seen.notes:
            reads = tuple(-1 if one.ignored else self._id(one.value) for one in call.sources)
            makes, writes = self._placed(call.makes), self._placed(call.writes)
            holds = tuple(sorted(held.get(call.number, ())))
            ops.append(TapedOp(call.number, form, reads, makes, writes, holds))
        if sorted(op.number for op in ops) != sorted(recorded):
            raise CannotTape("not every op that is written down was known by its form")
        return tuple(ops)

    def _placed(
        self, them: Iterable[tuple[int, "weakref.ref[Value]"]]
    ) -> tuple[tuple[int, int], ...]:
        known = [(place, ref()) for place, ref in them]
        return tuple((place, self._id(value)) for place, value in known if value is not None)

    def _written(
        self, one: _Done, frees: Sequence[Value], places: Mapping[int, int]
    ) -> list[list[int]]:
        """In words, and before it what Python has to bring for it."""
        if one.what is Do.DROP:
            return [self._written_drop(one)]
        if one.what is Do.LET_GO:
            holder, place = one.place
            held = sorted(place for number, place in self._seen.holds if number == holder)
            return [[Do.LET_GO, places[holder], held.index(place)]] if place in held else []
        brought = []
        for value in dict.fromkeys(_read(one)):
            number = self._lends(value)
            if number is not None:
                brought.append([int(Do.BRING), number])
        tail = [len(one.calls)]
        for rows in (one.made, one.written):
            tail.append(len(rows))
            for place, value, was_dropped in rows:
                if was_dropped and self._lends(value) is not None:
                    raise CannotTape("a value is both dropped and swapped")
                itemsize = 0 if one.group is None else one.group.parts[place].dtype.itemsize
                tail += [itemsize or place, self._known_id(value), was_dropped]
        tail += _listed([self._known_id(value) for value in frees])
        if one.group is None:
            return [*brought, [Do.RUN, places[one.calls[0].number], *tail]]
        inputs: list[int] = []
        for source, given in one.group.inputs:
            offset = source.offset * source.dtype.itemsize
            inputs += [self._known_id(source.value), offset, not given.dims]
        head = [self._kernel(one), one.group.count, len(one.group.inputs), *inputs]
        return [*brought, [Do.FUSED, *head, *tail]]

    def _written_drop(self, one: _Done) -> list[int]:
        assert one.cell is not None
        assert one.value is not None
        if id(one.cell) in self._by_python:
            raise CannotTape("a value is both dropped and swapped")
        if id(one.cell) not in self._number_of:
            raise CannotTape("a value is dropped that was saved before")
        ours: list[int] = []
        others: list[int] = []
        for source in one.sources:
            rows = ours if self._lends(source) is None else others
            rows.append(self._known_id(source))
        number = self._number_of[id(one.cell)]
        return [Do.DROP, number, self._known_id(one.value), *_listed(ours), *_listed(others)]

    def _lends(self, value: Value) -> int | None:
        """The save by which Python moves a value that is read; None: it does not."""
        cell = self._cell_of.get(id(value))
        if cell is None or id(cell) not in self._by_python:
            return None
        number = self._number_of[id(cell)]
        self._lent.add(number)
        return number

    def _kernel(self, one: _Done) -> int:
        assert one.group is not None
        assert one.kernel is not None
        looks = tuple(source.look() for source, _ in one.group.inputs)
        dtypes = tuple(one.group.parts[j].dtype for j in one.group.outputs)
        taped = TapedKernel(one.kernel, looks, dtypes)
        if taped not in self._kernels:
            self._kernels.append(taped)
        return self._kernels.index(taped)


def _read(one: _Done) -> list[Value]:
    """Values that it reads, but for those that it makes itself on the way."""
    if one.group is not None:
        return [source.value for source, _ in one.group.inputs]
    return [source.value for call in one.calls for source in call.sources if not source.ignored]


def _listed(numbers: Sequence[int]) -> list[int]:
    return [len(numbers), *numbers]


def _timely(done: Sequence[_Done]) -> list[tuple[_Done, list[Value]]]:
    """Each without results that nobody uses; and what is at hand for a while and not read later."""
    frees: list[list[Value]] = [[] for _ in done]
    last: dict[tuple[int, int], int] = {}  # the turn and the value -> where it is still read
    for i in range(len(done) - 1, -1, -1):
        one = done[i]
        used: list[list[tuple[int, Value, bool]]] = []
        for rows in (one.made, one.written):
            used.append([])
            for made in rows:
                _, value, was_dropped = made
                reader = last.pop((one.turn, id(value)), None)
                if reader is not None and not was_dropped:
                    frees[reader].append(value)
                if reader is not None or was_dropped:
                    used[-1].append(made)
                elif one.group is not None:
                    raise CannotTape("a kernel makes what nobody uses")
        one.made, one.written = used
        for value in _read(one):
            last.setdefault((one.turn, id(value)), i)
    return list(zip(done, frees, strict=True))
