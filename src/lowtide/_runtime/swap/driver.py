"""Steps under a budget: crude at first, then one is traced, then they go by a plan.

What happens in a step is a row of events (see `script`). While they agree with a planned step its
actions are done; where they do not, the step goes on crudely: everything that can leave does so
when memory runs short. Any event may find any cell in any state: the cells see to it that
nothing is lost.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum

import torch
from torch.optim import Optimizer

from lowtide._ir import Plan
from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.observe import Observer
from lowtide._runtime.swap.pieces import (
    MOST_PIECES,
    Piece,
    can_be_parted,
    only,
    pieces_of,
    step_once,
)
from lowtide._runtime.swap.saved import Handle
from lowtide._runtime.swap.script import (
    ASKED,
    BEGIN,
    STEPPING,
    Act,
    Action,
    Observed,
    Script,
    write_script,
)
from lowtide._runtime.swap.states import StateCell, state_tensors
from lowtide._runtime.swap.tier import Tier

_MOST_SCRIPTS = 8
_MOST_FOLLOWED = 64
_MOST_MODES = 1000
_NEVER = 1 << 62
_PATIENCE = 2  # steps after a traced one before another may be; doubles each time


Codes = tuple[int, ...]


class Mode(StrEnum):
    """How a step runs."""

    CRUDE = "crude"  # no plan: what can leave does when memory is short
    TRACED = "traced"  # the same, and recorded
    PLANNED = "planned"
    DEPARTED = "departed"  # planned up to where it did something else, then crude


class Driver:
    """Told of every event, it says what leaves and what comes back."""

    def __init__(
        self,
        tier: Callable[[torch.device], Tier | None],
        plan: Callable[[Observed], Plan],
        short: Callable[[], bool],
        smallest: int,
        piece_bytes: int,
    ) -> None:
        self._tier = tier
        self._make_plan = plan
        self._short = short
        self._smallest = smallest
        self._piece_bytes = piece_bytes
        self.scripts: list[Script] = []
        self._script: Script | None = None
        self._moved: frozenset[int] = frozenset()  # saves that some script moves
        self._observer: Observer | None = None
        self._optimizers: dict[int, Optimizer] = {}
        self._states: list[StateCell] = []
        self._pieces: dict[int, list[Piece]] = {}  # of each optimizer
        self._parted = ExitStack()  # an optimizer that has only some of its parameters
        self.steps: Counter[Mode] = Counter()  # so far
        self.modes: deque[Mode] = deque(maxlen=_MOST_MODES)  # of the last ones
        self._mode = Mode.CRUDE
        self._codes: list[int] = []
        self._last: list[Codes] = []  # the last three steps
        self._followed: dict[tuple[Codes, ...], Codes] = {}
        self._packs = 0  # tensors saved in this step
        self._before = 0  # ... and in all steps before it
        self._wanted: dict[int, Cell] = {}  # by the save, those that the script moves
        self._late: list[Action] = []  # what could not be done in its time
        self._crude: list[Cell] = []
        self._began = time.perf_counter()
        self._next_trace = 1  # after that many steps
        self._patience = _PATIENCE

    # What the hooks tell.

    def packed(self, handle: Handle) -> None:
        """A tensor was saved."""
        number = self._packs
        self._packs = number + 1
        handle.number = self._before + number
        cell = handle.cell
        if self._observer is not None:
            self._observer.packed(handle, number)
        if self._mode is Mode.PLANNED:
            if cell is not None and number in self._moved:
                self._wanted[number] = cell
        elif cell is not None and cell.handles == 1:
            self._crude.append(cell)
        self._event(handle.tensor.nbytes)

    def unpacking(self, handle: Handle) -> None:
        """Backward asks for one."""
        self._event(ASKED + handle.number - self._before)
        if self._observer is not None:
            self._observer.unpacking(handle)

    def stepping(self, optimizer: Optimizer, args: Sequence[object] = ()) -> None:
        """An optimizer is about to step, or its step is done here but for the last piece."""
        self.stepped_whole()
        number = self._number(optimizer)
        if self._observer is not None:
            self._observer.stepping(optimizer)
        pieces = self._pieces.get(number)
        if pieces is None and optimizer.state:
            pieces = self._pieces[number] = pieces_of(optimizer, self._piece_bytes)
        if pieces is None or len(pieces) < 2 or not can_be_parted(optimizer, args):
            self._event(STEPPING + number * MOST_PIECES)
            self.needed(optimizer)
            return
        for i, piece in enumerate(pieces):
            self._event(STEPPING + number * MOST_PIECES + i)
            for state in self._states_of(number):
                if state.piece == i:
                    state.have()
            with ExitStack() as undo:
                undo.enter_context(only(optimizer, piece))
                if i + 1 < len(pieces):
                    step_once(optimizer)
                else:
                    self._parted = undo.pop_all()  # PyTorch goes on with the last one

    def stepped_whole(self) -> None:
        """The last piece is done, or failed: the optimizer has all its parameters again."""
        self._parted.close()

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        self.stepped_whole()
        if self._observer is not None:
            self._observer.stepped(optimizer)

    def needed(self, optimizer: Optimizer) -> None:
        """Somebody looks at all of an optimizer's state, or replaces it: have it on the device."""
        self.stepped_whole()
        for state in self._states_of(self._number(optimizer)):
            state.have()

    def mark(self) -> None:
        """The step is over."""
        now = time.perf_counter()
        self._last = [*self._last[-2:], tuple(self._codes)]
        if self._observer is not None:
            try:
                self._learn()
            except BaseException:
                self._next_trace = _NEVER
                self._begin()
                raise
        elif self._mode is Mode.PLANNED:
            assert self._script is not None
            if len(self._codes) == len(self._script.codes):
                self._script.seconds.append(now - self._began)
            else:
                self._mode = Mode.DEPARTED
        self._begin()

    def stop(self) -> None:
        """Optimizer state back on the device, nothing recorded or planned any more."""
        self.stepped_whole()
        if self._observer is not None:
            self._observer.stop()
            self._observer = None
        self._mode = Mode.CRUDE
        self._script = None
        self._leave_states()

    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped."""
        return [*self._optimizers.values()]

    def forget(self) -> None:
        """Refer to nothing of the program's any more."""
        self._optimizers.clear()
        self._pieces.clear()
        self._wanted.clear()
        self._crude.clear()

    # One step.

    def _begin(self) -> None:
        self.modes.append(self._mode)
        self.steps[self._mode] += 1
        self._before += self._packs
        self._packs = 0
        self._codes = []
        self._wanted.clear()
        self._late.clear()
        self._crude = [cell for cell in self._crude if cell.handles]
        self._mode = Mode.PLANNED if self._script is not None else Mode.CRUDE
        expected = self._expected()
        known = next((script for script in self.scripts if script.codes == expected), None)
        if known is not None:
            self._script = known
            self._mode = Mode.PLANNED
        unknown = self._script is None or self.modes[-1] is Mode.DEPARTED
        if expected is not None:
            unknown = known is None
        if unknown and self.steps.total() >= self._next_trace and self._can_trace():
            self._mode = Mode.TRACED
            self._observer = Observer()
            self._observer.begin()
            self._next_trace = self.steps.total() + self._patience
            self._patience *= 2
        self._began = time.perf_counter()
        self._event(BEGIN)

    def _expected(self) -> Codes | None:
        """What the next step will do: what followed when two steps were like the last two."""
        if len(self._last) == 3:
            *two, following = self._last
            self._followed[tuple(two)] = following
            if len(self._followed) > _MOST_FOLLOWED:
                self._followed.clear()
        return self._followed.get(tuple(self._last[-2:]))

    def _can_trace(self) -> bool:
        return (
            len(self.scripts) < _MOST_SCRIPTS
            and not torch._C._len_torch_dispatch_stack()
            and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        )

    def _event(self, code: int) -> None:
        at = len(self._codes)
        self._codes.append(code)
        if self._mode is Mode.PLANNED and self._agrees(at, code):
            assert self._script is not None
            if self._late:
                self._try_late()
            for action in self._script.actions[at]:
                self._do(action)
            return
        if self._observer is not None:
            self._observer.event(code)
        if self._crude and self._short():
            self._relieve()

    def _do(self, action: Action) -> None:
        cell = self._states[-1 - action.who] if action.who < 0 else self._wanted.get(action.who)
        if cell is None:
            return
        if action.act is Act.LEAVE:
            if not cell.alone():
                self._late.append(action)
            elif isinstance(cell, StateCell) and not cell.shown():
                return
            else:
                cell.leave(action.at)
        elif action.act is Act.RELEASE:
            if not cell.release() and any(late.who == action.who for late in self._late):
                self._late.append(action)
        else:
            cell.fetch()

    def _try_late(self) -> None:
        actions, self._late = self._late, []
        for action in actions:
            self._do(action)

    def _agrees(self, at: int, code: int) -> bool:
        """Whether a script goes on like this: the one that is followed, or else another."""
        script = self._script
        assert script is not None
        if at < len(script.codes) and script.codes[at] == code:
            return True
        for other in self.scripts:
            if other.codes[: at + 1] == tuple(self._codes):
                self._script = other
                for actions in other.actions[:at]:
                    for action in actions:
                        if action.act is not Act.FETCH:
                            self._do(action)
                return True
        self._mode = Mode.DEPARTED
        self._late.clear()
        self._crude += self._wanted.values()
        return False

    def _relieve(self) -> None:
        """Everything that can leave does, at once."""
        stay = []
        for cell in self._crude:
            if cell.handles and not cell.asked:
                if cell.alone() and (not cell.here() or cell.leave()) and cell.release():
                    continue
                stay.append(cell)
        self._crude = stay

    # Planning.

    def _learn(self) -> None:
        observer, self._observer = self._observer, None
        assert observer is not None
        self._leave_states()
        tensors = self._state_tensors()
        observed = observer.finish([tensor for tensor, _, _ in tensors])
        known = [script for script in self.scripts if script.codes == observed.codes]
        if known:
            self._script = known[0]
            self._admit_states(tensors)
            return
        self._script = None
        script = write_script(observed, self._make_plan(observed))
        self.scripts.append(script)
        self._script = script
        self._moved |= script.wanted
        tier = self._tier(torch.device(observed.trace.device))
        if tier is not None:
            tier.prepare(max(other.below_bytes for other in self.scripts))
        self._admit_states(tensors)

    def _admit_states(self, tensors: list[tuple[torch.Tensor, int, int]]) -> None:
        for tensor, owner, piece in tensors:
            tier = self._tier(tensor.device)
            assert tier is not None
            self._states.append(StateCell(tensor, tier, owner, piece))

    def reloaded(self) -> None:
        """An optimizer's state was replaced: those are other tensors, perhaps of other sizes."""
        before = [(state.bytes, state.owner, state.piece) for state in self._states]
        self._leave_states()
        found = self._state_tensors()
        if [(t.untyped_storage().nbytes(), owner, piece) for t, owner, piece in found] == before:
            self._admit_states(found)
        else:
            self.scripts, self._script, self._moved = [], None, frozenset()
            self._pieces.clear()

    def _state_tensors(self) -> list[tuple[torch.Tensor, int, int]]:
        """What could move, with the number of its optimizer and of its piece."""
        found = []
        for number, optimizer in self._optimizers.items():
            piece_of = {
                id(parameter): i
                for i, piece in enumerate(self._pieces.get(number, ()))
                for group in piece
                for parameter in group
            }
            for parameter, tensor in state_tensors(optimizer, self._smallest):
                if self._tier(tensor.device) is not None:
                    found.append((tensor, number, piece_of.get(id(parameter), 0)))
        return found

    def _states_of(self, number: int) -> list[StateCell]:
        return [state for state in self._states if state.owner == number]

    def _leave_states(self) -> None:
        for state in self._states:
            state.drop()
        self._states = []

    def _number(self, optimizer: Optimizer) -> int:
        for number, known in self._optimizers.items():
            if known is optimizer:
                return number
        number = len(self._optimizers)
        self._optimizers[number] = optimizer
        return number


def modes_in_words(steps: Mapping[Mode, int]) -> str:
    """For example "1 crude, 1 traced, 18 planned"."""
    return ", ".join(f"{steps[mode]} {mode}" for mode in Mode if steps[mode])
