"""What Python can reach: the storages on a device, and captured graphs."""

import gc

import torch


def device_storages(device: int) -> list[torch.UntypedStorage]:
    """Each once. Tensors that only C++ holds (saved for a backward) are not among them."""
    found: dict[int, torch.UntypedStorage] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            try:
                gradient = thing.grad if thing.is_leaf else None
                for tensor in (thing, gradient):
                    if tensor is not None and _lies_on(tensor, device):
                        storage = tensor.untyped_storage()
                        found[storage._cdata] = storage
            except (RuntimeError, NotImplementedError, ValueError):
                continue  # a wrapper without a storage of its own, or a tensor without memory
    return list(found.values())


def _lies_on(tensor: torch.Tensor, device: int) -> bool:
    return (
        tensor.is_cuda
        and tensor.device.index == device
        and tensor.layout is torch.strided
        and tensor.untyped_storage().device.type == "cuda"
    )


def graphs_exist() -> bool:
    """Whether there is a CUDA graph, captured or about to be."""
    return any(issubclass(type(thing), torch.cuda.CUDAGraph) for thing in gc.get_objects())
