"""Recipes -> bytes: ops run again, below autograd, on what they were given the first time."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.order import ON_DEVICE, Gone, Item, reads, useful
from lowtide._runtime.delta.recipe import Call, Given, Source, Value
from lowtide._runtime.delta.room import Room
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.quiet import quiet
from lowtide._trace.tensors import tensors_in


class Replayer:
    """Every op runs with room made for it, and again if there was too little."""

    def __init__(self, ledger: Ledger, costs: Costs, room: Room) -> None:
        self._ledger = ledger
        self._costs = costs
        self._room = room
        self.calls = 0  # made again so far
        self.seconds = 0.0  # what they are known to take

    def _needed(self, values: Sequence[Value]) -> list[Call]:
        """What has to be run now to have them, in order. Raises `Gone`."""
        order: list[Call] = []
        seen: set[int] = set()
        for value in values:
            if value.call is None:
                raise Gone
            if id(value.call) not in seen:
                seen.add(id(value.call))
                self._add_needed(value.call, seen, order)
        return order

    def _add_needed(self, wanted: Call, seen: set[int], order: list[Call]) -> None:
        stack = [(wanted, 0)]
        while stack:
            call, at = stack.pop()
            if at == len(call.sources):
                order.append(call)
                continue
            stack.append((call, at + 1))
            source = call.sources[at]
            if source.ignored or self._is_there(source.value):
                continue
            made_by = source.value.call
            if made_by is None:
                raise Gone
            if id(made_by) not in seen:
                seen.add(id(made_by))
                stack.append((made_by, 0))

    def _is_there(self, value: Value) -> bool:
        cell = value.saved()
        if cell is not None:
            return cell.state in ON_DEVICE
        return value.held is not None or self._ledger.is_current(value) is not None

    def cost(self, value: Value, most: float) -> float:
        """Seconds to have `value` again as things are now, or a figure above `most`."""
        assert value.call is not None
        total = 0.0
        seen = {id(value.call)}
        stack = [value.call]
        while stack:
            call = stack.pop()
            total += self._costs.seconds(call.cost)
            if total > most:
                return total
            for source in call.sources:
                if source.ignored or self._is_there(source.value):
                    continue
                made_by = source.value.call
                if made_by is None:
                    return float("inf")
                if id(made_by) not in seen:
                    seen.add(id(made_by))
                    stack.append(made_by)
        return total

    def remake(self, cell: DeltaCell) -> None:
        """Run what is needed for it; dropped values that come by are kept as well."""
        value = cell.value
        assert value is not None
        storage = self.replay(self._needed([value]), value, self._adopt)
        if cell.state is State.DROPPED:  # the value was saved a second time, in another cell
            cell.adopt(storage)

    def _adopt(self, value: Value, storage: torch.UntypedStorage) -> None:
        cell = value.saved()
        if cell is not None and cell.state is State.DROPPED:
            cell.adopt(storage)

    def follow(self, items: Sequence[Item]) -> None:
        """Run calls and drop cells in this order, but for what is there already.

        What they read and is not there, as who wrote it down thought, is made first. Raises `Gone`.
        """
        found, missing = useful(items, self._is_there)
        if any(value.spoilt for value in missing):
            raise Gone
        with self._room.lock:
            self._replay([*self._needed(missing), *found], None, self._adopt)

    def replay(
        self,
        calls: Sequence[Call],
        target: Value,
        made: Callable[[Value, torch.UntypedStorage], None],
    ) -> torch.UntypedStorage:
        """Run `calls`; `made` is told of every value on the way. Gives the target's bytes."""
        return self._replay(calls, target, made)[id(target)].untyped_storage()

    def _replay(
        self,
        items: Sequence[Item],
        target: Value | None,
        made: Callable[[Value, torch.UntypedStorage], None],
    ) -> dict[int, torch.Tensor]:
        """What was made and is still of use, by the value: that is the target."""
        mine: dict[int, torch.Tensor] = {}
        pinned: dict[int, DeltaCell] = {}  # by the value that is still going to be read
        try:
            there = self._hold([item for item in items if isinstance(item, Call)], pinned)
            uses, later = reads(items, target)
            for key in [key for key in pinned if not uses[key]]:
                pinned.pop(key).pinned -= 1  # it is made again first
            with quiet(), torch.no_grad(), torch.inference_mode(False):
                for item, then in zip(items, later, strict=True):
                    if isinstance(item, Call):
                        self._run_call(item, there, uses, then, mine, pinned, made)
                    elif item.state is State.HERE and item.can_go() and item.alone():
                        self._room.drop(item)
                    else:
                        self._room.note(item)  # of the steps to come, one may drop it
            return mine
        finally:
            for cell in pinned.values():
                cell.pinned -= 1
                if cell.value is not None:
                    cell.value.let_go()

    def _hold(
        self, calls: Sequence[Call], pinned: dict[int, DeltaCell]
    ) -> dict[int, torch.UntypedStorage]:
        """What `calls` read and is there now stays as it is until they have read it.

        That may be something one of them makes again, for the sake of another result.
        """
        there: dict[int, torch.UntypedStorage] = {}
        for call in calls:
            for source in call.sources:
                value = source.value
                if source.ignored:
                    continue
                cell = value.saved()
                if cell is not None and cell.state in ON_DEVICE:
                    _pin(cell, value, pinned)
                    continue
                storage = value.held if cell is None else None
                storage = storage or self._ledger.is_current(value)
                if storage is not None:
                    there[id(value)] = storage
        return there

    def _given(
        self, source: Source, mine: dict[int, torch.Tensor], there: dict[int, torch.UntypedStorage]
    ) -> torch.Tensor:
        """What the source shows, on the device and going to stay there."""
        value = source.value
        if source.ignored:
            return torch.zeros(source.size, dtype=source.dtype, device=self._ledger.device)
        made = mine.get(id(value))
        if made is not None:
            return made if source.is_like(made) else source.seen_on(made.untyped_storage())
        storage = there.get(id(value))
        if storage is None:
            cell = value.saved()
            if cell is None:
                storage = value.held
            else:
                cell.bring()
                storage = cell.storage
        assert storage is not None, "a source of what was dropped is gone"
        return source.seen_on(storage)

    def _run_call(
        self,
        call: Call,
        there: dict[int, torch.UntypedStorage],
        uses: "Counter[int]",
        then: Mapping[int, int],
        mine: dict[int, torch.Tensor],
        pinned: dict[int, DeltaCell],
        made: Callable[[Value, torch.UntypedStorage], None],
    ) -> None:
        """`uses`: how often each value is still read before it is made again; `then`, from here."""
        given = [self._given(source, mine, there) for source in call.sources]
        for at, _ in call.writes:  # it is not to write where others read
            value = call.sources[at].value
            if uses[id(value)] > 1 or id(value) not in mine:
                copy = self._room.run(given[at].untyped_storage().clone, value.bytes)
                self._ledger.see(copy)
                given[at] = call.sources[at].seen_on(copy)
        result = self._again(call, given)
        self.calls += 1
        self.seconds += self._costs.seconds(call.cost)
        for source in call.sources:
            if not source.ignored:
                key = id(source.value)
                uses[key] -= 1
                if not uses[key]:
                    mine.pop(key, None)
                    cell = pinned.pop(key, None)
                    if cell is not None:
                        cell.pinned -= 1
                        source.value.let_go()  # perhaps it was only there to be read
        results = (result,) if type(result) is torch.Tensor else tuple(tensors_in(result))
        found = [(results[at], known()) for at, known in call.makes]
        found += [(given[at], known()) for at, known in call.writes]
        uses.update(then)  # they are none by now
        for tensor, remade in found:
            self._keep(tensor, remade, uses, mine, pinned, made)

    def _keep(
        self,
        tensor: torch.Tensor,
        remade: Value | None,
        uses: "Counter[int]",
        mine: dict[int, torch.Tensor],
        pinned: dict[int, DeltaCell],
        made: Callable[[Value, torch.UntypedStorage], None],
    ) -> None:
        """What a call has made, if somebody is going to use it."""
        storage = tensor.untyped_storage()
        self._ledger.see(storage)
        if remade is None:
            return
        made(remade, storage)
        if uses[id(remade)]:
            mine[id(remade)] = tensor
            cell = remade.saved()
            if cell is not None and cell.storage is storage:
                _pin(cell, remade, pinned)

    def _again(self, call: Call, tensors: list[torch.Tensor]) -> Any:
        """The call itself, with the random numbers that it had."""
        given = iter(tensors)
        args = _filled(call.args, given)
        kwargs = _filled(call.kwargs, given) if call.kwargs else call.kwargs
        room, state = self._room, call.random

        def work() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return call.func._op(*args, **kwargs)

        if room.lax and state is None:  # a plan has made room
            failures = room.failures()
            try:
                result = work()
                room.made_do(failures)
                return result
            except RuntimeError as error:
                if not room.was_short(error, failures):
                    raise

        def work_from_state() -> Any:
            assert state is not None
            with from_state(call.device, state):
                return work()

        need = self._costs.known_bytes(call.cost)
        wish = self._costs.inside(call.cost)
        first = wish > 0 and self._costs.chooses(call.cost)
        return room.run(work if state is None else work_from_state, need, wish=wish, first=first)


