"""What a tensor is to the recorder: plain memory, a wrapper, or made of parts."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is plain memory: not sparse, nested, uninitialised, meta, or a wrapper."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _is_dense(tensor)
    if is_wrapper(kind) or is_lazy(tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False  # torch.func wraps tensors in others that have no storage
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return not tensor._is_zerotensor()


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class are handled by code of their own (DTensor, quantised, …)."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not None and handler is not torch._C._disabled_torch_dispatch_impl


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of `tensor`; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold the bytes of `tensor`: itself, or the parts of a sparse one."""
    if has_storage(tensor):
        return [tensor]
    if is_wrapper(type(tensor)):
        return []
    if tensor.is_nested:
        return [tensor.values()] if tensor.layout is torch.strided else []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether writing every element of `tensor` leaves no old byte of its storage."""
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return whole and 0 not in tensor.stride()


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors in what an op takes or returns."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from tensors_in(item)
    elif isinstance(thing, dict):
        for item in thing.values():
            yield from tensors_in(item)
