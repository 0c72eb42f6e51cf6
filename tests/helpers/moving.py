"""A plan for tests: all that can move does."""

from typing import Any

from lowtide._analyze.load import find_peak
from lowtide._ir import Machine, Plan, Trace
from lowtide._policy.candidates import candidates, make_grid
from lowtide._policy.schedule import schedule
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.simulate import simulate


def everything(trace: Trace, machine: Machine, **asked: Any) -> Plan:
    """A plan that moves all that can move, as early and for as long as can be."""
    found = candidates(trace, smallest=asked["smallest"], reach=asked["reach"], held=asked["held"])
    found = make_grid(trace, asked["positions"]).fit(found)
    planned = tuple(schedule(trace, machine, found, 1, asked["positions"]))
    assert find_bad_swap(trace, planned) is None
    outcome = simulate(trace, machine, planned)
    plain = find_peak(trace).bytes
    return Plan(planned, outcome.peak_bytes, outcome.seconds, plain, outcome.plain_seconds)
