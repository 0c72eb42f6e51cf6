"""A traced step -> its buffers: what a pool for that step has to hold, and for how long.

Each storage on the trace's device is a buffer, from the op that makes it to the one after its
last; an op's workspace is one for that op. What is there before and after the step lives all
through. What the step leaves behind (a gradient, a result) lives on into the next step until its
forerunner, the one that was there before, was dropped: so it wraps round the end.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from lowtide._ir import Trace, Value
from lowtide._layout.buffers import Buffer, rounded


def step_buffers(trace: Trace, *, lasting: bool = True) -> tuple[list[Buffer], int]:
    """The buffers of a step that repeats, and its period in ops.

    What it leaves behind and did not find, or found and did not leave, keeps a place to itself all
    along; unless it is not `lasting`: then it is gone between steps.
    """
    period = len(trace.ops)
    grain = trace.granularity_bytes
    storages: dict[int, list[Value]] = defaultdict(list)
    for value in trace.values:
        if value.device == trace.device and value.bytes > 0:
            storages[value.storage].append(value)
    whole: list[Buffer] = []
    inherited: list[tuple[Value, Buffer]] = []  # there before, gone after
    left: list[tuple[Value, Buffer]] = []  # made here, there after
    for storage, versions in storages.items():
        versions.sort(key=lambda value: value.version)
        first, last = min(v.first for v in versions), max(v.end for v in versions)
        if last <= first:
            continue
        size = rounded(max(v.bytes for v in versions), grain)
        name = next((f"{storage}:{v.name}" for v in versions if v.name), str(storage))
        buffer = Buffer(name, first, last, size)
        before, after = any(v.before for v in versions), any(v.after for v in versions)
        if before and not after:
            inherited.append((versions[0], buffer))
        elif after and not before:
            left.append((versions[-1], buffer))
        else:
            whole.append(buffer)
    buffers = whole + _successions(inherited, left, period, lasting=lasting)
    for i, op in enumerate(trace.ops):
        if op.workspace_bytes > 0:
            size = rounded(op.workspace_bytes, grain)
            buffers.append(Buffer(f"workspace:{i}", i, i + 1, size))
    return sorted(buffers, key=lambda b: (b.lower, b.upper, b.name)), period


def _successions(
    inherited: Sequence[tuple[Value, Buffer]],
    left: Sequence[tuple[Value, Buffer]],
    period: int,
    *,
    lasting: bool,
) -> list[Buffer]:
    """Pair what the step leaves with what it found: the same thing, one step earlier.

    Of the same size; those of the same name first, the others in order, whatever their kind: what
    an earlier step left behind looks like an input to the next.
    """
    named: dict[tuple[str, int], list[Buffer]] = defaultdict(list)
    for value, buffer in inherited:
        named[value.name, buffer.size].append(buffer)
    heirs: list[tuple[Buffer, Buffer]] = []  # what is left, what was found
    others = []
    for value, buffer in left:
        if value.name and named[value.name, buffer.size]:
            heirs.append((buffer, named[value.name, buffer.size].pop(0)))
        else:
            others.append(buffer)
    waiting: dict[int, list[Buffer]] = defaultdict(list)
    for (_, size), buffers in named.items():
        waiting[size] += buffers
    alone = []
    for buffer in others:
        if waiting[buffer.size]:
            heirs.append((buffer, waiting[buffer.size].pop(0)))
        else:
            alone.append(buffer)
    alone += [buffer for buffers in waiting.values() for buffer in buffers]
    return [
        *(replace(new, upper=period + old.upper) for new, old in heirs),
        *(replace(buffer, lower=0, upper=period) if lasting else buffer for buffer in alone),
    ]
