"""Tensors saved for backward, in the hands of lowtide: hooks on every pack and unpack."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch

from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.tier import Tier
from lowtide._trace.saves import SaveEntry, check_version, install_hooks, origin_of
from lowtide._trace.tensors import has_storage, version_of


class Watcher(Protocol):
    """Who decides, told of every save in order."""

    def packed(self, handle: "Handle") -> None:
        """A tensor was saved."""

    def unpacking(self, handle: "Handle") -> None:
        """Backward asks for it."""


class Handle:
    """What PyTorch keeps in place of a saved tensor."""

    __slots__ = ("_saved", "cell", "entry", "number", "origin", "tensor", "version")

    def __init__(
        self, saved: "Saved", tensor: torch.Tensor, origin: tuple[int, str] | None
    ) -> None:
        self._saved = saved
        self.tensor = tensor
        self.version = version_of(tensor)
        self.origin = origin
        self.cell: Cell | None = None
        self.entry: SaveEntry | None = None
        self.number = -1

    def __del__(self) -> None:
        if self.cell is not None:
            self._saved.let_go(self.cell)


class Saved:
    """One cell for each storage that is worth moving, however many tensors save it."""

    def __init__(
        self, tier: Callable[[torch.device], Tier | None], watcher: Watcher, smallest: int
    ) -> None:
        self._tier = tier
        self._watcher = watcher
        self._smallest = smallest
        self._cells: dict[int, Cell] = {}  # by the storage they hold
        self._lock = threading.RLock()  # backward may run in several threads

    def install(self, undo: ExitStack) -> bool:
        """Hook until `undo`. False: the program has hooks of its own, which stay in charge."""
        return install_hooks(self.pack, self.unpack, undo)

    def pack(self, tensor: torch.Tensor) -> Handle:
        """A tensor is saved: as it is, on a cell if it is worth moving."""
        # A leaf is handed back itself, as PyTorch does: a function may look at what hangs on it.
        grows = tensor.grad_fn is not None
        alias = tensor
        if grows or (not tensor.requires_grad and not tensor.__dict__):
            with quiet():
                alias = tensor.detach()
        handle = Handle(self, alias, origin_of(tensor))
        with self._lock:
            if alias is not tensor and has_storage(alias):
                handle.cell = self._cell(tensor, alias)
            self._watcher.packed(handle)
        return handle

    def _cell(self, tensor: torch.Tensor, alias: torch.Tensor) -> Cell | None:
        storage = alias.untyped_storage()
        cell = self._cells.get(storage._cdata)
        if cell is None:
            base = tensor._base
            if (
                storage.nbytes() < self._smallest
                or (base is not None and base.is_leaf and base.requires_grad)  # a weight
                or not storage.resizable()
            ):
                return None
            tier = self._tier(storage.device)
            if tier is None:
                return None
            cell = self._cells[storage._cdata] = Cell(storage, tier)
        elif cell.bytes != storage.nbytes() and cell.here():
            cell.bytes = storage.nbytes()  # the program resized it
        cell.handles += 1
        return cell

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Backward gets what was saved, or the error that PyTorch would have raised."""
        with self._lock:
            self._watcher.unpacking(handle)
            if handle.cell is not None:
                handle.cell.have()
        check_version(handle.tensor, handle.version, handle.origin)
        return handle.tensor

    def let_go(self, cell: Cell) -> None:
        """A handle is gone."""
        with self._lock:
            cell.handles -= 1
            if not cell.handles:
                self._cells.pop(cell.key, None)
                cell.drop()

    def cells(self) -> list[Cell]:
        """All there are."""
        with self._lock:
            return list(self._cells.values())
