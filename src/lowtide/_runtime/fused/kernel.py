"""A program -> what runs it: a kernel on a GPU, portions that stay in the cache on a CPU."""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from lowtide._runtime.fused.program import Made, Operand, Program, Read, Step
from lowtide._runtime.fused.source import EACH, NAME, THREADS, source
from lowtide._runtime.swap.cuda_driver import launch

ALIGNED = 16  # bytes
_PORTION = 1 << 15  # elements for each thread of a CPU: PyTorch gives one no fewer
_BY_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "div": torch.div,
    "mul": torch.mul,
    "neg": torch.neg,
    "pow": torch.pow,
    "relu": torch.relu,
    "rsqrt": torch.rsqrt,
    "rsub": torch.rsub,
    "sigmoid": torch.sigmoid,
    "sigmoid_backward": torch.ops.aten.sigmoid_backward.default,
    "silu": torch.nn.functional.silu,
    "silu_backward": torch.ops.aten.silu_backward.default,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "tanh_backward": torch.ops.aten.tanh_backward.default,
    "threshold_backward": torch.ops.aten.threshold_backward.default,
}


Tensors = Sequence[torch.Tensor]


class Kernel(Protocol):
    """What runs a program on a part of its elements."""

    function: int  # of the driver's, that takes what it reads and makes; 0: there is none

    def scratch(self, count: int) -> int:
        """Bytes that it takes for so many, besides its outputs."""

    def __call__(self, inputs: Tensors, outputs: Tensors, first: int, count: int) -> None:
        """Of `count` elements from `first` on; outputs are rows that begin there."""


def make_kernel(program: Program, device: torch.device) -> Kernel | None:
    """None: there is none for such a program, or nothing to make it with."""
    if device.type == "cuda":
        return _CudaKernel(program, device)
    if device.type == "cpu" and all(not given.dims for given in program.inputs):
        return _Portions(program)
    return None


@functools.lru_cache(maxsize=512)  # a fit after another needs the same
def _compiled(text: str, _device: int) -> Any:
    """For the current device, which is that."""
    return torch.cuda._compile_kernel(text, NAME)


class _CudaKernel:
    def __init__(self, program: Program, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._made = _compiled(source(program), torch.cuda.current_device())  # with its module
        self.function: int = self._made.func.value
        self._device = device

    def scratch(self, count: int) -> int:  # noqa: ARG002
        return 0

    def __call__(self, inputs: Tensors, outputs: Tensors, first: int, count: int) -> None:
        pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
        blocks = -(-count // (THREADS * EACH))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        here = self._device.index is None or self._device.index == torch.cuda.current_device()
        with nullcontext() if here else torch.cuda.device(self._device):
            launch(self.function, blocks, THREADS, (*pointers, first, count), stream)


class _Portions:
    """What is made on the way is never larger than a portion."""

    function = 0

    def __init__(self, program: Program) -> None:
        self._program = program
        self._portion = _PORTION * torch.get_num_threads()

    def scratch(self, count: int) -> int:
        each = sum(step.dtype.itemsize for step in self._program.steps)
        return min(count, self._portion) * each

    def __call__(self, inputs: Tensors, outputs: Tensors, first: int, count: int) -> None:
        rows = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in inputs]  # as they lie
        for begin in range(first, first + count, self._portion):
            end = min(begin + self._portion, first + count)
            some = [row[begin:end] for row in rows]
            made: list[torch.Tensor] = []
            for step in self._program.steps:
                made.append(run_step(step, [taken(one, some, made) for one in step.operands]))
            for place, output in zip(self._program.outputs, outputs, strict=True):
                output[begin - first : end - first] = made[place]


def taken(
    operand: Operand, rows: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> torch.Tensor | float:
    """What an operand is, of what was read and made."""
    if isinstance(operand, Read):
        return rows[operand.place]
    return made[operand.place] if isinstance(operand, Made) else operand


def run_step(step: Step, given: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """By PyTorch."""
    if step.op == "_to_copy":
        assert isinstance(given[0], torch.Tensor)
        return given[0].to(step.dtype)
    return _BY_TORCH[step.op](*given)
