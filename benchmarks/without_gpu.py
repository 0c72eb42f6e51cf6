"""A step of a work as a GPU would run it, without one: to try plans on.

python benchmarks/without_gpu.py "Llama-1B-like 4x2048" --out llama.trace
lowtide simulate llama.trace --policy tide --budget 18GiB --machine h200

PyTorch runs it on tensors without bytes, and the times are those of a roofline: what an op reads
and writes at the speed of memory, or its products at the speed of the tensor cores. Llama's step
comes out at 33.2 GiB and 164 ms (measured on an H200: 33.3 and 172). GPT-2's does not, at 39.5 and
149 (47.8 and 237): a GPU's autocast computes its GELU in float32, a CPU's does not, and dropout of
attention is left out, since on a CPU there is no such kernel with it.
"""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from subjects import _gpt2, _llama
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import lowtide
from lowtide._analyze.load import find_peak
from lowtide._ir import Op, Trace
from lowtide._machine.flops import flops
from lowtide._trace import record, tensors
from lowtide._trace.file import save_trace
from lowtide._units import format_bytes, format_seconds

WORKS = {  # how it is built; rows, their length, and the vocabulary
    "GPT-2 medium 16x1024": (_gpt2, 16, 1024, 50257),
    "Llama-1B-like 4x2048": (_llama, 4, 2048, 32000),
}
BYTES, FLOPS, LAUNCH = 3.6e12, 620e12, 1.5e-6  # a second of an H200, by many ops; and for each


def main() -> None:
    """Trace, time, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    trace = timed(traced(options.work))
    save_trace(trace, options.out)
    seconds = sum(op.seconds for op in trace.ops)
    peak = format_bytes(find_peak(trace).bytes)
    print(f"{options.out}: {len(trace.ops)} ops, {format_seconds(seconds)}, {peak}")


def traced(work: str) -> Trace:
    """One step, of which every parameter's optimizer op can run by itself."""
    _take_for_plain()
    build, rows, length, vocabulary = WORKS[work]
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        model.train()
        for part in model.modules():
            if isinstance(getattr(part, "attn_dropout", None), nn.Dropout):
                part.attn_dropout = nn.Dropout(0.0)
            config: Any = getattr(part, "config", None)
            if hasattr(config, "attn_pdrop"):
                config.attn_pdrop = 0.0
        groups = [{"params": [one]} for one in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        tokens = torch.randint(0, vocabulary, (rows, length))

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return lowtide.trace(step)


def _take_for_plain() -> None:
    """The recorder takes tensors without bytes for plain ones."""
    wraps: Any = tensors.is_wrapper
    dense, see = tensors._is_dense, record.Recorder.__torch_dispatch__

    def is_wrapper(kind: type[Any]) -> bool:
        return not issubclass(kind, FakeTensor) and bool(wraps(kind))

    def is_dense(tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.layout is torch.strided and not tensor.is_nested
        return dense(tensor)

    def sees(
        self: record.Recorder,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **(kwargs or {}))
        return see(self, func, types, args, kwargs)

    for module in (tensors, record):
        setattr(module, "is_wrapper", is_wrapper)  # noqa: B010
    tensors._is_dense = is_dense
    record.Recorder.__torch_dispatch__ = sees  # type: ignore[method-assign]


def timed(trace: Trace) -> Trace:
    """With the times of a roofline."""

    def seconds(op: Op) -> float:
        if op.view or not op.writes:
            return 0.0
        values = (*{*op.reads, *op.updates}, *op.writes)
        size = sum(trace.values[value].bytes for value in values)
        return LAUNCH + max(size / BYTES, flops(trace, op) / FLOPS)

    return replace(trace, ops=tuple(replace(op, seconds=seconds(op)) for op in trace.ops))


if __name__ == "__main__":
    main()
