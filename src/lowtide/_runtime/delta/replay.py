"""Recipes -> bytes: ops run again, below autograd, on what they were given the first time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.going import ROOMY, Going, Rooms, Told, pin
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.order import ON_DEVICE, Gone, Item, reads, useful
from lowtide._runtime.delta.randomness import from_state
from lowtide._runtime.delta.recipe import Call, Source, Value, filled
from lowtide._runtime.delta.rehearsal import Rehearsal
from lowtide._runtime.delta.room import Room
from lowtide._runtime.fused.groups import Fuser, Group
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.quiet import quiet
from lowtide._trace.tensors import tensors_in


class Replayer:
    """Every op runs with room made for it, and again if there was too little.

    Those that a `fuser` knows how to run as one do, if there is one.
    """

    def __init__(
        self, ledger: Ledger, costs: Costs, room: Room, fuser: Fuser | None = None
    ) -> None:
        self._ledger = ledger
        self._costs = costs
        self._room = room
        self.fuser = fuser
        self.log = Rehearsal(costs)
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
            self.log.refuse("a value is saved in two cells")
            cell.adopt(storage)

    def _adopt(self, value: Value, storage: torch.UntypedStorage) -> None:
        cell = value.saved()
        if cell is not None and cell.state is State.DROPPED:
            cell.adopt(storage)

    def follow(self, items: Sequence[Item], rooms: Rooms = ROOMY) -> None:
        """Run calls and drop cells in this order, but for what is there already.

        What they read and is not there, as who wrote it down thought, is made first. Raises `Gone`.
        """
        found, missing = useful(items, self._is_there)
        if any(value.spoilt for value in missing):
            raise Gone
        with self._room.lock:
            self._replay([*self._needed(missing), *found], None, self._adopt, rooms)

    def replay(self, calls: Sequence[Call], target: Value, made: Told) -> torch.UntypedStorage:
        """Run `calls`; `made` is told of every value on the way. Gives the target's bytes."""
        return self._replay(calls, target, made)[id(target)].untyped_storage()

    def _replay(
        self, items: Sequence[Item], target: Value | None, made: Told, rooms: Rooms = ROOMY
    ) -> dict[int, torch.Tensor]:
        """What was made and is still of use, by the value: that is the target."""
        pinned: dict[int, DeltaCell] = {}
        self.log.take_turn()
        if made != self._adopt:
            self.log.refuse("a value is compared")
        try:
            there = self._hold([item for item in items if isinstance(item, Call)], pinned)
            uses, later = reads(items, target)
            for key in [key for key in pinned if not uses[key]]:
                pinned.pop(key).pinned -= 1  # it is made again first
            going = Going(there, uses, pinned, made, rooms)
            with quiet(), torch.no_grad(), torch.inference_mode(False):
                at = 0
                while at < len(items):
                    item = items[at]
                    if isinstance(item, Call):
                        at += self._run_some(items, at, later, going)
                        continue
                    if item.state is State.HERE and item.can_go() and item.alone():
                        self._room.drop(item)
                    else:
                        self._room.note(item)  # of the steps to come, one may drop it
                    at += 1
            return going.mine
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
                    pin(cell, value, pinned)
                    continue
                storage = value.held if cell is None else None
                storage = storage or self._ledger.is_current(value)
                if storage is not None:
                    there[id(value)] = storage
        return there

    def _given(self, source: Source, going: Going) -> torch.Tensor:
        """What the source shows, on the device and going to stay there."""
        value = source.value
        if source.ignored:
            return torch.zeros(source.size, dtype=source.dtype, device=self._ledger.device)
        made = going.mine.get(id(value))
        if made is not None:
            return made if source.is_like(made) else source.seen_on(made.untyped_storage())
        storage = going.there.get(id(value))
        if storage is None:
            cell = value.saved()
            if cell is None:
                storage = value.held
            else:
                cell.bring()
                storage = cell.storage
        assert storage is not None, "a source of what was dropped is gone"
        return source.seen_on(storage)

    def _run_some(
        self, items: Sequence[Item], at: int, later: Sequence[Mapping[int, int]], going: Going
    ) -> int:
        """The calls from there on that run as one, or only that one: how many."""
        fuser, one = self.fuser, items[at]
        assert isinstance(one, Call)
        room = going.rooms.get(one.number)
        group = None if fuser is None else fuser.group(items, at, later, room)
        if fuser is None or group is None or fuser.kernel(group) is None:
            self._run_call(one, later[at], going)
            return 1
        then = later[at : at + len(group.calls)]
        run = self._run_group if fuser.is_trusted(group) else self._compare_group
        if not run(fuser, group, then, going):
            self._run_calls(group, then, going)
        return len(group.calls)

    def _run_group(
        self, fuser: Fuser, group: Group, then: Sequence[Mapping[int, int]], going: Going
    ) -> bool:
        """False, and nothing has run: not all can be there, or made, at once."""
        kernel = fuser.kernel(group)
        try:
            inputs = [self._given(source, going) for source, _ in group.inputs]
        except OutOfBudget:
            return False
        if kernel is None or not group.can_read(inputs):
            return False

        def work() -> list[torch.Tensor]:
            rows = group.rows(group.count, self._ledger.device)
            kernel(inputs, rows, 0, group.count)
            return rows

        try:
            rows = self._with_room(work, group.bytes + kernel.scratch(group.count))
        except OutOfBudget:
            return False
        if self.log.on:
            self.log.ran_as_one(group, kernel)
        made: dict[int, torch.Tensor] = dict(zip(group.outputs, rows, strict=True))
        for j, call in enumerate(group.calls):
            self._has_run(call, going)
            going.uses.update(then[j])
            if j in made:
                self._keep(made[j], group.made[j], going)
        return True

    def _compare_group(
        self, fuser: Fuser, group: Group, then: Sequence[Mapping[int, int]], going: Going
    ) -> bool:
        """One by one, and then as one for comparison, if there is room and all is still there."""
        values = [source.value for source, _ in group.inputs]
        kept = {id(one): going.mine[id(one)] for one in values if id(one) in going.mine}
        need = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        if not self._room.has(need + fuser.comparing(group)):
            return False
        self._run_calls(group, then, going)
        read = [self._still_there(value, kept, going) for value in values]
        made = [self._still_there(group.made[j], going.mine, going) for j in group.outputs]
        storages = [storage for storage in (*read, *made) if storage is not None]
        if len(storages) < len(read) + len(made):
            return True  # another time
        inputs = [
            source.seen_on(storage)
            for (source, _), storage in zip(group.inputs, storages, strict=False)
        ]
        rows = [
            torch.empty(0, dtype=group.parts[j].dtype, device=storage.device).set_(storage)
            for j, storage in zip(group.outputs, storages[len(inputs) :], strict=True)
        ]
        if group.can_read(inputs):
            with suppress(OutOfBudget):  # another time
                self._with_room(lambda: fuser.compare(group, inputs, rows), fuser.comparing(group))
        return True

    def _still_there(
        self, value: Value | None, kept: Mapping[int, torch.Tensor], going: Going
    ) -> torch.UntypedStorage | None:
        """Its bytes, if they are on the device, all of them, and not on their way."""
        if value is None:
            return None
        cell = value.saved()
        tensor = kept.get(id(value))
        if cell is not None:
            storage = cell.storage if cell.state is State.HERE else None
        elif tensor is not None:
            storage = tensor.untyped_storage()
        else:
            storage = going.there.get(id(value), value.held)
        return storage if storage is not None and storage.nbytes() == value.bytes else None

    def _run_calls(self, group: Group, then: Sequence[Mapping[int, int]], going: Going) -> None:
        for call, reads_then in zip(group.calls, then, strict=True):
            self._run_call(call, reads_then, going)

    def _run_call(self, call: Call, then: Mapping[int, int], going: Going) -> None:
        """`then`: how often what it makes is read from here on."""
        given = [self._given(source, going) for source in call.sources]
        for at, _ in call.writes:  # it is not to write where others read
            value = call.sources[at].value
            if going.uses[id(value)] > 1 or id(value) not in going.mine:
                self.log.refuse(f"{call.func} writes to a copy")
                copy = self._room.run(given[at].untyped_storage().clone, value.bytes)
                self._ledger.see(copy)
                given[at] = call.sources[at].seen_on(copy)
        result = self._again(call, given)
        self._has_run(call, going)
        results = (result,) if type(result) is torch.Tensor else tuple(tensors_in(result))
        found = [(results[at], known()) for at, known in call.makes]
        found += [(given[at], known()) for at, known in call.writes]
        going.uses.update(then)  # they are none by now
        if self.log.on:
            self.log.ran(
                call, *([(at, known()) for at, known in of] for of in (call.makes, call.writes))
            )
        for tensor, remade in found:
            self._keep(tensor, remade, going)

    def _has_run(self, call: Call, going: Going) -> None:
        """What it has read is read once less."""
        self.calls += 1
        self.seconds += self._costs.seconds(call.cost)
        for source in call.sources:
            if not source.ignored:
                key = id(source.value)
                going.uses[key] -= 1
                if not going.uses[key]:
                    going.mine.pop(key, None)
                    cell = going.pinned.pop(key, None)
                    if cell is not None:
                        cell.pinned -= 1
                        source.value.let_go()  # perhaps it was only there to be read

    def _keep(self, tensor: torch.Tensor, remade: Value | None, going: Going) -> None:
        """What a call has made, if somebody is going to use it."""
        storage = tensor.untyped_storage()
        self._ledger.see(storage)
        if remade is None:
            return
        going.made(remade, storage)
        if going.uses[id(remade)]:
            going.mine[id(remade)] = tensor
            cell = remade.saved()
            if cell is not None and cell.storage is storage:
                pin(cell, remade, going.pinned)

    def _again(self, call: Call, tensors: list[torch.Tensor]) -> Any:
        """The call itself, with the random numbers that it had."""
        given = iter(tensors)
        args = filled(call.args, given)
        kwargs = filled(call.kwargs, given) if call.kwargs else call.kwargs
        state = call.random

        def work() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return call.func._op(*args, **kwargs)

        if state is None:
            return self._with_room(work, call=call)

        def work_from_state() -> Any:
            assert state is not None
            with from_state(call.device, state):
                return work()

        return self._made_room(work_from_state, 0, call)

    def _with_room(self, work: Callable[[], Any], need: int = 0, call: Call | None = None) -> Any:
        """Run what takes `need` bytes, or as much as the call does; a plan may have made room."""
        room = self._room
        if room.lax:
            failures = room.failures()
            try:
                result = work()
                room.made_do(failures)
                return result
            except RuntimeError as error:
                if not room.was_short(error, failures):
                    raise
        return self._made_room(work, need, call)

    def _made_room(self, work: Callable[[], Any], need: int, call: Call | None) -> Any:
        costs = self._costs
        if call is None:
            return self._room.run(work, need)
        wish = costs.inside(call.cost)
        first = wish > 0 and costs.chooses(call.cost)
        return self._room.run(work, costs.known_bytes(call.cost), wish=wish, first=first)
