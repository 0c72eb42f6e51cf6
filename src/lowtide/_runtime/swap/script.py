"""A plan in terms of what the runtime can see: at which event of the step what is to be done.

An *event* is a moment at which lowtide is called: the step begins, a tensor is saved, backward asks
for one, an optimizer is about to step. Each has a code, so that a step can be compared with the
one that was planned, and a position: the number of ops that had started in the planned one.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from lowtide._analyze.access import accesses
from lowtide._analyze.load import Curve, load_curve, rounded_bytes
from lowtide._ir import Drop, Hold, OpIndex, Phase, Plan, Rerun, Swap, Trace, ValueId
from lowtide._layout.buffers import Buffer
from lowtide._layout.pack import pack
from lowtide._policy.autoswap import CannotFit
from lowtide._runtime.swap.tier import GRAIN, rounded_place
from lowtide._simulate.remade import Remade, remade
from lowtide._simulate.simulate import held_bytes

BEGIN = -1  # the code of a step's first event
ASKED = -(1 << 60)  # plus how many saves after the step began the tensor was saved
STEPPING = -(1 << 61)  # an optimizer is about to step: plus its number
GUESTS = 1 << 40  # what is moved of an optimizer is numbered: its state, and from here on guests
_LAYOUT_SECONDS = 1.0
_COMPUTING = 2  # times its state, at most: what an optimizer's step makes meanwhile
_MOST_SECONDS = 100
_MOST_REPLANS = 6  # of steps that take more than planned where they are laid out

Places = tuple[tuple[int, int], ...]  # of sources that are held: the op's number, and which


def is_request(code: int) -> bool:
    """Whether it is that of an event at which backward asks for a save."""
    return ASKED // 2 * 3 < code < ASKED // 2


class Act(IntEnum):
    """In the order in which acts of one event are done."""

    LEAVE = 0
    DROP = 1
    RELEASE = 2
    FETCH = 3
    HAVE = 4  # nobody asks for it who could be made to wait


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do with one cell: that of a save, or from -1 downwards an optimizer's."""

    act: Act
    who: int
    at: int = 0  # where in the tier, for LEAVE


@dataclass(frozen=True, slots=True)
class Observed:
    """A traced step, and how its values are known to the runtime."""

    trace: Trace
    codes: tuple[int, ...]
    positions: tuple[OpIndex, ...]  # of each event, ascending
    saves: Mapping[ValueId, int]  # the number of the first save
    states: Mapping[ValueId, int]
    held: Mapping[ValueId, OpIndex]  # from which position nobody else refers to it
    numbers: tuple[int, ...]  # by which the driver can run each op again; -1: it cannot
    droppable: frozenset[ValueId] = frozenset()  # those that can be made again
    asked: tuple[float, ...] = ()  # when each event, and the end, came in an ordinary step
    guests: Mapping[ValueId, int] = field(default_factory=dict)  # weights and gradients
    plain_seconds: float = 0.0  # of its ops, each by itself


@dataclass(slots=True)
class Script:
    """A planned step."""

    codes: tuple[int, ...]
    actions: list[tuple[Action, ...]]  # for each event
    wanted: frozenset[int]  # saves that have an action
    below_bytes: int  # the tier needs them at once
    swapped_bytes: int  # that leave in a step
    steps_whole: bool  # nothing is gained by an optimizer's step in pieces
    together: int  # bytes of state whose pieces may step at once, where nothing moves between them
    plan: Plan
    observed: Observed  # the step that was planned
    reruns: Mapping[int, tuple[int, ...]]  # events -> what runs again then: see `_write_reruns`
    rooms: Mapping[int, Mapping[int, int]]  # ... and what may be made at once, by the first of them
    holds: Mapping[int, tuple[int, ...]]  # ops' numbers -> sources that are held from then on
    lets_go: Mapping[int, tuple[Places, Places]]  # events -> before and after what runs again then
    recorded: frozenset[int] | None = None  # ops that are to be written down; None: all
    plain: frozenset[int] = frozenset()  # saves that nothing is ever to be done with
    trouble: int = 0  # steps in which those were not enough
    short: int = 0  # the last so many steps were short of memory all the same
    replans: int = 0
    seconds: deque[float] = field(  # of the last steps that followed it
        default_factory=lambda: deque(maxlen=_MOST_SECONDS)
    )
    settled: list[float] = field(default_factory=list)  # ... of some that went as those to come
    rival: "Script | None" = None  # the one that it is to be faster than
    rounds: int = 0  # of planning by what was measured
    judged: bool = False  # it stays

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
    reruns, among = _write_reruns(observed, plan)
    dropped = _write_drops(observed, plan, found, reruns, among)
    holds, lets_go = _write_holds(observed, plan)
    step = remade(observed.trace, plan.remakes) if plan.remakes else None
    if step is not None:  # swaps are of the step with its reruns in it
        positions = tuple(OpIndex(step.position(at)) for at in observed.positions)
        observed = replace(observed, trace=step.trace, positions=positions)
    values = observed.trace.values
    sizes = [rounded_bytes(observed.trace, values[swap.value]) for swap in plan.swaps]
    held = held_bytes(load_curve(observed.trace), plan.swaps, sizes)
    rooms = {} if step is None else _write_rooms(given, plan, step, held, reruns)
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
            at = event(swap.fetch)
            if at == 0 and len(found) > 1 and observed.positions[1] < swap.until % count:
                at = 1  # a step begins before the program has let go of its gradients
            found[at].append(Action(Act.FETCH, who))
        if swap.value in observed.guests:
            last = bisect_right(observed.positions, swap.until % count) - 1
            found[last].append(Action(Act.HAVE, who))
    return Script(
        codes=observed.codes,
        actions=[_in_order(actions) for actions in found],
        wanted=dropped | {who for s in plan.swaps if (who := _who(observed, s.value)) >= 0},
        below_bytes=below,
        swapped_bytes=sum(values[swap.value].bytes for swap in plan.swaps),
        steps_whole=_steps_whole(observed, plan, room),
        together=_room_to_step(observed.trace, plan, held) // _COMPUTING,
        plan=plan,
        observed=given,
        reruns=reruns,
        rooms=rooms,
        holds=holds,
        lets_go=lets_go,
    )