def generator_of(device: torch.device) -> torch.Generator:
    """The one that ops on `device` use."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def from_state(device: torch.device, state: torch.Tensor) -> Iterator[None]:
    """Random numbers are those that follow `state`; afterwards they go on as before.

    On a GPU by another generator's state in place of the default one's: to set that would make
    cuDNN's RNNs draw a new seed for their dropout.
    """
    generator = generator_of(device)
    if device.type != "cuda":
        before = generator.get_state()
        generator.set_state(state)
        try:
            yield
        finally:
            generator.set_state(before)
        return
    shared = generator.graphsafe_get_state()
    try:
        rewind(device, state)
        yield
    finally:
        generator.graphsafe_set_state(shared)


def rewind(device: torch.device, state: torch.Tensor) -> None:
    """Random numbers are those that follow `state` from now on."""
    generator = generator_of(device)
    if device.type != "cuda":
        generator.set_state(state)
        return
    other = torch.Generator(device=device)
    other.set_state(state)
    generator.graphsafe_set_state(other)


def _pin(cell: DeltaCell, value: Value, pinned: dict[int, DeltaCell]) -> None:
    if id(value) not in pinned:
        pinned[id(value)] = cell
        cell.pinned += 1


def _filled(thing: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The captured argument, with the next tensors where some were given."""
    kind = type(thing)
    if kind is Given:
        return next(tensors)
    if kind is list:
        return [_filled(item, tensors) if type(item) in _FILLED else item for item in thing]
    if kind is tuple:
        return tuple([_filled(item, tensors) for item in thing])
    if kind is dict:
        return {name: _filled(item, tensors) for name, item in thing.items()}
    return thing


_FILLED = {Given, list, tuple, dict}
