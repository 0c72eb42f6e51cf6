"""The book of live storages: which value each one holds now, and when it died.

Rules, which the rest of the recorder relies on:

1. Nothing here keeps a tensor or a storage alive: PyTorch decides by reference counts whether a
   gradient is stolen, copied or added to in place, and one more reference would change that.
   Deaths come from weak references on storages.
2. `started` counts the ops that have begun. A storage that dies has been alive for ops below it.
3. Every recorded write may raise a tensor's version counter by one. A counter that has risen
   further was raised by a write nobody saw, and the content becomes a value with no producer.
4. A storage whose size changed has been allocated anew and is another storage.
"""

import gc
import weakref
from collections import Counter
from dataclasses import dataclass

import torch

from lowtide._trace.tensors import has_storage, version_of


@dataclass(slots=True)
class Entry:
    """One value while the recording goes on."""

    storage: int
    version: int
    bytes: int
    first: int
    device: str
    before: bool
    end: int | None = None
    unexplained: bool = False  # no op was seen making it, and it was not there before
    made_by_autograd: bool = False  # unexplained, yet the result of a differentiable function
    away: bool = False  # its bytes were elsewhere when the recording began
    pointer: int = 0


@dataclass(slots=True)
class _Live:
    value: int
    expected_version: int
    watch: weakref.ref[torch.UntypedStorage]


class Book:
    """Storages by identity, values by number."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.started = 0
        self._live: dict[int, _Live] = {}
        self._storages = 0
        self._others: Counter[int] = Counter()  # by value: storages it lies in besides

    def admit_existing(self) -> None:
        """Enter every tensor Python can reach; the step may never touch some, yet they are held."""
        things = gc.get_objects()
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Tensor)}
        for thing in things:
            if type(thing) in kinds and has_storage(thing):
                self._enter(thing, before=True)
                gradient = thing.grad if thing.is_leaf else None
                if gradient is not None and has_storage(gradient):
                    self._enter(gradient, before=True)  # Python may never have looked at it

    def current(self, tensor: torch.Tensor) -> int:
        """The value that `tensor` shows, for reading."""
        storage = tensor.untyped_storage()
        live = self._live.get(storage._cdata)
        if live is None:
            return self._enter(tensor, before=False)
        entry = self.entries[live.value]
        if entry.unexplained and _is_made_by_autograd(tensor):
            entry.made_by_autograd = True
        version = version_of(tensor)
        if storage.nbytes() != entry.bytes:  # Rule 4
            self._end(live.value)
            del self._live[storage._cdata]
            return self._enter(tensor, before=False)
        if version > live.expected_version:  # Rule 3
            self._next_version(live)
            live.expected_version = version
        return live.value

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` has been seen."""
        return tensor.untyped_storage()._cdata in self._live

    def write(self, tensor: torch.Tensor, op: int) -> int:
        """A new value on the storage of `tensor`, made by `op`."""
        storage = tensor.untyped_storage()
        live = self._live[storage._cdata]
        if storage.nbytes() != self.entries[live.value].bytes:  # the op resized it: Rule 4
            self._end(live.value, op)
            del self._live[storage._cdata]
            return self._enter(tensor, before=False, first=op)
        self._next_version(live, op)
        live.expected_version = max(live.expected_version, version_of(tensor)) + 1
        return live.value

    def make(self, tensor: torch.Tensor, op: int) -> int:
        """The value on a storage that `op` allocated."""
        return self._enter(tensor, before=False, first=op)

    def alias(self, known: torch.Tensor, other: torch.Tensor) -> None:
        """What lies in the storage of `other` is, from now on, the value that `known` shows."""
        live = self._live.get(known.untyped_storage()._cdata) if has_storage(known) else None
        if live is not None and has_storage(other):
            self._also(other.untyped_storage(), live.value, version_of(other))

    def move(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """The value that `tensor` shows lies in `storage` now, and so will the tensor."""
        live = self._live.get(tensor.untyped_storage()._cdata)
        if live is not None:
            self._also(storage, live.value, live.expected_version)

    def _also(self, storage: torch.UntypedStorage, value: int, version: int) -> None:
        key = storage._cdata
        if key not in self._live:
            watch = weakref.ref(storage, lambda _: self._die(key))
            self._live[key] = _Live(value, version, watch)
            self._others[value] += 1

    def belongs(
        self, tensor: torch.Tensor, size: int, device: torch.device, *, shown: bool, away: bool
    ) -> None:
        """What `tensor` shows, from before the recording, is at home on `device`, in `size` bytes.

        If it is only `shown` where it is now, it was moved there; if it is `away`, it takes nothing
        at home. Others that lie there, too, may count versions of their own: `tensor` is the one
        that is written to.
        """
        entry = self.entries[self.shown(tensor)]
        self._live[tensor.untyped_storage()._cdata].expected_version = version_of(tensor)
        if shown:
            entry.bytes, entry.device, entry.away = size, str(device), away

    def shown(self, tensor: torch.Tensor) -> int:
        """The value that `tensor` shows, entering it if need be.

        Unlike `current` it takes no version for news: an op may raise it before it returns.
        """
        live = self._live.get(tensor.untyped_storage()._cdata)
        return self._enter(tensor, before=False) if live is None else live.value

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The number of the storage of `tensor`, entering it if need be."""
        return self.entries[self.shown(tensor)].storage

    def close(self) -> None:
        """Stop watching; what is alive stays without an end."""
        self._live.clear()

    def _enter(self, tensor: torch.Tensor, *, before: bool, first: int | None = None) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return self._live[key].value
        number = len(self.entries)
        unexplained = first is None and not before
        self.entries.append(
            Entry(
                storage=self._storages,
                version=0,
                bytes=storage.nbytes(),
                first=self.started if first is None else first,
                device=str(storage.device),
                before=before,
                unexplained=unexplained,
                made_by_autograd=unexplained and _is_made_by_autograd(tensor),
                pointer=storage.data_ptr() if storage.nbytes() else 0,
            )
        )
        self._storages += 1
        watch = weakref.ref(storage, lambda _: self._die(key))
        self._live[key] = _Live(number, version_of(tensor), watch)
        return number

    def _next_version(self, live: _Live, first: int | None = None) -> None:
        old = self.entries[live.value]
        self._end(live.value, first)
        live.value = len(self.entries)
        self.entries.append(
            Entry(
                storage=old.storage,
                version=old.version + 1,
                bytes=old.bytes,
                first=self.started if first is None else first,
                device=old.device,
                before=False,
                pointer=old.pointer,
            )
        )

    def _end(self, value: int, at: int | None = None) -> None:
        self.entries[value].end = self.started if at is None else at

    def _die(self, key: int) -> None:
        live = self._live.pop(key, None)
        if live is None:
            return
        if self._others[live.value]:
            self._others[live.value] -= 1  # it lives on, elsewhere
        else:
            self._end(live.value)  # Rule 2


def _is_made_by_autograd(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf and tensor._base is None
