"""Trace -> the first thing in it that cannot be true, or nothing.

Shares no code with the recorder, the files or the analyses: it walks the ops once with the
plainest bookkeeping there is. The laws:

1. Indices point somewhere: `0 <= first <= end <= len(ops)`, operands and geometries exist. A
   value that is overwritten by the op that first sees it has an empty life, no other has.
2. A storage's versions are 0, 1, 2, … and follow each other without a gap, on one device.
3. Only the first version may be there before, only the last one after the step.
4. A value is written at most once, by the op at its `first`; one that was there before, never.
5. An op only touches values that are alive; only the op that overwrites a value in place may
   read it at `end`.
6. A save lies within its value's life and is unpacked no earlier than it was packed.
"""

import math
from collections import defaultdict
from itertools import pairwise

from lowtide._ir import Trace, Value, ValueId

_MOST_BYTES = 1 << 60  # sums of such numbers stay exact in 64 bits


def find_flaw(trace: Trace) -> str | None:
    """The first broken law in words, or None."""
    return _flaw_in_values(trace) or _flaw_in_ops(trace) or _flaw_in_saves(trace)


def _flaw_in_values(trace: Trace) -> str | None:
    count = len(trace.ops)
    versions: dict[int, list[Value]] = defaultdict(list)
    grain, unseen = trace.granularity_bytes, trace.unseen_bytes
    if not 1 <= grain <= _MOST_BYTES or not 0 <= unseen <= _MOST_BYTES:
        return "granularity is below 1 or unseen bytes are negative, or one of them is absurd"
    if sum(abs(value.bytes) + grain for value in trace.values) > _MOST_BYTES:
        return "its values have more bytes together than any machine"
    for i, value in enumerate(trace.values):
        if value.bytes < 0:
            return f"value {i} has {value.bytes} bytes"
        if not 0 <= value.first <= value.end <= count:
            return f"value {i} lives for ops {value.first}..{value.end} of {count}"
        if value.before and value.first != 0:
            return f"value {i} was there before the step but begins at op {value.first}"
        if value.after and value.end != count:
            return f"value {i} outlives the step but ends at op {value.end}"
        versions[value.storage].append(value)
    for storage, chain in versions.items():
        chain.sort(key=lambda value: value.version)
        if [value.version for value in chain] != list(range(len(chain))):
            return f"storage {storage} misses a version"
        if chain[-1].first == chain[-1].end:
            return f"storage {storage} has a last version that never lives"
        for old, new in pairwise(chain):
            if old.end != new.first or old.after or new.before or old.device != new.device:
                return f"storage {storage} breaks between versions {old.version} and {new.version}"
    return None


def _flaw_in_ops(trace: Trace) -> str | None:
    known = range(len(trace.values))
    written: set[ValueId] = set()
    for i, op in enumerate(trace.ops):
        touched = [*op.reads, *op.updates, *op.writes]
        touched += [operand.value for operand in (*op.operands, *op.results)]
        if any(value not in known for value in touched):
            return f"op {i} ({op.name}) names a value that does not exist"
        if any(
            not 0 <= operand.geometry < len(trace.geometries)
            for operand in (*op.operands, *op.results)
        ):
            return f"op {i} ({op.name}) names a geometry that does not exist"
        if not (0 <= op.seconds < math.inf and 0 <= op.workspace_bytes <= _MOST_BYTES):
            return f"op {i} ({op.name}) has a negative or absurd time or workspace"
        replaced = {(trace.values[new].storage, trace.values[new].version - 1) for new in op.writes}
        for new in op.writes:
            value = trace.values[new]
            if new in written or value.first != i or value.before:
                return f"op {i} ({op.name}) writes value {new}, which it cannot have made"
            written.add(new)
        for old in touched:
            value = trace.values[old]
            in_place = value.end == i and (value.storage, value.version) in replaced
            if not (value.first <= i < value.end or in_place):
                life = f"{value.first}..{value.end}"
                return f"op {i} ({op.name}) touches value {old}, alive only for {life}"
    return None


def _flaw_in_saves(trace: Trace) -> str | None:
    for i, value in enumerate(trace.values):
        for save in value.saves:
            if save.op is not None and not 0 <= save.op < len(trace.ops):
                return f"value {i} was saved by op {save.op}, which does not exist"
            if not value.first <= save.packed <= value.end:
                return f"value {i} was saved at op {save.packed}, outside its life"
            if any(not save.packed <= at <= len(trace.ops) for at in save.unpacked):
                return f"value {i} was unpacked outside of the step or before it was saved"
    return None
