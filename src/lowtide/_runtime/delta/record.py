"""An op that is about to run -> the call that recomputing would repeat."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Call, Source
from lowtide._runtime.delta.replay import generator_of
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


@dataclass(frozen=True, slots=True)
class Known:
    """What holds for every call of an op."""

    facts: OpFacts
    view: bool  # it makes no bytes and writes none
    repeatable: bool
    retriable: bool  # it can be run again after it failed


_known: dict[int, Known] = {}  # overloads live as long as the program


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
    return Known(
        facts=facts,
        view=view,
        repeatable=aten and packet not in _NOT_REPEATABLE,
        retriable=not facts.written or facts.overwrites,
    )


def shape_key(
    func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Hashable:
    """Alike for calls that make as much and take as long."""
    key: list[Hashable] = [id(func)]
    for thing in args:
        _add_shape(key, thing)
    for thing in kwargs.values():
        _add_shape(key, thing)
    return tuple(key)


def _add_shape(key: list[Hashable], thing: Any) -> None:
    if isinstance(thing, torch.Tensor):
        key.append(thing.size())
        key.append(thing.dtype)
    elif isinstance(thing, list | tuple):
        for item in thing:
            _add_shape(key, item)
    elif isinstance(thing, Hashable):
        key.append(thing)


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
        key: Hashable,
    ) -> Call | None:
        """The call, or None if it could not be repeated."""
        if not what.repeatable:
            return None
        ignored: set[int] = set()
        if what.facts.statistics:
            ignored = {id(t) for t in statistics_tensors(what.facts, args, kwargs)}
        sources: list[Source] = []
        exact: list[Hashable] = [id(func)]
        try:
            given = tuple(self._kept(arg, sources, exact, ignored) for arg in args)
            named = {name: self._kept(arg, sources, exact, ignored) for name, arg in kwargs.items()}
        except _CannotRepeat:
            return None
        device = self._ledger.device
        random = None
        if what.facts.may_be_random:
            random = generator_of(device).get_state()
            if random.device == device:  # 5 kB each, of main memory
                self._ledger.see(random.untyped_storage())
        return Call(func, given, named, sources, hash(tuple(exact)), key, random, device, [], [])

    def _kept(
        self,
        thing: Any,
        sources: list[Source],
        key: list[Hashable],
        ignored: set[int],
    ) -> Any:
        if isinstance(thing, torch.Tensor):
            return self._source(thing, sources, key, ignored)
        if isinstance(thing, list | tuple):
            items = [self._kept(item, sources, key, ignored) for item in thing]
            return items if isinstance(thing, list) else tuple(items)
        if isinstance(thing, torch.Generator) or not isinstance(thing, Hashable):
            raise _CannotRepeat
        key.append(thing)
        return thing

    def _source(
        self,
        tensor: torch.Tensor,
        sources: list[Source],
        key: list[Hashable],
        ignored: set[int],
    ) -> Source:
        if (
            not has_storage(tensor)
            or tensor.device != self._ledger.device
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            raise _CannotRepeat
        source = Source(
            self._ledger.value_of(tensor.untyped_storage()),
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            id(tensor) in ignored,
        )
        sources.append(source)
        key.append((source.dtype, source.size, source.stride))
        return source


def written_by(what: Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that this call writes to, said or unsaid."""
    if not what.facts.written and not what.facts.statistics:
        return []
    return written_tensors(what.facts, args, kwargs) + statistics_tensors(what.facts, args, kwargs)