def lowered(
    old: Script, less: int, slower: float, plan: Callable[[Observed, int | None], Plan]
) -> Script | None:
    """For the same steps, by a plan that holds so much less; None: that was done, or cannot be.

    Nor by one that takes more than `slower` times as long.
    """
    if old.replans >= _MOST_REPLANS:
        return None
    try:
        new = write_script(old.observed, plan(old.observed, old.plan.peak_bytes - less))
    except CannotFit:
        return None
    if new.plan.seconds > slower * old.plan.seconds:
        return None
    new.replans = old.replans + 1
    return new


def _write_drops(
    observed: Observed,
    plan: Plan,
    found: Sequence[list[Action]],
    reruns: dict[int, tuple[int, ...]],
    among: Container[int],
) -> frozenset[int]:
    """At the last event in time, unless it is used after that: then at the next one.

    Of several before one op at the first: there, others may come back for that op. Before or after
    what runs again at that event, which may read it, as the plan says. Those that are `among` it,
    by their places in the plan, are in `reruns` already.
    """
    begins = {observed.positions[event]: event for event in reruns}
    uses = [sorted(touched) for touched in accesses(observed.trace)]
    saved_at = [event for event, code in enumerate(observed.codes) if code >= 0]
    dropped = set()
    for place, drop in enumerate(plan.remakes):
        if not isinstance(drop, Drop) or drop.value not in observed.saves:
            continue
        if place in among:
            dropped.add(observed.saves[drop.value])
            continue
        touched = uses[drop.value]
        last = touched[max(0, bisect_left(touched, drop.before) - 1)]
        at = bisect_left(observed.positions, drop.before)
        if observed.positions[at : at + 1] != (drop.before,):
            at -= 1
        at = begins.get(drop.before, at)
        at = max(at, saved_at[observed.saves[drop.value]])
        if at < 0 or observed.positions[at] <= last:
            at += 1
        if at < len(found):
            who = observed.saves[drop.value]
            dropped.add(who)
            if at in reruns and observed.positions[at] < drop.before:
                reruns[at] = (*reruns[at], -1 - who)
            else:
                found[at].append(Action(Act.DROP, who))
    return frozenset(dropped)


def _write_holds(
    observed: Observed, plan: Plan
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[Places, Places]]]:
    """From the last op on that reads it and is written down, until the event after its end.

    What runs again then may need it, unless its end comes before that.
    """
    uses = accesses(observed.trace) if any(isinstance(one, Hold) for one in plan.remakes) else ()
    places: dict[ValueId, tuple[int, int]] = {}  # what is held -> by which op, as which source
    lets_go: dict[int, tuple[Places, Places]] = {}
    begun = -1  # the position before which something runs again already
    for one in plan.remakes:
        if isinstance(one, Rerun):
            begun = one.before
        elif isinstance(one, Hold):
            for reader in sorted(uses[one.value], reverse=True):
                op = observed.trace.ops[reader]
                read = [operand.value for operand in op.operands]
                known = observed.numbers[reader] >= 0
                if reader <= one.before and known and one.value in read:
                    places[one.value] = observed.numbers[reader], read.index(one.value)
                    break
        elif isinstance(one, Drop) and one.value in places:
            at = bisect_left(observed.positions, one.before)
            held = places[one.value]
            before, after = lets_go.get(at, ((), ()))
            is_between = at < len(observed.positions) and one.before < observed.positions[at]
            if is_between or one.before != begun:
                lets_go[at] = (*before, held), after  # nothing that runs again then reads it
            else:
                lets_go[at] = before, (*after, held)
    holds: dict[int, tuple[int, ...]] = {}
    for number, place in places.values():
        holds[number] = (*holds.get(number, ()), place)
    return holds, lets_go


