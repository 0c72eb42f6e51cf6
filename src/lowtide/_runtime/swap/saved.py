"""Tensors saved for backward, in the hands of lowtide: hooks on every pack and unpack."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Protocol

import torch
from torch.autograd.graph import Node

from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.file_tier import is_worker
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.tier import Tier
from lowtide._trace.saves import (
    Hooks,
    InstalledHooks,
    SaveEntry,
    check_version,
    install_hooks,
)
from lowtide._trace.tensors import has_storage


class Watcher(Protocol):
    """Who decides, told of every save in order."""

    def packed(self, handle: "Handle") -> None:
        """A tensor was saved."""

    def unpacking(self, handle: "Handle") -> None:
        """Backward asks for it."""

    def unpacked(self, handle: "Handle", tensor: torch.Tensor) -> None:
        """Backward gets it, as `tensor`."""


class Unwatched:
    """Nobody decides yet."""

    def packed(self, handle: "Handle") -> None:
        """Nothing."""

    def unpacking(self, handle: "Handle") -> None:
        """Nothing."""

    def unpacked(self, handle: "Handle", tensor: torch.Tensor) -> None:
        """Nothing."""


class Handle:
    """What PyTorch keeps in place of a saved tensor."""

    __slots__ = (
        "_saved",
        "bytes",
        "cell",
        "entry",
        "number",
        "origin",
        "original",
        "tensor",
        "version",
    )

    def __init__(
        self, saved: "Saved", tensor: torch.Tensor, version: int, origin: tuple[int, str] | None
    ) -> None:
        self._saved = saved
        self.tensor = tensor
        self.version = version
        self.origin = origin
        self.original: weakref.ref[torch.Tensor] | None = None
        self.cell: Cell | None = None
        self.entry: SaveEntry | None = None
        self.number = -1
        self.bytes = 0

    def __del__(self) -> None:
        if self.cell is not None:
            self._saved.let_go(self.cell)


class Saved:
    """One cell for each storage that is worth moving, however many tensors save it.

    Handles die anywhere: in a garbage collection that strikes in the middle of a call, or in
    a thread that copies. So a dead one is only noted; who enters or leaves does what it asks for.
    """

    def __init__(
        self,
        tier: Callable[[torch.device], Tier | None],
        watcher: Watcher,
        smallest: int,
        make_cell: Callable[[torch.UntypedStorage, Tier], Cell] = Cell,
    ) -> None:
        self._tier = tier
        self._watcher = watcher
        self._smallest = smallest
        self._make_cell = make_cell
        self._tiers: dict[torch.device, Tier] = {}  # those that `tier` has told of
        self._hooks: InstalledHooks | None = None
        self._cells: dict[int, Cell] = {}  # by the storage they hold
        self._lock = threading.RLock()  # backward may run in several threads
        self._depth = 0  # of calls that are inside, of the thread that has the lock
        self._gone: deque[Cell] = deque()  # once for each handle that died
        self.own_seconds = 0.0  # that saving and asking took in Python
        # Told of who made what is saved; None: nobody did, as far as is known.
        self.found: Callable[[Node | None], None] | None = None

    def watch(
        self,
        watcher: Watcher,
        smallest: int,
        make_cell: Callable[[torch.UntypedStorage, Tier], Cell],
    ) -> None:
        """From now on he decides."""
        self._watcher, self._smallest, self._make_cell = watcher, smallest, make_cell

    def install(self, undo: ExitStack) -> bool:
        """Hook until `undo`. False: the program has hooks of its own, which stay in charge."""
        self._hooks = install_hooks((self.pack, self.unpack), undo)
        return self._hooks is not None

    def exchange(self, hooks: Hooks) -> bool:
        """From now on these are called, and call these here where they must. False: not now."""
        return self._hooks is not None and self._hooks.exchange(hooks)

    def rest(self) -> bool:
        """Be told of nothing until `resume`. False: not now."""
        return self._hooks is not None and self._hooks.rest()

    def resume(self) -> bool:
        """Be told again. False: not yet."""
        return self._hooks is not None and self._hooks.resume()

    def __enter__(self) -> None:
        """Nobody else touches a cell until `__exit__`. On every save: hence no generator."""
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1 and self._gone:
            self._bury()

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1 and self._gone:
                self._bury()
        finally:
            self._depth -= 1
            self._lock.release()

    def pack(self, tensor: torch.Tensor) -> Handle:
        """A tensor is saved: as it is, on a cell if it is worth moving.

        Some hundreds of times in every forward, and the GPU waits for it: hence few calls.
        """
        began = perf_counter()
        # A leaf is handed back itself, as PyTorch does: a function may look at what hangs on it.
        alias = tensor
        node = tensor.grad_fn
        if self.found is not None:
            self.found(node)
        if node is not None or not (tensor.requires_grad or tensor.__dict__):
            with quiet(tensor):
                alias = tensor.detach()
        origin = None if node is None else (tensor.output_nr, node.name())
        version = 0 if alias.is_inference() else alias._version
        handle = Handle(self, alias, version, origin)
        if node is None and alias is not tensor:
            handle.original = weakref.ref(tensor)
        dense = has_storage(alias)
        if dense:
            handle.bytes = alias.nbytes
        with self._lock:
            self._depth += 1
            try:
                if self._gone and self._depth == 1:
                    self._bury()
                if dense and alias is not tensor:
                    storage = alias.untyped_storage()
                    cell = self._cells.get(storage._cdata)
                    if cell is None:
                        cell = self._cell(tensor, storage)
                    if cell is not None:
                        cell.handles += 1
                        handle.cell = cell
                self._watcher.packed(handle)
                if self._gone and self._depth == 1:
                    self._bury()
            finally:
                self._depth -= 1
                self.own_seconds += perf_counter() - began
        return handle

    def adopt(
        self,
        tensor: torch.Tensor,
        version: int,
        origin: tuple[int, str] | None,
        original: "weakref.ref[torch.Tensor] | None",
        number: int,
        itself: int,
    ) -> Handle:
        """One that somebody else has kept since it was saved, and told of.

        `itself`: it is the very tensor that was saved, and stays.
        """
        handle = Handle(self, tensor, version, origin)
        handle.original, handle.number, handle.bytes = original, number, tensor.nbytes
        with self:
            if not itself:
                storage = tensor.untyped_storage()
                cell = self._cells.get(storage._cdata) or self._cell(tensor, storage)
                if cell is not None:
                    cell.handles += 1
                    handle.cell = cell
        return handle

    def _cell(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Cell | None:
        """For a storage that has none yet. None: it stays."""
        base = tensor._base
        if (
            storage.nbytes() < self._smallest
            or (base is not None and base.is_leaf and base.requires_grad)  # a weight
            or not storage.resizable()
        ):
            return None
        device = storage.device
        if device.type == "cpu" and storage.is_shared():  # by other processes
            return None
        cell = self.make(storage)
        if cell is not None:
            self._cells[storage._cdata] = cell
        return cell

    def make(self, storage: torch.UntypedStorage) -> Cell | None:
        """A cell, whoever it is for. None: there is no tier below its device."""
        tier = self._tiers.get(storage.device)
        if tier is None:
            tier = self._tier(storage.device)
            if tier is None:
                return None
            self._tiers[storage.device] = tier
        return self._make_cell(storage, tier)

    def cell_on(self, storage: torch.UntypedStorage) -> Cell | None:
        """The one that is there for it."""
        return self._cells.get(storage._cdata)

    def forgo_unused(self, cell: Cell) -> None:
        """One that was taken, and has no handle after all."""
        if not cell.handles and self._cells.get(cell.first_key) is cell:
            del self._cells[cell.first_key]
            cell.drop()

    def take(self, cell: Cell) -> None:
        """Tensors on it that are saved, or adopted, are its handles."""
        self._cells[cell.first_key] = cell

    def unpack(self, handle: Handle) -> torch.Tensor:
        """Backward gets what was saved, or the error that PyTorch would have raised."""
        began = perf_counter()
        check_version(handle.tensor, handle.version, handle.origin)
        with self:
            self._watcher.unpacking(handle)
            tensor = self._unpacked(handle)
            self._watcher.unpacked(handle, tensor)
            self.own_seconds += perf_counter() - began
            return tensor

    def _unpacked(self, handle: Handle) -> torch.Tensor:
        original = None if handle.original is None else handle.original()
        if handle.cell is None:
            return handle.tensor if original is None else original
        handle.cell.have()
        return handle.cell.shown(handle.tensor) if original is None else original

    def show(self, handle: Handle) -> torch.Tensor:
        """What was saved; he who decides knows already that it is asked for."""
        check_version(handle.tensor, handle.version, handle.origin)
        with self:
            return self._unpacked(handle)

    def let_go(self, cell: Cell) -> None:
        """A handle is gone."""
        self._gone.append(cell)
        if not is_worker() and self._lock.acquire(blocking=False):
            try:
                if not self._depth:
                    self._depth = 1
                    try:
                        self._bury()
                    finally:
                        self._depth = 0
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._gone:
            cell = self._gone.popleft()
            cell.handles -= 1
            if not cell.handles:
                self._cells.pop(cell.first_key, None)
                cell.drop()

    def cells(self) -> list[Cell]:
        """All there are."""
        return list(self._cells.values())


def unpack(handle: Handle | torch.Tensor) -> torch.Tensor:
    """By whoever has kept it."""
    return handle if isinstance(handle, torch.Tensor) else handle._saved.unpack(handle)


def show(handle: Handle) -> torch.Tensor:
    """Likewise, if it is known that it is asked for."""
    return handle._saved.show(handle)
