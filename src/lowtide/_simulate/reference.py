"""The simulator again, in the plainest way there is: the measure of `simulate`.

It walks every op of every step, lets copies flow from event to event, and counts memory anew for
each op by asking of each value whether it is there. It shares nothing with the fast one but the
nouns and the time a copy takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lowtide._errors import BadInput
from lowtide._ir import Machine, Swap, Trace, Value
from lowtide._machine.link import seconds as link_seconds
from lowtide._simulate.outcome import Outcome

_TOLERANCE = 1e-12


@dataclass(slots=True, eq=False)
class _Copy:
    swap: int
    left: float  # work to do
    start: float = -1.0
    end: float | None = None


@dataclass(slots=True, eq=False)
class _World:
    """A clock and two queues, out and back; the first of each queue is being copied."""

    together: float
    now: float = 0.0
    queues: tuple[list[_Copy], list[_Copy]] = field(default_factory=lambda: ([], []))

    def put(self, way: int, swap: int, work: float) -> _Copy:
        copy = _Copy(swap, work)
        self.queues[way].append(copy)
        return copy

    def let_pass(self, seconds: float) -> None:
        """Compute is busy for so long."""
        to = self.now + seconds
        while self.now < to:
            self._to_next_event(to)
        self.now = to

    def wait_for(self, copy: _Copy) -> None:
        """Compute does nothing until the copy has ended."""
        while copy.end is None:
            self._to_next_event(None)

    def _to_next_event(self, to: float | None) -> None:
        copying = [queue[0] for queue in self.queues if queue]
        for copy in copying:
            if copy.start < 0:
                copy.start = self.now
        rate = self.together if len(copying) == 2 else 1.0
        soonest = min(copying, key=lambda copy: copy.left, default=None)
        if soonest is None or (to is not None and self.now + soonest.left / rate > to):
            assert to is not None, "compute waits for a copy that nobody put in"
            for copy in copying:
                copy.left -= (to - self.now) * rate
            self.now = to
            return
        passed = soonest.left / rate
        self.now += passed
        for copy in copying:
            if copy is not soonest:
                copy.left -= passed * rate
        soonest.left = 0.0
        soonest.end = self.now
        for queue in self.queues:
            if soonest in queue:
                queue.remove(soonest)


@dataclass(slots=True)
class _Step:
    """One step as it went: what it put in, and what was left to copy at its end."""

    begin: float
    end: float = 0.0
    starts: list[float] = field(default_factory=list)
    outs: dict[int, _Copy] = field(default_factory=dict)
    backs: dict[int, _Copy] = field(default_factory=dict)
    left: list[list[tuple[int, float]]] = field(default_factory=list)


def simulate_slowly(trace: Trace, machine: Machine, swaps: Sequence[Swap]) -> Outcome:
    """What `simulate` says, found the slow way."""
    if not trace.ops:
        raise BadInput("the trace is empty: it has no ops; record a step that runs some")
    world = _World(machine.together)
    steps: list[_Step] = []
    reported = None
    while reported is None:
        steps.append(_run_step(trace, machine, swaps, world, steps))
        last = steps[-1]
        crosses = any(swap.until >= len(trace.ops) for swap in swaps)
        one_is_enough = not crosses and not any(last.left)
        settled = len(steps) > 1 and _same(last, steps[-2])
        if one_is_enough or settled or len(steps) == 16:
            reported = last
    if any(world.queues):  # these copies end in the step after it
        _run_step(trace, machine, swaps, world, steps)

    out_spans = tuple(_span(reported.outs[k], reported) for k in range(len(swaps)))
    back_spans = tuple(_span(reported.backs[k], reported) for k in range(len(swaps)))
    seconds = reported.end - reported.begin
    plain = sum(op.seconds for op in trace.ops)
    copying = sum(end - start for start, end in out_spans + back_spans)
    loads = [_load(trace, swaps, i) for i in range(len(trace.ops))]
    return Outcome(
        seconds=seconds + machine.drag * copying,
        plain_seconds=plain,
        stall_seconds=seconds - plain,
        copy_seconds=copying,
        hidden=max(0.0, min(1.0, 1.0 - (seconds - plain) / copying)) if copying else 1.0,
        peak_bytes=max(loads),
        peak_op=loads.index(max(loads)),
        out_spans=out_spans,
        back_spans=back_spans,
        starts=np.array([start - reported.begin for start in reported.starts]),
    )


def _run_step(
    trace: Trace, machine: Machine, swaps: Sequence[Swap], world: _World, earlier: list[_Step]
) -> _Step:
    step = _Step(world.now)
    here = len(earlier)  # the number of this step
    everything = [*earlier, step]

    def due(position: int, op: int) -> int | None:
        """The step in which the stay began whose `position` this op is; None if there is none."""
        steps_later, at = divmod(position, len(trace.ops))
        return here - steps_later if at == op and steps_later <= here else None

    for i, op in enumerate(trace.ops):
        for k, swap in enumerate(swaps):
            began = due(swap.release, i)
            if began is not None:
                world.wait_for(everything[began].outs[k])
        for k, swap in enumerate(swaps):
            if due(swap.fetch, i) is not None:
                step.backs[k] = world.put(1, k, link_seconds(machine.back, _size(trace, swap)))
        for k, swap in enumerate(swaps):
            began = due(swap.until, i)
            if began is not None:
                fetched = began + swap.fetch // len(trace.ops)
                world.wait_for(everything[fetched].backs[k])
        step.starts.append(world.now)
        world.let_pass(op.seconds)
        for k, swap in enumerate(swaps):
            if swap.after == i:
                step.outs[k] = world.put(0, k, link_seconds(machine.out, _size(trace, swap)))
    step.end = world.now
    within = _TOLERANCE + _TOLERANCE * (step.end - step.begin)
    step.left = [
        [(copy.swap, copy.left) for copy in queue if copy.left > within] for queue in world.queues
    ]
    return step


def _same(one: _Step, other: _Step) -> bool:
    length, other_length = one.end - one.begin, other.end - other.begin
    within = _TOLERANCE + _TOLERANCE * length
    if abs(length - other_length) > within:
        return False
    for mine, theirs in zip(one.left, other.left, strict=True):
        if [swap for swap, _ in mine] != [swap for swap, _ in theirs]:
            return False
        for (_, left), (_, other_left) in zip(mine, theirs, strict=True):
            if abs(left - other_left) > _TOLERANCE + _TOLERANCE * left:
                return False
    return True


def _span(copy: _Copy, step: _Step) -> tuple[float, float]:
    assert copy.end is not None, "a copy of a lawful swap ends before the next step does"
    return copy.start - step.begin, copy.end - step.begin


def _load(trace: Trace, swaps: Sequence[Swap], op: int) -> int:
    """What is held while `op` runs."""
    held = trace.unseen_bytes + trace.ops[op].workspace_bytes
    for value in trace.values:
        alive = value.device == trace.device and value.first <= op < value.end
        if alive and not _is_away(trace, swaps, value, op):
            held += _rounded(trace, value)
    return held


def _is_away(trace: Trace, swaps: Sequence[Swap], value: Value, op: int) -> bool:
    """Is the value's storage swapped out, in this step or since the step before?"""
    return any(
        trace.values[swap.value].storage == value.storage and swap.release <= at < swap.fetch
        for swap in swaps
        for at in (op, op + len(trace.ops))
    )


def _size(trace: Trace, swap: Swap) -> int:
    return _rounded(trace, trace.values[swap.value])


def _rounded(trace: Trace, value: Value) -> int:
    size = 0 if value.bytes == 0 else trace.granularity_bytes
    while size < value.bytes:
        size += trace.granularity_bytes
    return size
