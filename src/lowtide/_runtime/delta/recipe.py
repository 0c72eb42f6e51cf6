"""Values and how each was made: what recomputing needs to know of an op that has run."""

import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._runtime.swap.cell import State

LONGEST = 48  # ops of one recipe

_nothing: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}  # tensors without a byte


Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # and the offset


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class Source:
    """A tensor that an op was given: some value, seen in some way."""

    value: "Value"
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    ignored: bool = False  # running statistics: written, and of no influence on the result

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, which shows the value, shows it in this way."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
        )

    def look(self) -> Look:
        """How the value is seen."""
        return self.dtype, self.size, self.stride, self.offset

    def seen_on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor again, over bytes that lie elsewhere."""
        assert storage.nbytes() >= self.value.bytes, "`set_` would make up what is missing"
        return seen_on(self.look(), storage)


def seen_on(look: Look, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor that looks like that, over these bytes."""
    dtype, size, stride, offset = look
    like = _nothing.get((dtype, storage.device))
    if like is None:
        like = torch.empty(0, dtype=dtype, device=storage.device)
        _nothing[dtype, storage.device] = like
    # To make one anew takes several times as long.
    return like.detach().set_(storage, offset, size, stride)


class Given:
    """Among the arguments of a call, in place of a tensor: the next of its sources."""


GIVEN = Given()


def filled(thing: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The captured argument, with the next tensors where some were given."""
    kind = type(thing)
    if kind is Given:
        return next(tensors)
    if kind is list:
        return [filled(item, tensors) if type(item) in _FILLED else item for item in thing]
    if kind is tuple:
        return tuple([filled(item, tensors) for item in thing])
    if kind is dict:
        return {name: filled(item, tensors) for name, item in thing.items()}
    return thing


_FILLED = {Given, list, tuple, dict}


@dataclass(slots=True, eq=False)
class Call:
    """An op that has run, so that it can be run again."""

    func: OpOverload[..., Any]
    args: list[Any]  # with GIVEN for each tensor
    kwargs: dict[str, Any]
    sources: list[Source]
    key: int  # the same for calls that do the same to tensors of the same shape, and only for those
    cost: Hashable  # under which its time and bytes are remembered
    random: torch.Tensor | None  # the generator's state before it
    device: torch.device
    makes: "list[tuple[int, weakref.ref[Value]]]"  # its results, by their place among them
    writes: "list[tuple[int, weakref.ref[Value]]]"  # what it wrote to, by the source's place
    number: int = -1  # among the ops of its step


class Value:
    """One version of one storage."""

    __slots__ = (
        "__weakref__",
        "bytes",
        "call",
        "cell",
        "dependents",
        "held",
        "kept",
        "key",
        "promised",
        "spoilt",
        "storage",
    )

    def __init__(self, storage: torch.UntypedStorage, call: Call | None) -> None:
        self.bytes: int = storage.nbytes()
        self.key: int = storage._cdata  # of the storage that it was made in
        self.call = call
        self.storage: weakref.ref[torch.UntypedStorage] = weakref.ref(storage)
        # For those that were dropped, if need be. What has no bytes costs nothing to hold.
        self.held: torch.UntypedStorage | None = None if self.bytes else storage
        self.promised = False  # a plan says how long it is held
        self.kept: Any | None = None  # its cell, when only those that were dropped need it
        self.cell: weakref.ref[Any] | None = None  # if it was saved for backward
        self.dependents: set[Any] = set()  # dropped cells of which it is a source
        self.spoilt = False  # written to since, or found not to be what its recipe makes

    @classmethod
    def lost(cls, count: int, call: Call | None) -> "Value":
        """One whose bytes are no more: without a call it can never be had again."""
        value = cls(_GONE, call)
        value.bytes, value.storage, value.held = count, NOWHERE, None
        value.spoilt = call is None
        return value

    def let_go(self) -> None:
        """Hold its bytes no longer, if that was for others who do not need them any more."""
        if not self.dependents:
            if not self.promised and self.bytes:
                self.held = None
            if self.kept is not None:
                self.kept.drop()

    def is_given(self) -> bool:
        """Whether no op that was seen made it, and it is still there."""
        return self.call is None and not self.spoilt and self.storage() is not None

    def saved(self) -> Any | None:
        """Its cell, as long as somebody wants it."""
        cell = None if self.cell is None else self.cell()
        return None if cell is None or cell.state is State.GONE else cell


_GONE = torch.UntypedStorage(0)
_gone = torch.UntypedStorage(0)
NOWHERE = weakref.ref(_gone)
del _gone
NOBODY = Value.lost(0, None)  # in place of running statistics, which nobody asks what they were


@dataclass(frozen=True, slots=True)
class Recipe:
    """What has to be run to have a value again, in order, and what for that must be there."""

    calls: tuple[Call, ...]
    sources: tuple[Value, ...]
    key: Hashable


def find_recipe(value: Value) -> Recipe | None:
    """Back from `value` over what was not saved, to values that are held or saved."""
    if value.call is None or value.spoilt:
        return None
    calls: dict[int, Call] = {}
    sources: dict[int, Value] = {}
    shape: list[Hashable] = []
    order: list[Call] = []
    stack: list[tuple[Call, int]] = [(value.call, 0)]
    calls[id(value.call)] = value.call
    while stack:
        call, at = stack.pop()
        if at == len(call.sources):
            order.append(call)
            shape.append(call.key)
            continue
        stack.append((call, at + 1))
        source = call.sources[at]
        if source.ignored:
            continue
        found = source.value
        ref = found.cell
        cell = None if ref is None else ref()
        if id(found) in sources:
            shape.append(("again", [*sources].index(id(found))))
        elif (
            found.held is not None
            or (cell is not None and cell.state is not State.GONE)  # it is saved
            or found.is_given()
        ):
            sources[id(found)] = found
            shape.append(source.size)
        elif found.call is None or found.spoilt:
            return None
        elif id(found.call) not in calls:
            if len(calls) == LONGEST:
                return None
            calls[id(found.call)] = found.call
            stack.append((found.call, 0))
    return Recipe(tuple(order), tuple(sources.values()), tuple(shape))
