"""Trace, plan, machine -> the planned step in numbers: what every report of a plan shows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lowtide._analyze.access import producers
from lowtide._analyze.load import Curve, load_by_kind, rounded_bytes
from lowtide._ir import Kind, Machine, Plan, Swap, Trace, Value, ValueId
from lowtide._layout.buffers import pieces
from lowtide._layout.from_plan import plan_buffers
from lowtide._layout.pack import pack
from lowtide._machine.link import line
from lowtide._simulate.outcome import Outcome
from lowtide._simulate.remade import Remade, remade
from lowtide._simulate.simulate import simulate

# What stays lies at the bottom of the stack, what comes and goes at the top.
_STAYS = (Kind.PARAMETER, Kind.STATE, Kind.BUFFER, Kind.INPUT)
_ORDER = (*_STAYS, Kind.GRADIENT, Kind.ACTIVATION, Kind.TEMPORARY)
LAYERS = ("held by no tensor", *map(str, _ORDER), "workspace")

_NOMINAL_SECONDS = 1e-6  # of an op, where the trace has no times
_NOTHING = 1e-9  # a share of the step: shorter waits are rounding

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step as it goes by its plan. Times are in seconds from its start.

    `trace` is the step as it was traced, `step` the one with its reruns in it, and `starts`,
    `ends`, `waits`, `again` and `before` have an entry for each op of that one: when it starts
    and ends, how long compute waits before it, whether it runs again, and which op of `trace` it
    is or is run again for.
    """

    trace: Trace
    plan: Plan
    timed: bool  # False: the trace has no times, each op counts as 1 µs
    step: Remade
    outcome: Outcome
    starts: Times
    ends: Times
    waits: Times
    again: npt.NDArray[np.bool_]
    before: npt.NDArray[np.int64]

    @property
    def seconds(self) -> float:
        """When the last op ends; what copies slow compute down is not in it."""
        return float(self.ends[-1])

    def arrives(self, position: int) -> float:
        """When compute gets to an op, perhaps of the next step, and may have to wait there."""
        step, place = divmod(position, len(self.starts))
        return float(step * self.seconds + self.starts[place] - self.waits[place])

    def begins(self, position: int) -> float:
        """When an op, perhaps of the next step, starts."""
        step, place = divmod(position, len(self.starts))
        return float(step * self.seconds + self.starts[place])

    def waited(self, number: int) -> float:
        """How long compute waits for the two copies of a swap."""
        swap, ops = self.plan.swaps[number], len(self.starts)
        left = self.outcome.out_spans[number][1] - self.arrives(swap.release)
        # The copy back was put in during this step: so many steps after the stay began.
        late = swap.until - swap.fetch // ops * ops
        came = self.outcome.back_spans[number][1] - self.arrives(late)
        waits = [seconds for seconds in (left, came) if seconds > _NOTHING * self.seconds]
        return max(waits, default=0.0) if swap.release == swap.until else sum(waits)


def plan_step(trace: Trace, plan: Plan, machine: Machine | None) -> PlannedStep:
    """The step by `plan`, which must be lawful; without swaps it needs no machine."""
    timed = any(op.seconds > 0 for op in trace.ops)
    if not timed:
        trace = replace(trace, ops=tuple(replace(op, seconds=_NOMINAL_SECONDS) for op in trace.ops))
    if machine is None:
        assert not plan.swaps, "a plan that swaps needs the machine it was made for"
        machine = Machine("", 0, 0, line(0.0, 1.0), line(0.0, 1.0))
    step = remade(trace, plan.remakes)
    outcome = simulate(step.trace, machine, plan.swaps)
    count = len(step.trace.ops)
    starts = outcome.starts
    ends = starts + np.array([op.seconds for op in step.trace.ops])
    waits = starts - np.concatenate(([0.0], ends[:-1]))
    waits[waits <= _NOTHING * ends[-1]] = 0.0
    again = np.ones(count, dtype=np.bool_)
    again[list(step.at[:-1])] = False
    before = np.searchsorted(np.array(step.at[:-1]), np.arange(count))
    before = np.minimum(before, len(trace.ops) - 1)
    return PlannedStep(trace, plan, timed, step, outcome, starts, ends, waits, again, before)


def layers(trace: Trace, swaps: Sequence[Swap]) -> npt.NDArray[np.int64]:
    """What each op holds: a row for each of `LAYERS`."""
    count = len(trace.ops)
    row = {kind: number for number, kind in enumerate(Kind)}
    held = load_by_kind(trace)
    change = np.zeros((len(row), 2 * count + 1), dtype=np.int64)
    for swap in swaps:
        value = trace.values[swap.value]
        change[row[value.kind], swap.release] -= rounded_bytes(trace, value)
        change[row[value.kind], swap.fetch] += rounded_bytes(trace, value)
    away = np.cumsum(change, axis=1)
    held += away[:, :count] + away[:, count : 2 * count]
    unseen = np.full(count, trace.unseen_bytes, dtype=np.int64)
    workspace = np.array([op.workspace_bytes for op in trace.ops], dtype=np.int64)
    return np.array([unseen, *(held[row[kind]] for kind in _ORDER), workspace])


def labels(trace: Trace) -> list[str]:
    """What to call each value: its name, its module, or the op that made it."""
    maker = producers(trace)
    return [
        value.name or value.module or (trace.ops[maker[number]].name if number in maker else "")
        for number, value in ((ValueId(i), value) for i, value in enumerate(trace.values))
    ]


def _life(value: Value) -> int:
    return value.end - value.first


def away_bytes(planned: PlannedStep) -> Curve:
    """What the tier below holds during each op: a copy, until the value is back."""
    trace, count = planned.step.trace, len(planned.starts)
    change = np.zeros(2 * count + 2, dtype=np.int64)
    for swap in planned.plan.swaps:
        size = rounded_bytes(trace, trace.values[swap.value])
        change[swap.after + 1] += size
        change[min(swap.until, 2 * count)] -= size
    away = np.cumsum(change)
    found: Curve = away[:count] + away[count : 2 * count]
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of the pool, and who has them from when to when, in seconds."""

    start: float
    end: float
    offset: int
    bytes: int
    layer: int  # of `LAYERS`
    label: str


@dataclass(frozen=True, slots=True)
class Pool:
    """An address for all that the planned step holds; `load` is the most of it alive at once."""

    places: tuple[Place, ...]
    height: int
    load: int


def pack_pool(planned: PlannedStep, seconds: float) -> Pool:
    """The lowest pool that is found in so many seconds."""
    trace = planned.step.trace
    buffers, owners, period = plan_buffers(trace, planned.plan.swaps)
    if not buffers:
        return Pool((), 0, 0)
    packing = pack(buffers, align=trace.granularity_bytes, period=period, seconds=seconds)
    owner: dict[int, int] = {}  # of its versions the one that is there for longest
    for number in sorted(range(len(trace.values)), key=lambda n: _life(trace.values[n])):
        owner[trace.values[number].storage] = number
    named = labels(trace)
    places = []
    for buffer in packing.buffers:
        storage = owners[int(buffer.name.partition("#")[0])]
        if storage is None:
            kind, label = "workspace", trace.ops[buffer.lower].name
        else:
            kind, label = trace.values[owner[storage]].kind, named[owner[storage]]
        places += [
            Place(
                planned.begins(lower) if lower else 0.0,
                planned.begins(upper) if upper < period else planned.seconds,
                buffer.offset or 0,
                buffer.size,
                LAYERS.index(kind),
                label,
            )
            for lower, upper in pieces(buffer, period)
        ]
    return Pool(tuple(places), packing.height, packing.max_load)
