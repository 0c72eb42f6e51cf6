"""Some values swapped, others made again: one step of both, simulated.

Which values are swapped is given, as swaps of the step as it was traced. What then is still above
the limit is made again (`remake`). With the reruns in it the step is another one: it is longer, and
an op that runs again may need a swapped value earlier. So the swaps are scheduled anew in that one,
and that one is simulated.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from lowtide._analyze.load import rounded_bytes
from lowtide._ir import Kind, Machine, OpIndex, Plan, Remake, Swap, ValueId
from lowtide._machine.link import seconds as link_seconds
from lowtide._policy.candidates import Candidate, Reach
from lowtide._policy.ground import Ground, Runtime
from lowtide._policy.problem import PACES, ROUNDS, Pace, Problem, best_within, make_problem
from lowtide._policy.remake import remake
from lowtide._policy.taste import Taste, Weights
from lowtide._simulate.remade import Remade, remade


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A step, a machine, and what may be done."""

    ground: Ground
    machine: Machine | None  # None: nothing is swapped
    limit: int
    runtime: Runtime | None
    smallest: int  # bytes of what is worth swapping
    host_budget: int | None

    def problem(self, step: Remade | None = None) -> Problem:
        """Of swapping, in the step as it was traced or as it was made."""
        assert self.machine is not None
        runtime = self.runtime
        trace = self.ground.trace if step is None else step.trace

        def at(position: int) -> OpIndex:
            return OpIndex(position if step is None else step.position(position))

        return make_problem(
            trace,
            self.machine,
            reach=Reach.ALL if runtime is None else Reach.RUNTIME,
            held=None if runtime is None else {v: at(p) for v, p in runtime.held.items()},
            movable=None if runtime is None else runtime.movable,
            positions=None if runtime is None else [at(p) for p in runtime.positions],
            host_budget=self.host_budget,
            smallest=self.smallest,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a trial tries. `swaps` are of the step as it was traced.

    `paces`: they are scheduled at these, one after the other; without, once, at the usual one.
    """

    swaps: tuple[Swap, ...] = ()
    taste: Taste = field(default_factory=Taste)
    weights: Weights | None = None
    holds: frozenset[int] = frozenset()
    paces: tuple[Pace, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """What is done, and what comes of it. `swaps` are of the step with its reruns."""

    remakes: tuple[Remake, ...]
    swaps: tuple[Swap, ...]
    seconds: float
    peak_bytes: int
    paces: tuple[Pace, ...] = ()  # at which the swaps were scheduled, if others may be better


def attempt(
    task: Task, choice: Choice, most_seconds: float = inf, *, thorough: bool = False
) -> Trial | None:
    """None: it takes longer than `most_seconds`, or more than the limit. Raises `Stuck`.

    `thorough`: the best of all paces is looked for.
    """
    ground = task.ground
    plain = ground.starts[-1]
    drag = 0.0
    if task.machine is not None and choice.swaps:
        out, back = _copying(task.machine, ground, choice.swaps)
        if max(out, back) > most_seconds:  # a step takes as long as the busier lane, at least
            return None
        drag = task.machine.drag * (out + back)
    found = remake(
        ground,
        task.limit,
        choice.taste,
        choice.weights,
        most_seconds - plain - drag,
        choice.swaps,
        choice.holds,
    )
    if found is None:
        return None
    again, remakes = found
    if not choice.swaps:
        return Trial(tuple(remakes), (), plain + again, task.limit)
    step = remade(ground.trace, remakes)
    problem = task.problem(step)
    trial = best_within(
        problem,
        _again(problem, step, choice.swaps),
        task.limit,
        paces=PACES if thorough else (Pace(),),
        rounds=ROUNDS if thorough else 0,
        known=() if thorough else choice.paces,
    )
    outcome = trial.outcome
    if outcome.peak_bytes > task.limit or outcome.seconds > most_seconds:
        return None
    if task.host_budget is not None and _below(step, trial.swaps) > task.host_budget:
        return None
    paces = trial.paces if thorough or choice.paces else ()
    return Trial(tuple(remakes), trial.swaps, outcome.seconds, outcome.peak_bytes, paces)


def _copying(machine: Machine, ground: Ground, swaps: Sequence[Swap]) -> tuple[float, float]:
    """How long each lane copies in a step: hardly ever is a swap found not to be needed later."""
    sizes = [ground.size[swap.value] for swap in swaps]
    out = sum(link_seconds(machine.out, size) for size in sizes)
    return out, sum(link_seconds(machine.back, size) for size in sizes)


def _below(step: Remade, swaps: Sequence[Swap]) -> int:
    """Bytes of the tier below that are taken at once, at most: a copy there until it is back."""
    count = len(step.trace.ops)
    change = np.zeros(2 * count + 1, dtype=np.int64)
    for swap in swaps:
        size = rounded_bytes(step.trace, step.trace.values[swap.value])
        change[swap.after + 1] += size
        change[min(swap.until + 1, 2 * count)] -= size
    below = np.cumsum(change)
    return int((below[:count] + below[count : 2 * count]).max())


def _again(problem: Problem, step: Remade, chosen: Sequence[Swap]) -> list[Candidate]:
    """The stays of the new step that begin as the chosen ones of the old step do."""
    by_value: dict[ValueId, list[Candidate]] = defaultdict(list)
    for candidate in problem.found:
        by_value[candidate.value].append(candidate)
    found = []
    traced = frozenset(step.at)
    count = len(step.trace.ops)
    for swap in chosen:
        release = step.position(swap.release)
        weight = step.trace.values[swap.value].kind is Kind.PARAMETER
        for candidate in by_value[swap.value]:
            if candidate.earliest <= release < candidate.latest:
                # What was dropped and is made from a weight keeps that.
                if not weight or candidate.until % count in traced:
                    found.append(candidate)
                break
    return found


def as_plan(task: Task, trial: Trial, peak: int, plain_peak: int) -> Plan:
    """The trial, to be kept."""
    return Plan(
        trial.swaps,
        peak,
        trial.seconds,
        plain_peak,
        task.ground.starts[-1],
        "tide",
        "" if task.machine is None else task.machine.name,
        trial.remakes,
    )
