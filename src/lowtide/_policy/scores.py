"""Candidates -> how much each is worth moving: AutoSwap's scores.

DOA    duration of absence: how long the bytes are idle, less both copies
AOA    area of absence: DOA times bytes; divided by bytes where DOA is negative
WDOA   weighted duration of absence: over the ops away, seconds times bytes above the limit
SWDOA  submodular WDOA: WDOA on the load that the picks before have left

and one that is not in the paper:

LEAD   how long before the peak a value falls idle: an optimizer's state is away equally long
       whichever part of it leaves, and only what leaves early is out in time

An op counts by its duration, and only where the load is above the limit: elsewhere an absence
buys nothing. Each function returns one number a candidate, in their order; higher is better.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide._analyze.load import Curve
from lowtide._ir import Machine, Trace
from lowtide._machine.link import seconds
from lowtide._policy.candidates import Candidate

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Clock:
    """When each position of an undisturbed step is reached; the step repeats without a pause."""

    begins: Scores  # of every op, and the end of the step

    @property
    def count(self) -> int:
        """Ops in a step."""
        return len(self.begins) - 1

    @property
    def period(self) -> float:
        """Seconds of a step."""
        return float(self.begins[-1])

    def at(self, position: int) -> float:
        """Seconds from the start of the step to that of op `position`."""
        step, place = divmod(position, self.count)
        return step * self.period + float(self.begins[place])

    def first_from(self, moment: float) -> int:
        """The first position that is reached at `moment` or later."""
        if self.period <= 0:
            return 0
        step = int(moment // self.period)
        place = int(np.searchsorted(self.begins, moment - step * self.period, side="left"))
        position = step * self.count + place
        while self.at(position) < moment:  # what rounding took
            position += 1
        return position

    def last_until(self, moment: float) -> int:
        """The last position that is reached at `moment` or earlier."""
        if self.period <= 0:
            return 0
        step = int(moment // self.period)
        place = int(np.searchsorted(self.begins, moment - step * self.period, side="right")) - 1
        position = step * self.count + place
        while self.at(position) > moment:
            position -= 1
        return position


def make_clock(trace: Trace) -> Clock:
    """The clock of `trace`, each op taking the seconds it was recorded with."""
    lengths = [op.seconds for op in trace.ops]
    return Clock(np.concatenate([[0.0], np.cumsum(lengths, dtype=np.float64)]))


def doa(found: Sequence[Candidate], clock: Clock, machine: Machine) -> Scores:
    """Seconds that each could be away with both of its copies hidden; negative: not at all."""
    return np.array(
        [
            clock.at(c.until)
            - clock.at(c.after + 1)
            - seconds(machine.out, c.bytes)
            - seconds(machine.back, c.bytes)
            for c in found
        ],
        dtype=np.float64,
    )


def aoa(found: Sequence[Candidate], clock: Clock, machine: Machine) -> Scores:
    """Seconds times bytes; where the seconds are negative, large values are the better ones."""
    absence = doa(found, clock, machine)
    size = np.array([c.bytes for c in found], dtype=np.float64)
    return np.where(absence >= 0, absence * size, absence / np.maximum(size, 1))


def wdoa(found: Sequence[Candidate], clock: Clock, load: Curve, limit: int) -> Scores:
    """Seconds times bytes above `limit` while each is away."""
    return Stretches.of(found, clock.count).total(_excess(clock, load, limit))


def swdoa(found: Sequence[Candidate], clock: Clock, load: Curve, limit: int) -> Scores:
    """WDOA when its turn came, taking always the highest; 0 for those never needed.

    The turns' scores never rise, so sorting by them gives the turns back.
    """
    away = Stretches.of(found, clock.count)
    load = load.copy()
    worth = np.zeros(len(found))
    left = np.ones(len(found), dtype=np.bool_)
    while left.any():
        gains = np.where(left, away.total(_excess(clock, load, limit)), 0.0)
        best = int(gains.argmax())
        if gains[best] <= 0:
            break
        worth[best] = gains[best]
        left[best] = False
        add(load, found[best].earliest, found[best].latest, -found[best].bytes)
    return worth


def lead(found: Sequence[Candidate], clock: Clock, load: Curve) -> Scores:
    """Seconds from when each falls idle to the next peak of `load`."""
    peak = clock.at(int(load.argmax()))
    period = clock.period or 1.0
    return np.array([(peak - clock.at(c.after + 1)) % period for c in found], dtype=np.float64)


def vote(*scores: Scores) -> Scores:
    """Minus the sum of each candidate's ranks; equals share the better rank."""
    total = np.zeros(len(scores[0]))
    for score in scores:
        ordered = np.sort(-score)
        total -= np.searchsorted(ordered, -score, side="left")
    return total


def _excess(clock: Clock, load: Curve, limit: int) -> Scores:
    excess: Scores = np.maximum(load - limit, 0) * np.diff(clock.begins)
    return excess


@dataclass(frozen=True, slots=True)
class Stretches:
    """The ops over which each candidate can be away; they wrap around the end of the step."""

    count: int
    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    @classmethod
    def of(cls, found: Sequence[Candidate], count: int) -> "Stretches":
        """Those of `found` in a step of `count` ops."""
        first = np.array([c.earliest for c in found], dtype=np.int64)
        end = np.array([c.latest for c in found], dtype=np.int64)
        return cls(count, first, end)

    def total(self, per_op: npt.NDArray[np.generic]) -> Scores:
        """The sum of `per_op` over each stretch."""
        sums = np.concatenate([[0.0], np.cumsum(per_op, dtype=np.float64)])
        step_end, end = np.divmod(self.end, self.count)
        step_first, first = np.divmod(self.first, self.count)
        total: Scores = sums[end] - sums[first] + (step_end - step_first) * sums[-1]
        return total


def ops_between(first: int, end: int, count: int) -> npt.NDArray[np.int64]:
    """The ops at positions first <= p < end of a step of `count` that repeats."""
    return np.arange(first, end, dtype=np.int64) % count


def add(load: Curve, first: int, end: int, change: int) -> None:
    """Add `change` bytes to `load` at positions first <= p < end, at most one step of them."""
    begin = first % len(load)
    beyond = begin + end - first - len(load)  # what goes on into the next step
    load[begin : begin + end - first] += change
    if beyond > 0:
        load[:beyond] += change
