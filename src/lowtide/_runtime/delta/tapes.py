"""Steps by a plan that go on without Python, as long as they are as rehearsed.

Two settled steps by a plan in which the same was done, to the same values, make a *tape*
(`rehearsal`), and those after them go by it (`native/gate/tape.h`). Whatever is not as rehearsed
ends that for the step: Python is given values, calls and cells as it would have them by then
(`hand_over`), and goes on.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.native_tape import NativeTape
from lowtide._runtime.delta.order import Gone
from lowtide._runtime.delta.recipe import NOBODY, Value, seen_on
from lowtide._runtime.delta.rehearsal import CannotTape, Tape
from lowtide._runtime.delta.replay import Replayer
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.see import Seer
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.follow import Follower
from lowtide._runtime.swap.natively import Taped
from lowtide._runtime.swap.saved import Saved
from lowtide._runtime.swap.script import Act, Action, Script

_REHEARSED = 6  # steps, at most, until two are alike
_FAILED = 3  # steps that were not as rehearsed, until none goes by a tape any more


@dataclass(slots=True)
class _Of:
    """What is known of a script."""

    script: Script
    tape: Tape | None = None
    rehearsed: Tape | None = None  # the last that came of a step
    rehearsals: int = 0
    failed: int = 0
    taped: Taped | None = None


class _Lent:
    """In place of the dropped values that are made from one that Python moves."""

    def __init__(self, value: Value, tapes: "Tapes") -> None:
        self.value = value
        self._tapes = tapes

    def bring(self) -> None:
        """The value is about to be written to."""
        self._tapes.hand_over()
        for cell in tuple(self.value.dependents):
            cell.bring()


class Tapes:
    """Of the scripts that steps follow."""

    following: Follower
    saved: Saved
    halt: Callable[[], None]  # Python sees what happens next
    keeps: Callable[[], bool]  # whether saves may be kept natively

    def __init__(
        self,
        room: Room,
        ledger: Ledger,
        seer: Seer,
        replayer: Replayer,
        load: Callable[[], NativeTape | None],
    ) -> None:
        self._room, self._ledger, self._forms, self._holds = room, ledger, seer.forms, seer.holds
        self._replayer = replayer
        log = self.log = replayer.log
        seer.log = seer.holds.log = log
        seer.not_as_it_was = self.hand_over
        seer.about_to_write.append(self.about_to_write)
        room.dropped = lambda cell, sources: log.dropped(cell, sources) if log.on else None
        self._load: Callable[[], NativeTape | None] | None = load
        self._native: NativeTape | None = None
        self._put: Tape | None = None
        self._lent: list[_Lent] = []
        self._all: list[_Of] = []
        self._of: _Of  # that the step follows
        self.on = False
        self._taking = False  # over what a tape knows
        self.steps = 0  # that went by one to the end
        self.why: str | None = None  # a rehearsal came to nothing, or a step was handed over

    def begin(self, script: Script | None) -> None:
        """A step begins, in which only what is needed for the script is seen, or all (None)."""
        self.log.stop()
        if script is None or not self._room.lax or self._room.blind:
            return
        native, self._of = self._loaded(), self._known(script)
        if native is None:
            return
        if self._put is not None and native.is_owed():
            native.hand_over()  # it was broken off
        if native.is_busy() or not self.keeps():
            return  # another fit's step goes by it; or nobody keeps saves natively
        if self._of.tape is None:
            if self._of.rehearsals < _REHEARSED:
                self.log.begin()
        elif self._is_put(native, self._of.tape):
            self.on = True
            native.begin()

    def _known(self, script: Script) -> _Of:
        found = next((one for one in self._all if one.script is script), None)
        if found is None:
            found = _Of(script)
            self._all = [one for one in self._all if one.script in self.following.scripts]
            self._all.append(found)
        return found

    def _is_put(self, native: NativeTape, tape: Tape) -> bool:
        if not native.put(tape, self._take_over, self._bring, self._run_kernel):
            self._of.tape = None
            return False
        self._put = tape
        return True

    def _loaded(self) -> NativeTape | None:
        if self._load is not None:
            self._native, self._load = self._load(), None
        return self._native

    @property
    def taped(self) -> Taped | None:
        """What of this step the tape does."""
        return self._of.taped if self.on else None

    def only_lets_go(self, at: int) -> bool:
        """Whether the tape does nothing at that event but let go of values."""
        return self.on and self._put is not None and at in self._put.lets_go

    def end(self, *, as_planned: bool) -> bool:
        """A step has ended, as it was planned or otherwise. Whether it was a rehearsal."""
        self.finish()
        if not as_planned or not self.log.on:
            self.log.stop()
            return False
        of = self._of
        of.rehearsals += 1
        away = swapped(of.script)
        try:
            found = self.log.end(of.script.recorded or (), away)
        except CannotTape as why:
            self.why = str(why)
            return True
        if of.rehearsed == found:
            of.tape, of.taped = found, Taped(frozenset(found.saves), away)
        of.rehearsed = found
        return True

    def finish(self) -> None:
        """Nothing more is done by the tape in this step."""
        if not self.on or self._native is None:
            return
        if self._native.is_idle():
            self.on = False
            self.steps += 1
            self._native.clear()
            self._settle()
        else:
            self.hand_over()

    def stop(self) -> None:
        """For good: nothing of the program's is referred to."""
        steps = self.steps
        self.finish()
        self.steps = steps  # the one that has begun is none
        self.log.stop()
        self._all.clear()
        if self._native is not None:
            self._native.leave(self._take_over)

    def happen(self, event: int) -> None:
        """Do what is to be done then."""
        if self._native is not None:
            self._native.happen(event)

    def about_to_write(self, storage: torch.UntypedStorage) -> None:
        """Somebody is."""
        if self.on and self._native is not None:
            self._native.about_to_write(storage)

    def lend(self, number: int, value: Value | None) -> None:
        """Python has saved it, and moves it: as long as others are made from it, it is wanted."""
        if self.on and value is not None and self._put is not None and number in self._put.lent:
            lent = _Lent(value, self)
            value.dependents.add(lent)
            self._lent.append(lent)

    def hand_over(self) -> None:
        """If a step goes by a tape, it goes on without."""
        if self.on and self._native is not None:
            self._native.hand_over()

    # What the native side asks for.

    def _bring(self, number: int) -> None:
        cell = self.following.wanted.get(number)
        if isinstance(cell, DeltaCell):
            with self._or_by_python():
                cell.bring()

    def _run_kernel(
        self, number: int, read: Sequence[torch.UntypedStorage], made: Sequence[torch.Tensor]
    ) -> None:
        assert self._put is not None
        taped = self._put.kernels[number]
        with self._or_by_python():
            inputs = [seen_on(look, one) for look, one in zip(taped.looks, read, strict=True)]
            rows = [one.view(dtype) for one, dtype in zip(made, taped.dtypes, strict=True)]
            taped.kernel(inputs, rows, 0, rows[0].numel())

    @contextmanager
    def _or_by_python(self) -> Iterator[None]:
        """What cannot be done now is done when somebody asks for it."""
        try:
            yield
        except (Gone, OutOfBudget, torch.OutOfMemoryError):
            self.hand_over()

    def _take_over(self) -> None:
        """All that is known is Python's from now on. Broken off, it can be gone on with."""
        native, tape = self._native, self._put
        assert native is not None
        assert tape is not None
        self.halt()
        with self._room.lock:
            if not native.is_owed() or self._taking:
                return  # another thread has done it, or this one is at it
            self._taking = True
            try:
                self._take(native, tape)
            finally:
                self._taking = False

    def _take(self, native: NativeTape, tape: Tape) -> None:
        if self.on:
            self.on = False
            self.why = native.reason()
            self._of.failed += 1
            if self._of.failed >= _FAILED:
                self._of.tape, self._of.rehearsals = None, _REHEARSED
        values = self._values(native, tape)
        cells = self._cells(native, tape, values)
        for number, value in tape.saves.items():
            if value in cells and number in self.following.moved:
                self.following.wanted[number] = cells[value]
        self.following.late += [Action(Act.DROP, number) for number in native.late()]
        native.adopt_saves()
        native.clear()
        for cell in cells.values():
            self.saved.forgo_unused(cell)  # whose saves are gone by now
        self._settle()
        script, at = self.following.script, len(self.following.codes) - 1
        if script is not None:
            for places in script.lets_go.get(at, ()):
                self._holds.let_go(places)

    def _values(self, native: NativeTape, tape: Tape) -> list[Value]:
        """Each value of the tape as Python knows it, and the calls that have made them."""
        found: dict[int, Value] = {}
        storages = [native.storage(value) for value in range(len(tape.bytes))]

        def known(which: int) -> Value:
            if which not in found:
                storage = storages[which]
                if storage is None or native.is_spoilt(which):
                    found[which] = Value.lost(tape.bytes[which], None)
                else:
                    found[which] = self._ledger.value_of(storage)
            return found[which]

        for place, op in enumerate(tape.ops):
            if not native.is_noted(place):
                continue
            read = [NOBODY if value < 0 else known(value) for value in op.reads]
            call = self._forms.call_on(op.form, op.number, read, native.random(place))
            self._room.calls[op.number] = call
            results = [(call.makes, *one) for one in op.makes]
            for rows, result, which in [*results, *((call.writes, *one) for one in op.writes)]:
                storage = storages[which]
                if storage is None or native.is_spoilt(which):
                    value = Value.lost(tape.bytes[which], call)
                else:
                    value = self._ledger.made(storage, call, tape.bytes[which])
                found[which] = value
                rows.append((result, weakref.ref(value)))
            for i, source in enumerate(op.holds):
                held = storages[op.reads[source]]
                if native.holds(place, i) and held is not None:
                    self._holds.promise((op.number, source), read[source], held)
        return [known(value) for value in range(len(tape.bytes))]

    def _cells(
        self, native: NativeTape, tape: Tape, values: Sequence[Value]
    ) -> dict[int, DeltaCell]:
        """Of the values that are saved, dropped or not."""
        cells: dict[int, DeltaCell] = {}
        for which in dict.fromkeys(tape.saves.values()):
            storage = native.storage(which)
            if storage is None or not native.is_wanted(which):
                continue
            cell = self.saved.cell_on(storage) or self.saved.make(storage)
            assert isinstance(cell, DeltaCell)
            cell.bytes = tape.bytes[which]
            cells[which] = cell
            if native.is_saved(which):
                self.saved.take(cell)
        for which, cell in cells.items():
            if not native.is_dropped(which):
                continue
            if cell.state is not State.DROPPED:
                self._ledger.gone_away(cell.key, cell.bytes)
                cell.state = State.DROPPED
            sources = native.sources(which)
            cell.sources = [values[source] for source in sources]
            for source in sources:
                assert not native.is_spoilt(source), "what a dropped value is made from is gone"
                values[source].dependents.add(cell)
                if values[source].saved() is None:
                    values[source].held = native.storage(source)
            if not native.is_saved(which):
                values[which].kept = cell  # only for those that are made from it
        return cells

    def _settle(self) -> None:
        """The step goes by no tape any more."""
        lent, self._lent = self._lent, []
        for one in lent:
            one.value.dependents.discard(one)
            one.value.let_go()
        if self._native is None:
            return
        dropped, count, refused, calls = self._native.take_counts()
        self._room.counts["dropped"] += dropped
        self._room.counts["dropped bytes"] += count
        self._room.counts["not dropped"] += refused
        self._replayer.calls += calls
        if self._put is not None:  # most of it, if the step was handed over
            self._replayer.seconds += self._put.seconds


def swapped(script: Script) -> Collection[int]:
    """The saves that a script has leave for the tier below."""
    return {
        action.who
        for actions in script.actions
        for action in actions
        if action.act is not Act.DROP and action.who >= 0
    }
