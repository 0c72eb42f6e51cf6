"""A traced step -> the plan of those like it, by whichever policy is asked for.

Weights and gradients move only where no plan does without: state is idle for longer, and nobody
but its optimizer looks at it. By swapping alone they do not: nobody sees then who writes to them.

Plans are made for a link that is a little slower than it was measured to be, and timed by the one
that there is. A plan uses up what time copies have; if they all take a little longer, so much
longer is waited for the last of them, in every step. One that allows for it takes no longer.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial

from lowtide._analyze.load import find_peak
from lowtide._ir import Machine, Plan, Trace
from lowtide._machine.link import slower
from lowtide._policy.autoswap import CannotFit, autoswap
from lowtide._policy.candidates import Reach
from lowtide._policy.host import Host
from lowtide._policy.tide import tide
from lowtide._runtime.swap.lying import plan_with_layout
from lowtide._runtime.swap.observe import movable_in, runtime_of
from lowtide._runtime.swap.pace import paced
from lowtide._runtime.swap.script import Observed
from lowtide._simulate.remade import remade
from lowtide._simulate.simulate import simulate

_ACT_SECONDS = 45e-6  # of the host, for each part of a swap; seen beside an H200
_BUSY = 0.9  # of a step: a device that computes for less waits for the host
_BOUND = 0.95  # ... and for one that computes for more the host waits
SWAPPING_SPARE = 0.005  # of a limit, by swapping alone: layouts show what else is missing
_LATE = 1.03  # times what a copy takes alone
_SECONDS, _PATIENCE = 2.0, 3.0  # of search for a better plan; times so many where it is tight


def plan_by_tide(
    observed: Observed,
    machine: Machine,
    *,
    limit: int,
    highest: int | None,
    host_budget: int,
    smallest: int,
    host: Host | None = None,
) -> Plan | None:
    """Of steps that hold no more than `limit`; None: none was found.

    `highest`: a layout is looked for that lies within so many bytes. `host`: what it is known to
    take for a plan that it had no time for. So those are looked for which ask it for less: no step
    is faster than it is asked for.
    """
    if host is None:
        return _plan_by_tide(observed, machine, limit, highest, host_budget, smallest, 0, _SECONDS)
    found: list[Plan] = []
    for least in host.least:
        plan = _plan_by_tide(
            observed, machine, limit, highest, host_budget, smallest, least, _SECONDS / 2
        )
        if plan is None:
            break  # nor with still less
        asked = host.step_seconds(plan.remakes, plan.swaps)
        found.append(replace(plan, seconds=max(plan.seconds, asked)))
    return min(found, key=lambda plan: plan.seconds, default=None)


def _plan_by_tide(
    observed: Observed,
    machine: Machine,
    limit: int,
    highest: int | None,
    host_budget: int,
    smallest: int,
    least: int,
    seconds: float,
) -> Plan | None:
    """In which nothing smaller than `least` is dropped or moved."""
    for guests in (False, True):
        runtime = runtime_of(observed, guests=guests)
        if least:
            values = observed.trace.values
            large = {value for value in observed.droppable if values[value].bytes >= least}
            runtime = replace(runtime, droppable=large)
        within = partial(
            tide,
            observed.trace,
            _careful(machine),
            seconds=seconds,
            patience=_PATIENCE,
            runtime=runtime,
            smallest=max(smallest, least),
            host_budget=host_budget,
        )
        with suppress(CannotFit):
            if highest is None:
                return _as_measured(observed, within(limit=limit), machine)
            plan = plan_with_layout(observed.trace, within, limit, highest)
            return plan and _as_measured(observed, plan, machine)
    return None


def _careful(machine: Machine) -> Machine:
    return replace(machine, out=slower(machine.out, _LATE), back=slower(machine.back, _LATE))


def _timed(plan: Plan, trace: Trace, machine: Machine) -> Plan:
    """By the link that there is."""
    if not plan.swaps:
        return plan
    outcome = simulate(remade(trace, plan.remakes).trace, machine, plan.swaps)
    return replace(plan, seconds=outcome.seconds)


def _as_measured(observed: Observed, plan: Plan, machine: Machine) -> Plan:
    """Where nothing is moved or dropped, ops run one by one, as in the step that was traced."""
    plain = observed.plain_seconds
    if plan.swaps or plan.remakes:
        return replace(_timed(plan, observed.trace, machine), plain_seconds=plain)
    return replace(plan, plain_seconds=plain, seconds=plain)


def plan_by_swapping(
    observed: Observed,
    machine: Machine,
    *,
    limit: int | None,
    host_budget: int,
    smallest: int,
    spare: float = 0.0,
) -> Plan:
    """Without a limit: as little as costs no time, that of the host included.

    Of a limit, that share is left if it can be: the last pages of blocks are not full.
    """
    plain = find_peak(observed.trace).bytes
    if limit is not None and spare and plain > limit:
        with suppress(CannotFit):
            less = int((1 - spare) * limit)
            return plan_by_swapping(
                observed, machine, limit=less, host_budget=host_budget, smallest=smallest
            )
    trace = _as_it_runs(observed)
    seconds = sum(op.seconds for op in trace.ops)
    keep = Plan((), plain, seconds, plain, seconds, "keep", machine.name)
    if limit is not None and plain <= limit:
        return keep
    busy = sum(op.seconds for op in observed.trace.ops)
    host = Host(0.0, 0.0, 0.0)
    if observed.asked and trace.device != "cpu" and busy < _BUSY * seconds:
        host = Host(observed.asked[-1], 0.0, _ACT_SECONDS)
        if limit is None:
            return keep  # whatever else it does takes time
    plan = autoswap(
        trace,
        _careful(machine),
        limit=limit,
        mode="free" if limit is None else "limit",
        host_budget=host_budget,
        reach=Reach.RUNTIME,
        held=observed.held,
        movable=movable_in(observed, guests=False),
        positions=sorted(set(observed.positions)),
        smallest=smallest,
    )
    plan = _timed(plan, trace, machine)
    return replace(plan, seconds=max(plan.seconds, host.step_seconds((), plan.swaps)))


def _as_it_runs(observed: Observed) -> Trace:
    """The step with the time in it that the device waits for the host.

    Where the device is busy all the time it is the host that waits: it asks for an op late, and not
    because it is slow. Ops that were taken to come later than they do would have to wait for copies
    that are still under way.
    """
    trace = observed.trace
    if not observed.asked:
        return trace
    as_asked = paced(trace, observed.positions, observed.asked)
    busy, seconds = (sum(op.seconds for op in one.ops) for one in (trace, as_asked))
    bound = trace.device != "cpu" and busy >= _BOUND * seconds
    return trace if bound else as_asked
