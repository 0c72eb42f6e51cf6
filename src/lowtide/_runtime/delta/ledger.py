"""Which storages are there, how many bytes they hold, and which value each of them is."""

import gc
import weakref
from functools import partial
from typing import Any

import torch

from lowtide._runtime.delta.recipe import NOWHERE, Call, Value
from lowtide._trace.tensors import has_storage

GRAIN = 512  # PyTorch hands out multiples of it on a GPU, and of 64 on a CPU


class Ledger:
    """Counts the bytes of all storages on one device, from their first sight to their end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = 0  # ops so far
        self.held = 0
        self.away = 0  # bytes of what lowtide has taken away and plain training would hold
        self.peak = 0
        self.plain_peak = 0
        self.values: dict[int, Value] = {}  # by storage, as long as it is there
        self._leaves: dict[int, weakref.ref[Value]] = {}  # likewise
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._unseen = 0
        self._grain = GRAIN if device.type == "cuda" else 64
        self._self = weakref.ref(self)
        self._index = device.index or 0
        if device.type == "cuda" and device.index is None:
            self._index = torch.cuda.current_device()

    def admit_existing(self) -> None:
        """All storages that Python can reach; on a GPU also what it cannot. From the beginning."""
        self.held = self._unseen = 0
        self._sizes.clear()
        self._refs.clear()
        self.values.clear()
        self.admit_more()

    def admit_more(self) -> None:
        """Those that were made while nobody counted. What is known stays known."""
        self.held -= self._unseen
        self._unseen = 0
        with torch._C.DisableTorchFunctionSubclass():
            for thing in gc.get_objects():
                if issubclass(type(thing), torch.Tensor):
                    self._admit(thing)
        if self.device.type == "cuda":
            self.count_unseen()

    def count_unseen(self) -> None:
        """Bytes of the GPU that no storage here is known to hold."""
        seen = self.held - self._unseen
        taken = torch._C._cuda_memoryStats(self._index)["allocated_bytes"]["all"]["current"]
        self._unseen = max(0, int(taken) - seen)
        self.held = seen + self._unseen

    def _admit(self, tensor: torch.Tensor) -> None:
        try:
            if tensor.device == self.device and has_storage(tensor):
                self.see(tensor.untyped_storage())
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None:
                self._admit(gradient)
        except (RuntimeError, NotImplementedError, ReferenceError):
            return  # a wrapper, or a tensor without memory

    def see(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage, if it was not known yet."""
        if storage._cdata in self._sizes:
            return False
        self._enter(storage, self._rounded(storage.nbytes()))
        self._look()
        return True

    def see_below(self, storage: torch.UntypedStorage) -> None:
        """It lies below the device, also if PyTorch calls both main memory: it takes nothing."""
        if storage.device == self.device:
            self._enter(storage, 0)

    def _enter(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        self._sizes[key] = size
        self._refs[key] = weakref.ref(storage, partial(_forget, self._self, key))
        self.held += size

    def _look(self) -> None:
        held = self.held
        if held > self.peak:
            self.peak = held
        if held + self.away > self.plain_peak:
            self.plain_peak = held + self.away

    def begin_step(self) -> None:
        """Peaks are those of a step."""
        self.peak, self.plain_peak = self.held, self.held + self.away

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Its bytes were given back, or taken again."""
        key = storage._cdata
        size = self._rounded(storage.nbytes())
        before = self._sizes.get(key)
        if before is None:
            self.see(storage)
            return
        self._sizes[key] = size
        self.held += size - before
        self._look()

    def gone_away(self, key: int, count: int) -> None:
        """The storage has no bytes any more: lowtide has taken these away."""
        self.away += count
        if key in self._sizes:
            self.held -= self._sizes[key]
            self._sizes[key] = 0

    def forget(self, key: int) -> None:
        """The storage is gone."""
        self.held -= self._sizes.pop(key, 0)
        self._refs.pop(key, None)
        self.values.pop(key, None)
        self._leaves.pop(key, None)

    def value_of(self, storage: torch.UntypedStorage) -> Value:
        """What the storage is: made by an op that was seen, or else something given."""
        key = storage._cdata
        value = self.values.get(key) or self._leaf(key)
        if value is None:
            self.see(storage)
            value = Value(storage, None)
            self._leaves[key] = weakref.ref(value)
        elif value.cell is not None:
            cell = value.cell()
            if cell is not None:
                cell.last = self.now
        return value

    def made(self, storage: torch.UntypedStorage, call: Call, count: int) -> Value:
        """A call has made it, of so many bytes, and nobody was told then."""
        self.see(storage)
        value = self.known(storage)
        if value is None:
            value = Value(storage, call)
            value.held = None if count else storage
        value.call, value.bytes = call, count
        self._leaves.pop(value.key, None)
        self.values[value.key] = value
        return value

    def known(self, storage: torch.UntypedStorage) -> Value | None:
        """What the storage is, if it was ever used or made."""
        key = storage._cdata
        return self.values.get(key) or self._leaf(key)

    def _leaf(self, key: int) -> Value | None:
        found = self._leaves.get(key)
        value = None if found is None else found()
        return None if value is None or value.storage() is None else value

    def tables(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """By storage, all of which something is known: they are the same as long as it lives."""
        return self.values, self._leaves

    def written(self, storage: torch.UntypedStorage, value: Value | None) -> None:
        """It is no longer what it was, but `value`, or something unknown."""
        key = storage._cdata
        leaf = self._leaf(key)
        self._leaves.pop(key, None)
        for old in (self.values.pop(key, None), leaf):
            if old is None:
                continue
            old.storage = NOWHERE
            old.held = None
            old.spoilt = old.spoilt or old.call is None
            cell = old.saved()
            if cell is not None:
                cell.value = value
                if value is not None:
                    value.cell = old.cell
            old.cell = None
        if value is not None:
            self.values[key] = value

    def is_current(self, value: Value) -> torch.UntypedStorage | None:
        """The value's storage, if it is there and still is that value."""
        storage = value.storage()
        if storage is None or not storage.nbytes():
            return None
        return storage if self.known(storage) is value else None

    def spoil(self) -> None:
        """Nothing that is there is made again."""
        for value in self.values.values():
            value.spoilt = True

    def new_graphs(self) -> None:
        """Recipes lead no further back than here: what is there now counts as given.

        What dropped values are to be made from is still known: nobody may write to it unnoticed.
        """
        kept = {
            key: value
            for key, value in self.values.items()
            if value.dependents or value.held is not None or value.kept is not None
        }
        self.values.clear()
        self.values.update(kept)

    def _rounded(self, count: int) -> int:
        return -(-count // self._grain) * self._grain


def _forget(ledger: "weakref.ref[Ledger]", key: int, _storage: object = None) -> None:
    found = ledger()
    if found is not None:
        found.forget(key)
