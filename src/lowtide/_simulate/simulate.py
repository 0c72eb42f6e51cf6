"""Trace, machine and swaps -> the steady step, fast.

Three lanes: compute, copies out, copies back (`lanes`). Compute runs the ops in order and stops
for nothing but the copies that swaps make it wait for, so between the positions that swaps name
its clock is a prefix sum plus the stalls so far; only those positions are visited. A stall delays
everything after it. What is held depends on positions alone, because compute waits.

`reference` tells the same story slowly; the tests compare the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lowtide._analyze.load import Curve, load_curve, rounded_bytes
from lowtide._errors import BadInput
from lowtide._ir import Machine, Swap, Trace
from lowtide._machine.link import seconds as link_seconds
from lowtide._simulate.lanes import Lanes, Pending
from lowtide._simulate.outcome import Outcome

MOST_STEPS = 16  # swaps across the boundary may need some to settle, and need not settle at all
_TOLERANCE = 1e-12

# What happens at a position, in this order: three things before the op, one after it.
_RELEASE, _FETCH, _UNTIL, _AFTER = range(4)
_Event = tuple[float, int, int, int]  # plain time since the step's start, what, swap, position


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """All that does not depend on the swaps, for those who try many."""

    trace: Trace
    machine: Machine
    plain: list[float]  # when each op starts in a step without stalls, and when the last one ends
    curve: Curve  # what each op holds without swaps


def prepare(trace: Trace, machine: Machine) -> Ground:
    """What `simulate_on` needs to know of them."""
    if not trace.ops:
        raise BadInput("the trace is empty: it has no ops; record a step that runs some")
    plain = list(accumulate((op.seconds for op in trace.ops), initial=0.0))
    return Ground(trace, machine, plain, load_curve(trace))


def simulate(trace: Trace, machine: Machine, swaps: Sequence[Swap]) -> Outcome:
    """The steady step. The swaps must be lawful: see `find_bad_swap`."""
    return simulate_on(prepare(trace, machine), swaps)


def simulate_on(ground: Ground, swaps: Sequence[Swap]) -> Outcome:
    """`simulate`, on what was prepared."""
    sizes = [rounded_bytes(ground.trace, ground.trace.values[swap.value]) for swap in swaps]
    loads = held_bytes(ground.curve, swaps, sizes)
    peak_op = int(loads.argmax())
    run = _Run(ground, swaps, sizes)
    run.settle()
    plain = ground.plain[-1]
    out_spans, back_spans = run.spans()
    copying = sum(end - start for start, end in (*out_spans, *back_spans))
    stalled = sum(stall for _, stall in run.stalls)
    delays = np.zeros(len(loads))
    for position, stall in run.stalls:
        delays[position] += stall
    return Outcome(
        seconds=plain + stalled + ground.machine.drag * copying,
        plain_seconds=plain,
        stall_seconds=stalled,
        copy_seconds=copying,
        hidden=min(1.0, max(0.0, 1.0 - stalled / copying)) if copying > 0.0 else 1.0,
        peak_bytes=int(loads[peak_op]),
        peak_op=peak_op,
        out_spans=out_spans,
        back_spans=back_spans,
        starts=np.array(ground.plain[:-1]) + np.cumsum(delays),
    )


def held_bytes(curve: Curve, swaps: Sequence[Swap], sizes: Sequence[int]) -> Curve:
    """What each op holds, `curve` without swaps, when `sizes[k]` bytes are away during the k-th."""
    count = len(curve)
    change = [0] * (2 * count + 1)
    for swap, size in zip(swaps, sizes, strict=True):
        change[swap.release] -= size
        change[swap.fetch] += size
    away = np.cumsum(np.array(change[:-1], dtype=np.int64))
    loads: Curve = curve + away[:count] + away[count:]
    return loads


class _Run:
    """The training loop as far as it has run; `start` is where the step under way began."""

    def __init__(self, ground: Ground, swaps: Sequence[Swap], sizes: Sequence[int]) -> None:
        machine = ground.machine
        self.plain_seconds = ground.plain[-1]
        self.out_works = [link_seconds(machine.out, size) for size in sizes]
        self.back_works = [link_seconds(machine.back, size) for size in sizes]
        self.first_events, self.events, self.carried = _events(ground, swaps)
        self.lanes = Lanes(machine)
        self.out_copy = [0] * len(swaps)  # the newest copy of each swap, as the lane counts them
        self.back_copy = [0] * len(swaps)
        self.start = 0.0
        self.end = 0.0
        self.stalls: list[tuple[int, float]] = []  # of the last step: position and seconds

    def settle(self) -> None:
        """Run steps until two end alike; the last one is the one to report."""
        self._step(self.first_events)
        if not self.carried:
            return
        seen = self._state()
        for _ in range(MOST_STEPS - 1):
            self._step(self.events)
            seen, before = self._state(), seen
            if _alike(seen, before):
                break

    def spans(self) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
        """Of the copies put in during the last step; what is still under way is run to its end."""
        out, back = self.lanes.out, self.lanes.back
        out_copy, back_copy = self.out_copy.copy(), self.back_copy.copy()
        outs, backs, start = len(out.works), len(back.works), self.start
        if self.carried:
            stalls = self.stalls
            self._step(self.events[: self.carried])
            self.stalls = stalls
        self.lanes.advance(outs, backs)
        found = []
        for lane, copies in ((out, out_copy), (back, back_copy)):
            spans = map(lane.span, copies)
            found.append(tuple((begin - start, end - start) for begin, end in spans))
        return found[0], found[1]

    def _step(self, events: Sequence[_Event]) -> None:
        """Compute visits `events`; its clock is `base` plus the plain time."""
        lanes, out, back = self.lanes, self.lanes.out, self.lanes.back
        base = self.start = self.end
        stalls = []
        for plain, what, swap, position in events:
            if what == _AFTER:
                self.out_copy[swap] = len(out.works)
                out.put(swap, base + plain, self.out_works[swap])
                continue
            if what == _FETCH:
                self.back_copy[swap] = len(back.works)
                back.put(swap, base + plain, self.back_works[swap])
                continue
            if what == _RELEASE:
                copy, lane = self.out_copy[swap], out
                if copy >= out.done:
                    lanes.advance(copy + 1, 0)
            else:
                copy, lane = self.back_copy[swap], back
                if copy >= back.done:
                    lanes.advance(0, copy + 1)
            stall = lane.ends[copy] - (base + plain)
            if stall > 0.0:
                stalls.append((position, stall))
                base = lane.ends[copy] - plain
        self.stalls = stalls
        self.end = base + self.plain_seconds

    def _state(self) -> tuple[float, Pending, Pending]:
        """All that the next step can feel of this one, and how long this one was."""
        out, back = self.lanes.out, self.lanes.back
        self.lanes.advance(len(out.works), len(back.works), self.end)
        length = self.plain_seconds + sum(stall for _, stall in self.stalls)
        within = _TOLERANCE * (1.0 + length)
        return length, out.pending(within), back.pending(within)


def _events(ground: Ground, swaps: Sequence[Swap]) -> tuple[list[_Event], list[_Event], int]:
    """What happens in the first step, in every later one, and how many events of the later ones
    it takes until nothing is left of the step before.
    """
    count = len(ground.curve)
    found = []
    for k, swap in enumerate(swaps):
        found.append((swap.after % count, _AFTER, k, swap.after >= count))
        found.append((swap.release % count, _RELEASE, k, swap.release >= count))
        found.append((swap.fetch % count, _FETCH, k, swap.fetch >= count))
        found.append((swap.until % count, _UNTIL, k, swap.until >= count))
    found.sort()
    plain = ground.plain
    events = [(plain[at + (what == _AFTER)], what, k, at) for at, what, k, _ in found]
    first = [event for event, (*_, carried) in zip(events, found, strict=True) if not carried]
    last = max((i for i, (*_, carried) in enumerate(found) if carried), default=-1)
    return first, events, last + 1


def _alike(one: tuple[float, Pending, Pending], other: tuple[float, Pending, Pending]) -> bool:
    """Within the tolerance the same length and the same work left of the same copies."""

    def close(x: float, y: float) -> bool:
        return abs(x - y) <= _TOLERANCE * (1.0 + max(abs(x), abs(y)))

    if not close(one[0], other[0]):
        return False
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        if len(mine) != len(theirs):
            return False
        if any(k != j or not close(x, y) for (k, x), (j, y) in zip(mine, theirs, strict=True)):
            return False
    return True
