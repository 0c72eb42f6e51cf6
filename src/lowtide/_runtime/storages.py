"""What Python can reach: the storages on a device, and captured graphs."""

import gc
from bisect import bisect_right
from collections.abc import Callable

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


def movable_storages(device: int, is_paged: Callable[[int], bool]) -> list[torch.UntypedStorage]:
    """Those with bytes of the current stream, in pages or in segments of no private pool."""
    stream = torch.cuda.current_stream(device).cuda_stream
    ranges = sorted(
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
        and segment["stream"] == stream
        and tuple(segment["segment_pool_id"]) == (0, 0)
    )
    starts = [start for start, _ in ranges]

    def among_them(storage: torch.UntypedStorage) -> bool:
        address = storage.data_ptr()
        at = bisect_right(starts, address) - 1
        return (at >= 0 and address < ranges[at][1]) or is_paged(address)

    return [s for s in device_storages(device) if s.nbytes() > 0 and among_them(s)]


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
