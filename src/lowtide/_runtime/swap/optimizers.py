"""The optimizers of a loop: their state, which comes and goes, and their steps, done in pieces."""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from lowtide._runtime.storages import graphs_exist
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.guests import GuestCell, is_worth_moving
from lowtide._runtime.swap.pieces import (
    MOST_PIECES,
    Piece,
    can_be_parted,
    covers,
    joined,
    narrow_once,
    only,
    pieces_of,
    state_bytes,
    step_once,
    widen,
)
from lowtide._runtime.swap.script import GUESTS, STEPPING
from lowtide._runtime.swap.states import StateCell, state_tensors
from lowtide._runtime.swap.tier import Tier

_NOBODY = -1

Movable = tuple[torch.Tensor, int, int]  # a tensor, the number of its optimizer, and of its piece


class Optimizers:
    """Known by what they train: some loops make a new optimizer for every step."""

    def __init__(
        self,
        tier: Callable[[torch.device], Tier | None],
        event: Callable[[int], None],
        smallest: int,
        piece_bytes: int,
        make_cell: Callable[[torch.Tensor, Tier, int, int], StateCell] = StateCell,
        make_guest: Callable[..., GuestCell] | None = None,  # None: weights and gradients stay
    ) -> None:
        self._tier = tier
        self._make_cell = make_cell
        self._make_guest = make_guest
        self._event = event
        self._smallest = smallest
        self._piece_bytes = piece_bytes
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[int, weakref.ref[Optimizer]] = {}
        self._pieces: dict[int, list[Piece]] = {}
        self._sizes: dict[int, tuple[list[Piece], list[int]]] = {}
        self._stepping: set[int] = set()  # those that do so as a whole
        self._others: set[int] = set()  # those that are not what they were
        self.cells: list[StateCell] = []
        self._guests: dict[int, list[GuestCell]] = {}
        self._flat: list[GuestCell] = []  # all of these, in order
        self._guests_move = False  # some were to leave, once
        self._graphs = False  # ... and there were CUDA graphs then

    def know(self, optimizer: Optimizer) -> None:
        """It is going to step; what state it has may move before."""
        number = self._number(optimizer)
        if optimizer.state:
            self._pieces.setdefault(number, pieces_of(optimizer, self._piece_bytes))
        self._know_guests(optimizer, number)

    def guests(self) -> list[GuestCell]:
        """Of each trained weight that is worth moving: the weight, and its gradient."""
        return self._flat

    def guests_to_move(self) -> list[GuestCell]:
        """The same, for who is going to have some leave; none where a graph knows addresses."""
        if not self._guests_move:
            self._graphs = graphs_exist()
            self._guests_move = True
        return [] if self._graphs else self.guests()

    def guests_away(self) -> list[GuestCell]:
        """Those that have left, or are about to."""
        if not self._guests_move:  # as nearly always
            return []
        return [guest for guest in self._flat if guest.state is not State.HERE]

    def cell_of(self, who: int) -> StateCell | None:
        """Which an action of a plan is about."""
        at = -1 - who
        cells: Sequence[StateCell] = self.cells
        if at >= GUESTS:
            at -= GUESTS
            cells = self.guests_to_move()
        return cells[at] if at < len(cells) else None

    def _know_guests(self, optimizer: Optimizer, number: int) -> bool:
        """Not while it steps, when it does not have all of its parameters.

        False: they are others than before.
        """
        make = self._make_guest
        if make is None:
            return True
        wanted = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if is_worth_moving(parameter, self._smallest) and self._tier(parameter.device)
        ]
        known = self._guests.get(number, [])
        if len(known) == 2 * len(wanted) and all(
            guest.is_about(parameter) for guest, parameter in zip(known[::2], wanted, strict=True)
        ):
            return True
        old = {id(guest.parameter()): i for i, guest in enumerate(known[::2])}
        piece_of = self._piece_of(number)
        found: list[GuestCell] = []
        for parameter in wanted:
            tier = self._tier(parameter.device)
            at = old.get(id(parameter))
            if at is not None and known[2 * at].is_about(parameter):
                found += known[2 * at : 2 * at + 2]
            elif tier is not None:
                piece = piece_of.get(id(parameter), 0)
                found += (
                    make(parameter, tier, number, piece, is_gradient=is_gradient)
                    for is_gradient in (False, True)
                )
        staying = {id(guest) for guest in found}
        for guest in known:
            if id(guest) not in staying:
                guest.drop()
        self._guests[number] = found
        self._flat = [guest for guests in self._guests.values() for guest in guests]
        return not known

    def step(
        self,
        optimizer: Optimizer,
        args: Sequence[object],
        *,
        whole: bool,
        first: bool = False,
        together: Callable[[int], int] = lambda _: 0,
    ) -> bool:
        """It is about to step: have its state, or do its step here but for the last piece.

        With `whole` it only looks like a step in pieces; with `first` there may be pieces before
        there is state. Pieces that are here step at once with those before as long as that is no
        more bytes of state than `together` says of the next event. False: its parameters are not
        those of before, so plans are of no use any more.
        """
        widen(optimizer)
        number = self._number(optimizer)
        self._stepping.discard(number)
        pieces = self._pieces.get(number)
        same = pieces is None or covers(pieces, optimizer)
        if not same:
            pieces = None
            del self._pieces[number]
        if pieces is None and (optimizer.state or first):
            pieces = self._pieces[number] = pieces_of(optimizer, self._piece_bytes)
            self._others.add(number)
        if not same or number in self._others:
            self._others.discard(number)
            self._put_in_pieces(optimizer, number)
        same = self._know_guests(optimizer, number) and same
        if pieces is None or len(pieces) < 2 or not can_be_parted(optimizer, args):
            self._event(STEPPING + number * MOST_PIECES)
            self.need(optimizer)
            self._stepping.add(number)
            return same
        if whole:
            for i in range(len(pieces)):
                self._event(STEPPING + number * MOST_PIECES + i)
            self.need(optimizer)
            self._stepping.add(number)
            return same
        now: list[Piece] = []  # that step at once
        held = 0  # bytes of state that is theirs
        for i, piece in enumerate(pieces):
            code = STEPPING + number * MOST_PIECES + i
            self._event(code)
            for cell in self._in(number, i):
                cell.have()
            now.append(piece)
            if i + 1 == len(pieces):
                narrow_once(optimizer, joined(now))  # PyTorch goes on with the last ones
                break
            most = together(code + 1)
            if most:
                sizes = self._sizes_of(optimizer, number, pieces)
                held += sizes[i]
                cells = self._in(number, i + 1)
                still = all(cell.state is State.HERE for cell in cells)
                if still and held + sizes[i + 1] <= most:
                    continue
            with only(optimizer, joined(now)):
                step_once(optimizer)
            now, held = [], 0
        return same

    def _sizes_of(self, optimizer: Optimizer, number: int, pieces: list[Piece]) -> list[int]:
        """Bytes of state in each piece, looked at once."""
        known = self._sizes.get(number)
        if known is None or known[0] is not pieces:
            sizes = [state_bytes(optimizer, piece) for piece in pieces]
            known = self._sizes[number] = pieces, sizes
        return known[1]

    def stepped(self, optimizer: Optimizer) -> None:
        """Its step is over."""
        widen(optimizer)
        self._stepping.discard(self._number(optimizer))

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Whether it is at a step that is not in pieces."""
        return self._number(optimizer) in self._stepping

    def may_move(self, cell: StateCell) -> bool:
        """Not while its optimizer steps as a whole, with a closure perhaps, and needs all."""
        return cell.owner not in self._stepping

    def need(self, optimizer: Optimizer) -> None:
        """Somebody looks at all of its state, or replaces it: have it on the device."""
        widen(optimizer)
        for cell in self._of(self._number(optimizer)):
            cell.have()

    def all(self) -> list[Optimizer]:
        """Those that are known and still there."""
        return [optimizer for known in self._known.values() if (optimizer := known()) is not None]

    def movable(self) -> list[Movable]:
        """The state that could move."""
        found = []
        for number, known in self._known.items():
            optimizer = known()
            if optimizer is None:
                continue
            piece_of = self._piece_of(number)
            for parameter, tensor in state_tensors(optimizer, self._smallest):
                if self._tier(tensor.device) is not None:
                    found.append((tensor, number, piece_of.get(id(parameter), 0)))
        return found

    def _piece_of(self, number: int) -> dict[int, int]:
        """By the parameter."""
        return {
            id(parameter): i
            for i, piece in enumerate(self._pieces.get(number, ()))
            for group in piece
            for parameter in group
        }

    def _put_in_pieces(self, optimizer: Optimizer, number: int) -> None:
        """Its cells, by the pieces as they are now; what is not its own is nobody's for now."""
        piece_of = self._piece_of(number)
        found = {
            id(thing): piece_of.get(id(parameter), MOST_PIECES)
            for parameter, state in optimizer.state.items()
            if isinstance(state, dict)
            for thing in state.values()
        }
        for cell in self.cells:
            piece = found.get(id(cell.tensor()))
            if piece is not None:
                cell.owner, cell.piece = number, piece
            elif cell.owner == number:
                cell.owner, cell.piece = _NOBODY, MOST_PIECES
        for guest in self._guests.get(number, ()):
            guest.piece = piece_of.get(id(guest.parameter()), 0)

    def admit(self, tensors: Sequence[Movable]) -> None:
        """A cell for each."""
        self._sizes.clear()  # of state that was there before
        for tensor, owner, piece in tensors:
            tier = self._tier(tensor.device)
            assert tier is not None
            self.cells.append(self._make_cell(tensor, tier, owner, piece))
        places = {id(thing): i for i, thing in enumerate(self._things())}
        self.cells.sort(key=lambda cell: places.get(id(cell.tensor()), -1))  # whoever was first

    def _things(self) -> Iterator[object]:
        for optimizer in self.all():
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    yield from state.values()

    def admit_again(self) -> bool:
        """State was replaced. False: it is not like that of before."""
        before = [(cell.bytes, cell.owner, cell.piece) for cell in self.cells]
        self.leave()
        found = self.movable()
        if [(t.untyped_storage().nbytes(), owner, piece) for t, owner, piece in found] != before:
            return False
        self.admit(found)
        return True

    def drop_orphans(self) -> None:
        """Keep no tensor alive that its optimizer has replaced."""
        for cell in self.cells:
            if cell.is_orphan():
                cell.drop()

    def leave(self) -> None:
        """All state back on the device, and no cells. Raises if there is no room for some."""
        failures: list[Exception] = []
        kept = []
        for cell in (*self.cells, *self.guests()):
            try:
                cell.drop()
            except Exception as error:  # noqa: BLE001 - the others come back all the same
                failures.append(error)
                kept.append(cell)
        self.cells = kept
        self._guests.clear()
        self._flat = []
        if failures:
            raise failures[0]

    def forget(self) -> None:
        """Refer to none any more."""
        self._known.clear()
        self._pieces.clear()
        self._sizes.clear()

    def _in(self, number: int, piece: int) -> list[StateCell]:
        return [cell for cell in self._of(number) if cell.piece == piece]

    def _of(self, number: int) -> list[StateCell]:
        """State, and what else has left."""
        return [c for c in (*self.cells, *self.guests_away()) if c.owner == number]

    def _number(self, optimizer: Optimizer) -> int:
        for number, known in self._known.items():
            if known() is optimizer:
                return number
        trained = tuple(id(p) for group in optimizer.param_groups for p in group["params"])
        number = self._numbers.setdefault(trained, len(self._numbers))
        if number in self._known:
            self._others.add(number)
        self._known[number] = weakref.ref(optimizer)
        return number
