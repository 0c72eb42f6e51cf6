"""Whether somebody else refers to a storage."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide._runtime.swap.sharing import _private, is_shared


class Holder:
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def is_shared(self, tensors: int) -> bool:
        """Not within an `assert`: pytest gives what it looks at further names."""
        return is_shared(self.storage, tensors)


def test_tensors_and_names_are_told_apart() -> None:
    tensor = torch.ones(8)
    holder = Holder(tensor.untyped_storage())
    assert not holder.is_shared(1)
    assert holder.is_shared(0)
    other = tensor[2:]
    assert holder.is_shared(1)
    assert not holder.is_shared(2)
    del other
    name = holder.storage
    assert holder.is_shared(1)
    del name
    assert not holder.is_shared(1)


def test_a_second_name_shows_where_no_tensor_is_left() -> None:
    """PyTorch holds a storage's object only as long as a tensor lies on it."""
    holder = Holder(torch.ones(8).untyped_storage())
    assert not holder.is_shared(0)
    name = holder.storage
    assert holder.is_shared(0)
    del name
    assert not holder.is_shared(0)


class Counting(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = func(*args, **(kwargs or {}))
        return result


def test_nobody_sees_how_it_is_found_out() -> None:
    holder = Holder(torch.ones(8).untyped_storage())
    _private.cache_clear()
    with Counting() as counting:  # type: ignore[no-untyped-call]
        holder.is_shared(0)
        holder.is_shared(1)
    assert counting.seen == 0
