"""AutoSwap: swap to the tier below what is not in use.

"Efficient Memory Management for GPU-based Deep Learning Systems", Zhang et al. 2019. Candidates
are picked in the order of a score until the load is within the limit (`select`), and scheduled
either so that compute never waits, whatever peak that leaves ("free"), or so that the limit is
kept, whatever that costs ("limit").

What is simulated is what is returned: copies of both directions contend, and a wait delays all
that follows, neither of which the published code knew. Known to be imperfect: the choice is
greedy and sees the link only through DOA and AOA; nothing is ever recomputed.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Literal

import numpy as np

from lowtide._errors import BadInput, LowtideError
from lowtide._ir import Machine, OpIndex, Plan, Trace, ValueId
from lowtide._policy.candidates import Reach
from lowtide._policy.combine import combined, tune_weights
from lowtide._policy.problem import (
    PLAIN_SCORES,
    Problem,
    Trial,
    best_within,
    choose,
    keep,
    make_problem,
    plain_score,
    try_swaps,
)
from lowtide._policy.schedule import schedule
from lowtide._policy.scores import Scores
from lowtide._units import format_bytes

SCORES = (*PLAIN_SCORES, "bayes")
BEST = "best"  # of a few scores, whichever comes out best
_TRIED = {"limit": ("swdoa", "doa", "vote", "lead"), "free": ("swdoa", "lead")}
FREE_RATIO = 1.005  # by plan; measured, a step that takes 1.01 of the plain one counts as free
_AHEAD = 0.02  # of a step, that copies are over before anybody waits for them: no op is on time

# By which shares of what swapping could save at most, or of the best found so far, it is tried.
_COARSE = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03, 0.015)
_FINE = (0.8, 0.9, 1.1, 1.2, 1.3)
_FINER = (0.94, 0.97, 1.03, 1.06)

Scorer = Callable[[int], Scores | None]


class CannotFit(LowtideError):
    """No choice of this policy is within the limit; `smallest_bytes` is one that can be met."""

    def __init__(self, message: str, smallest_bytes: int, op: OpIndex) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.op = op


def autoswap(
    trace: Trace,
    machine: Machine,
    *,
    limit: int | None,
    score: str = BEST,
    mode: Literal["limit", "free"] = "limit",
    host_budget: int | None = None,
    reach: Reach = Reach.RUNTIME,
    held: Mapping[ValueId, OpIndex] | None = None,
    movable: Container[ValueId] | None = None,
    positions: Sequence[int] | None = None,
    smallest: int = 1 << 20,
) -> Plan:
    """The plan that keeps the load within `limit` bytes, or raises `CannotFit`.

    In mode "free" compute never waits and the peak is the lowest that can be had so; a limit
    only says below which peak there is no need to go. At most `host_budget` bytes are away at once.
    `positions` are those at which the runtime can act; `held`, `movable` and `reach` say what it
    can move.
    """
    if score not in (*SCORES, BEST):
        raise BadInput(f"no score is called {score!r}: known are {', '.join(SCORES)}, {BEST}")
    if mode not in ("limit", "free"):
        raise BadInput(f"no mode is called {mode!r}: known are limit, free")
    if mode == "limit" and limit is None:
        raise BadInput("mode limit needs a limit in bytes: give one, or take mode free")
    problem = make_problem(
        trace,
        machine,
        reach=reach,
        held=held,
        movable=movable,
        positions=positions,
        host_budget=host_budget,
        smallest=smallest,
    )
    found: list[tuple[str, Trial]] = []
    refusals = []
    for name in _TRIED[mode] if score == BEST else (score,):
        try:
            found.append((name, _planned(problem, name, mode, limit)))
        except CannotFit as refusal:
            refusals.append(refusal)
    if not found:
        raise min(refusals, key=lambda refusal: refusal.smallest_bytes)
    score, trial = min(
        found,
        key=lambda named: (
            (named[1].outcome.seconds, named[1].outcome.peak_bytes)
            if mode == "limit"
            else (named[1].outcome.peak_bytes, named[1].outcome.seconds)
        ),
    )
    return Plan(
        swaps=trial.swaps,
        peak_bytes=trial.outcome.peak_bytes,
        seconds=trial.outcome.seconds,
        plain_peak_bytes=problem.plain_peak,
        plain_seconds=trial.outcome.plain_seconds,
        policy=f"autoswap/{score}",
        machine=machine.name,
    )


def _planned(problem: Problem, score: str, mode: str, limit: int | None) -> Trial:
    if mode == "limit":
        assert limit is not None
        return _fastest_within(problem, score, limit)
    trial = _lowest_free(problem, score, limit or 0)
    if limit is not None and trial.outcome.peak_bytes > limit:
        peak_op = OpIndex(trial.outcome.peak_op)
        raise _cannot(problem, limit, trial.outcome.peak_bytes, peak_op, " without waiting")
    return trial


def _scorer(problem: Problem, name: str, limit: int) -> Scorer:
    """The scores at any limit; a combination is tuned at this one."""
    if name != "bayes":
        return lambda at: plain_score(problem, name, at)
    weights = tune_weights(problem, limit)
    return lambda at: combined(problem, weights, at)


def _fastest_within(problem: Problem, score: str, limit: int) -> Trial:
    lowest = choose(problem, None, limit)
    if problem.host_budget is None and lowest.peak_bytes > limit:
        # Every order ends with all that helps being away, so the order does not matter.
        raise _cannot(problem, limit, lowest.peak_bytes, OpIndex(lowest.peak_op))
    scorer = _scorer(problem, score, limit)
    selection = choose(problem, scorer(limit), limit)
    if selection.peak_bytes > limit:
        reachable = selection
        while True:  # with less above the limit the order is another, and so is what it reaches
            aim = reachable.peak_bytes
            reachable = choose(problem, scorer(aim), aim)
            if reachable.peak_bytes <= aim:
                break
        raise _cannot(problem, limit, aim, OpIndex(selection.peak_op))
    trial = best_within(problem, selection.chosen, limit)
    assert trial.outcome.peak_bytes <= limit, "a schedule must keep the limit its choice can keep"
    return trial


def _lowest_free(problem: Problem, score: str, limit: int) -> Trial:
    """Aim at one peak after another, and keep the lowest that comes out.

    What comes out is above the aim where copies cannot be hidden, and not monotone in it: a low
    aim takes values that fill the lanes to no avail. So a coarse row of aims first, closer to each
    other where little is saved, then finer ones around the best.
    """
    highest = problem.plain_peak
    floor = max(choose(problem, None, 0).peak_bytes, limit)
    if floor >= highest:
        return try_swaps(problem, ())
    scorer = _scorer(problem, score, (floor + highest) // 2)
    best, saved = try_swaps(problem, ()), 0.0
    for shares in (_COARSE, _FINE, _FINER):
        around = saved or 1.0
        for share in shares:
            aim = round(highest - share * around * (highest - floor))
            trial = _free(problem, scorer, max(aim, floor))
            if trial.outcome.peak_bytes < best.outcome.peak_bytes:
                best, saved = trial, share * around
        if not saved:
            break
    return best


def _free(problem: Problem, scorer: Scorer, aim: int) -> Trial:
    """Aim at one peak without waiting; what could not be hidden makes way for others."""
    best = try_swaps(problem, ())
    scores, ahead = scorer(aim), _AHEAD * problem.clock.period
    for slack in sorted({1.0, 1 / problem.machine.together}):
        left, left_scores, waited = problem, scores, False
        for _ in range(4):
            chosen = choose(left, left_scores, aim).chosen
            swaps = schedule(problem.stage, problem.machine, chosen, None, slack=slack, ahead=ahead)
            trial = try_swaps(problem, swaps)
            outcome = trial.outcome
            if outcome.seconds > FREE_RATIO * outcome.plain_seconds:
                waited = True
            elif outcome.peak_bytes < best.outcome.peak_bytes:
                best = trial
            failed = {(c.value, c.after) for c in chosen} - {(s.value, s.after) for s in swaps}
            if not failed or outcome.peak_bytes <= aim:
                break
            kept = np.array([(c.value, c.after) not in failed for c in left.found])
            left = keep(left, kept)
            left_scores = None if left_scores is None else left_scores[kept]
        if not waited:
            break  # the two directions are hardly ever busy at once: no need to allow for it
    return best


def _cannot(problem: Problem, limit: int, lowest: int, op: OpIndex, how: str = "") -> CannotFit:
    culprit = problem.trace.ops[op]
    place = f"{culprit.module} / {culprit.name}" if culprit.module else culprit.name
    return CannotFit(
        f"the budget is {format_bytes(limit)} ({limit} bytes), but swapping{how} cannot go below "
        f"{format_bytes(lowest)} ({lowest} bytes): op {op}, {place}, needs that much at once",
        lowest,
        op,
    )
