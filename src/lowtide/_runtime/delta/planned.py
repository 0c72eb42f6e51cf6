"""What is known of a step, used: one is traced, and those like it go by its plan.

The plan says at which event which value is dropped, leaves or comes back. It is a guess about a
step that has not happened: room is made for every op as ever, so a plan that is off costs time and
nothing else, and a step that departs from it goes on as one that was never planned.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch.optim import Optimizer

from lowtide._errors import OutOfBudget
from lowtide._ir import Plan
from lowtide._policy.host import Host
from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.going import Rooms
from lowtide._runtime.delta.holds import Holds
from lowtide._runtime.delta.idle import IdleState
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.moves import move
from lowtide._runtime.delta.order import Gone, Item
from lowtide._runtime.delta.recipe import Value
from lowtide._runtime.delta.replans import Replans
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.tapes import Tapes
from lowtide._runtime.delta.tracing import Tracing
from lowtide._runtime.swap.follow import Follower
from lowtide._runtime.swap.natively import plain_saves
from lowtide._runtime.swap.observe import Observer
from lowtide._runtime.swap.saved import Handle
from lowtide._runtime.swap.script import (
    ASKED,
    BEGIN,
    Action,
    Observed,
    Script,
    write_script,
)

_MOST_SCRIPTS, _MOST_MODES = 8, 1000
_LONGEST = 1_000_000  # events of a step
_WHOLE = 2  # steps by a plan that are seen as a whole: from then on it is known what that takes
_MOST_TROUBLE = 3  # ... that took more, until all are


class Planned:
    """Told of every event of steps that are seen op by op."""

    room: Room
    holds: Holds
    idle: IdleState
    tapes: Tapes
    write_down: Callable[[frozenset[int] | None], None]  # which ops of a step; None: all
    follow: Callable[[Sequence[Item], Rooms], None]  # run them again, or drop them, in order

    def __init__(
        self,
        plan: Callable[[Observed, int | None, Host | None], Plan | None],
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._tell = tell
        self.resume: Callable[[], None] = lambda: None  # an event was as planned
        self._began = time.perf_counter()
        self.following = Follower(self._do)
        self.replans = Replans(plan, self.following, self._exchanged, self._failed)
        self.tracing = Tracing()
        self.mode = Mode.DYNAMIC
        self.modes: deque[Mode] = deque(maxlen=_MOST_MODES)
        self.steps: Counter[Mode] = Counter()
        self.before = 0  # tensors saved in all steps before this one
        self._ended: Script | None = None  # by which the last planned step went
        self._trouble = self._failures = 0  # drops refused, and memory short, when it began
        self._cells: list[DeltaCell | None] = []  # of this step's saves, if it is seen as a whole

    # Its life: the dispatch mode that sees ops is off meanwhile.

    def wants_trace(self) -> bool:
        """Whether the step that begins should be traced."""
        return (
            self.following.is_unknown
            and len(self.following.scripts) < _MOST_SCRIPTS
            and self.tracing.can_begin(self.steps.total())
        )

    def trace(self) -> Observer:
        """Trace the step that begins."""
        self.mode = Mode.TRACED
        self.following.agrees = False
        optimizers = self.idle.optimizers
        return self.tracing.begin(self.steps.total(), (*optimizers.cells, *optimizers.guests()))

    def learn(self) -> None:
        """The traced step has ended: plan those like it."""
        observer = self.tracing.end()
        if observer is None:
            return
        try:
            self.idle.admit()
            states = [cell.tensor() for cell in self.idle.optimizers.cells]
            observed = self.tracing.finish(observer, states, self.room.left())
            if self.following.know(observed.codes) or not observed.trace.ops:
                return
            plan = self._plan(observed, None, None)
            if plan is not None:
                self.following.add(write_script(observed, plan, self.room.most()))
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._failed(error)

    def shrink(self, less: int, slower: float) -> bool:
        """Plan anew, so that steps hold so much less: see `Replans`. False: that cannot be."""
        return self.replans.shrink(self._ended, less, slower)

    def _exchanged(self, new: Script) -> None:
        """Steps go by that from now on."""
        self._ended = new
        if self.following.script is new:  # a step may have begun: it is seen as a whole
            self.write_down(None)
            self.holds.begin(new.holds)

    def unlearn(self) -> None:
        """Optimizers have other state than the one that was planned with."""
        self.following.unlearn()
        if self.mode is Mode.PLANNED:
            self.mode = Mode.DEPARTED
            self.write_down(None)
            self._let_go()

    def _failed(self, error: Exception) -> None:
        self.tracing.never()
        what = f"{type(error).__name__}: {error}"
        self._tell(f"planning failed ({what}), please report it; steps go on without a plan")

    def _give_up(self) -> None:
        self.write_down(None)
        self.following.codes.clear()
        self.following.depart()
        self._let_go()
        self.mode = Mode.DYNAMIC
        self.tracing.give_up()

    def stop(self) -> None:
        """Nothing is recorded or planned any more."""
        self.tracing.stop()
        self.mode = Mode.DYNAMIC
        self.following.script = None
        self.following.rest()
        self._let_go()

    # What happens in a step.

    def begin(self, saves: int, *, watched: bool) -> None:
        """A step has ended, in which so many tensors were saved, and another begins."""
        self.modes.append(self.mode)
        self.steps[self.mode] += 1
        self.before += saves
        self._began = time.perf_counter()
        self._cells = []
        self._let_go()
        if not watched:
            self.mode = Mode.LOOSE
            self.write_down(None)
            self.following.rest()
            return
        self.following.begin()
        self.mode = Mode.PLANNED if self.following.agrees else Mode.DYNAMIC
        self._trouble, self._failures = self.room.counts["not dropped"], self._shortage()

    def end(self) -> None:
        """A step has ended."""
        if self.mode is Mode.LOOSE:
            return
        self.following.end()
        as_planned = self.mode is Mode.PLANNED and not self.following.departed
        rehearsed = self.tapes.end(as_planned=as_planned)
        if self.mode is not Mode.PLANNED:
            return
        if self.following.departed:
            self.mode = Mode.DEPARTED
        elif self.following.script is not None:
            script = self._ended = self.following.script
            script.seconds.append(time.perf_counter() - self._began)
            settled = script.recorded is not None
            times = self._shortage() - self._failures if settled else 0
            if not self.replans.was_short(script, times, self.room.budget or 0):
                self._learn_ops(script)
                if settled and not times and not rehearsed and script.recorded is not None:
                    self.replans.settled(script)

    def _shortage(self) -> int:
        return self.room.counts["out of memory"] + self.room.flushes()

    def _learn_ops(self, script: Script) -> None:
        """Which ops have to be written down for a step like the one that has ended."""
        troubled = self.room.counts["not dropped"] != self._trouble
        if script.recorded is not None:
            if troubled:
                script.recorded = None
                script.trouble += 1
        elif len(script.seconds) >= _WHOLE and script.trouble < _MOST_TROUBLE and not troubled:
            recorded = frozenset(self.room.calls) | frozenset(script.holds)
            tied = [id(cell) for cell in self._cells if cell and cell.is_made_by(recorded)]
            script.recorded = recorded
            script.plain = plain_saves(self._cells, self.following.moved, tied)

    def is_settled(self) -> bool:
        """Whether steps go by a plan as they are going to from now on."""
        script = self.following.script
        return script is not None and script.recorded is not None

    def is_steady(self) -> bool:
        """Whether, besides, no other plan is going to be tried."""
        script = self.following.script
        return self.is_settled() and script is not None and script.judged

    def keeps_all(self) -> bool:
        """Whether the step that has ended went by the only plan, which stays and does nothing."""
        script = self.following.script if self.mode is Mode.PLANNED else None
        if script is None or not script.judged or len(self.following.scripts) > 1:
            return False
        return not script.plan.swaps and not script.plan.remakes

    def main_script(self) -> Script | None:
        """The one that was followed most."""
        return max(self.following.scripts, key=lambda one: len(one.seconds), default=None)

    def begun(self) -> None:
        """The step that begins has begun, and is seen."""
        script = self.following.script if self.mode is Mode.PLANNED else None
        self.write_down(None if script is None else script.recorded)
        self.holds.begin({} if script is None else script.holds)
        self.tapes.begin(script if script is not None and script.recorded is not None else None)
        self.event(BEGIN)

    def _let_go(self) -> None:
        """Nothing is held, unless something is still to be made from it."""
        self.holds.begin({})

    def packed(self, handle: Handle, number: int, value: Value | None) -> None:
        """A tensor was saved, as the `number`-th of this step; it shows that value, if known."""
        handle.number = self.before + number
        if self.tracing.observer is not None:
            self.tracing.observer.packed(handle, number)
        cell, following = handle.cell, self.following
        if not self.room.lax:  # it is seen as a whole
            self._cells.append(cell if isinstance(cell, DeltaCell) else None)
        if cell is not None and number in following.moved:
            following.wanted[number] = cell
        if self.tapes.log.on and isinstance(cell, DeltaCell):
            self.tapes.log.saved(number, cell)
        self.tapes.lend(number, value)
        if value is not None and value.call is not None and value.call.number in self.holds.wanted:
            self.room.surely_of(value)  # made from what is held, it is made in another way
        self.event(handle.bytes)

    def unpacking(self, handle: Handle) -> None:
        """Backward asks for one: it is too late to drop it."""
        number = handle.number - self.before
        self.following.expire(number)
        self.event(ASKED + number)

    def unpacked(self, handle: Handle, tensor: torch.Tensor) -> None:
        """It gets it."""
        if self.tracing.observer is not None:
            self.tracing.observer.unpacked(handle, tensor)

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if self.tracing.observer is not None:
            self.tracing.observer.stepping(optimizer, self.idle.optimizers.guests())

    def steps_parted(self) -> bool:
        """Whether an optimizer that is about to step does so in pieces, even if there is room.

        When it is traced, to know what can be gained by that; and when a plan says so.
        """
        script = self.following.script if self.mode is Mode.PLANNED else None
        return self.tracing.observer is not None or (script is not None and not script.steps_whole)

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        if self.tracing.observer is not None:
            self.tracing.observer.stepped(optimizer)

    def _run_again(self, numbers: Sequence[int], rooms: Rooms) -> None:
        """What the plan makes again now; what is left of it is made when asked for."""
        items: list[Item] = []
        for number in numbers:
            if number < 0:
                cell = self.following.wanted.get(-1 - number)
                if isinstance(cell, DeltaCell):
                    items.append(cell)
            elif number in self.room.calls:
                items.append(self.room.calls[number])
        if items:
            with suppress(Gone, OutOfBudget, torch.OutOfMemoryError):
                self.follow(items, rooms)

    def event(self, code: int) -> None:
        """Something happens."""
        following = self.following
        script, at = following.script, len(following.codes)
        if (
            self.mode is Mode.PLANNED
            and script is not None
            and following.agrees
            and at < len(script.codes)
            and script.codes[at] == code
        ):  # as ever
            following.codes.append(code)
            self.tapes.log.at = at
            if script.actions[at] or at in script.reruns:
                self.tracing.finish_chain()
            has_let_go = self.tapes.only_lets_go(at)
            if has_let_go:  # before anything comes back
                self.tapes.happen(at)
            if script.actions[at] or following.late:
                with self.replans.acts as acts:
                    following.act(script.actions[at])
                acts.count += len(script.actions[at])
            if self.tapes.on and not has_let_go:
                self.tapes.happen(at)
            if not self.tapes.on and (at in script.reruns or at in script.lets_go):
                with self.replans.reruns as reruns:
                    self._go_on(at)
                reruns.count += len(script.reruns.get(at, ()))
            self.resume()
            return
        if at >= _LONGEST:  # nobody ends this step: it is none
            self._give_up()
        if self.mode is not Mode.PLANNED:
            self.following.codes.append(code)
            if self.tracing.observer is not None:
                self.tracing.observer.event(code)
            return
        actions = following.next(code)
        self.write_down(None)
        if actions is None or following.script is None:
            self.mode = Mode.DEPARTED
            self._let_go()
            with self.room.lock:
                self.room.adopt()  # what it has kept natively may have to leave
            return
        self.holds.begin(following.script.holds)
        following.act(actions)
        self._go_on(at)

    def _go_on(self, at: int) -> None:
        """What the plan makes again at that event, and what it holds no longer."""
        script = self.following.script
        if script is not None and self.following.agrees:
            before, after = script.lets_go.get(at, ((), ()))
            self.holds.let_go(before)
            self._run_again(script.reruns.get(at, ()), script.rooms.get(at, {}))
            self.holds.let_go(after)

    def _do(self, action: Action, waits: bool) -> bool:
        if action.who < 0:
            return self.idle.do(action, waits=waits, has=self._has)
        cell = self.following.wanted.get(action.who)
        if not isinstance(cell, DeltaCell):
            return True
        return move(cell, action.act, self.room, waits=waits, has=self._has)

    def _has(self, count: int) -> bool:
        """Whether so much may come back now."""
        return self.room.lax or self.room.has(count)
