"""What ops have made and written to, put down: how much, and which call did it."""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Call, Value
from lowtide._trace.tensors import has_storage, tensors_in

_WORTH_A_STATE = 16  # times the bytes of the generator's state: smaller results are not remade


class Results:
    """Told of every op that has run."""

    def __init__(self, ledger: Ledger, costs: Costs) -> None:
        self._ledger = ledger
        self._costs = costs

    def put_down(
        self,
        result: Any,
        written: Sequence[torch.Tensor],
        key: Hashable | None,
        call: Call | None,
        taken: int | None,
    ) -> int:
        """Count the bytes that were made, and write down how."""
        made = 0
        ledger = self._ledger
        if call is not None and not is_worth(call, [*tensors_in(result)]):
            call = None
        tensors = (result,) if type(result) is torch.Tensor else tensors_in(result)
        for place, tensor in enumerate(tensors):
            if tensor.device != ledger.device or not has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            if not ledger.see(storage):
                continue
            made += storage.nbytes()
            if call is not None:
                value = Value(storage, call)
                ledger.values[storage._cdata] = value
                call.makes.append((place, weakref.ref(value)))
        if written:
            self.put_down_writes(written, call)
        if key is not None:
            self._costs.saw_bytes(key, made, taken)
        return made

    def put_down_writes(self, written: Sequence[torch.Tensor], call: Call | None) -> None:
        """These are not what they were."""
        storages = [tensor.untyped_storage() for tensor in written]
        keys = [storage._cdata for storage in storages]
        for storage, key in zip(storages, keys, strict=True):
            place = _place_of(call, key) if call is not None else None
            if call is None or place is None or keys.count(key) > 1:
                self._ledger.written(storage, None)
                continue
            value = Value(storage, call)
            self._ledger.written(storage, value)
            call.writes.append((place, weakref.ref(value)))


def is_worth(call: Call, made: Sequence[torch.Tensor] | Sequence[torch.UntypedStorage]) -> bool:
    """Whether what it has made is worth its random state: on a CPU that is 5 kB, which stay."""
    if call.random is None:
        return True
    most = max((_bytes(one) for one in made), default=0)
    return most >= _WORTH_A_STATE * call.random.nbytes


def _bytes(one: torch.Tensor | torch.UntypedStorage) -> int:
    return one.nbytes if isinstance(one, torch.Tensor) else one.nbytes()


def _place_of(call: Call, key: int) -> int | None:
    """Which source of the call lies in the storage that it wrote to."""
    for place, source in enumerate(call.sources):
        if source.value.key == key:
            return None if source.ignored else place
    return None
