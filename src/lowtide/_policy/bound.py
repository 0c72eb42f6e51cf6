"""Trace, limit -> seconds of recomputing that no plan can do without. Needs `lowtide[exact]`.

A value can only be away between two of its uses, and each time it was away the op that made it has
to run again; one that makes several values may bring them all back at once, so each carries its
part of the op's time. What is away while an op runs must make up for what is above the limit
there. Values may go in part: a linear programme, over some of the ops.

Known to be imperfect: what has to be there to make a value again costs nothing here, so for tight
limits the bound is far below what can be done.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from lowtide._analyze.load import load_curve
from lowtide._errors import BadInput
from lowtide._ir import Trace
from lowtide._policy.ground import Ground

_MOST_OPS = 300  # at which the limit is looked at


def least_recompute_seconds(trace: Trace, limit: int) -> float:
    """No plan that recomputes, and does nothing else, runs less again."""
    try:
        from ortools.linear_solver import pywraplp
    except ImportError:
        raise BadInput("a bound needs OR-Tools: pip install 'lowtide[exact]'") from None
    ground = Ground(trace)
    curve = load_curve(trace)
    above = np.flatnonzero(curve > limit)
    if not len(above):
        return 0.0
    step = max(1, len(above) // _MOST_OPS)
    looked_at = sorted({*above[::step].tolist(), int(curve.argmax())})
    solver = pywraplp.Solver.CreateSolver("GLOP")
    # In numbers near 1, as the solver likes them: per cent of the limit, thousandths of the step.
    bytes_unit = 0.01 * limit
    seconds_unit = 0.001 * max(ground.starts[-1], 1e-9)
    rows = {
        op: solver.Constraint(float(curve[op] - limit) / bytes_unit, solver.infinity())
        for op in looked_at
    }
    objective = solver.Objective()
    objective.SetMinimization()
    positions = np.array(looked_at)
    for value, after, until, seconds in _stays(ground):
        low, high = np.searchsorted(positions, (after + 1, until))
        if low == high:
            continue
        share = solver.NumVar(0.0, 1.0, "")
        objective.SetCoefficient(share, seconds / seconds_unit)
        for op in looked_at[low:high]:
            rows[op].SetCoefficient(share, ground.size[value] / bytes_unit)
    status = solver.Solve()
    if status == pywraplp.Solver.INFEASIBLE:
        return float("inf")
    if status != pywraplp.Solver.OPTIMAL:
        return 0.0
    return float(objective.Value()) * seconds_unit


def _stays(ground: Ground) -> Iterator[tuple[int, int, int, float]]:
    """When each value could be away, and what of an op's time that costs at least."""
    ops = ground.trace.ops
    for value, can in enumerate(ground.can):
        if not can:
            continue
        maker = ground.maker[value]
        able = sum(ground.can[other] for other in ops[maker].writes)
        seconds = ground.again[maker] / able
        end = ground.trace.values[value].end
        uses = [maker, *ground.uses[value]]
        for after, until in pairwise(uses):
            if until - after > 1:
                yield value, after, until, seconds
        if end > uses[-1] + 1:
            yield value, uses[-1], end, 0.0  # nobody needs it any more
