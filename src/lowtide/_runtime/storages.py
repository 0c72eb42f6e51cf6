"""What Python can reach: the storages on a device, and captured graphs."""

import gc
from collections.abc import Iterator

import torch


def device_storages(device: int) -> list[torch.UntypedStorage]:
    """Each once. Tensors that only C++ holds (saved for a backward) are not among them."""
    found: dict[int, torch.UntypedStorage] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors():
            try:
                if tensor.device.type != "cuda" or tensor.device.index != device:
                    continue
                if tensor.layout is not torch.strided:
                    continue
                storage = tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue  # a wrapper without a storage of its own, or a tensor without memory
            if storage.device.type == "cuda":
                found[storage._cdata] = storage
    return list(found.values())


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def graphs_exist() -> bool:
    """Whether there is a CUDA graph, captured or about to be."""
    return any(issubclass(type(thing), torch.cuda.CUDAGraph) for thing in gc.get_objects())
