"""Ops of backward that wait for each other, behind the gate and without a fit."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide._runtime.delta.gate import load_gate
from lowtide._runtime.delta.mode import SeeingMode
from lowtide._runtime.fused.chains import Chains
from lowtide._runtime.fused.kernels import Kernels


def fail(said: str) -> None:
    raise AssertionError(said)


@contextmanager
def waiting(device: torch.device) -> Iterator[Chains]:
    gate = load_gate(fail)
    assert gate is not None
    gate.number = 0
    chains = Chains(Kernels(device, verify=True, tell=fail))

    def see(func: Any, _what: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            gate.take_number()
        else:
            chains.answer(func, args, kwargs)
        return func(*args, **kwargs)

    mode = SeeingMode(see)
    mode.learn = gate.learn
    mode.begin()
    try:
        gate.open(mode, frozenset())
        gate.watch(({}, {}))  # nobody knows anything of what is written to
        chains.open()
        yield chains
    finally:
        chains.leave()
        gate.watch(None)
        gate.close()
        mode.leave()


def raw(tensor: torch.Tensor) -> bytes:
    """What lies at its address, not asked of PyTorch."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    address = tensor.data_ptr()
    assert address, "its bytes are not there"
    return ctypes.string_at(address, tensor.nbytes)
