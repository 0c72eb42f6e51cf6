"""The search for a plan: where it begins, and how it goes on until the time is over.

It begins with passes of a few tastes; where there is no way without it, more and more leaves of
what lasts. Then come steps that the linear programme speaks of (`relax`), and those in which more
and more is swapped: state that has to pass by while its optimizer steps, what is hidden behind
compute, and what is dear to make again. From the best of these it climbs: the weights of some
values in the pass are changed (of single ones, of all that ops of one kind make, of a stretch of
the step), others are held, swaps are left out, added or exchanged, and what is not worse is kept.
Every trial is a simulated step.
"""

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import log2

import numpy as np

from lowtide._analyze.load import Curve, load_curve
from lowtide._ir import Kind, Phase, Rerun, Swap
from lowtide._policy.candidates import Candidate
from lowtide._policy.ground import Ground
from lowtide._policy.joint import Choice, Task, Trial, attempt
from lowtide._policy.problem import Problem, choose, plain_score
from lowtide._policy.relax import can_relax, relax
from lowtide._policy.remake import remake, stays_of
from lowtide._policy.schedule import schedule
from lowtide._policy.scores import Scores
from lowtide._policy.taste import Stuck, Taste, Weights
from lowtide._simulate.simulate import held_bytes

_LONGEST = 10.0  # times the plain step: what takes longer is no plan
# Of the time, up to which each part may take.
_GUIDED, _PASSED, _SWAPPED, _TASTED = 0.2, 0.4, 0.55, 0.65
_TASTES = tuple(
    Taste(cost, size, distance, around)
    for around in (True, False)
    for cost in (0.5, 1.0, 1.5, 2.0, 3.0)
    for size in (0.5, 0.75, 1.0, 1.5)
    for distance in (0.25, 0.5, 1.0, 2.0)
)
_FEW = (
    Taste(),
    Taste(distance=0.5),
    Taste(around=False),
    Taste(0.5, 0.75, 0.25),
    Taste(1.5, 0.5),
    Taste(1.5, 0.75, 0.25),
    Taste(3.0, 1.0, 2.0),
)
_FACTORS = (0.05, 0.25, 0.5, 1.5, 4.0, 20.0)
_SHARES = (0.25, 0.5, 1.0, 0.1, 0.75, 0.375, 0.05, 0.9, 0.625, 0.175)  # of what is too much
_MORE = (0.1, 0.14, 0.06, 0.2, 0.03, 0.3)  # of all state, beyond what has to move
_SHORT = (Taste(0.5, 0.75, 0.25), Taste(distance=0.5))  # where much has to be made again
_HINTS = ((1e-2, 0.5), (1e-2, 0.02), (1e-4, 0.5))  # what a hint weighs, and from which share on
_HELD, _EXCHANGED = 0.15, 0.3  # of the trials
# What is not used in most of the step, before what is.
_LASTING = ((Kind.STATE,), (Kind.STATE, Kind.GRADIENT))
_SAME = 1 - 1e-5  # times the seconds of the best: not faster than that
_MUCH = 1.15  # times the plain step
_EARLY = 1.3  # times what a copy takes: so much earlier it starts


