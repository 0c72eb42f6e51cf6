"""Trace -> a short fingerprint of what the step does to memory.

Equal for two traces of the same step: times, workspaces and where the recording came from are
left out, and so are the numbers among the arguments (a learning rate that decays) and offsets
(another slice of the same dataset).
"""

import hashlib
import json

from lowtide._ir import Trace


def digest(trace: Trace) -> str:
    """64 hexadecimal digits."""
    number: dict[tuple[object, ...], int] = {}  # geometries that differ in the offset are one
    shapes = [(g.dtype, g.shape, g.strides) for g in trace.geometries]
    shape = [number.setdefault(key, len(number)) for key in shapes]
    ops = [
        [op.name, op.reads, op.updates, op.writes, op.phase, op.module, op.node]
        + [op.random, op.factory, op.view, op.grad]
        + [[operand.value, shape[operand.geometry]] for operand in (*op.operands, *op.results)]
        for op in trace.ops
    ]
    values = [
        [v.storage, v.version, v.bytes, v.kind, v.first, v.end, v.before, v.after]
        + [v.device, v.name, v.module]
        + [[save.op, save.node, save.packed, save.unpacked] for save in v.saves]
        for v in trace.values
    ]
    text = json.dumps([trace.device, trace.granularity_bytes, ops, values, list(number)])
    return hashlib.sha256(text.encode()).hexdigest()
