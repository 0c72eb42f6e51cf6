"""An exact answer for small problems, from OR-tools' CP-SAT (the extra `lowtide[exact]`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide._errors import BadInput
from lowtide._layout.buffers import Buffer, pieces, rounded


@dataclass(frozen=True, slots=True)
class Exact:
    """The best layout found; `proved` when none is lower. No offsets: the capacity is too small."""

    offsets: list[int] | None
    bound: int
    proved: bool


def exact(
    buffers: Sequence[Buffer],
    *,
    align: int = 1,
    period: int | None = None,
    capacity: int | None = None,
    seconds: float = 60.0,
    seed: int = 0,
) -> Exact:
    """Minimise the height with one integer for each offset and no two rectangles overlapping."""
    cp_model = _solver()
    model = cp_model.CpModel()
    most = sum(rounded(buffer.size, align) for buffer in buffers)
    most += max(buffer.offset or 0 for buffer in buffers)
    if capacity is not None:
        most = min(most, capacity)
    height = model.new_int_var(0, most, "height")
    offsets, times, bytes_ = [], [], []
    for i, buffer in enumerate(buffers):
        if buffer.size > most:
            return Exact(None, buffer.size, proved=True)
        turns = model.new_int_var(0, (most - buffer.size) // align, f"turns{i}")
        offset = turns * align
        if buffer.offset is not None:
            model.add(offset == buffer.offset)
        model.add(offset + buffer.size <= height)
        for lower, upper in pieces(buffer, period):
            times.append(model.new_fixed_size_interval_var(lower, upper - lower, f"t{i}"))
            bytes_.append(model.new_fixed_size_interval_var(offset, buffer.size, f"b{i}"))
        offsets.append(offset)
    model.add_no_overlap_2d(times, bytes_)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed % 2**31
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Exact(None, most + 1, proved=True)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(None, 0, proved=False)
    found = [int(solver.value(offset)) for offset in offsets]
    return Exact(found, int(solver.best_objective_bound), proved=status == cp_model.OPTIMAL)


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise BadInput(
            "method exact needs OR-tools: pip install 'lowtide[exact]', or use another method"
        ) from error
    return cp_model
