"""Optimizer state, idle from one step of the optimizer to the next."""

import torch
from torch.optim import Optimizer

from lowtide._runtime.swap.cell import Cell, State
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.sharing import is_shared
from lowtide._runtime.swap.tier import Tier


class StateCell(Cell):
    """A tensor that an optimizer keeps.

    Unlike a saved tensor it can be looked at any time. So while it is away it shows its bytes where
    they are, below the device; the same tensor object, which the optimizer goes on referring to.
    """

    __slots__ = ("_tensor", "owner", "piece")

    def __init__(self, tensor: torch.Tensor, tier: Tier, owner: int, piece: int) -> None:
        super().__init__(tensor.untyped_storage(), tier)
        self.owner = owner  # the number of the optimizer
        self.piece = piece  # ... and of the part of its step that needs it
        self.handles = 1
        self._tensor = tensor

    def shown(self) -> bool:
        """Whether the tensor still is what this cell knows: the program may have replaced it."""
        return self.state is State.AWAY or (
            self._tensor.untyped_storage()._cdata == self.key
            and self._tensor.untyped_storage().nbytes() == self.bytes
        )

    def release(self) -> bool:
        """Its bytes are free; the tensor shows the copy."""
        was = self.state
        if was is not State.LEAVING or not self._arrived():
            return self.state is State.AWAY
        assert self._place is not None
        with quiet():
            self._tensor.data = self._like(self._tier.view(self._place).untyped_storage())
            self.storage.resize_(0)
        self.state = State.AWAY
        return True

    def have(self) -> None:
        """On the device and whole, for what computes next."""
        away = self.state in (State.AWAY, State.COMING)
        super().have()
        self.asked = False  # after the optimizer's step it may leave again
        if away:
            with quiet():
                self._tensor.data = self._like(self.storage)

    def drop(self) -> None:
        """The tensor is on the device again, and no longer ours."""
        self.have()
        super().drop()

    def _like(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor's shape over other bytes."""
        t = self._tensor
        like = torch.empty(0, dtype=t.dtype, device=storage.device)
        return like.set_(storage, 0, t.size(), t.stride())


def state_tensors(optimizer: Optimizer, smallest: int) -> list[tuple[object, torch.Tensor]]:
    """What an optimizer keeps for each parameter and is worth moving.

    Whole storages that nobody else looks at.
    """
    return [
        (parameter, thing)
        for parameter, state in optimizer.state.items()
        if isinstance(state, dict)
        for thing in state.values()
        if isinstance(thing, torch.Tensor) and _movable(thing, smallest)
    ]


def _movable(tensor: torch.Tensor, smallest: int) -> bool:
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.requires_grad
        or tensor._base is not None
    ):
        return False
    storage = tensor.untyped_storage()
    return (
        storage.nbytes() >= smallest
        and tensor.storage_offset() == 0
        and storage.resizable()
        and not is_shared(storage, 1)
    )
