"""A plan in terms of what the runtime can see: at which event of the step what is to be done.

An *event* is a moment at which lowtide is called: the step begins, a tensor is saved, backward asks
for one, an optimizer is about to step. Each has a code, so that a step can be compared with the
one that was planned, and a position: the number of ops that had started in the planned one.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from lowtide._analyze.access import accesses, producers
from lowtide._analyze.load import load_curve
from lowtide._ir import Drop, Hold, OpIndex, Phase, Plan, Rerun, Swap, Trace, ValueId
from lowtide._layout.buffers import Buffer
from lowtide._layout.pack import pack
from lowtide._runtime.swap.tier import GRAIN, rounded_place
from lowtide._simulate.remade import remade

BEGIN = -1  # the code of a step's first event
ASKED = -(1 << 60)  # plus how many saves after the step began the tensor was saved
STEPPING = -(1 << 61)  # an optimizer is about to step: plus its number
_LAYOUT_SECONDS = 1.0
_MOST_SECONDS = 100


class Act(IntEnum):
    """In the order in which acts of one event are done."""

    HOLD = 0
    LEAVE = 1
    DROP = 2
    RELEASE = 3
    FETCH = 4


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do with one cell: that of a save, or from -1 downwards an optimizer state."""

    act: Act
    who: int
    at: int = 0  # where in the tier, for LEAVE; which source of the cell's value, for HOLD


@dataclass(frozen=True, slots=True)
class Observed:
    """A traced step, and how its values are known to the runtime."""

    trace: Trace
    codes: tuple[int, ...]
    positions: tuple[OpIndex, ...]  # of each event, ascending
    saves: Mapping[ValueId, int]  # the number of the first save
    states: Mapping[ValueId, int]
    held: Mapping[ValueId, OpIndex]  # from which position nobody else refers to it
    droppable: frozenset[ValueId] = frozenset()  # those that can be made again
    asked: tuple[float, ...] = ()  # when each event, and the end, came in an ordinary step


@dataclass(slots=True)
class Script:
    """A planned step."""

    codes: tuple[int, ...]
    actions: list[tuple[Action, ...]]  # for each event
    wanted: frozenset[int]  # saves that have an action
    below_bytes: int  # the tier needs them at once
    swapped_bytes: int  # that leave in a step
    steps_whole: bool  # nothing is gained by an optimizer's step in pieces
    plan: Plan
    observed: Observed  # the step that was planned
    together: Mapping[int, tuple[int, ...]]  # saves -> those that are made again with each
    recorded: frozenset[int] | None = None  # ops that are to be written down; None: all
    trouble: int = 0  # steps in which those were not enough
    short: int = 0  # the last so many steps were short of memory all the same
    replans: int = 0
    seconds: deque[float] = field(  # of the last steps that followed it
        default_factory=lambda: deque(maxlen=_MOST_SECONDS)
    )

    @property
    def trace(self) -> Trace:
        """Of the step that was planned."""
        return self.observed.trace


def write_script(given: Observed, plan: Plan, room: int = 0) -> Script:
    """Tie each swap's positions to events, and each drop's.

    `room`: bytes that a step in which nothing moves may hold, if that is more than planned.
    """
    observed = given
    found: list[list[Action]] = [[] for _ in observed.codes]
    dropped = _write_drops(observed, plan, found) | _write_holds(observed, plan, found)
    together = _together(observed, plan)
    if plan.remakes:  # swaps are of the step with its reruns in it
        step = remade(observed.trace, plan.remakes)
        positions = tuple(OpIndex(step.position(at)) for at in observed.positions)
        observed = replace(observed, trace=step.trace, positions=positions)
    count = len(observed.trace.ops)
    places, below = _places(observed, plan.swaps)

    def event(position: int) -> int:
        at = bisect_left(observed.positions, position % count)
        return at if at < len(observed.positions) else 0  # nothing more happens in that step

    for swap, place in zip(plan.swaps, places, strict=True):
        # Plans are made of what is known here: with an event at 0, states as the step leaves them.
        who = _who(observed, swap.value)
        found[event(swap.after + 1)].append(Action(Act.LEAVE, who, place))
        found[event(swap.release)].append(Action(Act.RELEASE, who))
        if swap.fetch < swap.until:  # else whoever asks for it fetches it
            found[event(swap.fetch)].append(Action(Act.FETCH, who))
    return Script(
        codes=observed.codes,
        actions=[_in_order(actions) for actions in found],
        wanted=dropped | {who for s in plan.swaps if (who := _who(observed, s.value)) >= 0},
        below_bytes=below,
        swapped_bytes=sum(observed.trace.values[swap.value].bytes for swap in plan.swaps),
        steps_whole=_steps_whole(observed, plan, room),
        plan=plan,
        observed=given,
        together=together,
    )


