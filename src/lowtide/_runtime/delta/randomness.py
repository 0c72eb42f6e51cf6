"""The state of random generators: kept, put back, and put in place of the one there is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