class Search:
    """One search; `best` is what was found so far."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        self._task = task
        self._ground = task.ground
        self._random = random.Random(seed)  # noqa: S311
        self.best: Trial | None = None
        self._choice = Choice()
        self._seconds = _LONGEST * task.ground.starts[-1]
        self._problem: Problem | None = None
        if task.machine is not None:
            problem = task.problem()
            self._problem = problem if problem.found else None

    def run(self, seconds: float, patience: float = 1.0) -> Trial | None:
        """For about so long, and as long as the first plan takes; None: there is none.

        Where the first ones make the step take much longer, `patience` times as long.
        """
        has_solver = can_relax()  # which may take a moment
        began = time.perf_counter()
        self.begin()
        if self.best is None or self.best.seconds > _MUCH * self._ground.starts[-1]:
            seconds *= patience
        if has_solver:
            self._guide((), began + _GUIDED * seconds)
        if self._problem is not None:
            self._pass_by(self._problem, began + _PASSED * seconds)
            self._swap(self._problem, began + _SWAPPED * seconds, guided=has_solver)
        if self.best is None:
            return None
        tastes = (replace(self._choice, taste=taste) for taste in _TASTES)
        self._try_cheapest(self._choice.swaps, tastes, began + _TASTED * seconds)
        self._climb(began + seconds)
        if self._choice.swaps:
            self._try(self._choice, thorough=True)
        return self.best

    def begin(self) -> bool:
        """Whether a few tastes find a way, if need be with what cannot be made again away, or all.

        Until there is one, the first will do: to have all away takes long.
        """
        for taste in _FEW:
            self._try(Choice(taste=taste))
        for swaps in self._away() if self.best is None else ():
            if any(self._try(Choice(swaps, taste)) for taste in _FEW):
                break
        return self.best is not None

    def _away(self) -> Iterator[tuple[Swap, ...]]:
        """More and more of what can be, for as long as it can be."""
        problem = self._problem
        if problem is None:
            return
        values, least = problem.trace.values, 0
        for kinds in _LASTING:
            lasting = [one for one in problem.found if values[one.value].kind in kinds]
            if len(lasting) > least:
                yield tuple(schedule(problem.stage, problem.machine, lasting, 0))
            least = len(lasting)
        lasting = [one for one in problem.found if not self._ground.can[one.value]]
        if least < len(lasting) < len(problem.found):
            yield tuple(schedule(problem.stage, problem.machine, lasting, 0))
        yield tuple(schedule(problem.stage, problem.machine, problem.found, 0))

    def _try(self, choice: Choice, *, thorough: bool = False) -> bool:
        """Whether it is no worse than the best; then it is the best.

        Of two that take as long, that is the one which moves less.
        """
        try:
            found = attempt(self._task, choice, self._seconds, thorough=thorough)
        except Stuck:
            return False
        if found is None:
            return False
        best = self.best
        if best is not None and found.seconds > _SAME * best.seconds:
            sizes = self._ground.size
            moved, least = (sum(sizes[s.value] for s in one.swaps) for one in (found, best))
            if moved > least:
                return False
        self._seconds, self.best = found.seconds, found
        self._choice = replace(choice, paces=found.paces)
        return True

    def _try_cheapest(self, swaps: Sequence[Swap], choices: Iterable[Choice], until: float) -> None:
        """Of choices with these swaps the one by which least runs again.

        A pass takes a small part of the time in which a step with swaps is simulated.
        """
        if not swaps:
            for choice in choices:
                if time.perf_counter() < until:
                    self._try(choice)
            return
        least, best, stays = self._seconds, None, stays_of(self._ground, swaps)
        for choice in choices:
            if time.perf_counter() > until:
                break
            with suppress(Stuck):
                found = remake(
                    *(self._ground, self._task.limit, choice.taste, choice.weights),
                    *(least, stays, choice.holds),
                )
                if found is not None and (best is None or found[0] < least):
                    least, best = found[0], choice
        if best is not None:
            self._try(best)

    def _guide(self, swaps: Sequence[Swap], until: float) -> None:
        """Follow what the linear programme says of a step with these swaps."""
        ground = self._ground
        if time.perf_counter() > until:
            return
        hint = relax(ground, self._load(swaps), self._task.limit, {s.value for s in swaps})
        if hint is None:
            return
        choices = []
        for weight, least in _HINTS:
            weights = np.ones(len(ground.size))
            weights[[value for value, share in hint.dropped.items() if share > least]] = weight
            holds = frozenset(value for value, share in hint.held.items() if share > least)
            choices += [
                Choice(tuple(swaps), taste, weights, holds)
                for taste in dict.fromkeys((self._choice.taste, *_FEW))
            ]
        self._try_cheapest(swaps, choices, until)

    def _load(self, swaps: Sequence[Swap]) -> Curve:
        if not swaps or self._problem is None:
            return load_curve(self._ground.trace)
        sizes = [self._ground.size[swap.value] for swap in swaps]
        return held_bytes(self._problem.ground.curve, swaps, sizes)

    def _pass_by(self, problem: Problem, until: float) -> None:
        """Where state has to come and go while its optimizer steps, try to move an even part of it.

        No less than that is too much then. With a little more, there is room to copy both ways
        at once; and what is moved of every piece of the step is what its copies have time for.
        """
        needed = _passing_by(problem, self._task.limit)
        values, ops = problem.trace.values, self._ground.ops
        idle = (one for one in problem.found if one.until >= ops)
        lasting = [one for one in idle if values[one.value].kind is Kind.STATE]
        total = sum(one.bytes for one in lasting)
        if not 0 < needed <= total:
            return
        for more in _MORE:
            now = time.perf_counter()
            if now > until or needed / total + more > 1.0:
                continue
            picked = _evenly(lasting, needed / total + more)
            swaps = tuple(_scheduled(problem, picked, self._task.limit))
            for taste in dict.fromkeys((self._choice.taste, *_SHORT)):
                if time.perf_counter() < until:
                    self._try(Choice(swaps, taste), thorough=True)

    def _swap(self, problem: Problem, until: float, *, guided: bool) -> None:
        """Try to swap more and more."""
        peak, limit = problem.plain_peak, self._task.limit
        alone = [plain_score(problem, name, limit) for name in ("swdoa", "doa", "vote", "lead")]
        beside = [_dear(problem, self._ground), None]
        for share, orders in ((1.0, alone), *((share, beside) for share in _SHARES)):
            aim = round(peak - share * (peak - limit))
            for scores in orders:
                picked = choose(problem, scores, aim).chosen
                # So that nothing waits; back as soon as there is room by what is swapped alone; or
                # not before there is all the same, when what cannot be made again is in the way.
                for within in dict.fromkeys((None, aim, limit)):
                    now = time.perf_counter()
                    if now > until:
                        return
                    swaps = tuple(_scheduled(problem, picked, within))
                    if not swaps:
                        continue
                    choice = Choice() if orders is alone else self._choice
                    thorough = orders is alone and within == limit  # as autoswap would
                    self._try(replace(choice, swaps=swaps, paces=()), thorough=thorough)
                    if guided and orders is beside:
                        self._guide(swaps, min(until, now + (until - now) / 4))
                    elif self.best is None:
                        for taste in _FEW:
                            self._try(Choice(swaps, taste))

    def _climb(self, until: float) -> None:
        ground, draw = self._ground, self._random
        changes = self._changes() if any(ground.can) else None
        exchanges = self._exchanges(self._problem) if self._problem is not None else None
        groups = _alike(ground, ground.holdable)
        while time.perf_counter() < until and (changes or exchanges):
            choice = self._choice
            if exchanges and (not changes or draw.random() < _EXCHANGED):
                self._try(replace(choice, swaps=tuple(next(exchanges))))
            elif groups and draw.random() < _HELD:
                group = draw.choice(groups)
                if draw.random() < 0.5:
                    group = group[draw.randrange(len(group)) :: draw.choice((1, 2))]
                self._try(replace(choice, holds=choice.holds ^ frozenset(group)))
            elif changes:
                weights = np.ones(len(ground.size)) if choice.weights is None else choice.weights
                weights = weights.copy()
                next(changes)(weights)
                self._try(replace(choice, weights=weights))

    def _exchanges(self, problem: Problem) -> Iterator[list[Swap]]:
        """Other choices of what is swapped, for ever."""
        draw = self._random
        while True:
            chosen = list(self._choice.swaps)
            if chosen and draw.random() < 0.6:
                for _ in range(draw.choice((1, 1, 2, 4))):
                    if chosen:
                        chosen.pop(draw.randrange(len(chosen)))
            if not chosen or draw.random() < 0.6:
                taken = {(swap.value, swap.after) for swap in chosen}
                free = [c for c in problem.found if (c.value, c.after) not in taken]
                more = draw.sample(free, min(len(free), draw.choice((1, 1, 2, 4))))
                chosen += _scheduled(problem, more, None)
            yield chosen

    def _changes(self) -> "Iterator[_Change]":
        """Ways to change the weights, for ever."""
        ground, draw = self._ground, self._random
        able = [value for value, can in enumerate(ground.can) if can]
        able.sort(key=lambda value: ground.maker[value])
        groups = [group for group in _alike(ground, able) if len(group) > 1]
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
        ground = self._ground
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


def _scheduled(problem: Problem, picked: Sequence[Candidate], within: int | None) -> list[Swap]:
    return schedule(problem.stage, problem.machine, picked, within, slack=_EARLY)


def _passing_by(problem: Problem, limit: int) -> int:
    """Bytes above the limit while an optimizer steps."""
    ops = zip(problem.trace.ops, problem.ground.curve.tolist(), strict=True)
    return max((held for op, held in ops if op.phase is Phase.OPTIMIZER), default=0) - limit


def _evenly(found: Sequence[Candidate], part: float) -> list[Candidate]:
    """So large a part of them, and of every stretch in the order in which they fall idle."""
    picked: list[Candidate] = []
    owed = 0.0
    for one in sorted(found, key=lambda one: one.after):
        owed += part * one.bytes
        if one.bytes <= 2 * owed:
            picked.append(one)
            owed -= one.bytes
    return picked


def _alike(ground: Ground, values: Iterable[int]) -> list[list[int]]:
    """Those of one size that ops of one kind make, together."""
    alike: dict[tuple[str, int], list[int]] = defaultdict(list)
    for value in values:
        maker = ground.maker[value]
        name = ground.trace.ops[maker].name if maker >= 0 else ""
        alike[name, ground.size[value]].append(value)
    return list(alike.values())


def _dear(problem: Problem, ground: Ground) -> Scores:
    """First what cannot be made again, then what takes long to make for its size."""
    seconds = ground.seconds()
    found = np.array(
        [seconds[c.value] / c.bytes if ground.can[c.value] else np.inf for c in problem.found]
    )
    most = found[np.isfinite(found)].max(initial=0.0)
    return np.where(np.isfinite(found), found, 2 * most + 1.0)
