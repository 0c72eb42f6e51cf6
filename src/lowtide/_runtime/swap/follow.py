"""Steps compared with those that were planned; as long as they agree, scripts are carried out.

Which plan a step follows is known from its first event on where steps repeat or take turns: what
followed when two steps were like the last two. Otherwise the last plan is tried, and where the
step departs from it another one that has begun like this step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.script import Act, Action, Script

_MOST_FOLLOWED = 64

Codes = tuple[int, ...]
Mode = TypeVar("Mode", bound=StrEnum)


class Follower:
    """`do` is given an action and whether an earlier one of that cell waits; False: not yet."""

    def __init__(self, do: Callable[[Action, bool], bool]) -> None:
        self._do = do
        self.scripts: list[Script] = []
        self.script: Script | None = None  # the one that is followed, or was last
        self.agrees = False  # so far, in this step
        self.departed = False  # in the last step
        self.ended: Script | None = None  # by which the last one went, to its end
        self.is_unknown = True  # whether this step is expected to be none that is planned
        self.codes: list[int] = []
        self.wanted: dict[int, Cell] = {}  # by the save, those that some script moves
        self.moved: frozenset[int] = frozenset()  # the saves of which that is
        self._last: list[Codes] = []  # the last three steps
        self._followed: dict[tuple[Codes, ...], Codes] = {}
        self.late: list[Action] = []  # what could not be done in its time

    def rest(self) -> None:
        """Nothing is followed, for now."""
        self.agrees = False
        self.wanted.clear()

    def begin(self) -> None:
        """A step begins."""
        self.codes = []
        self.wanted.clear()
        self.late.clear()
        self.agrees = self.script is not None
        expected = self._expected()
        known = next((script for script in self.scripts if script.codes == expected), None)
        if known is not None:
            self.script = known
            self.agrees = True
        self.is_unknown = self.script is None or self.departed
        if expected is not None:
            self.is_unknown = known is None
        self.departed = False

    def end(self) -> Codes:
        """A step has ended: what happened in it."""
        if self.agrees:
            assert self.script is not None
            if len(self.codes) < len(self.script.codes):
                self.depart()
        self.ended = self.script if self.agrees else None
        codes = tuple(self.codes)
        self._last = [*self._last[-2:], codes]
        return codes

    def add(self, script: Script) -> None:
        """From now on."""
        self.scripts.append(script)
        self.script = script
        self.moved |= script.wanted

    def replace(self, old: Script, new: Script) -> None:
        """A better one for the same steps."""
        self.scripts[self.scripts.index(old)] = new
        self.moved |= new.wanted
        if self.script is old:
            self.script = new
        if self.ended is old:
            self.ended = new

    def know(self, codes: Codes) -> bool:
        """Whether such a step is planned; if so, the next one follows that."""
        self.script = next((script for script in self.scripts if script.codes == codes), None)
        return self.script is not None

    def unlearn(self) -> None:
        """What was planned is about other tensors."""
        self.scripts, self.script, self.moved = [], None, frozenset()
        if self.agrees:
            self.depart()

    def depart(self) -> None:
        """The step goes on as no plan says."""
        self.agrees = False
        self.departed = True
        self.late.clear()

    def steps_whole(self) -> bool:
        """Whether optimizers step as a whole, in a step like this one."""
        return self.agrees and self.script is not None and self.script.steps_whole

    def together(self, code: int) -> int:
        """Bytes of state that may step at once, if `code` is the next event and nothing is done.

        With any other, another script may take over, and do what it has to.
        """
        script, at = self.script, len(self.codes)
        if script is None or not self.agrees or self.late or script.codes[at : at + 1] != (code,):
            return 0
        return 0 if script.actions[at] else script.together

    def packed(self, number: int, cell: Cell | None) -> None:
        """A tensor was saved."""
        if cell is not None and number in self.moved:
            self.wanted[number] = cell

    def next(self, code: int) -> Sequence[Action] | None:
        """An event: what is to be done now. None: the step is no planned one."""
        at = len(self.codes)
        self.codes.append(code)
        if not self.agrees or not self._goes_on(at, code) or self.script is None:
            return None  # to do something may have shown that plans are of no use any more
        return self.script.actions[at]

    def act(self, actions: Sequence[Action]) -> None:
        """Do what is late and then these, or have them tried again with the next event."""
        late, self.late = self.late, []
        waiting: set[int] = set()
        for action in (*late, *actions):
            if not self.agrees:
                return
            if not self._do(action, action.who in waiting):
                self.late.append(action)
                waiting.add(action.who)

    def expire(self, who: int) -> None:
        """What is late for this save is not to be done any more."""
        if self.late:
            self.late = [action for action in self.late if action.who != who]

    def _expected(self) -> Codes | None:
        """What the next step will do: what followed when two steps were like the last two."""
        if len(self._last) == 3:
            *two, following = self._last
            self._followed[tuple(two)] = following
            if len(self._followed) > _MOST_FOLLOWED:
                self._followed.clear()
        return self._followed.get(tuple(self._last[-2:]))

    def _goes_on(self, at: int, code: int) -> bool:
        """Whether a script goes on like this: the one that is followed, or else another."""
        script = self.script
        assert script is not None
        if at < len(script.codes) and script.codes[at] == code:
            return True
        for other in self.scripts:
            if other.codes[: at + 1] == tuple(self.codes):
                self.script = other
                self.late.clear()
                for actions in other.actions[:at]:
                    self.act([action for action in actions if action.act is not Act.FETCH])
                return True
        self.depart()
        return False


def in_words(steps: Mapping[Mode, int], modes: Iterable[Mode]) -> str:
    """For example "1 crude, 1 traced, 18 planned"."""
    return ", ".join(f"{steps[mode]} {mode}" for mode in modes if steps[mode])
