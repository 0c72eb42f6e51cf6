"""Steps of optimizers of which not every op is seen: there are many small ones."""

from collections.abc import Sequence

from torch.optim import Optimizer

from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.see import Seer
from lowtide._runtime.swap.quiet import is_calm

_PLENTY = 0.3  # of the budget that is free: an optimizer's step has room


class Unseen:
    """What is said here holds as long as nothing is dropped, so nothing is: see `Room.blind`.

    Then nothing can be written to that something is to be made from. With a closure an optimizer
    may do anything.
    """

    def __init__(self, ledger: Ledger, room: Room, seer: Seer) -> None:
        self._ledger = ledger
        self._room = room
        self._seer = seer
        self.now = False  # an optimizer is at it, and nobody sees what it writes to

    def may_write(self, args: Sequence[object]) -> bool:
        """Whether no op of its step that only writes needs to be seen: nothing is saved."""
        return (
            self._room.lax
            and is_calm()  # or nobody could say when it is over
            and all(arg is None for arg in args)
            and not any(cell.wanted() for cell in self._room.cells)
        )

    def may_step(self, optimizer: Optimizer, args: Sequence[object]) -> bool:
        """Whether none needs to be seen at all: there is plenty of room."""
        budget = self._room.budget
        if not self._room.lax or budget is None or self._ledger.away:
            return False
        if any(arg is not None for arg in args):
            return False
        trained = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        return self._room.has(max(int(_PLENTY * budget), 2 * trained))

    def begin(self) -> None:
        """It steps."""
        self.now = True
        self._seer.let_write(True)

    def end(self) -> None:
        """After the step, or what has become of it: nobody knows what is as it was."""
        self.forget()
        for cell in self._room.cells:
            if cell.value is not None and cell.wanted():
                cell.value.spoilt = True
        self._ledger.spoil()

    def forget(self) -> None:
        """Ops that write are seen again."""
        self.now = False
        self._seer.let_write(False)
