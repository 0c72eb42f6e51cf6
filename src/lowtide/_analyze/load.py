"""Trace -> the load curve, its peak, and who owns the peak.

Load at op i: every storage of the trace's device alive while op i runs, sizes rounded up to the
allocator's granularity, plus op i's workspace, plus what no tensor accounts for.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide._errors import BadInput
from lowtide._ir import Kind, OpIndex, Trace, Value, ValueId

Curve = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest load of a step; `owners` are the values alive there, largest first."""

    op: OpIndex
    bytes: int
    owners: tuple[ValueId, ...]
    workspace_bytes: int
    unseen_bytes: int


def rounded_bytes(trace: Trace, value: Value) -> int:
    """What the allocator hands out for `value`'s storage."""
    grain = trace.granularity_bytes
    return -(-value.bytes // grain) * grain


def load_curve(trace: Trace) -> Curve:
    """Bytes held on the trace's device during each op."""
    tensors: Curve = load_by_kind(trace).sum(axis=0)
    return tensors + _workspace(trace) + trace.unseen_bytes


def load_by_kind(trace: Trace) -> npt.NDArray[np.int64]:
    """One row for every `Kind` in order: the bytes its values hold during each op."""
    row = {kind: number for number, kind in enumerate(Kind)}
    change = np.zeros((len(row), len(trace.ops) + 1), dtype=np.int64)
    here = [value for value in trace.values if value.device == trace.device]
    kinds = [row[value.kind] for value in here]
    grain = trace.granularity_bytes
    sizes = -(-np.array([value.bytes for value in here], dtype=np.int64) // grain) * grain
    np.add.at(change, (kinds, [value.first for value in here]), sizes)
    np.subtract.at(change, (kinds, [value.end for value in here]), sizes)
    return np.cumsum(change, axis=1)[:, :-1]


def carried_bytes(trace: Trace) -> Curve:
    """Bytes that live on from op i - 1 to op i, for every i."""
    change = np.zeros(len(trace.ops) + 2, dtype=np.int64)
    for value in trace.values:
        if value.device == trace.device and value.end > value.first:
            change[value.first + 1] += rounded_bytes(trace, value)
            change[value.end] -= rounded_bytes(trace, value)
    return np.cumsum(change)[: len(trace.ops)]


def find_peak(trace: Trace) -> Peak:
    """The first op at which the load is highest."""
    if not trace.ops:
        raise BadInput("the trace is empty: it has no ops; record a step that runs some")
    curve = load_curve(trace)
    at = OpIndex(int(curve.argmax()))
    alive = [
        ValueId(i)
        for i, value in enumerate(trace.values)
        if value.device == trace.device and value.first <= at < value.end
    ]
    alive.sort(key=lambda i: -trace.values[i].bytes)
    workspace = trace.ops[at].workspace_bytes
    return Peak(at, int(curve[at]), tuple(alive), workspace, trace.unseen_bytes)


def owned_bytes(trace: Trace, values: tuple[ValueId, ...]) -> dict[tuple[Kind, str], int]:
    """The bytes of `values` by kind and module."""
    total: dict[tuple[Kind, str], int] = defaultdict(int)
    for i in values:
        value = trace.values[i]
        total[value.kind, value.module] += rounded_bytes(trace, value)
    return dict(total)


def _workspace(trace: Trace) -> Curve:
    return np.array([op.workspace_bytes for op in trace.ops], dtype=np.int64)
