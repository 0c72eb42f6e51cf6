"""A recorded step -> the offsets its allocations are to have when it is made again."""

from dataclasses import dataclass, replace

from lowtide._layout.buffers import Buffer, rounded
from lowtide._layout.pack import pack
from lowtide._runtime.core import StepRecord

GRAIN = 512  # bytes: as PyTorch's allocator rounds


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Offsets by phase and allocation, -1 for what outlives the plan and is to lie outside.

    Consecutive steps use the phases in turn: a block that outlives the step it was made in, and
    the making of its successor too, must not lie where the successor does.
    """

    sizes: list[int]
    phases: list[list[int]]
    height: int
    max_load: int


def widened(step: StepRecord, other: StepRecord) -> StepRecord:
    """The step with the longer of both records' lives: what dies sometimes later always might."""
    assert step.sizes == other.sizes
    freed = [-1 if -1 in ends else max(ends) for ends in zip(step.freed, other.freed, strict=True)]
    return replace(step, freed=freed, ticks=max(step.ticks, other.ticks))


def plan_step(step: StepRecord, *, seconds: float = 2.0) -> StepPlan:
    """Pack one step of those that repeat it; lives may go on into the next one.

    With no life longer than the step, one set of offsets serves every step. With longer ones, the
    step is laid out twice, as two phases of a step of double length: then what lives on takes
    its bytes only while it lives. What outlives even that, or has no end yet, stays outside.
    """
    lives = [
        end - start if end >= 0 else None for start, end in zip(step.made, step.freed, strict=True)
    ]
    count = 1 if all(life is None or life <= step.ticks for life in lives) else 2
    period = step.ticks * count
    buffers = [
        Buffer(
            f"{phase}:{i}",
            step.made[i] + phase * step.ticks,
            step.freed[i] + phase * step.ticks,
            rounded(step.sizes[i], GRAIN),
        )
        for phase in range(count)
        for i, life in enumerate(lives)
        if life is not None and life <= period
    ]
    phases = [[-1] * len(step.sizes) for _ in range(count)]
    if not buffers:
        return StepPlan(step.sizes, phases, 0, 0)
    packing = pack(buffers, period=period, align=GRAIN, seconds=seconds)
    for buffer in packing.buffers:
        phase, i = map(int, buffer.name.split(":"))
        assert buffer.offset is not None
        phases[phase][i] = buffer.offset
    return StepPlan(step.sizes, phases, packing.height, packing.max_load)
