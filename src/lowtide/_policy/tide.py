"""Tide: what stays, what is swapped and what is made again, chosen for the step's time.

See `search` for how it is looked for, `joint` for what a trial is, `remake` for the pass over the
step that decides what is made again, and `relax` for the bound.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from lowtide._analyze.load import find_peak
from lowtide._ir import Machine, OpIndex, Plan, Trace
from lowtide._policy.autoswap import CannotFit
from lowtide._policy.ground import Ground, Runtime
from lowtide._policy.joint import Choice, Task, as_plan, attempt
from lowtide._policy.search import Search
from lowtide._policy.taste import Stuck
from lowtide._simulate.remade import remade
from lowtide._units import format_bytes

_SMALLER = 0.005  # of the plain peak: how closely the smallest limit is looked for


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
    patience: float = 1.0,
) -> Plan:
    """The fastest plan that was found within `limit` bytes, or raises `CannotFit`.

    Without a machine nothing is swapped. The search takes about `seconds`, and as long as the first
    plan takes if that is longer; `patience` times that where the step then takes much longer.
    """
    peak = find_peak(trace)
    plain = sum(op.seconds for op in trace.ops)
    if peak.bytes <= limit:
        name = "" if machine is None else machine.name
        return Plan((), peak.bytes, plain, peak.bytes, plain, "tide", name)
    with _without_collections():
        ground = Ground(trace, runtime)
        task = Task(ground, machine, limit, runtime, smallest, host_budget)
        best = Search(task, seed).run(seconds, patience)
        if best is None:
            raise _cannot(task, peak.bytes)
        found = find_peak(remade(trace, best.remakes).trace).bytes if not best.swaps else 0
    return as_plan(task, best, found or best.peak_bytes, peak.bytes)


@contextmanager
def _without_collections() -> Iterator[None]:
    """A search makes many objects and no circle: to look for those took a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _cannot(task: Task, peak: int) -> CannotFit:
    """With the smallest limit that was found to be met, and the op at which this one was not."""
    worst = 0
    try:
        attempt(task, Choice())
    except Stuck as stuck:
        worst = stuck.op
    low, high = task.limit, peak
    while high - low > max(1.0, _SMALLER * peak):
        middle = (low + high) // 2
        if Search(replace(task, limit=middle)).begin():
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
