"""Optimizer state, idle from one step to the next: where there is no plan, the last that goes.

Nothing but a copy brings it back, so values that can be made again, or that were saved for this
backward alone, go before it. A step that could not do without its bytes says that the next ones
cannot, either: from then on it starts to leave when the optimizer has stepped. Where even that is
not enough gradients go, and then weights, which are read where they are until the optimizer's
step needs them.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cell import Keeper
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.guests import GuestCell
from lowtide._runtime.swap.optimizers import Optimizers
from lowtide._runtime.swap.pieces import MOST_PIECES
from lowtide._runtime.swap.script import STEPPING, Act, Action
from lowtide._runtime.swap.states import StateCell
from lowtide._runtime.swap.tier import Tier

_HERE = (State.HERE, State.LEAVING)
_AWAY = (State.AWAY, State.COMING)
_COMPUTING = 2  # times the parameters: what a step may make on the way
_ADAM = 2  # ... and what a first step leaves
_AHEAD = 8  # times a tensor's bytes have to be free for it to come before it is needed


class _Counted(StateCell):
    """Its bytes are counted."""

    __slots__ = ()

    _keeper: Keeper

    def _let_go(self) -> None:
        super()._let_go()
        self._keeper.ledger.away += self.bytes

    def _take_again(self) -> None:
        self._keeper.with_room(super()._take_again, self.bytes)
        self._keeper.ledger.see(self.storage)
        self._keeper.ledger.away -= self.bytes

    def _moving(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self._keeper.moving(tensor, storage)
        if storage is not self.storage:
            self._keeper.ledger.see_below(storage)


class IdleCell(_Counted):
    """A state tensor."""

    __slots__ = ("_keeper",)

    def __init__(
        self, tensor: torch.Tensor, tier: Tier, owner: int, piece: int, keeper: Keeper
    ) -> None:
        super().__init__(tensor, tier, owner, piece)
        self._keeper = keeper

    def drop(self) -> None:
        """No longer ours; if it is gone, nothing is away."""
        if self.state is State.AWAY and self.is_orphan():
            self._keeper.ledger.away -= self.bytes
        super().drop()


class IdleGuest(_Counted, GuestCell):
    """A weight or a gradient."""

    __slots__ = ("_keeper",)

    def __init__(
        self,
        keeper: Keeper,
        parameter: torch.Tensor,
        tier: Tier,
        owner: int,
        piece: int,
        *,
        is_gradient: bool,
    ) -> None:
        GuestCell.__init__(self, parameter, tier, owner, piece, is_gradient=is_gradient)
        self._keeper = keeper

    def _found_gone(self) -> None:
        self._keeper.ledger.away -= self.bytes


class IdleState:
    """The state of all optimizers of a loop, and what goes when that was not enough."""

    def __init__(
        self,
        tier: Callable[[torch.device], Tier | None],
        keeper: Keeper,
        smallest: int,
        piece_bytes: int,
    ) -> None:
        def make_cell(tensor: torch.Tensor, below: Tier, owner: int, piece: int) -> StateCell:
            return IdleCell(tensor, below, owner, piece, keeper)

        self.optimizers = Optimizers(
            tier, self._piece, smallest, piece_bytes, make_cell, partial(IdleGuest, keeper)
        )
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.told: Callable[[int], None] = lambda _: None  # of every piece of a step
        self.changed: Callable[[], None] = lambda: None  # what there is is not what was planned
        self.guest_leaves: Callable[[], None] = lambda: None  # who writes to it says so from now on
        self._before: list[tuple[int, int, int]] | None = None  # before it was replaced
        self._by_plan = False  # what leaves when is said by a plan, in this step
        self._at: tuple[int, int] | None = None  # the optimizer that steps, and its piece
        self._has: Callable[[int], bool] = lambda _: False  # whether so much more may be held
        self._states = 0  # parameters whose state was looked at
        self._was_needed = False  # in this step
        self._leaves = False  # at once after every step

    def stepping(
        self,
        optimizer: Optimizer,
        args: Sequence[object],
        has: Callable[[int], bool],
        *,
        parted: bool,
    ) -> bool:
        """An optimizer is about to step: as a whole if all is there, and room to compute in.

        `parted`: in pieces all the same. Whether it is going to be as a whole.
        """
        self._has = has
        cells = (*self.optimizers.cells, *self.optimizers.guests_away())
        here = not parted and not any(cell.state in _AWAY for cell in cells)
        trained = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        count = trained * (_COMPUTING if optimizer.state else _COMPUTING + _ADAM)
        room = has(count)
        if not self.optimizers.step(optimizer, args, whole=here and room, first=not room):
            self._states = 0
            self.changed()
        return self.optimizers.steps_whole(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        self.optimizers.stepped(optimizer)
        self._at = None

    def mark(self, *, by_plan: bool) -> None:
        """The step is over, and in the next one a plan says what leaves when, or none."""
        self._drop_orphans()
        for guest in self.optimizers.guests_away():
            guest.settle()
        self._leaves = self._leaves or (self._was_needed and not self._by_plan)
        self._was_needed = False
        self._by_plan = by_plan
        if self._leaves and not by_plan:
            self.admit()
            for cell in self._free(self.optimizers.cells, _HERE):
                if cell.alone():
                    cell.leave()

    def release(self, enough: Callable[[], bool], *, leaving: bool) -> list[int]:
        """Let go until there is enough: only what is on its way out anyway, or all that can.

        Gives the bytes of each.
        """
        if not leaving:
            self._drop_orphans()
            self.admit()
        released = []
        guests = self.optimizers.guests_away() if leaving else self.optimizers.guests_to_move()
        cells = (*self.optimizers.cells, *sorted(guests, key=lambda one: not one.is_gradient))
        for cell in [] if leaving else self._free(cells, {State.COMING}):
            if enough():
                break
            cell.send_back()
        for cell in self._free(cells, _HERE):
            if enough():
                break
            starts = cell.state is State.LEAVING
            if not starts and not leaving and cell.alone():
                starts = self._leave(cell)
            if starts and cell.release():
                released.append(cell.bytes)
        self._was_needed = self._was_needed or bool(released)
        return released

    def _leave(self, cell: StateCell) -> bool:
        if isinstance(cell, GuestCell):
            self.guest_leaves()
        return cell.leave()

    def reloaded(self) -> None:
        """An optimizer's state was replaced. That of others stays where it is."""
        if self._before is None:
            self._before = self._likeness()
        self.optimizers.drop_orphans()
        self.optimizers.cells = [c for c in self.optimizers.cells if c.state is not State.GONE]
        self._states = 0  # they are admitted later: whoever loads them still refers to them

    def _drop_orphans(self) -> None:
        if any(cell.is_orphan() for cell in self.optimizers.cells):
            self.reloaded()  # by the program itself, without a word

    def leave(self) -> None:
        """All of it back on the device."""
        self.optimizers.leave()

    def admit(self) -> None:
        """What an optimizer has made since."""
        states = sum(len(optimizer.state) for optimizer in self.optimizers.all())
        if states != self._states:
            before = self._likeness() if self._before is None else self._before
            self._before = None
            self._states = states
            self.optimizers.admit(self.optimizers.movable())  # those that have a cell are not
            if before and self._likeness() != before:
                self.changed()

    def bytes(self) -> int:
        """Of what is on the device and could leave."""
        state = sum(tensor.untyped_storage().nbytes() for tensor, _, _ in self.optimizers.movable())
        return state + sum(g.bytes for g in self.optimizers.guests() if g.subject() is not None)

    def about_to_write(self, storage: torch.UntypedStorage) -> None:
        """An op is: no copy of what it writes to is to be taken for it."""
        guests = self.optimizers.guests_away()
        if guests:
            with self.lock:
                any(guest.written_to(storage) for guest in guests)

    def largest(self) -> torch.Tensor | None:
        """Of the weights that could leave. When its optimizer steps it has to be here."""
        found = (guest.parameter() for guest in self.optimizers.guests())
        weights = (weight for weight in found if weight is not None)
        return max(weights, key=lambda weight: weight.nbytes, default=None)

    def _likeness(self) -> list[tuple[int, int, int]]:
        return [(cell.bytes, cell.owner, cell.piece) for cell in self.optimizers.cells]

    def do(self, action: Action, *, waits: bool, has: Callable[[int], bool]) -> bool:
        """What a plan says; `has`: whether so much may come back. False: not yet."""
        if self._before is not None:
            self.admit()
        cell = self.optimizers.cell_of(action.who)
        if cell is None or not self.optimizers.may_move(cell):
            return True
        if action.act is Act.HAVE:
            with suppress(OutOfBudget, torch.OutOfMemoryError):  # it can be read where it is
                cell.have()
        elif action.act is Act.LEAVE:
            if cell.state is State.HERE and not cell.alone():
                return False
            self._leave(cell)
        elif action.act is Act.RELEASE:
            return cell.state is not State.LEAVING or cell.release() or not waits
        elif cell.state is State.AWAY and has(cell.bytes):
            with suppress(OutOfBudget, torch.OutOfMemoryError):  # who needs it asks again
                cell.fetch()
        return True

    def _free(self, cells: Iterable[StateCell], states: Container[State]) -> Iterator[StateCell]:
        """Those that no optimizer is at work on."""
        for cell in cells:
            at_work = (cell.owner, cell.piece) == self._at
            if cell.state in states and not at_work and self.optimizers.may_move(cell):
                yield cell

    def _piece(self, code: int) -> None:
        """A piece of a step begins: what it needs may come, and what the next one needs."""
        owner, piece = divmod(code - STEPPING, MOST_PIECES)
        self._at = owner, piece
        self.told(code)
        for cell in (*self.optimizers.cells, *self.optimizers.guests_away()):
            if cell.owner != owner:
                continue
            soon = cell.piece == piece + 1 and not self._by_plan
            if cell.piece == piece or (soon and self._has(_AHEAD * cell.bytes)):
                cell.fetch()