def _write_reruns(observed: Observed, plan: Plan) -> tuple[dict[int, tuple[int, ...]], set[int]]:
    """What runs again before an op, when backward first asks for something that it reads.

    In the plan's order: ops by the numbers that the driver knows them by, and from -1 downwards
    the saves that are dropped on the way. Also the places in the plan of such drops.
    """
    groups: dict[int, list[int]] = defaultdict(list)  # by the position in the plan
    for place, one in enumerate(plan.remakes):
        if isinstance(one, Rerun) or (isinstance(one, Drop) and one.before in groups):
            groups[one.before].append(place)
    found: dict[int, tuple[int, ...]] = {}
    among: set[int] = set()
    for position, places in groups.items():
        items, drops = [], set()
        for place in places:
            one = plan.remakes[place]
            if isinstance(one, Rerun):
                items.append(observed.numbers[one.op])
                if items[-1] < 0:
                    break
            elif isinstance(one, Drop) and one.value in observed.saves:
                items.append(-1 - observed.saves[one.value])
                drops.add(place)
        else:
            first = bisect_left(observed.positions, position)
            last = bisect_right(observed.positions, position)
            for event in range(first, last):
                if ASKED <= observed.codes[event] < BEGIN:
                    found[event] = tuple(items)
                    among |= drops
                    break
    return found, among


def _write_rooms(
    observed: Observed, plan: Plan, step: Remade, held: Curve, reruns: Iterable[int]
) -> dict[int, dict[int, int]]:
    """At each event with `reruns`, what may be made from each op on for the planned peak to hold.

    One by one they make no more. What runs several of them as one makes all of it before what it
    reads may go.
    """
    begun: Counter[int] = Counter()
    rooms: dict[int, dict[int, int]] = defaultdict(dict)  # by the position in the plan
    for one in plan.remakes:
        if isinstance(one, Rerun):
            at = step.lead[one.before] + begun[one.before]
            begun[one.before] += 1
            values = (step.trace.values[value] for value in step.trace.ops[at].writes)
            made = sum(rounded_bytes(step.trace, value) for value in values)
            room, number = plan.peak_bytes - int(held[at]) + made, observed.numbers[one.op]
            there = rooms[one.before]
            there[number] = min(room, there.get(number, room))
    return {event: rooms[observed.positions[event]] for event in reruns}


def _steps_whole(observed: Observed, plan: Plan, room: int) -> bool:
    """Whether optimizers may step at once: no state leaves, and there is room for what that takes.

    The step was traced in pieces; at once it makes temporary copies of everything.
    """
    if any(swap.value in observed.states or swap.value in observed.guests for swap in plan.swaps):
        return False
    trace = observed.trace
    more = _COMPUTING * sum(trace.values[value].bytes for value in observed.states)
    loads = load_curve(trace)
    held = max(
        (loads[i] for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER), default=0
    )
    moves = bool(plan.swaps or plan.remakes)
    return bool(held + more <= (plan.peak_bytes if moves else max(plan.peak_bytes, room)))


def _room_to_step(trace: Trace, plan: Plan, held: Curve) -> int:
    """Bytes by which what is held while optimizers step is below the planned peak."""
    steps = [i for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER]
    return max(0, plan.peak_bytes - int(held[steps].max(initial=0)))


def _in_order(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Bytes are released from the last copy to the first: who waits for it waits only once."""
    releases = [action for action in actions if action.act is Act.RELEASE]
    return (
        *(action for action in actions if action.act in (Act.LEAVE, Act.DROP)),
        *reversed(releases),
        *(action for action in actions if action.act is Act.FETCH),
        *(action for action in actions if action.act is Act.HAVE),
    )


def _who(observed: Observed, value: ValueId) -> int:
    if value in observed.states:
        return -1 - observed.states[value]
    if value in observed.guests:
        return -1 - GUESTS - observed.guests[value]
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
