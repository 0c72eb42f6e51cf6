"""A recorded step -> the offsets its allocations are to have when it is made again."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide._errors import BadInput
from lowtide._ir import CUDA_GRANULARITY_BYTES
from lowtide._layout.buffers import Buffer, max_load, rounded
from lowtide._layout.pack import Packing, pack
from lowtide._runtime.core import StepRecord

_STRICT = 0.4  # of the time: for a layout that wastes nothing
ARENA_GRAIN = 2 << 20  # bytes: PyTorch's segments are multiples of it


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Offsets by phase and allocation, -1 for what outlives the plan and is to lie outside.

    Consecutive steps use the phases in turn: a block that outlives the step it was made in, and
    the making of its successor too, must not lie where the successor does.
    """

    sizes: list[int]
    phases: list[list[int]]
    left: list[int]  # the allocations that outlive their step
    height: int
    max_load: int


def widened(step: StepRecord, other: StepRecord) -> StepRecord:
    """The step with the longer of both records' lives: what dies sometimes later always might."""
    assert step.sizes == other.sizes
    ticks = max(step.ticks, other.ticks)
    rows = [
        [end + ticks - one.ticks if end >= one.ticks else end for end in one.freed]
        for one in (step, other)
    ]
    freed = [-1 if -1 in ends else max(ends) for ends in zip(*rows, strict=True)]
    return replace(step, freed=freed, ticks=ticks)


def plan_step(
    step: StepRecord,
    *,
    beside: StepPlan | None = None,
    room: int = 0,
    seconds: float = 2.0,
    single: bool = False,
) -> StepPlan:
    """Pack one step of those that repeat it; lives may go on into the next one.

    With no life longer than the step, one set of offsets serves every step. With longer ones, the
    step is laid out twice, as two phases of a step of double length: then what lives on takes
    its bytes only while it lives. What outlives even that, or has no end yet, stays outside.
    With `single` all that lives longer does: a step that is laid out once is laid out lower.

    The next step may be of another shape and follow another plan, `beside`. So that what is left
    behind is not in its way, it is put where that plan leaves its own, if `room` allows.
    """
    lives = [
        end - start if end >= 0 else None for start, end in zip(step.made, step.freed, strict=True)
    ]
    count = 1 if single or all(life is None or life <= step.ticks for life in lives) else 2
    period = step.ticks * count
    buffers = [
        Buffer(
            f"{phase}:{i}",
            step.made[i] + phase * step.ticks,
            step.freed[i] + phase * step.ticks,
            rounded(step.sizes[i], CUDA_GRANULARITY_BYTES),
        )
        for phase in range(count)
        for i, life in enumerate(lives)
        if life is not None and life <= period
    ]
    left = [i for i, end in enumerate(step.freed) if end > step.ticks]
    phases = [[-1] * len(step.sizes) for _ in range(count)]
    if not buffers:
        return StepPlan(step.sizes, phases, left, 0, 0)
    packing = None
    if beside is not None and len(beside.phases) == count:
        packing = _pack_beside(buffers, left, step, beside, period, room, seconds)
    if packing is None:
        packing = _pack_low(buffers, period, seconds)
    for buffer in packing.buffers:
        phase, i = map(int, buffer.name.split(":"))
        assert buffer.offset is not None
        phases[phase][i] = buffer.offset
    return StepPlan(step.sizes, phases, left, packing.height, packing.max_load)


def _pack_low(buffers: Sequence[Buffer], period: int, seconds: float) -> Packing:
    """The layout whose height is the load, which most steps have, or else one that is low."""
    # An arena is a multiple of its grain: what ends within the last one is low enough.
    enough = rounded(max_load(buffers, period=period), ARENA_GRAIN)
    packing = pack(
        buffers,
        period=period,
        align=CUDA_GRANULARITY_BYTES,
        capacity=enough,
        seconds=_STRICT * seconds,
    )
    if packing.height <= enough:
        return packing
    left = max(0.0, seconds - packing.seconds)
    other = pack(buffers, period=period, align=CUDA_GRANULARITY_BYTES, seconds=left)
    return min(packing, other, key=lambda found: found.height)


def _pack_beside(
    buffers: Sequence[Buffer],
    left: Sequence[int],
    step: StepRecord,
    beside: StepPlan,
    period: int,
    room: int,
    seconds: float,
) -> Packing | None:
    """The layout with what is left behind where the other plan leaves blocks of the same size."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for i in beside.left:
        waiting[beside.sizes[i]].append(i)
    partner = {i: waiting[step.sizes[i]].pop(0) for i in left if waiting[step.sizes[i]]}
    fixed = []
    for buffer in buffers:
        phase, i = map(int, buffer.name.split(":"))
        offset = beside.phases[phase][partner[i]] if i in partner else -1
        fixed.append(replace(buffer, offset=offset) if offset >= 0 else buffer)
    try:
        packing = pack(
            fixed, period=period, align=CUDA_GRANULARITY_BYTES, capacity=room, seconds=seconds
        )
    except BadInput:  # they would share bytes: there, they are not all alive together
        return None
    return packing if packing.height <= room else None
