"""Trace -> what its ops take when they run again beside others: element-wise ones run as one.

Such an op takes as long as its bytes take to be read and written. Where several run one after the
other as a single kernel (`_runtime/fused`), what one of them makes for the next is not written, and
what they all read is read once. So of an op's time that part is left which is for bytes that come
from elsewhere, or that backward was promised.
"""

from collections.abc import Container
from dataclasses import replace
from math import prod

from lowtide._analyze.access import producers
from lowtide._ir import Op, Trace, ValueId

# What a fused kernel can compute: by the ops' names, without "aten."
ELEMENTWISE = frozenset(
    {
        "_to_copy.default",
        "add.Tensor",
        "div.Scalar",
        "div.Tensor",
        "mul.Scalar",
        "mul.Tensor",
        "neg.default",
        "pow.Tensor_Scalar",
        "relu.default",
        "rsqrt.default",
        "rsub.Scalar",
        "sigmoid.default",
        "silu.default",
        "sub.Tensor",
        "tanh.default",
    }
)
# ... and only backward does.
GRADIENTS = frozenset(
    {
        "sigmoid_backward.default",
        "silu_backward.default",
        "tanh_backward.default",
        "threshold_backward.default",
    }
)
DTYPES = ("bfloat16", "float16", "float32")
LEAST_SECONDS = 0.5e-6  # of an op, so that none is free


def _is_able(trace: Trace, op: Op) -> bool:
    """Whether it could be part of a fused kernel: numbers by number, of tensors that lie alike."""
    return op.name.removeprefix("aten.") in ELEMENTWISE and lies_alike(trace, op)


def lies_alike(trace: Trace, op: Op) -> bool:
    """Whether it makes one tensor, of ones that lie like it or are read by strides."""
    if len(op.results) != 1:
        return False
    made = trace.geometries[op.results[0].geometry]
    if made.dtype not in DTYPES:
        return False
    whole = False
    for operand in op.operands:
        given = trace.geometries[operand.geometry]
        if given.dtype not in DTYPES or not given.shape:
            return False
        if given.shape == made.shape:
            if given.strides != made.strides:
                return False
            whole = True
    return whole


def with_fused_reruns(trace: Trace, again: Container[int]) -> Trace:
    """The trace with `again_seconds` of those of the ops `again` that could be fused."""
    makers = producers(trace)
    ops = list(trace.ops)
    able = {i for i, op in enumerate(ops) if i in again and op.seconds and _is_able(trace, op)}
    readers: dict[ValueId, list[int]] = {}
    for i in able:
        for value in trace.ops[i].reads:
            readers.setdefault(value, []).append(i)

    def size(number: int) -> int:
        (made,) = trace.ops[number].results
        return prod(trace.geometries[made.geometry].shape)

    def goes_with(number: int, other: int | None) -> bool:
        return other is not None and other in able and size(other) == size(number)

    for i in able:
        op = trace.ops[i]
        sources = [makers.get(value) for value in op.reads]
        inside = [goes_with(i, source) for source in sources]
        beside = any(goes_with(i, other) for value in op.writes for other in readers.get(value, ()))
        if not any(inside) and not beside:
            continue
        read = [trace.values[value].bytes for value in op.reads]
        written = sum(trace.values[value].bytes for value in op.writes)
        left = sum(count for count, made in zip(read, inside, strict=True) if not made)
        if any(trace.values[value].saves for value in op.writes):
            left += written
        share = left / max(1, sum(read) + written)
        ops[i] = replace(op, again_seconds=min(op.seconds, share * op.seconds + LEAST_SECONDS))
    return replace(trace, ops=tuple(ops))


def again_seconds(op: Op) -> float:
    """What it takes when it runs again."""
    return op.seconds if op.again_seconds is None else op.again_seconds
