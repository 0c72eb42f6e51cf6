"""An op that is about to run -> the call that recomputing would repeat."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.randomness import generator_of
from lowtide._runtime.delta.recipe import GIVEN, NOBODY, Call, Source
from lowtide._trace.schema import OpFacts, op_facts, statistics_tensors, written_tensors
from lowtide._trace.tensors import has_storage

# Their results depend on the order in which threads come, or on what memory held before.
_NOT_REPEATABLE = {
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten._efficientzerotensor",
    "aten._cudnn_rnn",  # changes the state of its dropout, which its schema does not tell
    "aten.miopen_rnn",
    "aten.index_add",
    "aten.index_add_",
    "aten.index_put",
    "aten.index_put_",
    "aten.scatter_add",
    "aten.scatter_add_",
    "aten.scatter_reduce",
    "aten.scatter_reduce_",
    "aten.put",
    "aten.put_",
    "aten.histc",
    "aten.bincount",
    "aten._embedding_bag",
    "aten.resize_",
    "aten.set_",
}


# What besides tensors decides how much a call makes.
_ATOMS = {
    int,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}


@dataclass(frozen=True, slots=True)
class Known:
    """What holds for every call of an op."""

    facts: OpFacts
    view: bool  # it makes no bytes and writes none
    repeatable: bool
    makes: bool  # ... bytes, besides those it writes to
    writes: bool
    retriable: bool  # it can be run again after it failed
    plain: bool  # PyTorch's own; it reads what it is given and makes something new of it, no more
    draws: bool  # the same, but of random numbers, too
    only_writes: bool  # PyTorch's own; it changes what it is given, and draws no random numbers
    only_moves_statistics: bool  # plain, but for that


_known: dict[int, Known] = {}  # overloads live as long as the program
_keys: dict[Hashable, int] = {}  # of calls, by all that decides what they do
_MOST_KEYS = 100_000
_unused = count()


def known(func: OpOverload[..., Any]) -> Known:
    """Worked out once."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = _find_out(func)
    return found


def _find_out(func: OpOverload[..., Any]) -> Known:
    facts = op_facts(func)
    returns = func._schema.returns
    view = bool(returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    )
    packet = facts.name.rsplit(".", 1)[0]
    aten = func.namespace == "aten"
    makes = any(result.alias_info is None for result in returns)
    writes = bool(facts.written or facts.statistics)
    return Known(
        facts=facts,
        view=view,
        repeatable=aten and packet not in _NOT_REPEATABLE,
        makes=makes,
        writes=writes,
        retriable=not facts.written or facts.overwrites,
        plain=aten and makes and not writes and not facts.may_be_random,
        draws=aten and makes and not writes and facts.may_be_random,
        only_writes=aten
        and bool(facts.written)
        and not (facts.overwrites or facts.statistics or facts.may_be_random),
        only_moves_statistics=aten
        and makes
        and bool(facts.statistics)
        and not (facts.written or facts.may_be_random),
    )


def shape_key(
    func: OpOverload[..., Any], what: Known, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Hashable:
    """Alike for calls that make as much and take as long."""
    key: list[Hashable] = [id(func)]
    _add_shapes(key, args, what.facts.factory)
    if kwargs:
        _add_shapes(key, kwargs.values(), what.facts.factory)
    return tuple(key)


def _add_shapes(key: list[Hashable], things: Iterable[Any], floats: bool) -> None:
    for thing in things:
        kind = type(thing)
        if kind is torch.Tensor or kind is torch.nn.Parameter or isinstance(thing, torch.Tensor):
            key.append(thing.shape)
            key.append(thing.dtype)
        elif isinstance(thing, list | tuple):
            key.append(len(thing))
            _add_shapes(key, thing, floats)
        elif kind in _ATOMS or (floats and kind is float):
            key.append(thing)  # other floats change from step to step


def _key_of(exact: Hashable) -> int:
    """A number that no other has: a hash would not do, that of -1 and -2 is the same."""
    found = _keys.get(exact)
    if found is None:
        if len(_keys) >= _MOST_KEYS:
            _keys.clear()
        found = _keys[exact] = next(_unused)
    return found


class _CannotRepeat(Exception):
    pass


class Captor:
    """Writes down what an op is given."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def capture(
        self,
        func: OpOverload[..., Any],
        what: Known,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Call | None:
        """The call, or None if it could not be repeated."""
        if not what.repeatable:
            return None
        reading = _Reading(self._ledger)
        if what.facts.statistics:
            reading.ignored = {id(t) for t in statistics_tensors(what.facts, args, kwargs)}
        try:
            given = [reading.kept(arg) for arg in args]
            named = {name: reading.kept(arg) for name, arg in kwargs.items()} if kwargs else {}
        except _CannotRepeat:
            return None
        device = self._ledger.device
        random = None
        if what.facts.may_be_random:
            random = generator_of(device).get_state()
            if random.device == device:  # 5 kB each, of main memory
                self._ledger.see(random.untyped_storage())
        cost = (id(func), *reading.shapes)
        exact = _key_of((cost, *map(float.hex, reading.floats)))
        return Call(func, given, named, reading.sources, exact, cost, random, device, [], [])


class _Reading:
    """The arguments of one call, gone through once. On every op: hence plain loops."""

    __slots__ = ("_device", "_ledger", "floats", "ignored", "shapes", "sources")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._device = ledger.device
        self.sources: list[Source] = []
        self.shapes: list[Hashable] = []  # and whatever else decides how much is made
        self.floats: list[float] = []
        self.ignored: set[int] | tuple[()] = ()

    def kept(self, thing: Any) -> Any:
        """As it is written down."""
        kind = type(thing)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self._add_source(thing)
            return GIVEN
        if kind in _ATOMS:
            self.shapes.append(thing)
            return thing
        if kind is float:
            self.floats.append(thing)
            self.shapes.append(float)  # where, not how much
            return thing
        if isinstance(thing, list | tuple):
            self.shapes.append(len(thing))
            items = [self.kept(item) for item in thing]
            return items if isinstance(thing, list) else tuple(items)
        if isinstance(thing, torch.Tensor):
            self._add_source(thing)
            return GIVEN
        raise _CannotRepeat  # a generator, a symbolic number

    def _add_source(self, tensor: torch.Tensor) -> None:
        if (
            tensor.device != self._device
            or not has_storage(tensor)
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            raise _CannotRepeat
        ignored = bool(self.ignored) and id(tensor) in self.ignored
        value = NOBODY if ignored else self._ledger.value_of(tensor.untyped_storage())
        dtype, size, stride = tensor.dtype, tensor.shape, tensor.stride()
        source = Source(value, dtype, size, stride, int(tensor.storage_offset()), ignored)
        self.sources.append(source)
        self.shapes += (dtype, size, stride)


def written_by(what: Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that this call writes to, said or unsaid."""
    return written_tensors(what.facts, args, kwargs) + statistics_tensors(what.facts, args, kwargs)
