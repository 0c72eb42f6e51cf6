"""Steps by a plan, measured -> whether to try another plan, and by which to go on (Capuchin).

A plan is made for what a device does, before anybody knows what it takes to ask for it. Where steps
take longer than planned it is the host that is waited for, mostly, and a plan that asks for less is
faster. So such steps are planned again with what was measured, once or twice, and whichever
plan turns out to be faster stays.
"""

from enum import Enum, auto
from statistics import median
from time import perf_counter
from typing import Self

from lowtide._ir import Drop
from lowtide._policy.host import Host, count_acts, count_reruns
from lowtide._runtime.swap.script import Script

SETTLED, _MEASURED = (
    8,
    4,
)  # steps by a plan, as all to come; of them the last, by which it is judged
_OFF = 1.05  # times what was planned
_ROUNDS = 2
_SHARES = (0.2, 0.4, 0.6, 0.8)  # of what a plan moves, that another one does not


class Verdict(Enum):
    """What is to become of a plan."""

    WAIT = auto()  # too little is known
    KEEP = auto()
    BACK = auto()  # to the one before
    ANOTHER = auto()


def judge(script: Script) -> Verdict:
    """By its last steps."""
    if script.judged or len(script.settled) < SETTLED:
        return Verdict.WAIT
    plan, measured = script.plan, measured_seconds(script)
    if not plan.swaps and not plan.remakes:
        return Verdict.KEEP  # it adds nothing to a step
    if script.rival is not None and measured_seconds(script.rival) <= measured:
        return Verdict.BACK
    if measured <= _OFF * plan.seconds or script.rounds >= _ROUNDS:
        return Verdict.KEEP
    return Verdict.ANOTHER


def measured_seconds(script: Script) -> float:
    """Of a step by it, when memory lay as it was going to."""
    return median(script.settled[-_MEASURED:])


class Spent:
    """Seconds of the host, a sum and a count: what lowtide itself adds to a step."""

    def __init__(self) -> None:
        self._began = 0.0
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.seconds = 0.0
        self.count = 0

    def __enter__(self) -> Self:
        self._began = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._began

    def each(self) -> float:
        """On average."""
        return self.seconds / self.count if self.count else 0.0


def host_of(script: Script, reruns: Spent, acts: Spent, hooked: float) -> Host:
    """What the host takes for steps like it, from those that were measured.

    Where saves are dealt with, for `hooked` seconds a step, more is done than acts and reruns:
    that, too, is for what moves.
    """
    plan = script.plan
    again = count_reruns(plan.remakes) * reruns.each()
    count = count_acts(plan.remakes, plan.swaps)
    each = max(acts.each(), (hooked - again) / max(1, count))
    seconds = max(0.0, measured_seconds(script) - again - count * each)
    return Host(seconds, reruns.each(), each, _coarser(script))


def _coarser(script: Script) -> tuple[int, ...]:
    """Sizes between those of what its plan moves: without what is smaller, less does."""
    saves, values = script.observed.saves, script.observed.trace.values
    moved = {one.value for one in script.plan.remakes if isinstance(one, Drop)}
    moved |= {swap.value for swap in script.plan.swaps}
    sizes = sorted(values[value].bytes for value in moved & saves.keys())
    picked = {sizes[int(share * len(sizes))] + 1 for share in _SHARES if sizes}
    return tuple(sorted(least for least in picked if least <= sizes[-1]))
