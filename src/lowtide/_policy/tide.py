"""Tide: what is made again, chosen for the step's time within a limit of bytes.

A pass over the step (`remake`) decides by taste. Many tastes are tried, and from the best of them a
search goes on: the weights of some values are changed (of single ones, of all that ops of one
kind make, of a stretch of the step), and what is not worse is kept, until the time is over.

Known to be imperfect: nothing is swapped yet.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log2

import numpy as np
import numpy.typing as npt

from lowtide._analyze.load import find_peak
from lowtide._ir import OpIndex, Plan, Remake, Rerun, Trace
from lowtide._policy.autoswap import CannotFit
from lowtide._policy.remake import Ground, Stuck, Taste, remake
from lowtide._simulate.remakes import run_remakes
from lowtide._units import format_bytes

_TASTE_SHARE = 1 / 3  # of the time
_LONGEST = 10.0  # times the plain step: what takes longer is no plan
_SMALLER = 0.005  # of the plain peak: how closely the smallest limit is looked for
_TASTES = tuple(
    Taste(cost, size, distance, around)
    for around in (True, False)
    for cost in (0.5, 1.0, 1.5, 2.0, 3.0)
    for size in (0.5, 0.75, 1.0, 1.5)
    for distance in (0.25, 0.5, 1.0, 2.0)
)
_FEW = (Taste(), Taste(distance=0.5), Taste(around=False), Taste(0.5, 0.75, 0.25), Taste(1.5, 0.5))

_FACTORS = (0.05, 0.25, 0.5, 1.5, 4.0, 20.0)

Weights = npt.NDArray[np.float64]


def tide(trace: Trace, *, limit: int, seconds: float = 10.0, seed: int = 0) -> Plan:
    """The plan with the least to run again within `limit` bytes, or raises `CannotFit`.

    The search takes about `seconds`, and as long as the first plan takes if that is longer.
    """
    peak = find_peak(trace)
    plain = sum(op.seconds for op in trace.ops)
    if peak.bytes <= limit:
        return Plan((), peak.bytes, plain, peak.bytes, plain, "tide")
    ground = Ground(trace)
    found = _Search(ground, limit, _LONGEST * plain, random.Random(seed)).run(seconds)  # noqa: S311
    if found is None:
        raise _cannot(ground, limit, peak.bytes, _LONGEST * plain)
    result = run_remakes(trace, found)
    assert result.peak_bytes <= limit
    return Plan(
        (), result.peak_bytes, result.seconds, peak.bytes, plain, "tide", remakes=tuple(found)
    )


@dataclass(slots=True)
class _Search:
    ground: Ground
    limit: int
    most: float
    random: random.Random
    best: list[Remake] | None = None
    seconds: float = 0.0
    taste: Taste = field(default_factory=Taste)

    def run(self, seconds: float) -> list[Remake] | None:
        began = time.perf_counter()
        self.seconds = self.most
        for taste in _TASTES:
            late = time.perf_counter() - began > _TASTE_SHARE * seconds
            if late and (self.best is not None or taste is _TASTES[len(_TASTES) // 2]):
                break
            if self._try(taste, None):
                self.taste = taste
        if self.best is None:
            return None
        weights = np.ones(len(self.ground.size))
        changes = self._changes()
        while time.perf_counter() - began < seconds:
            changed = weights.copy()
            next(changes)(changed)
            if self._try(self.taste, changed):
                weights = changed
        return self.best

    def _try(self, taste: Taste, weights: Weights | None) -> bool:
        """Whether it is no worse than the best; then it is the best."""
        try:
            found = remake(self.ground, self.limit, taste, weights, self.seconds)
        except Stuck:
            return False
        if found is None:
            return False
        self.seconds, self.best = found
        return True

    def _changes(self) -> "Iterator[_Change]":
        """Ways to change the weights, for ever."""
        ground, draw = self.ground, self.random
        able = [value for value, can in enumerate(ground.can) if can]
        able.sort(key=lambda value: ground.maker[value])
        alike: dict[tuple[str, int], list[int]] = defaultdict(list)
        for value in able:
            name = ground.trace.ops[ground.maker[value]].name
            alike[name, ground.size[value]].append(value)
        groups = [group for group in alike.values() if len(group) > 1]
        for value in dict.fromkeys(self._made_again()):
            yield _Change([value], 20.0)  # could another go instead?
        while True:
            kind = draw.random()
            if kind < 0.25 and groups:
                group = draw.choice(groups)
                start = draw.randrange(len(group)) if draw.random() < 0.5 else 0
                some = group[start :: draw.choice((1, 1, 1, 2, 3, 4))]
                some = some[: max(1, int(len(some) * draw.choice((draw.random(), 1.0))))]
                yield _Change(some, draw.choice((0.1, 0.4, 0.7, 1.5, 3.0, 10.0)))
            elif kind < 0.4:
                start = draw.randrange(len(able))
                length = int(2 ** draw.uniform(1, max(1.0, log2(len(able)))))
                yield _Change(able[start : start + length], draw.choice((0.2, 0.6, 1.6, 5.0)))
            else:
                made = self._made_again()
                pool = made if made and draw.random() < 0.6 else able
                some = [draw.choice(pool) for _ in range(draw.choice((1, 1, 2, 3, 5, 8)))]
                yield _Change(some, [draw.choice(_FACTORS) for _ in some])

    def _made_again(self) -> list[int]:
        ground = self.ground
        return [
            value
            for one in self.best or ()
            if isinstance(one, Rerun)
            for value in ground.trace.ops[one.op].writes
            if ground.can[value]
        ]


@dataclass(frozen=True, slots=True)
class _Change:
    values: list[int]
    factor: float | list[float]

    def __call__(self, weights: Weights) -> None:
        weights[self.values] *= self.factor


def _cannot(ground: Ground, limit: int, peak: int, most: float) -> CannotFit:
    """With the smallest limit that was found to be met, and the op at which this one was not."""
    worst = 0
    for taste in _FEW:
        try:
            remake(ground, limit, taste, None, most)
        except Stuck as stuck:
            worst = stuck.op
    low, high = limit, peak
    while high - low > _SMALLER * peak:
        middle = (low + high) // 2
        if any(_fits(ground, middle, taste, most) for taste in _FEW):
            high = middle
        else:
            low = middle
    name = ground.trace.ops[min(worst, ground.ops - 1)].name
    return CannotFit(
        f"the budget is {format_bytes(limit)} ({limit} bytes), but recomputing cannot go below "
        f"about {format_bytes(high)}: op {worst}, {name}, needs more at once",
        high,
        OpIndex(worst),
    )


def _fits(ground: Ground, limit: int, taste: Taste, most: float) -> bool:
    try:
        return remake(ground, limit, taste, None, most) is not None
    except Stuck:
        return False
