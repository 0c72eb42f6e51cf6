"""Tide: what stays, what is swapped and what is made again, chosen for the step's time.

A pass over the step (`remake`) decides by taste what is made again. Many tastes are tried. Then
values are swapped besides: more and more of them, hidden behind compute or not, those first that
are dear to make again. From the best of all that a search goes on: the weights of some values in
the pass are changed (of single ones, of all that ops of one kind make, of a stretch of the step),
swaps are left out, added or exchanged, and what is not worse is kept, until the time is over.
Every trial is a simulated step (`joint`).
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2

import numpy as np

from lowtide._analyze.load import find_peak
from lowtide._ir import Machine, OpIndex, Plan, Rerun, Swap, Trace
from lowtide._policy.autoswap import CannotFit
from lowtide._policy.ground import Ground, Runtime
from lowtide._policy.joint import Task, Trial, as_plan, attempt
from lowtide._policy.problem import Problem, choose
from lowtide._policy.remake import Stuck, Taste, Weights
from lowtide._policy.schedule import schedule
from lowtide._policy.scores import Scores
from lowtide._simulate.remade import remade
from lowtide._units import format_bytes

_TASTE_SHARE = 1 / 3  # of the time
_SWAP_SHARE = 2 / 3  # ... up to then
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
_SHARES = (0.25, 0.5, 1.0, 0.1, 0.75, 0.375, 0.05, 0.9, 0.625, 0.175)  # of what is too much
_EXCHANGED = 0.3  # of the trials, if anything can be swapped
_EARLY = 1.3  # times what a copy takes: so much earlier it starts


def tide(
    trace: Trace,
    machine: Machine | None = None,
    *,
    limit: int,
    seconds: float = 10.0,
    seed: int = 0,
    runtime: Runtime | None = None,
    smallest: int = 1 << 20,
    host_budget: int | None = None,
) -> Plan:
    """The fastest plan that was found within `limit` bytes, or raises `CannotFit`.

    Without a machine nothing is swapped. The search takes about `seconds`, and as long as the first
    plan takes if that is longer.
    """
    peak = find_peak(trace)
    plain = sum(op.seconds for op in trace.ops)
    if peak.bytes <= limit:
        name = "" if machine is None else machine.name
        return Plan((), peak.bytes, plain, peak.bytes, plain, "tide", name)
    ground = Ground(trace, runtime)
    task = Task(ground, machine, limit, runtime, smallest, host_budget)
    best = _Search(task, random.Random(seed)).run(seconds)  # noqa: S311
    if best is None:
        raise _cannot(task, peak.bytes)
    found = find_peak(remade(trace, best.remakes).trace).bytes if not best.swaps else 0
    return as_plan(task, best, found or best.peak_bytes, peak.bytes)


@dataclass(slots=True)
class _Search:
    task: Task
    random: random.Random
    best: Trial | None = None
    seconds: float = inf
    taste: Taste = field(default_factory=Taste)

    def run(self, seconds: float) -> Trial | None:
        began = time.perf_counter()
        problem = None if self.task.machine is None else self.task.problem()
        if problem is not None and not problem.found:
            problem = None
        self._begin(problem)
        for taste in _TASTES:
            if time.perf_counter() - began > _TASTE_SHARE * seconds:
                break
            if self._try((), taste, None):
                self.taste = taste
        if problem is not None:
            self._swap(problem, began + _SWAP_SHARE * seconds)
        if self.best is None:
            return None
        weights = np.ones(len(self.task.ground.size))
        changes = self._changes() if any(self.task.ground.can) else None
        exchanges = self._exchanges(problem) if problem is not None else None
        while time.perf_counter() - began < seconds and (changes or exchanges):
            if exchanges and (not changes or self.random.random() < _EXCHANGED):
                self._try(next(exchanges), self.taste, weights)
            elif changes:
                changed = weights.copy()
                next(changes)(changed)
                if self._try(self.best.chosen, self.taste, changed):
                    weights = changed
        if self.best.chosen:
            self._try(self.best.chosen, self.taste, weights, thorough=True)
        return self.best

    def _begin(self, problem: Problem | None) -> bool:
        """Whether a few tastes find a way, if need be with all away that can be."""
        self.seconds = _LONGEST * self.task.ground.starts[-1]
        for taste in _FEW:
            if self._try((), taste, None):
                self.taste = taste
        if self.best is None and problem is not None:
            found, trace = problem.found, problem.trace
            away = schedule(trace, problem.machine, found, 0, problem.positions)
            for taste in _FEW:
                if self._try(away, taste, None):
                    self.taste = taste
        return self.best is not None

    def _try(
        self,
        chosen: Sequence[Swap],
        taste: Taste,
        weights: Weights | None,
        *,
        thorough: bool = False,
    ) -> bool:
        """Whether it is no worse than the best; then it is the best."""
        try:
            found = attempt(self.task, chosen, taste, weights, self.seconds, thorough=thorough)
        except Stuck:
            return False
        if found is None:
            return False
        self.seconds, self.best = found.seconds, found
        return True

    def _swap(self, problem: Problem, until: float) -> None:
        """Try to swap more and more."""
        peak, limit = problem.plain_peak, self.task.limit
        for share in _SHARES:
            aim = round(peak - share * (peak - limit))
            for scores in (_dear(problem, self.task.ground), None):
                picked = choose(problem, scores, aim).chosen
                for within in (None, aim):
                    if time.perf_counter() > until:
                        return
                    swaps = schedule(
                        problem.trace,
                        problem.machine,
                        picked,
                        within,
                        problem.positions,
                        slack=_EARLY,
                    )
                    for taste in (self.taste,) if self.best is not None else _FEW:
                        if swaps and self._try(swaps, taste, None):
                            self.taste = taste

    def _exchanges(self, problem: Problem) -> Iterator[list[Swap]]:
        """Other choices of what is swapped, for ever."""
        draw = self.random
        while True:
            assert self.best is not None
            chosen = list(self.best.chosen)
            if chosen and draw.random() < 0.6:
                for _ in range(draw.choice((1, 1, 2, 4))):
                    if chosen:
                        chosen.pop(draw.randrange(len(chosen)))
            if not chosen or draw.random() < 0.6:
                taken = {(swap.value, swap.after) for swap in chosen}
                free = [c for c in problem.found if (c.value, c.after) not in taken]
                more = draw.sample(free, min(len(free), draw.choice((1, 1, 2, 4))))
                chosen += schedule(
                    problem.trace, problem.machine, more, None, problem.positions, slack=_EARLY
                )
            yield chosen

    def _changes(self) -> "Iterator[_Change]":
        """Ways to change the weights, for ever."""
        ground, draw = self.task.ground, self.random
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
        ground = self.task.ground
        return [
            value
            for one in (self.best.remakes if self.best is not None else ())
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


def _dear(problem: Problem, ground: Ground) -> Scores:
    """First what cannot be made again, then what takes long to make for its size."""
    found = np.array(
        [
            ground.seconds[c.value] / c.bytes if ground.can[c.value] else np.inf
            for c in problem.found
        ]
    )
    most = found[np.isfinite(found)].max(initial=0.0)
    return np.where(np.isfinite(found), found, 2 * most + 1.0)


def _cannot(task: Task, peak: int) -> CannotFit:
    """With the smallest limit that was found to be met, and the op at which this one was not."""
    worst = 0
    for taste in _FEW:
        try:
            attempt(task, (), taste)
        except Stuck as stuck:
            worst = stuck.op
    low, high = task.limit, peak
    problem = None if task.machine is None else task.problem()
    while high - low > max(1.0, _SMALLER * peak):
        middle = (low + high) // 2
        if _Search(replace(task, limit=middle), random.Random(0))._begin(problem):  # noqa: S311
            high = middle
        else:
            low = middle
    ground = task.ground
    name = ground.trace.ops[min(worst, ground.ops - 1)].name
    how = "recomputing" if task.machine is None else "recomputing and swapping"
    return CannotFit(
        f"the budget is {format_bytes(task.limit)} ({task.limit} bytes), but {how} cannot go "
        f"below about {format_bytes(high)}: op {worst}, {name}, needs more at once",
        high,
        OpIndex(worst),
    )