def _write_drops(observed: Observed, plan: Plan, found: Sequence[list[Action]]) -> frozenset[int]:
    """At the last event in time, unless it is used after that: then at the next one.

    What is made again is made when it is asked for.
    """
    uses = [sorted(touched) for touched in accesses(observed.trace)]
    dropped = set()
    for drop in plan.remakes:
        if not isinstance(drop, Drop) or drop.value not in observed.saves:
            continue
        touched = uses[drop.value]
        last = touched[max(0, bisect_left(touched, drop.before) - 1)]
        at = bisect_right(observed.positions, drop.before) - 1
        if at < 0 or observed.positions[at] <= last:
            at += 1
        if at < len(found):
            who = observed.saves[drop.value]
            found[at].append(Action(Act.DROP, who))
            dropped.add(who)
    return frozenset(dropped)


def _write_holds(observed: Observed, plan: Plan, found: Sequence[list[Action]]) -> frozenset[int]:
    """When something that is made from it is saved: that leads to it."""
    trace = observed.trace
    held = {one.value for one in plan.remakes if isinstance(one, Hold)}
    if not held:
        return frozenset()
    packs = [at for at, code in enumerate(observed.codes) if code >= 0]
    makers = producers(trace)
    wanted = set()
    for value, number in sorted(observed.saves.items()):
        maker = makers.get(value)
        if maker is None or number >= len(packs):
            continue
        at = packs[number]
        for place, operand in enumerate(trace.ops[maker].operands):
            if operand.value in held and observed.positions[at] <= trace.values[operand.value].end:
                held.discard(operand.value)
                found[at].append(Action(Act.HOLD, number, place))
                wanted.add(number)
    return frozenset(wanted)


def _together(observed: Observed, plan: Plan) -> dict[int, tuple[int, ...]]:
    """Saves that are made again at one position: those that a later op needs come along."""
    by_position: dict[int, set[int]] = defaultdict(set)
    for one in plan.remakes:
        if isinstance(one, Rerun):
            made = observed.trace.ops[one.op].writes
            by_position[one.before] |= {observed.saves[v] for v in made if v in observed.saves}
    found: dict[int, set[int]] = defaultdict(set)
    for group in by_position.values():
        for number in group:
            found[number] |= group - {number}
    return {number: tuple(sorted(others)) for number, others in found.items() if others}


def _steps_whole(observed: Observed, plan: Plan, room: int) -> bool:
    """Whether optimizers may step at once: no state leaves, and there is room for what that takes.

    The step was traced in pieces; at once it makes temporary copies of everything, at most of
    twice the state's size.
    """
    if any(swap.value in observed.states for swap in plan.swaps):
        return False
    trace = observed.trace
    more = 2 * sum(trace.values[value].bytes for value in observed.states)
    loads = load_curve(trace)
    held = max(
        (loads[i] for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER), default=0
    )
    moves = bool(plan.swaps or plan.remakes)
    return bool(held + more <= (plan.peak_bytes if moves else max(plan.peak_bytes, room)))


def _in_order(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Bytes are released from the last copy to the first: who waits for it waits only once."""
    releases = [action for action in actions if action.act is Act.RELEASE]
    return (
        *(action for action in actions if action.act in (Act.HOLD, Act.LEAVE, Act.DROP)),
        *reversed(releases),
        *(action for action in actions if action.act is Act.FETCH),
    )


def _who(observed: Observed, value: ValueId) -> int:
    if value in observed.states:
        return -1 - observed.states[value]
    return observed.saves[value]


def _places(observed: Observed, swaps: Sequence[Swap]) -> tuple[list[int], int]:
    """Where in the tier below each lies, and how much of it they need.

    From the end of op `after` until op `until` has it: a step at most, so one place is enough.
    """
    if not swaps:
        return [], 0
    count = len(observed.trace.ops)
    buffers = []
    for i, swap in enumerate(swaps):
        first = (swap.after + 1) % count
        size = rounded_place(observed.trace.values[swap.value].bytes)
        buffers.append(Buffer(str(i), first, first + swap.until - swap.after, size))
    packing = pack(buffers, align=GRAIN, period=count, seconds=_LAYOUT_SECONDS)
    where = {buffer.name: buffer.offset or 0 for buffer in packing.buffers}
    return [where[str(i)] for i in range(len(swaps))], packing.height
