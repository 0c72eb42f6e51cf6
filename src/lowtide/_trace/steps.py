"""Marks and ops of a recording -> the bounds of one steady step.

With optimizers, a step ends where the optimizer steps that does so most rarely (of equals, the
one that began last): gradient accumulation is one step, and so is a round of several critics and
one generator. Without one, the step is the period of the op sequence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide._analyze.load import carried_bytes
from lowtide._analyze.repeat import find_repeat
from lowtide._ir import Phase, Trace


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of an optimizer's step: `at` ops had run."""

    at: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """The ops `start <= i < stop` are one step."""

    start: int
    stop: int


def closing_marks(marks: Sequence[Mark]) -> list[Mark]:
    """The marks at which a step ends."""
    counts = Counter(mark.optimizer for mark in marks)
    if not counts:
        return []
    order = list(counts)  # by first step
    closing = min(order, key=lambda number: (counts[number], -order.index(number)))
    return [mark for mark in marks if mark.optimizer == closing]


def last_step(marks: Sequence[Mark]) -> Bounds | None:
    """The stretch between the last two closing marks, if anything ran in it."""
    ends = [mark.at for mark in closing_marks(marks)][-2:]
    return Bounds(*ends) if len(ends) == 2 and ends[0] < ends[1] else None


def repeating_step(recording: Trace, *, times: int = 2) -> Bounds | None:
    """The last period of a loop without an optimizer, cut where the least memory is held.

    `times` is how many periods must be seen. Not everything that repeats is a step: the layers
    of a model do, when they are initialised and again in each pass. So ops in different modules
    are different ops, and a step must do something in a module, or go backward if anything does.
    """
    values = recording.values
    repeat = find_repeat(
        [
            (op.name, op.module, *(values[value].bytes for value in op.writes))
            for op in recording.ops
        ]
    )
    if repeat is None or repeat.times < times:
        return None
    period = recording.ops[repeat.start : repeat.start + repeat.period]
    if any(op.phase is Phase.BACKWARD for op in recording.ops):
        if not {Phase.FORWARD, Phase.BACKWARD} <= {op.phase for op in period}:
            return None
    elif not any(op.module for op in period):
        return None
    carried = carried_bytes(recording)
    candidates = range(repeat.stop - 2 * repeat.period + 1, repeat.stop - repeat.period + 1)
    start = min(candidates, key=lambda i: carried[i])
    return Bounds(start, start + repeat.period)
