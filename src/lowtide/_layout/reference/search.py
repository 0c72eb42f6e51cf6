"""The whole search: greedy passes, then rounds of attempts that learn.

Mirrors core.cc, agent.cc and search.cc of native/layout.
The numbers below are the native ones; with the same seed and node budget both give one answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowtide._layout.buffers import Fit, rounded
from lowtide._layout.native import Answer, Request
from lowtide._layout.reference.clock import Clock
from lowtide._layout.reference.greedy import (
    PASSES,
    allocate_in_time,
    fill_gaps,
    height_of,
    order_by,
)
from lowtide._layout.reference.problem import (
    Problem,
    compress,
    dominated,
    lower_bound,
    parts,
    restrict_to,
)
from lowtide._layout.reference.tree import Outcome, Tree

_AGENTS = 4
_BACKTRACKS = 500  # placements an attempt may waste
_WORK = 300_000_000  # look-ahead steps a straight dive may take
_CORE = 3000  # buffers in a tree
_GROWN = 4000  # and in one that has grown
_DECAY, _LESSON, _NOISE = 0.8, 30.0, 0.2
_PATIENCE = 4  # failed leaps before a shorter one
_STEP = 5  # a step closes a 2**_STEP-th of the gap


def search(request: Request) -> Answer:
    """What `native.search` does, in Python and on one thread."""
    clock = Clock(request.seconds)
    align = request.align
    size = [rounded(size, align) for size in request.size]
    unit = math.gcd(align if align > 1 else 0, *size, *(f for f in request.fixed if f > 0)) or 1
    lives = []
    for lower, upper in zip(request.lower, request.upper, strict=True):
        wraps = request.period and upper > request.period
        lives.append(
            (lower, request.period, upper - request.period) if wraps else (lower, upper, 0)
        )
    fixed = [f // unit if f > 0 else f for f in request.fixed]
    problem = compress(lives, [s // unit for s in size], fixed)
    _refuse_clashes(problem)

    goal = request.goal // unit
    all_parts = [_Part(problem, ids) for ids in parts(problem)]
    nodes = 0

    def tally() -> tuple[int, int]:
        bound = max((part.bound for part in all_parts), default=0)
        return bound, max((part.height for part in all_parts), default=0)

    def spent() -> bool:
        return clock.out() or 0 <= request.nodes <= nodes

    target = max(tally()[0], goal)
    for part in all_parts:
        part.first_layout(target, clock)
    bound, height = tally()
    nodes = sum(part.nodes for part in all_parts)
    while height > max(bound, goal) and not spent():
        for part in all_parts:
            if part.height > max(bound, goal) and not spent():
                left = request.nodes - nodes if request.nodes >= 0 else None
                part.round(max(bound, goal), request.seed, left, clock, only_goal=goal >= bound)
                bound, height = tally()
                nodes = sum(part.nodes for part in all_parts)
    offsets = [0] * problem.count
    for part in all_parts:
        for i, offset in zip(part.ids, part.best, strict=True):
            offsets[i] = offset * unit
    return Answer(offsets, height * unit, min(bound, height) * unit, nodes)


def _refuse_clashes(problem: Problem) -> None:
    pinned = sorted((fixed, i) for i, fixed in enumerate(problem.fixed) if fixed >= 0)
    for place, (low, i) in enumerate(pinned):
        for high, j in pinned[place + 1 :]:
            if high >= low + problem.size[i]:
                break
            if problem.meet(i, j):
                raise ValueError("two fixed buffers share bytes")


class _Random:
    """splitmix64."""

    def __init__(self, state: int) -> None:
        self._state = state

    def next(self) -> float:
        mask = 2**64 - 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & mask
        z = self._state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class _Core:
    """The buffers that decide: those of the heaviest sections, as many as can be watched."""

    ids: list[int]
    problem: Problem
    watched: list[int]


def _affordable(problem: Problem, easy: set[int], load: int) -> list[int] | None:
    """The core whose sections have at least `load`, unless a straight dive would cost too much."""
    before = [0]
    for section in problem.load:
        before.append(before[-1] + (section >= load))
    ids = [
        i
        for i in range(problem.count)
        if problem.fixed[i] >= 0 or (i not in easy and problem.peak[i] >= load)
    ]
    steps = sum(before[end] - before[begin] for i in ids for begin, end in problem.span[i])
    return ids if len(ids) <= _CORE and len(ids) * steps // 2 <= _WORK else None


def _threshold(problem: Problem, easy: set[int]) -> int | None:
    """The lowest load from which sections can be watched."""
    loads = sorted(set(problem.load))
    low, high = 0, len(loads)
    while low < high:
        middle = (low + high) // 2
        if _affordable(problem, easy, loads[middle]) is not None:
            high = middle
        else:
            low = middle + 1
    return loads[low] if low < len(loads) else None


def _luby(round_: int) -> int:
    """1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ...: mostly short attempts, now and then a long one.

    A long one gets to the end of a tree and proves that there is nothing in it.
    """
    size = 1
    while size < round_:
        size = 2 * size + 1
    return (size + 1) // 2 if size == round_ else _luby(round_ - size // 2)


@dataclass(slots=True)
class _Agent:
    """One line of attempts: a way to rank buffers, and what its failures taught it."""

    kind: int
    random: _Random
    tree: Tree | None = None
    # a weight per watched section: at the goal, and modest
    lessons: list[list[float]] = field(default_factory=list)
    attempts: int = 0
    # of the last attempt:
    outcome: Outcome = Outcome.SPENT
    capacity: int = 0
    modest: bool = False
    nodes: int = 0
    layout: list[int] | None = None
    homeless: list[int] = field(default_factory=list)  # ended above the capacity

    def meet_core(self, core: _Core) -> None:
        self.tree = Tree(core.problem, core.watched)
        heaviest = max([1, *(core.problem.load[k] for k in core.watched)])
        weight = [core.problem.load[k] / heaviest for k in core.watched]
        self.lessons = [weight, weight]

    def attempt(
        self, problem: Problem, core: _Core, rest: Sequence[int], limit: int, clock: Clock
    ) -> None:
        """Solve the core at the capacity, then fill the rest around it."""
        assert self.tree is not None
        self.layout, self.homeless = None, []
        rank = self._rank(core.problem, self.tree)
        self.outcome = self.tree.run(rank, self.capacity, limit, clock)
        self.nodes = self.tree.nodes
        self.attempts += 1
        if self.outcome is Outcome.SPENT:
            self._learn(self.tree)
        if self.outcome is not Outcome.SOLVED:
            return
        offsets = [-1] * problem.count
        for i, offset in zip(core.ids, self.tree.offsets, strict=True):
            offsets[i] = offset
        self.nodes += len(rest)
        if not fill_gaps(problem, rest, Fit.BEST, clock, offsets):
            self.outcome = Outcome.SPENT
            return
        self.homeless = [i for i in rest if offsets[i] + problem.size[i] > self.capacity]
        self.layout = offsets

    def shake(self, problem: Problem, clock: Clock) -> None:
        """Without a core, too many buffers being alive at once: shaken greedy passes."""
        self.layout, self.homeless, self.outcome = None, [], Outcome.SPENT
        score = []
        for i in range(problem.count):
            width, size, peak = (
                float(problem.width(i)),
                float(problem.size[i]),
                float(problem.peak[i]),
            )
            base = (width, size, peak, width * peak)[self.kind]
            score.append(base * (1.0 + _NOISE * self.random.next()))
        self.attempts += 1
        self.nodes = problem.count
        offsets = list(problem.fixed)
        if fill_gaps(problem, _descending(score), Fit.BEST, clock, offsets):
            self.layout = offsets

    def _rank(self, core: Problem, tree: Tree) -> list[int]:
        weights = self.lessons[self.modest]
        sums = [0.0]
        for weight in weights:
            sums.append(sums[-1] + weight)
        score = []
        for i in range(core.count):
            view = tree.view[i]
            total = 0.0
            for begin, end in view:
                total += sums[end] - sums[begin]
            heaviest = max((w for b, e in view for w in weights[b:e]), default=0.0)
            width, size = float(core.width(i)), float(core.size[i])
            base = (heaviest * width, heaviest * width * size, total, total * math.sqrt(size))
            noise = _NOISE * self.random.next() if self.attempts else 0.0
            score.append(base[self.kind] * (1.0 + noise))
        rank = [0] * core.count
        for place, i in enumerate(_descending(score)):
            rank[i] = place
        return rank

    def _learn(self, tree: Tree) -> None:
        total = float(max(sum(tree.kills), 1))
        self.lessons[self.modest] = [
            weight * _DECAY + kills / total * _LESSON
            for weight, kills in zip(self.lessons[self.modest], tree.kills, strict=True)
        ]


def _descending(score: Sequence[float]) -> list[int]:
    return sorted(range(len(score)), key=lambda i: -score[i])


class _Part:
    """One independent part of the problem."""

    def __init__(self, whole: Problem, ids: list[int]) -> None:
        self.ids = ids
        self._problem = restrict_to(whole, ids)
        self.bound = lower_bound(self._problem)
        self.best: list[int] = []
        self.height = 0
        self.nodes = 0
        self._agents: list[_Agent] = []
        self._rounds = 0
        self._modest = False
        self._ease, self._waited = 1, 0

    def first_layout(self, goal: int, clock: Clock) -> None:
        if not self._problem.wraps and max(self._problem.fixed) < 0:
            for backwards in (False, True):
                if self.best and self.height <= goal:
                    return
                self.nodes += self._problem.count
                self._keep(allocate_in_time(self._problem, backwards=backwards))
        for keys, fit in PASSES:
            if self.best and (self.height <= goal or clock.out()):
                return
            self.nodes += self._problem.count
            offsets = list(self._problem.fixed)
            patience = clock if self.best else Clock(-1)  # some layout is owed
            if fill_gaps(self._problem, order_by(self._problem, keys), fit, patience, offsets):
                self._keep(offsets)

    def round(
        self, goal: int, seed: int, nodes_left: int | None, clock: Clock, *, only_goal: bool
    ) -> None:
        """A round of attempts at the goal, or a modest one: something better soon.

        In a modest round half of the agents try a leap, half a step. Such rounds go on while they
        succeed, else they alternate.
        """
        if not self._agents:
            self._prepare(goal, seed)
        self._rounds += 1
        limit = len(self._core.ids) + _BACKTRACKS * _luby(self._rounds)
        if nodes_left is not None:
            limit = min(limit, max(nodes_left // _AGENTS, 1))
        before = self.height
        gap = before - goal
        leap, step = max(1, gap >> self._ease), max(1, gap >> _STEP)
        homeless: set[int] = set()
        for index, agent in enumerate(self._agents):
            less = leap if (self._rounds + index) % 2 == 0 else step
            agent.capacity = before - less if self._modest else goal
            agent.modest = self._modest
            if self._core.ids:
                agent.attempt(self._problem, self._core, self._rest, limit, clock)
            else:
                agent.shake(self._problem, clock)
            self.nodes += agent.nodes
            if agent.outcome is Outcome.IMPOSSIBLE:
                self.bound = max(self.bound, agent.capacity + 1)
            homeless.update(agent.homeless)
            if agent.layout is not None:
                self._keep(agent.layout)
            if self.height <= goal:
                return
        better = self.height < before
        if better:
            self._ease, self._waited = 1, 0
        elif self._modest:
            self._waited += 1
            if self._waited >= _PATIENCE:
                self._ease = self._ease + 1 if gap >> self._ease > 1 else 1
                self._waited = 0
        self._modest = not only_goal and (better or not self._modest)
        # Buffers that found no room around the core have to be thought of with it.
        if homeless and len(self._core.ids) + len(homeless) <= _GROWN:
            self._set_core(sorted({*self._core.ids, *homeless}))

    def _keep(self, offsets: list[int]) -> None:
        height = height_of(self._problem, offsets)
        if not self.best or height < self.height:
            self.best, self.height = offsets, height

    def _prepare(self, goal: int, seed: int) -> None:
        self._easy = dominated(self._problem, goal)[::-1]
        easy = set(self._easy)
        self._from = _threshold(self._problem, easy)
        ids = None if self._from is None else _affordable(self._problem, easy, self._from)
        for kind in range(_AGENTS):
            self._agents.append(_Agent(kind, _Random((seed * _AGENTS + kind) % 2**64)))
        self._set_core(ids or [])

    def _set_core(self, ids: list[int]) -> None:
        problem = restrict_to(self._problem, ids)
        watched = [k for k, load in enumerate(problem.load) if load >= (self._from or 0)]
        self._core = _Core(ids, problem, watched)
        taken = {*ids, *self._easy}
        self._rest = [i for i in order_by(self._problem, PASSES[0][0]) if i not in taken]
        self._rest += self._easy
        if ids:
            for agent in self._agents:
                agent.meet_core(self._core)
