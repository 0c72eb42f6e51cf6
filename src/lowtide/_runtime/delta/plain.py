"""Saves that nothing is ever to be done with, kept natively while a step goes on as expected."""

from collections.abc import Callable
from itertools import count

from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.native_saves import EVENTFUL, PLAIN, NativeSaves
from lowtide._runtime.delta.planned import Planned
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.tally import Tally
from lowtide._runtime.swap.saved import Saved
from lowtide._runtime.swap.script import Script, is_request


class Plain:
    """Between `go` and `halt` what happens may be dealt with where Python does not see it.

    So whoever wants to know what has happened in a step halts first.
    """

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
        self._load = load
        self._saved: Saved | None = None
        self._native: NativeSaves | None = None
        self._expected: object = None  # a script, or where nobody watches the saves of a step
        self._moved: frozenset[int] | None = None
        room.adopt = self.adopt
        if planned is not None:
            planned.resume = self.go

    def start(self, saved: Saved) -> None:
        """Its saves."""
        self._saved = saved

    def prepare(self) -> None:
        """A step begins that may be dealt with natively: the hooks are, from now on."""
        if self._native is not None or self._saved is None:
            return
        native = self._load()
        self._load = lambda: None  # once: it can be had, or not
        if native is not None and native.work_for(self._saved, self.happened):
            if self._saved.exchange(native.hooks):
                self._native = native
            else:
                native.leave()

    def stop(self) -> None:
        """For good."""
        self.halt()
        native, self._native = self._native, None
        if native is not None:
            native.leave()
        self._saved = None

    def halt(self) -> None:
        """Python knows what has happened so far, and sees what happens next."""
        found = None if self._native is None else self._native.stop()
        if found is None:
            return
        event, saves = found
        if self._planned is None or not isinstance(self._expected, Script):
            self._tally.go_on(saves)
            return
        codes = self._planned.following.codes
        codes += self._expected.codes[len(codes) : event]
        self._tally.saves = saves

    def adopt(self) -> None:
        """Every saved tensor is in Python's hands."""
        self.halt()
        if self._native is not None:
            self._native.adopt()

    def go(self) -> None:
        """An event was as planned: those to come may be dealt with natively."""
        native, planned = self._native, self._planned
        if native is None or planned is None or not self._room.lax:
            return
        following = planned.following
        script = following.script
        if script is None or not following.agrees or following.late:
            return
        if planned.mode is not Mode.PLANNED or not script.plain:
            return
        if self._expected is not script or self._moved is not following.moved:
            self._expected, self._moved = script, following.moved
            native.follow(script.codes, _flags(script, following.moved), asks_count=True)
        native.go(len(following.codes), self._tally.saves, planned.before)

    def go_loose(self) -> None:
        """A step begins that nobody watches."""
        rows = self._tally.known_rows
        if rows:
            self.prepare()
        native = self._native
        if native is None or not rows:
            return
        if self._expected is not rows:
            self._expected, self._moved = rows, None
            native.follow([size for size, _ in rows], [PLAIN] * len(rows), asks_count=False)
        native.go(0, 0, 0 if self._planned is None else self._planned.before)

    def happened(self, code: int) -> None:
        """An event at which something is to be done."""
        with self._room.lock:
            self.halt()
            if self._planned is not None:
                self._planned.event(code)


def _flags(script: Script, moved: frozenset[int]) -> list[int]:
    """What each event is."""
    numbers = count()
    flags = []
    for at, code in enumerate(script.codes):
        if code >= 0:
            number = next(numbers)
            can = number in script.plain and number not in moved
        else:
            can = is_request(code)
        eventful = bool(script.actions[at]) or at in script.reruns or at in script.lets_go
        flags.append(PLAIN * can | EVENTFUL * eventful)
    return flags
