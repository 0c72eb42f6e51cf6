"""Saves that nothing is ever to be done with, kept natively while a step goes on as expected."""

from collections.abc import Callable

from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.planned import Planned
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.tally import Tally
from lowtide._runtime.swap.native_saves import NativeSaves
from lowtide._runtime.swap.natively import Natively
from lowtide._runtime.swap.saved import Saved
from lowtide._runtime.swap.script import Script


class Plain:
    """In steps by a plan for which nobody counts, and in those that nobody watches."""

    def __init__(
        self,
        room: Room,
        tally: Tally,
        planned: Planned | None,
        load: Callable[[], NativeSaves | None],
    ) -> None:
        self._room = room
        self._tally = tally
        self._planned = planned
        self._natively = Natively(load, self._went_on, self.happened)
        self.halt, self.prepare = self._natively.halt, self._natively.prepare
        self.stop = self._natively.stop
        room.adopt = self._natively.adopt
        if planned is not None:
            planned.resume, planned.tapes.halt = self.go, self.halt
            planned.tapes.keeps = self._natively.is_at_work

    def start(self, saved: Saved) -> None:
        """Its saves."""
        self._natively.start(saved)
        if self._planned is not None:
            self._planned.tapes.saved = saved
            self._planned.replans.hooked = lambda: saved.own_seconds

    def _went_on(self, event: int, saves: int) -> None:
        expected = self._natively.expected
        if self._planned is None or not isinstance(expected, Script):
            self._tally.go_on(saves)
            return
        codes = self._planned.following.codes
        codes += expected.codes[len(codes) : event]
        self._tally.saves = saves

    def go(self) -> None:
        """An event was as planned: those to come may be dealt with natively."""
        planned = self._planned
        if planned is None or not self._room.lax:
            return
        following = planned.following
        script = following.script
        if script is None or not following.agrees:
            return
        taped, late = planned.tapes.taped, bool(following.late)
        if planned.mode is Mode.PLANNED and (taped or not late):
            saves = self._tally.saves, planned.before
            at = len(following.codes)
            self._natively.go(script, following.moved, saves, at, taped, tells=late)

    def go_loose(self) -> None:
        """A step begins that nobody watches."""
        rows = self._tally.known_rows
        if rows:
            self.prepare()
        self._natively.go_by_sizes(rows, 0 if self._planned is None else self._planned.before)

    def happened(self, code: int) -> None:
        """An event at which something is to be done."""
        with self._room.lock:
            self.halt()
            if self._planned is not None:
                self._planned.event(code)
