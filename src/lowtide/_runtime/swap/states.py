"""Optimizer state, idle from one step of the optimizer to the next."""

import weakref
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.optim import Optimizer

from lowtide._runtime.swap.cell import Cell, State
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.sharing import in_shared_memory, is_shared
from lowtide._runtime.swap.tier import Tier
from lowtide._trace.tensors import version_of


def hook_state(
    optimizer: Optimizer,
    need: Callable[[Optimizer], None],
    reloaded: Callable[[], None],
    undo: ExitStack,
) -> None:
    """Told before somebody asks for its state as a whole, and when it was replaced."""
    for handle in (
        optimizer.register_state_dict_pre_hook(need),
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: need(optimizer)),
        optimizer.register_load_state_dict_post_hook(lambda _: reloaded()),
    ):
        undo.callback(handle.remove)


NOTHING = torch.UntypedStorage(0, device="cpu")


class StateCell(Cell):
    """A tensor that an optimizer keeps.

    Unlike a saved tensor it can be looked at, and written, any time. So while it is away it shows
    its bytes where they are, below the device; the same tensor object, which the optimizer goes on
    referring to. What is written there is what comes back. Who still looks at those bytes when it
    has come back keeps them from being used for anything else.
    """

    __slots__ = ("_device", "_shown", "_tensor", "_version", "_whole", "owner", "piece")

    def __init__(self, tensor: torch.Tensor, tier: Tier, owner: int, piece: int) -> None:
        super().__init__(tensor.untyped_storage(), tier)
        self.owner = owner  # the number of the optimizer
        self.piece = piece  # ... and of the part of its step that needs it
        self.handles = 2  # the tensor and the one that shows it whole
        self._device = self.storage.device
        with quiet(), torch.inference_mode(False):
            self._whole: torch.Tensor | None = like(tensor, self.storage)
        self._tensor = weakref.ref(tensor)  # the optimizer may replace it
        self._version = 0
        self._shown: list[torch.UntypedStorage] = []  # the bytes below, as somebody may see them

    def tensor(self) -> torch.Tensor | None:
        """The optimizer's, unless that has replaced it."""
        return self._tensor()

    def home(self) -> torch.device:
        """Where it is when the optimizer needs it."""
        return self._device

    def is_orphan(self) -> bool:
        """Whether the optimizer has replaced the tensor."""
        return self.tensor() is None

    def leave(self, at: int | None = None) -> bool:
        """Start to copy it out, if it still is what the optimizer has."""
        tensor = self.tensor()
        if tensor is None or tensor.untyped_storage()._cdata != self.key:
            return False
        self._version = version_of(tensor)
        return super().leave(at)

    def release(self) -> bool:
        """Its bytes are free; the tensor shows the copy."""
        tensor = self.tensor()
        if self.state is not State.LEAVING or self._tier.stream() != self._stream:
            return self.state is State.AWAY
        if not self._arrived() or tensor is None or version_of(tensor) != self._version:
            self.state = State.HERE
            self._give()
            return False
        assert self._place is not None
        with quiet():
            self._shown.append(self._tier.view(self._place))
            self._moving(tensor, self._shown[-1])
            whole, self._whole = self._whole, None
            if whole is None:
                tensor.data = like(tensor, self._shown[-1])
            else:
                tensor.data = whole.set_(self._shown[-1], 0, tensor.size(), tensor.stride())
            self._let_go()
        self.state = State.AWAY
        return True

    def _let_go(self) -> None:
        self._whole = None
        self.storage = NOTHING

    def _take_again(self) -> None:
        # A new storage: the old one would ask the allocator of the time when it was made.
        # Not by `UntypedStorage`: on a CPU that asks no allocator that was put in front.
        taken = torch.empty(self.bytes, dtype=torch.uint8, device=self._device)
        self.storage = taken.untyped_storage()
        self.key = self.storage._cdata

    def send_back(self) -> None:
        """It came too early: it is still shown where its copy below is, and that is still good."""
        assert self.state is State.COMING
        self._wait()
        self._let_go()
        self.state = State.AWAY

    def have(self) -> None:
        """On the device and whole, for what computes next."""
        if self.state in (State.AWAY, State.COMING):
            tensor = self.tensor()
            self.fetch()
            self._wait()
            self.state = State.HERE
            if tensor is not None:
                self._show(tensor)
            self._give()
        else:
            super().have()
        self.asked = False  # after the optimizer's step it may leave again

    def _show(self, tensor: torch.Tensor) -> None:
        with quiet(), torch.inference_mode(False), torch.no_grad():
            shown = tensor.detach()
            self._whole = like(tensor, self.storage)
            if version_of(tensor) != self._version:
                self._whole.copy_(shown)  # somebody wrote to it while it was away
            self._moving(tensor, self.storage)
            tensor.data = self._whole

    def _moving(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """The tensor is about to lie on `storage`."""

    def _give(self) -> None:
        while self._shown:
            shown = self._shown.pop()
            if is_shared(shown, 0):
                self._shown.append(shown)
                return
        super()._give()

    def drop(self) -> None:
        """The tensor is on the device again, and no longer ours; nothing is, if it is gone."""
        if self.state is not State.GONE and not self.is_orphan():
            self.have()
        self._whole = None
        super().drop()


def like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor's shape over other bytes."""
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, 0, tensor.size(), tensor.stride())


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
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return False
    storage = tensor.untyped_storage()
    return (
        storage.nbytes() >= smallest
        and tensor.storage_offset() == 0
        and storage.resizable()
        and not is_shared(storage, 1)
        and not in_shared_memory(storage)
    )
