"""Steps under a budget: crude at first, then one is traced, then they go by a plan.

What happens in a step is a row of events (see `script`). While they agree with a planned step its
actions are done; where they do not, the step goes on crudely: everything that can leave does so
when memory runs short. Any event may find any cell in any state: the cells see to it that
nothing is lost.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch.optim import Optimizer

from lowtide._ir import Plan
from lowtide._runtime.swap.below import Below
from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.follow import Follower
from lowtide._runtime.swap.modes import Mode
from lowtide._runtime.swap.native_saves import NativeSaves
from lowtide._runtime.swap.natively import Natively, plain_saves
from lowtide._runtime.swap.observe import Observer
from lowtide._runtime.swap.optimizers import Optimizers
from lowtide._runtime.swap.pace import Pace
from lowtide._runtime.swap.quiet import is_capturing
from lowtide._runtime.swap.saved import Handle, Saved
from lowtide._runtime.swap.script import ASKED, BEGIN, Act, Action, Observed, lowered, write_script
from lowtide._runtime.swap.states import StateCell
from lowtide._runtime.swap.tier import Tier

_MOST_SCRIPTS, _MOST_MODES = 8, 1000
_MANY = 10_000
_LONGEST = 1_000_000  # events of a step
_NEVER = 1 << 62
_PATIENCE = 2  # steps after a traced one before another may be; doubles each time
_REST = 64  # steps that nobody watches, where nothing is gained by watching


class Driver:
    """Told of every event, it says what leaves and what comes back."""

    def __init__(
        self,
        tier: Callable[[torch.device], Tier | None],
        plan: Callable[[Observed, int | None], Plan],
        short: Callable[[], bool],
        smallest: int,
        piece_bytes: int,
        saves: Callable[[], NativeSaves | None] = lambda: None,
        *,
        may_rest: bool = False,
        first_trace: int = 2,
    ) -> None:
        self._tier = tier
        self._may_rest = may_rest
        self._resting = 0  # so many steps more
        self._natively = Natively(saves, self._went_on, self._happened)
        self._saved: Saved | None = None
        self._cells: list[Cell | None] = []  # of this step's saves, if Python has seen them all
        self._make_plan = plan
        self._short = short
        self.following = Follower(self._do)
        self._below = Below()
        self._observer: Observer | None = None
        self.optimizers = Optimizers(tier, self._event, smallest, piece_bytes)
        self.steps: Counter[Mode] = Counter()  # so far
        self.modes: deque[Mode] = deque(maxlen=_MOST_MODES)  # of the last ones
        self._mode = Mode.CRUDE
        self._packs = 0  # tensors saved in this step
        self._before = 0  # ... and in all steps before it
        self._crude: list[Cell] = []
        self._strays: list[Observer] = []  # given up, and still on the stack of modes
        self._pace = Pace(lambda: 0.0 if self._saved is None else self._saved.own_seconds)
        self._next_trace = first_trace  # after that many steps: the first one is slow
        self._patience = _PATIENCE

    def start(self, saved: Saved) -> None:
        """Its saves."""
        self._saved = saved
        self._natively.start(saved)

    # What the hooks tell.

    def packed(self, handle: Handle) -> None:
        """A tensor was saved."""
        self._natively.halt()
        number = self._packs
        self._packs = number + 1
        handle.number = self._before + number
        cell = handle.cell
        if self._observer is not None:
            self._observer.packed(handle, number)
        if self._mode is Mode.PLANNED:
            self._cells.append(cell)
            self.following.packed(number, cell)
        elif cell is not None and cell.handles == 1:
            self._crude.append(cell)
            if len(self._crude) % _MANY == 0:  # a loop without an end of steps
                self._crude = [cell for cell in self._crude if cell.handles]
        self._event(handle.bytes)

    def unpacking(self, handle: Handle) -> None:
        """Backward asks for one."""
        self._natively.halt()
        self._event(ASKED + handle.number - self._before)

    def unpacked(self, handle: Handle, tensor: torch.Tensor) -> None:
        """It gets it."""
        if self._observer is not None:
            self._observer.unpacked(handle, tensor)

    def stepping(self, optimizer: Optimizer, args: Sequence[object]) -> None:
        """An optimizer is about to step."""
        if self._resting:
            return
        self._natively.halt()
        if self._observer is not None:
            self._observer.stepping(optimizer)
        whole, together = self.following.steps_whole(), self.following.together
        if not self.optimizers.step(optimizer, args, whole=whole, together=together):
            self._unlearn()

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        if self._resting:
            return
        self.optimizers.stepped(optimizer)
        if self._observer is not None:
            self._observer.stepped(optimizer)

    def reloaded(self) -> None:
        """An optimizer's state was replaced: those are other tensors, perhaps of other sizes."""
        self._natively.halt()
        if not self.optimizers.admit_again():
            self._unlearn()

    def mark(self) -> None:
        """The step is over."""
        if self._resting:
            self._rest()
            return
        self._natively.halt()
        codes = self.following.end()
        if self._observer is not None and not self._observer.can_finish():
            self._give_up()
        elif self._observer is not None:
            try:
                self._learn()
            except BaseException:
                self._next_trace = _NEVER
                self._begin()
                raise
        elif self._mode is Mode.CRUDE:
            self._pace.end(codes)
        elif self._mode is Mode.PLANNED:
            script = self.following.script
            if self.following.agrees and script is not None:
                script.seconds.append(self._pace.seconds())
                self._below.followed(script, self.following.scripts)
                if not script.plain and len(self._cells) == self._packs:
                    script.plain = plain_saves(self._cells, self.following.moved)
                if self._may_rest and self._go_to_rest():
                    return
            else:
                self._mode = Mode.DEPARTED
        self._begin()

    def _go_to_rest(self) -> bool:
        """Be told of nothing for a while, if nothing moves: to be told takes time, too."""
        assert self._saved is not None
        if any(script.plan.swaps for script in self.following.scripts):
            return False
        self.optimizers.leave()  # what they replace meanwhile is kept by nobody
        if not self._saved.rest():
            return False
        self._count(self._mode)
        self._resting = _REST
        return True

    def _rest(self) -> None:
        """A step has ended that nobody has watched. Sooner or later one of them is."""
        assert self._saved is not None
        self._resting -= 1
        if self._resting or not self._saved.resume():
            self._resting = max(1, self._resting)
            self._count(Mode.PLAIN)
            return
        self._mode = Mode.PLAIN
        self._begin()

    def has_followed(self) -> bool:
        """Whether a step has gone by a plan, so that what it leaves away is."""
        return any(script.seconds for script in self.following.scripts)

    def stop(self) -> None:
        """Optimizer state back on the device, nothing recorded or planned any more."""
        self._resting = 0
        self._natively.stop()
        if self._observer is not None and self._observer.can_finish():
            self._observer.stop()
            self._observer = None
        elif self._observer is not None:
            self._give_up()
        self._pop_strays()
        self._mode = Mode.CRUDE
        self.following.script = None
        self.optimizers.leave()

    def forget(self) -> None:
        """Refer to nothing of the program's any more."""
        self.optimizers.forget()
        self.following.wanted.clear()
        self._crude.clear()

    # One step.

    def _count(self, mode: Mode) -> None:
        self.modes.append(mode)
        self.steps[mode] += 1

    def _begin(self) -> None:
        self._count(self._mode)
        self._before += self._packs
        self._packs = 0
        self._cells = []
        self._crude = [cell for cell in self._crude if cell.handles]
        self.optimizers.drop_orphans()
        self.following.begin()
        self._mode = Mode.PLANNED if self.following.agrees else Mode.CRUDE
        unknown = self.following.is_unknown
        if unknown and self.steps.total() >= self._next_trace and self._can_trace():
            self._mode = Mode.TRACED
            self.following.agrees = False
            self._observer = Observer()
            self._observer.begin()
            self._next_trace = self.steps.total() + self._patience
            self._patience *= 2
        script = self.following.script
        if self._mode is Mode.PLANNED and script is not None and script.plain:
            self._natively.prepare()
        self._pace.begin()
        self._event(BEGIN)

    def _can_trace(self) -> bool:
        return (
            len(self.following.scripts) < _MOST_SCRIPTS
            and not self._strays
            and Observer.can_begin()
            and not is_capturing()
        )

    def _give_up(self) -> None:
        """The recorder's mode cannot be popped here: it stays, silent, until it can."""
        assert self._observer is not None
        self._observer.abandon()
        self._strays.append(self._observer)
        self._observer = None

    def _pop_strays(self) -> None:
        while self._strays and self._strays[-1].can_finish():
            self._strays.pop().pop()

    def _event(self, code: int) -> None:
        if self._resting:
            return  # backward of a step before
        self._pop_strays()
        if len(self.following.codes) >= _LONGEST:  # nobody ends this step: it is none
            self.following.codes.clear()
            self._pace.forget()
            self._crude = [cell for cell in self._crude if cell.handles]
        if self._mode is Mode.PLANNED:
            actions = self.following.next(code)
            if actions is not None:
                if (actions or self.following.late) and not is_capturing():
                    self._act(actions)
                self._go_on()
                return
            self._depart()
        else:
            self.following.codes.append(code)
        if self._observer is not None:
            self._observer.event(code)
        elif self._mode is Mode.CRUDE:
            self._pace.note()
        if self._crude and self._short():
            self._pace.forget()
            self._relieve()

    def _go_on(self) -> None:
        """An event was as planned: those to come may be dealt with natively."""
        following = self.following
        script = following.script
        if script is not None and following.agrees and not following.late and not self._strays:
            saves = self._packs, self._before
            self._natively.go(script, following.moved, saves, len(following.codes))

    def _depart(self) -> None:
        """The step goes on crudely: all that it has saved may leave."""
        self._mode = Mode.DEPARTED
        self._natively.adopt()
        if self._saved is not None:
            self._crude = self._saved.cells()

    def _went_on(self, event: int, saves: int) -> None:
        """Natively, up to there."""
        script = self.following.script
        assert script is not None
        codes = self.following.codes
        codes += script.codes[len(codes) : event]
        self._packs = saves

    def _happened(self, code: int) -> None:
        """An event at which something is to be done."""
        assert self._saved is not None
        with self._saved:
            self._natively.halt()
            self._event(code)

    def _act(self, actions: Sequence[Action]) -> None:
        tier = self._below.tier
        if tier is not None:
            tier.pause()
        try:
            self.following.act(actions)
        finally:
            if tier is not None:
                tier.resume()

    def _do(self, action: Action, waits: bool) -> bool:
        cell = self._cell(action.who)
        if cell is None:
            return True
        if isinstance(cell, StateCell) and not self.optimizers.may_move(cell):
            return True
        if action.act is Act.LEAVE:
            if not cell.alone():
                return False
            cell.leave(action.at)
        elif action.act is Act.RELEASE:
            return cell.release() or not waits
        else:
            with suppress(torch.OutOfMemoryError):  # who needs it asks again
                cell.fetch()
        return True

    def _cell(self, who: int) -> Cell | None:
        return self.following.wanted.get(who) if who >= 0 else self.optimizers.cell_of(who)

    def _relieve(self) -> None:
        """Everything that can leave does, at once."""
        if is_capturing():
            return
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
        self.optimizers.leave()
        tensors = self.optimizers.movable()
        observed = observer.finish([tensor for tensor, _, _ in tensors])
        self.optimizers.admit(tensors)
        if not self._packs:
            return  # an evaluation: a share of its peak is no budget
        if self.following.know(observed.codes) or not observed.trace.ops:
            return
        observed = replace(observed, asked=self._pace.of(observed.codes))
        new = write_script(observed, self._make_plan(observed, None))
        self.following.add(new)
        tier = self._tier(torch.device(observed.trace.device))
        self._below.prepare(tier, self.following.scripts, new)

    def shrink(self, less: int, slower: float) -> bool:
        """Plan steps like the last anew: see `lowered`. False: was done, or cannot be."""
        old = self.following.ended
        new = None if old is None else lowered(old, less, slower, self._make_plan)
        if old is None or new is None:
            return False
        self._natively.halt()
        self.following.replace(old, new)
        self._below.prepare(self._below.tier, self.following.scripts, new)
        return True

    def _unlearn(self) -> None:
        """What was planned is about other tensors."""
        self._natively.halt()
        self.following.unlearn()
        if self._mode is Mode.PLANNED:
            self._depart()
