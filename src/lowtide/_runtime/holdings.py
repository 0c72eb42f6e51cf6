"""What a model and its optimizers hold: parameters, gradients, state, and on which device."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer


def parameters(model: nn.Module | None) -> Iterable[torch.Tensor]:
    """Of a model, if there is one."""
    return () if model is None else model.parameters()


def trained(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """What it trains."""
    for group in optimizer.param_groups:
        yield from group["params"]


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device that holds most of them."""
    held: dict[torch.device, int] = {}
    for tensor in tensors:
        held[tensor.device] = held.get(tensor.device, 0) + tensor.nbytes
    return max(held, key=lambda device: held[device], default=None)


def persistent(
    model: nn.Module | None, optimizers: Sequence[Optimizer], device: torch.device
) -> Iterator[torch.Tensor]:
    """Weights, gradients and optimizer state."""
    seen: set[int] = set()
    for parameter in itertools.chain(parameters(model), *map(trained, optimizers)):
        if id(parameter) in seen or parameter.device != device:
            continue
        seen.add(id(parameter))
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (t for t in state.values() if isinstance(t, torch.Tensor))


def device_in_use() -> torch.device | None:
    """None: there is a GPU, and nobody has used it yet."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    # Not `is_available`, which begins to use it.
    return None if torch.cuda.device_count() else torch.device("cpu")
