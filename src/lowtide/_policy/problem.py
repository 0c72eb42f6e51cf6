"""What a policy that swaps works on, and one plan for one limit."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lowtide._analyze.load import rounded_bytes
from lowtide._errors import BadInput
from lowtide._ir import Machine, OpIndex, Phase, Swap, Trace, ValueId
from lowtide._policy.candidates import Candidate, Reach, candidates, make_grid
from lowtide._policy.schedule import Stage, schedule
from lowtide._policy.scores import Clock, Scores, aoa, doa, lead, make_clock, vote, wdoa
from lowtide._policy.select import Selection, select
from lowtide._simulate.outcome import Outcome
from lowtide._simulate.simulate import Ground, held_bytes, prepare, simulate_on

PLAIN_SCORES = ("doa", "aoa", "wdoa", "swdoa", "vote", "lead")


@dataclass(frozen=True, slots=True)
class Pace:
    """How a schedule is made (`schedule`); `ahead` is in steps."""

    slack: float = 1.3
    ahead: float = 0.0
    fetch_first: bool = True


# How much earlier than just in time fetches are tried. Where both directions are busy it is late.
_EARLIER = ((1.0, 0.0), (1.3, 0.0), (2.0, 0.0), (1.0, 0.05), (1.0, 0.1))
PACES = tuple(Pace(*earlier, first) for earlier in _EARLIER for first in (True, False))
ROUNDS = 4  # of making a schedule again for what it made of the step
_BEFORE = 0.05  # of a step, that copies out are asked for before their turn
_ROUNDING = 1e-9
_WORTH = 0.01  # of a step: of less waiting nothing is to be gained so


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A step on a machine, and what may leave."""

    trace: Trace
    machine: Machine
    ground: Ground
    stage: Stage
    found: tuple[Candidate, ...]
    areas: Scores  # AOA of each
    host_budget: int | None

    @property
    def clock(self) -> Clock:
        """Of the step as it is if nothing waits."""
        return self.stage.clock

    @property
    def plain_peak(self) -> int:
        """Bytes, if nothing leaves."""
        return int(self.ground.curve.max())


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Swaps, how they went, and the paces they were scheduled at, one for each time."""

    swaps: tuple[Swap, ...]
    outcome: Outcome
    paces: tuple[Pace, ...] = ()


def make_problem(
    trace: Trace,
    machine: Machine,
    *,
    reach: Reach,
    held: Mapping[ValueId, OpIndex] | None,
    movable: Container[ValueId] | None,
    positions: Sequence[int] | None,
    host_budget: int | None,
    smallest: int,
) -> Problem:
    """All that does not depend on the limit, worked out once."""
    ground = prepare(trace, machine)
    stage = Stage(make_grid(trace, positions), make_clock(trace), ground.curve)
    idle = candidates(trace, smallest=smallest, reach=reach, held=held, movable=movable)
    found = tuple(stage.grid.fit(idle))
    return Problem(
        trace,
        machine,
        ground,
        stage,
        found,
        aoa(found, stage.clock, machine),
        host_budget,
    )


def plain_score(problem: Problem, name: str, limit: int) -> Scores | None:
    """The score called `name` of every candidate; None for SWDOA, which `select` works out."""
    found, clock, machine = problem.found, problem.clock, problem.machine
    if name == "swdoa":
        return None
    if name == "doa":
        return doa(found, clock, machine)
    if name == "aoa":
        return problem.areas
    if name == "lead":
        return lead(found, clock, problem.ground.curve)
    weighted = wdoa(found, clock, problem.ground.curve, limit)
    if name == "wdoa":
        return weighted
    if name == "vote":
        return vote(doa(found, clock, machine), problem.areas, weighted)
    raise BadInput(f"no score is called {name!r}: known are {', '.join(PLAIN_SCORES)}, bayes")


def choose(problem: Problem, scores: Scores | None, limit: int) -> Selection:
    """What leaves so that the load is within `limit`, as far as it can be."""
    return select(
        problem.found,
        scores,
        problem.clock,
        problem.ground.curve,
        limit,
        problem.host_budget,
        problem.areas,
    )


def best_within(
    problem: Problem,
    chosen: Sequence[Candidate],
    limit: int,
    *,
    paces: Sequence[Pace] = PACES,
    rounds: int = ROUNDS,
    known: Sequence[Pace] = (),
) -> Trial:
    """The fastest way found to keep `chosen` away so that the load stays within `limit`.

    A schedule is made for a step in which nothing waits. Where compute then does, ops come later,
    and copies that seemed to end too late do not: so it is made again, `rounds` times at most, for
    the step as it came out. `known`: those paces, for one time after the other, are good.
    """
    at: list[Sequence[Pace]] = [(pace,) for pace in known] or [paces] * (rounds + 1)
    best = _fastest(problem, chosen, limit, at[0])
    for some in at[1:]:
        if best.outcome.stall_seconds <= _WORTH * best.outcome.plain_seconds:
            break
        stage = replace(problem.stage, clock=_as_it_came_out(best.outcome))
        trial = _fastest(replace(problem, stage=stage), chosen, limit, some)
        if trial.outcome.seconds >= best.outcome.seconds:
            break
        best = replace(trial, paces=(*best.paces, *trial.paces))
    return _postponed(problem, best) if rounds else best


def _postponed(problem: Problem, trial: Trial) -> Trial:
    """While an optimizer steps, what leaves is dealt with at few moments: it steps in pieces then.

    A copy out has to wait for its turn, so it may be asked for at any moment from when the value
    falls idle until a little before that. Of the last such moments, in order, those are taken that
    are needed. What has left is freed when the step is over, unless more would be held then.
    """
    outcome, clock, grid = trial.outcome, _as_it_came_out(trial.outcome), problem.stage.grid
    end = grid.down(clock.count)
    stepping = np.array([op.phase is Phase.OPTIMIZER for op in problem.trace.ops])
    last = {}
    for k, (start, _) in enumerate(outcome.out_spans):
        idle = trial.swaps[k].after + 1
        if stepping[min(idle, clock.count - 1)]:
            turn = grid.down(clock.last_until(start - _BEFORE * clock.period))
            last[k] = max(idle, min(turn, end))
    swaps, moment = list(trial.swaps), -1
    for k in sorted(last, key=lambda k: (last[k], k)):
        if moment <= swaps[k].after:
            moment = last[k]
        swaps[k] = replace(swaps[k], after=OpIndex(moment - 1))
    over = OpIndex(grid.up(clock.count))
    freed = [
        replace(swap, release=over)
        if swap.release < over <= swap.fetch and stepping[swap.release]
        else swap
        for swap in swaps
    ]
    if swaps == list(trial.swaps) == freed:
        return trial
    most = _most_held(problem, trial.swaps, stepping)
    for some in (freed, swaps):
        later = try_swaps(problem, some)
        same = later.outcome.seconds <= outcome.seconds * (1 + _ROUNDING)
        lower = later.outcome.peak_bytes <= outcome.peak_bytes
        if same and lower and _most_held(problem, some, stepping) <= most:
            return replace(later, paces=trial.paces)
    return trial


def _most_held(problem: Problem, swaps: Sequence[Swap], during: npt.NDArray[np.bool_]) -> int:
    """Bytes: what is free then is what pieces that step at once may take."""
    sizes = [rounded_bytes(problem.trace, problem.trace.values[swap.value]) for swap in swaps]
    return int(held_bytes(problem.ground.curve, swaps, sizes)[during].max(initial=0))


def _fastest(
    problem: Problem, chosen: Sequence[Candidate], limit: int, paces: Sequence[Pace]
) -> Trial:
    trials = []
    for pace in paces:
        swaps = schedule(
            problem.stage,
            problem.machine,
            chosen,
            limit,
            slack=pace.slack,
            ahead=pace.ahead * problem.clock.period,
            fetch_first=pace.fetch_first,
        )
        trials.append(replace(try_swaps(problem, swaps), paces=(pace,)))
    return min(trials, key=lambda trial: trial.outcome.seconds)


def _as_it_came_out(outcome: Outcome) -> Clock:
    end = outcome.plain_seconds + outcome.stall_seconds
    return Clock(np.append(outcome.starts, end))


def try_swaps(problem: Problem, swaps: Sequence[Swap]) -> Trial:
    """Simulate them."""
    return Trial(tuple(swaps), simulate_on(problem.ground, swaps))


def keep(problem: Problem, kept: npt.NDArray[np.bool_]) -> Problem:
    """The problem with only those candidates."""
    found = tuple(c for c, stays in zip(problem.found, kept, strict=True) if stays)
    return replace(problem, found=found, areas=problem.areas[kept])
