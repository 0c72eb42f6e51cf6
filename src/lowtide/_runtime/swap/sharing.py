"""Who else refers to a storage: counts of references, compared with those of one nobody shares.

How many references PyTorch itself keeps between a storage and its Python object differs from
version to version, so it is counted once on storages made for that.
"""

import functools
import sys

import torch

from lowtide._runtime.swap.quiet import quiet


def is_shared(storage: torch.UntypedStorage, tensors: int) -> bool:
    """Whether more than `tensors` tensors lie on it, or others know its Python object.

    The caller refers to the object once.
    """
    private_users, private_names = _private(tensors > 0)
    users = torch._C._storage_Use_Count(storage._cdata)
    return users - tensors > private_users or sys.getrefcount(storage) > private_names


def in_shared_memory(storage: torch.UntypedStorage) -> bool:
    """Whether other processes may have it, too. (Of a CUDA storage PyTorch always says so.)"""
    return storage.device.type == "cpu" and storage.is_shared()


@functools.cache
def _private(has_tensors: bool) -> tuple[int, int]:
    """Of a storage with and without a tensor on it: PyTorch itself holds the object then."""
    with quiet():
        tensor: torch.Tensor | None = torch.empty(1, device="cpu")
    assert tensor is not None
    storage = tensor.untyped_storage()
    if not has_tensors:
        tensor = None
    users, names = _as_if_asked(storage)
    return users - has_tensors, names


def _as_if_asked(storage: torch.UntypedStorage) -> tuple[int, int]:
    """From as deep a call as `is_shared`: a caller's parameter is a reference, too."""
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)
