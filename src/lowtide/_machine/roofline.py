"""Trace as measured on one machine -> the same step on another.

A roofline: an op needs at least the time in which its bytes pass through memory, and the time in
which its flops can be done. How far a measured op stays behind that bound is taken to be a
property of the op, so its time changes as the bound does.

Known to be imperfect: the time of a tiny op is mostly launch latency, which differs little
between cards, but is scaled all the same; an op that touches a slice is charged for the whole
value; whether float32 products used TF32 is guessed, see `_rates`.
"""

import dataclasses

from lowtide._errors import BadInput
from lowtide._ir import Machine, Op, Trace
from lowtide._machine.flops import base_name, flops, multiplied_dtype

_FLOAT, _TENSOR_FLOAT = "float32", "tfloat32"


def scaled(trace: Trace, have: Machine, want: Machine) -> Trace:
    """The step on `want`, if it took the times in `trace` on `have`."""
    if have == want:
        return trace
    for machine in (have, want):
        if not machine.memory_bytes_per_second:
            raise BadInput(
                f"machine {machine.name} has no memory_bytes_per_second, without which times "
                f"cannot be scaled: add it to its file"
            )
    rounded = _rounds_products(trace, have)
    ops = tuple(_scaled_op(trace, at, have, want, rounded) for at in range(len(trace.ops)))
    return dataclasses.replace(trace, ops=ops)


def _scaled_op(trace: Trace, at: int, have: Machine, want: Machine, rounded: bool) -> Op:
    op = trace.ops[at]
    touched = {*op.reads, *op.updates, *op.writes}
    size = sum(trace.values[value].bytes for value in touched)
    if not size or not op.seconds:
        return op
    bounds = [size / machine.memory_bytes_per_second for machine in (have, want)]
    work = flops(trace, op)
    if work:
        dtypes = _rates(multiplied_dtype(trace, op), rounded or "convolution" in base_name(op))
        for k, machine in enumerate((have, want)):
            bounds[k] = max(bounds[k], work / _rate(machine, dtypes, f"op {at}, {op.name}"))
    return dataclasses.replace(op, seconds=op.seconds * bounds[1] / bounds[0])


def _rounds_products(trace: Trace, have: Machine) -> bool:
    """Whether float32 matrix products used TF32, for a trace does not say.

    They did if one of them was faster than plain float32 can be on that machine.
    """
    plain = dict(have.flops_per_second).get(_FLOAT)
    return plain is not None and any(
        op.seconds * plain < work and multiplied_dtype(trace, op) == _FLOAT
        for op in trace.ops
        if "convolution" not in base_name(op) and (work := flops(trace, op)) and op.seconds
    )


def _rates(dtype: str, rounded: bool) -> tuple[str, ...]:
    """The names under which the speed may be listed, the best first.

    Convolutions count as TF32: PyTorch lets them use it unless told otherwise. A card without
    it runs at plain float32.
    """
    return (_TENSOR_FLOAT, _FLOAT) if dtype == _FLOAT and rounded else (dtype,)


def _rate(machine: Machine, dtypes: tuple[str, ...], where: str) -> float:
    known = dict(machine.flops_per_second)
    for dtype in dtypes:
        if dtype in known:
            return known[dtype]
    raise BadInput(
        f"machine {machine.name} has no flops_per_second for {dtypes[-1]}, in which {where} "
        f"multiplies: add it to its file"
    )
