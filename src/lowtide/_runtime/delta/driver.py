"""Training under a budget with no plan: every op is seen, and room is made before it runs."""

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.asleep import Asleep
from lowtide._runtime.delta.cap import Cap, Giver
from lowtide._runtime.delta.cell import DeltaCell, Keeper
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.garbage import Garbage
from lowtide._runtime.delta.gate import Gate
from lowtide._runtime.delta.idle import IdleState
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.mode import SeeingMode
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.native_tape import NativeTape
from lowtide._runtime.delta.plain import Plain
from lowtide._runtime.delta.planned import Planned
from lowtide._runtime.delta.refusal import why_not
from lowtide._runtime.delta.replay import Replayer
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.see import Seer
from lowtide._runtime.delta.tally import Tally
from lowtide._runtime.delta.tapes import Tapes
from lowtide._runtime.delta.trust import Trust
from lowtide._runtime.delta.unseen import Unseen
from lowtide._runtime.delta.watching import Watching
from lowtide._runtime.fused.chains import Chains
from lowtide._runtime.fused.groups import Fuser
from lowtide._runtime.swap.native_saves import NativeSaves
from lowtide._runtime.swap.quiet import is_calm, is_free
from lowtide._runtime.swap.saved import Handle, Saved
from lowtide._runtime.swap.tier import Tier


