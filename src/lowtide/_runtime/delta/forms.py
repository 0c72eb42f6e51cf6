"""Ops that look as they did in the step before: written down without being looked at again."""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import NOBODY, Call, Look, Source, Value
from lowtide._runtime.delta.results import is_worth

_MOST = 8  # forms of ops with one number: steps of several kinds may take turns


@dataclass(frozen=True, slots=True)
class _Form:
    """A call, but for what it was given."""

    func: OpOverload[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    key: int
    cost: Hashable
    device: torch.device
    looks: list[tuple[Look, bool]]  # and whether the bytes are ignored


class Forms:
    """By the ids that the gate has given them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._forms: dict[int, _Form] = {}
        self._kept: dict[int, list[int]] = {}  # by the number of an op in its step

    def keep(self, form: int, call: Call) -> None:
        """An op that looks like that is known from now on, by that id."""
        if form in self._forms:
            return
        kept = self._kept.setdefault(call.number, [])
        kept.append(form)
        if len(kept) > _MOST:  # nor does the gate know more
            self._forms.pop(kept.pop(0), None)
        looks = [(source.look(), source.ignored) for source in call.sources]
        self._forms[form] = _Form(
            call.func, call.args, call.kwargs, call.key, call.cost, call.device, looks
        )

    def call(
        self,
        id_: int,
        number: int,
        read: Sequence[torch.UntypedStorage],
        random: torch.Tensor | None,
    ) -> Call | None:
        """It has run again, on these storages. None: another thread is about to keep its form."""
        if id_ not in self._forms:
            return None
        known, value_of = self._ledger.values, self._ledger.value_of
        looks = self._forms[id_].looks
        values = [
            NOBODY if ignored else known.get(storage._cdata) or value_of(storage)
            for storage, (_, ignored) in zip(read, looks, strict=True)
        ]
        if random is not None and random.device == self._ledger.device:
            self._ledger.see(random.untyped_storage())
        return self.call_on(id_, number, values, random)

    def call_on(
        self, id_: int, number: int, values: Sequence[Value], random: torch.Tensor | None
    ) -> Call:
        """The same, where it is known what values they are."""
        form = self._forms[id_]
        return Call(
            form.func,
            form.args,
            form.kwargs,
            [
                Source(v, *look, ignored)
                for v, (look, ignored) in zip(values, form.looks, strict=True)
            ],
            form.key,
            form.cost,
            random,
            form.device,
            [],
            [],
            number,
        )

    def put_down(
        self, call: Call, made: Sequence[torch.UntypedStorage], places: Sequence[int]
    ) -> None:
        """What it has made, but for storages that were there before."""
        ledger = self._ledger
        if not is_worth(call, made):
            return
        for storage, place in zip(made, places, strict=True):
            if ledger.see(storage):
                value = Value(storage, call)
                ledger.values[value.key] = value
                call.makes.append((place, weakref.ref(value)))