class Dynamic:
    """Told of every op, save and request, it keeps what the device holds within the budget."""

    def __init__(
        self,
        device: torch.device,
        budget: int | None,
        policy: str,
        verify: str,
        speed: Callable[[], float],
        idle: Callable[[Keeper], IdleState],
        fuser: Fuser | None = None,
        planned: Planned | None = None,
        gate: Callable[[], Gate | None] = lambda: None,
        saves: Callable[[], NativeSaves | None] = lambda: None,
        tape: Callable[[], NativeTape | None] = lambda: None,
    ) -> None:
        self.digests = verify == "always"
        self.ledger, self._costs = Ledger(device), Costs(device)
        self.cap = Cap(device)
        self.room = Room(self.ledger, self._costs, budget, policy, speed)
        self.seer = Seer(self.ledger, self._costs, self.room, gate)
        if fuser is not None:
            self.seer.chains = Chains(fuser.kernels, wait=not self.digests)
        self.replayer = Replayer(self.ledger, self._costs, self.room, fuser)
        self.trust = Trust(verify, self.room, self._costs, self.replayer)
        self.room.recipe_of, self.room.surely_of = self.trust.reliable, self.trust.surely
        self.room.cost_of = self.replayer.cost
        self.room.ask(self.cap)
        self.idle = idle(self)
        self.seer.about_to_write.append(self.idle.about_to_write)
        self.idle.guest_leaves = self.seer.see_all_writes
        self.seer.others_watch = self.idle.optimizers.guests_away
        if policy == "delta":  # the others are as they were published
            self.room.idle = self.idle
        load = (lambda: None) if self.digests else tape  # then all that is dropped is compared
        self.tapes = Tapes(self.room, self.ledger, self.seer, self.replayer, load)
        self.planned = planned
        if planned is not None:
            planned.tapes, self.tapes.following = self.tapes, planned.following
            planned.room, planned.idle = self.room, self.idle
            planned.tracing.chains = self.seer.chains
            self.idle.told = self._piece
            self.idle.changed = planned.unlearn
            planned.write_down = self._write_down
            planned.follow = self.replayer.follow
            planned.holds = self.seer.holds
            self.room.spare = planned.holds.let_all_go
        self._mode: SeeingMode | None = None
        self._tally = Tally()
        self._at_step: int | None = None  # the next op's number when one stepped, without closure
        self._unseen = Unseen(self.ledger, self.room, self.seer)
        self._plain = Plain(self.room, self._tally, planned, saves)
        self._garbage = Garbage()
        self.watching = Watching(self.room, self.ledger, self.cap, self._tally, planned)
        self._asleep = Asleep(self.cap, self.room, self.seer, self._tally, self._push)
        self.steps = 0

    # Its life.

    def start(self, saved: Saved, optimizers: Sequence[Optimizer]) -> None:
        """See ops from now on."""
        self.room.lock = self.idle.lock = saved
        self._asleep.start(saved)
        self._plain.start(saved)
        for optimizer in optimizers:
            self.idle.optimizers.know(optimizer)
        if self.ledger.device.type == "cuda":
            self.room.know_speed()  # measuring takes memory, too
        self._push()
        self._refuse_what_cannot_be()
        self.set_budget(self.room.budget)

    def _refuse_what_cannot_be(self) -> None:
        """Before the first step, if what is there already is too much, or what has to be."""
        if self.room.budget is None or self._mode is None:
            return
        stays, largest = self.ledger.held - self.idle.bytes(), self.idle.largest()
        why = why_not(self.room.budget, stays, largest)
        if why is not None:
            self._pop()
            raise OutOfBudget(why)

    def set_budget(self, budget: int | None) -> None:
        """Hold that from now on."""
        self.room.budget = budget
        if budget is not None and self._mode is not None:
            self.cap.put(budget)
            self.room.margin = self.cap.margin(budget)

    def _push(self) -> None:
        if self._mode is None and is_calm():
            self.ledger.admit_existing()
            self._enter()

    def _pop(self) -> None:
        """Nobody sees when an op runs out of memory: PyTorch is not to be held to the budget."""
        self.cap.lift()
        self._leave()

    def stop(self) -> None:
        """See no op any more, and hold nothing back."""
        self.tapes.stop()
        self._asleep.stop()
        self.room.budget = None
        self._plain.stop()
        self._unseen.forget()
        self._garbage.collect_as_before()
        self._pop()
        self.seer.leave_gate()
        if self.planned is not None:
            self.planned.stop()
        self.idle.leave()

    def forget(self) -> None:
        """Refer to nothing of the program's any more."""
        self.idle.optimizers.forget()
        self.room.forget()
        self.ledger.new_graphs()

    def use_pages(self, giver: Giver | None) -> bool:
        """Whether memory is given in pages from now on. None: no more, so nobody guards it."""
        if giver is None:
            self._asleep.end()
        return self.cap.use_pages(giver)

    def is_settled(self) -> bool:
        """Whether steps are made as they are going to be from now on."""
        if self._mode is None:
            return True
        return self.planned is not None and self.planned.is_settled()

    def shrink(self, less: int, slower: float) -> bool:
        """Hold so much less, and take at most `slower` times as long. False: that cannot be."""
        if self.planned is None or self._mode is None:
            return False
        return self.planned.shrink(less, slower)

    def mark(self) -> None:
        """The step is over."""
        self._see_again()
        if self.planned is not None:
            self._end_planned(self.planned)
        self._costs.collect()
        self.steps += 1
        if self._mode is None:
            if self.watching.was_another(told=not self._asleep.undisturbed()):
                self._watch_again()
        elif self.watching.is_needless():
            self._pop()
        if self.planned is not None:
            self.planned.begin(self._tally.saves, watched=self._mode is not None)
        self._tally.begin()
        self.room.keep_wanted()
        self.ledger.new_graphs()
        if self._mode is not None and self.ledger.device.type == "cuda":
            self.ledger.count_unseen()
        self.ledger.begin_step()
        self.seer.begin_step()
        if self._asleep.had_woken() and self._mode is not None:
            self.set_budget(self.room.budget)
        if self._mode is not None:
            self.idle.mark(by_plan=self.planned is not None and self.planned.mode is Mode.PLANNED)
            if self.planned is not None:
                self._begin_planned(self.planned)
            self._asleep.end(self.room.budget)
        elif not self._asleep.begin(self.room.budget if self.watching.guards() else None):
            self._plain.go_loose()

    def _end_planned(self, planned: Planned) -> None:
        """What was traced was traced below this mode, which leaves for a moment."""
        planned.end()
        self.seer.observe = None
        if planned.tracing.observer is None:
            return
        on_top = self._mode is not None and self._mode.is_on_top()
        if on_top:
            self._leave()
        try:
            planned.learn()
        finally:
            if on_top:
                self._enter()

    def _begin_planned(self, planned: Planned) -> None:
        if self.room.budget is not None and self._mode is not None and self._mode.is_on_top():
            self._leave()
            try:
                planned.tracing.pop_stray()
                if planned.wants_trace():
                    self.seer.observe = planned.trace().see
            finally:
                self._enter()
        if planned.is_settled():
            self._plain.prepare()
        planned.begun()

    def _write_down(self, ops: frozenset[int] | None) -> None:
        """Of the ops to come only these, if that is enough for a plan; None: all of them.

        Then nobody makes room either where the device's allocator is held to the budget: for an
        op that is short of it there is still some made when it has failed.
        """
        self.seer.recorded = ops
        if ops is not None:
            self._garbage.collect_less()
        else:
            self._plain.halt()
            self.tapes.hand_over()
        was, self.room.lax = self.room.lax, ops is not None and self.cap.holds
        if self.room.lax:
            self.watching.goes_lax()
        self.seer.tend_gate(self._mode)
        if was and not self.room.lax and self._mode is not None:
            self.ledger.admit_more()

    def _leave(self) -> None:
        mode, self._mode = self._mode, None
        self.seer.tend_gate(self._mode)
        if mode is not None:
            mode.leave()

    def _enter(self) -> None:
        self._mode = SeeingMode(self.seer.see)
        self._mode.begin()
        self.seer.tend_gate(self._mode)

    def _watch_again(self) -> None:
        """What happens from now on, if that can be."""
        if is_free():
            self._tally.watch_again()
            self._push()
            self.set_budget(self.room.budget)

    # What the hooks tell.

    def make_cell(self, storage: torch.UntypedStorage, tier: Tier) -> DeltaCell:
        """For a storage that is saved for the first time."""
        cell = DeltaCell(storage, tier, self)
        self.room.add(cell)
        return cell

    def packed(self, handle: Handle) -> None:
        """A tensor was saved."""
        self._plain.halt()
        if self._unseen.now:
            self._see_again()
        planned = self.planned
        observer = None if planned is None else planned.tracing.observer
        if observer is not None:
            observer.begin_own(anew=True)  # whatever has become of the last one
        number = self._tally.save(handle.bytes)
        if self._mode is None and not self._unseen.now:
            self._asleep.saved_one(number, handle.bytes)
        cell = handle.cell
        value = cell.value if isinstance(cell, DeltaCell) else None
        if cell is not None and cell.handles == 1:
            self._tally.add_storage(cell.bytes)
            if self._mode is None:
                self.watching.guess()
            elif value is not None and value.call is not None:
                self.trust.consider(value, number)
        if planned is not None and self._mode is not None:
            planned.packed(handle, number, value)
        if observer is not None:
            if value is not None and self.trust.reliable(value) is not None:
                observer.can_drop(number)
            observer.end_own()

    def unpacking(self, handle: Handle) -> None:
        """Backward asks for one: what it is going to ask for next may already come back."""
        self._plain.halt()
        self._begin_own(anew=True)
        if self.planned is not None and self._mode is not None:
            self.planned.unpacking(handle)
        cell = handle.cell
        if not isinstance(cell, DeltaCell):
            return
        cell.last = self.ledger.now
        if self.planned is not None and self.planned.following.agrees:
            return
        self.room.fetch_before(cell, self.seer.largest)

    def unpacked(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Backward gets it."""
        if self.planned is not None:
            self.planned.unpacked(handle, tensor)
        self._end_own()

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._see_again()
        if self._at_step is not None:  # ops of the program have the same numbers, seen or not
            self.seer.at = self._at_step
        self.idle.stepped(optimizer)
        if self.planned is not None:
            self.planned.stepped(optimizer)

    def stepping(self, optimizer: Optimizer, args: Sequence[object]) -> None:
        """An optimizer is about to step."""
        self.tapes.finish()  # nobody may see what it writes to
        self._see_again()  # a step within another, or after one that failed
        self._at_step = self.seer.at if all(arg is None for arg in args) else None
        if self.planned is not None and self._mode is not None:
            self.planned.stepping(optimizer)
        parted = self.planned is not None and self.planned.steps_parted()
        on_top = self._mode is not None and self._mode.is_on_top()
        unseen = on_top and not parted and self._unseen.may_step(optimizer, args)
        if self._mode is not None and self._unseen.may_write(args):
            self._unseen.begin()
        whole = self.idle.stepping(optimizer, args, self.room.has, parted=parted)
        if not whole:
            self._tally.step_in_pieces()
        if unseen and whole and not self.ledger.away:  # a plan may have dropped just now
            self._unseen.begin()
            self._leave()
        self._plain.halt()  # what comes next ends that

    def _piece(self, code: int) -> None:
        if self._mode is not None:
            self._plain.happened(code)

    def _see_again(self) -> None:
        """All that happens, after an optimizer's step or what has become of it."""
        self._plain.halt()
        if self._unseen.now and is_calm():
            if self._mode is None:
                self._enter()
            self._unseen.end()

    # What cells ask for.

    def with_room(self, work: Callable[[], None], count: int) -> None:
        """Run what takes so many bytes."""
        if self._mode is None:  # nobody counts
            work()
            return
        self._begin_own()
        try:
            self.room.run(work, count, "bringing back a saved tensor")
        finally:
            self._end_own()

    def _begin_own(self, *, anew: bool = False) -> None:
        if self.planned is not None and self.planned.tracing.observer is not None:
            self.planned.tracing.observer.begin_own(anew=anew)

    def _end_own(self) -> None:
        if self.planned is not None and self.planned.tracing.observer is not None:
            self.planned.tracing.observer.end_own()

    def moving(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """An optimizer's tensor is about to lie on another storage."""
        if self.planned is not None and self.planned.tracing.observer is not None:
            self.planned.tracing.observer.moved(tensor, storage)

    def remake(self, cell: DeltaCell) -> None:
        """Have a dropped one's bytes again."""
        cell.bounces += 1
        self.room.counts["remade"] += 1
        with self.room.lock:
            self.replayer.remake(cell)
