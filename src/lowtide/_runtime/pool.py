"""What the pool does at each mark: watch, plan, make room, follow, and look again.

Steps are recorded from the start. One that was made twice is planned as soon as the step after it
has ended, because only then the ends of what it left behind are known. From then on plans are
followed, and every step is still recorded: one that fits no plan, or whose blocks live longer
than planned, is planned (again) in the same way. Plans are kept by signature, the sizes of a
step in order, so steps of several shapes each find their own.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from lowtide._layout.buffers import Buffer, rounded
from lowtide._layout.pack import pack
from lowtide._report.pool_text import PoolSummary
from lowtide._runtime.core import Core, Lane, Mode, StepRecord
from lowtide._runtime.paging import plan_pages
from lowtide._runtime.planning import ARENA_GRAIN, StepPlan, plan_step, widened
from lowtide._units import format_bytes

_SMALLEST_ARENA = 1 << 20
_MOST_PLANS = 256  # a lane; the least recently followed goes
_FIRST_SECONDS, _LATER_SECONDS = 2.0, 0.5  # for one layout
_TIGHT_SECONDS = 6.0  # ... where every byte of it counts
_GRACE_SECONDS = 3.0  # that planning may take in any case; beyond it, ...
_PLANNING_SHARE = 0.02  # ... of the time: shapes that vary without end are not all worth a plan
_MOST_SEEN = 4096  # signatures counted, a lane
_MOST_REPLANS = 4  # of one signature: lives that vary without end are left displaced
_TROUBLE = 3  # fewer may be due to what lay where before the plan was made
_LONGEST_STEP = 200_000  # allocations: a longer one takes too long to lay out between steps
_TRIM_WITHIN = 8  # marks: in case no step goes by its plan alone
_DEAR = 1.2  # times as long steps may take for more room than is missing
_MORE = 0.005  # of an arena: by so much steps are made to need less than would just do
_PATIENCE = 50  # marks until an arena that could not be had is asked for again


class Place(Protocol):
    """The memory that a pool stands in."""

    missing: int  # of the last arena that could not be had, the bytes for which there was no room

    def settle(self, device: int) -> None:
        """Move what stays for good out of the way, before the first arena is made."""

    def set_arena(
        self, lane: int, size: int, device: int, *, grows: bool, left: Mapping[int, int]
    ) -> bool:
        """Give the lane an arena on its device, or a larger one; False: there is no memory.

        `left` says where in it the allocations lie that the last step has left behind.
        """

    def page_room(self, device: int) -> int:
        """Bytes that an arena in pages may have on the device."""

    def trim(self) -> None:
        """Give back what is cached and not in use, if it is much; a step has just gone well."""

    def clear(self, lanes: Mapping[int, int]) -> None:
        """Take these lanes' arenas away; their devices are given. What lies in them stays."""


@dataclass(slots=True)
class _Known:
    """A planned signature."""

    number: int
    plan: StepPlan
    record: StepRecord
    beside: int  # the signature of the highest plan when it was laid out, or -1
    replans: int = 0
    trouble: int = 0  # its last so many steps found planned bytes still in use


@dataclass(slots=True)
class _LaneState:
    seen: OrderedDict[int, int] = field(default_factory=OrderedDict)
    plans: OrderedDict[int, _Known] = field(default_factory=OrderedDict)  # least recent first
    before: Lane | None = None  # its step before the last
    asked_again: int = 0  # the mark from which a refused arena may be asked for again
    told: bool = False  # that one was refused
    patience: int = _PATIENCE  # marks until it is asked for again
    paged: bool = False  # its arena is one in pages
    device: int = 0

    def forget(self, core: Core, number: int) -> None:
        """All plans, and what could have become one."""
        for known in self.plans.values():
            core.forget(number, known.number)
        self.plans.clear()
        self.seen.clear()
        self.before = None

    def highest(self) -> int:
        """The signature of the highest plan, or -1."""
        return max(self.plans, key=lambda s: self.plans[s].plan.height, default=-1)

    def arena_size(self) -> int:
        """What all plans fit in."""
        return _arena_size(max((known.plan.height for known in self.plans.values()), default=0))


class Pool:
    """Keeps a native pool in plans. `tell` is given one line when something cannot be had.

    `shrink` is asked before: whether the steps to come will need so much less, and take at most so
    many times as long. Until `ready`, steps say little of those to come, and none is planned.
    """

    def __init__(
        self,
        core: Core,
        place: Place,
        tell: Callable[[str], None],
        shrink: Callable[[int, float], bool] | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ready = ready
        self._shrink = shrink or (lambda *_: False)
        self._is_tight = shrink is not None
        self._core = core
        self._place = place
        self._tell = tell
        self._lanes: dict[int, _LaneState] = {}
        self._settled: set[int] = set()
        self._lacked: Counter[int] = Counter()  # by lane: layouts in a row that were too high
        self._trim_in = 0  # marks until what is cached is given back; 0: nothing is due
        self._marks = self._replayed = 0
        self._began = time.monotonic()
        self._planning_seconds = 0.0
        self._planned = self._allocations = self._unplanned = self._displaced = 0
        self._mode = Mode.RECORD
        pack([Buffer("", 0, 1, 1)])  # the search is built now, if it has to be, not at a mark
        core.set_mode(Mode.RECORD)

    def mark(self, *, anew: bool = False) -> None:
        """The step is over. `anew`: those to come are others."""
        self._marks += 1
        lanes = self._core.mark()
        if self._mode is Mode.REPLAY:
            self._account(lanes)
        short = {lane.device for lane in lanes if self._is_tight and _fits_only_without(lane)}
        if anew or short:
            self._start_over({lane.device for lane in lanes} if anew else short, wait=not anew)
            return
        for lane in lanes:
            state = self._lanes.setdefault(lane.lane, _LaneState(device=lane.device))
            state.paged = lane.page > 0
            if self._marks > 1:  # the first step's frees of what was there before are not seen
                self._look_at(lane, state)

    def _start_over(self, devices: set[int], *, wait: bool) -> None:
        """Without arenas, until steps repeat again. `wait`: and until some time has passed."""
        states = {n: state for n, state in self._lanes.items() if state.device in devices}
        arenas = {n: state.device for n, state in states.items() if state.plans and not state.paged}
        try:
            self._place.clear(arenas)
        finally:
            for number, state in states.items():
                state.forget(self._core, number)
                state.asked_again = self._marks + state.patience if wait else 0
                state.patience *= 2 if wait else 1
            self._settled -= devices  # what was gathered may lie in pieces again
            self._core.set_mode(self._mode)

    def stop(self) -> None:
        """Follow no more: arenas go with their last blocks."""
        self._core.stop()

    def summary(self) -> PoolSummary:
        """So far."""
        known = [entry for state in self._lanes.values() for entry in state.plans.values()]
        loads = [
            max((entry.plan.max_load for entry in state.plans.values()), default=0)
            for state in self._lanes.values()
        ]
        sizes = [state.arena_size() for state in self._lanes.values()]
        return PoolSummary(
            steps=self._marks,
            replayed=self._replayed,
            plans=len(known),
            arena_bytes=sum(sizes),
            planned=self._planned,
            allocations=self._allocations,
            unplanned=self._unplanned,
            displaced=self._displaced,
            load_bytes=sum(loads),
        )

    def _account(self, lanes: list[Lane]) -> None:
        served = [lane for lane in lanes if lane.arena_bytes and lane.allocations]
        self._replayed += bool(served) and all(lane.plan >= 0 for lane in served)
        for lane in served:
            self._planned += lane.planned
            self._allocations += lane.allocations
            self._unplanned += lane.unplanned
            self._displaced += lane.displaced
        if not served:
            return
        unforeseen = any(lane.unplanned or lane.displaced for lane in served)
        if self._trim_in == 0 and unforeseen:
            self._trim_in = _TRIM_WITHIN
        elif self._trim_in:
            self._trim_in -= 1
            # At the first step that went by its plan alone, or when it is time.
            if not unforeseen or self._trim_in == 0:
                self._trim_in = 0
                self._place.trim()
                self._core.set_mode(self._mode)  # the place may have needed another one

    def _look_at(self, lane: Lane, state: _LaneState) -> None:
        if not lane.allocations:
            state.before = None
            return
        state.seen[lane.signature] = state.seen.pop(lane.signature, 0) + 1
        if len(state.seen) > _MOST_SEEN:
            state.seen.popitem(last=False)
        known = state.plans.get(lane.signature)
        if known is not None:
            state.plans.move_to_end(lane.signature)
            known.trouble = known.trouble + 1 if lane.displaced else 0
        if lane.refused and state.plans and not state.paged:  # it fits only without an arena
            state.asked_again = self._marks + state.patience
        before, state.before = state.before, lane
        if before is not None and self._wanted(before, lane, state):
            self._plan(before, lane, state)

    def _wanted(self, step: Lane, now: Lane, state: _LaneState) -> bool:
        """Whether this step, whose successor `now` has ended, is to be planned."""
        if step.overflow or step.allocations > _LONGEST_STEP or not self._ready():
            return False
        if self._is_tight and step.signature != now.signature:
            return False  # what is left behind has to lie where it is planned to
        if not state.paged and any(
            other.paged and other.device == state.device for other in self._lanes.values()
        ):
            return False  # an arena beside pages would take what they need
        if self._marks < state.asked_again or state.seen.get(step.signature, 0) < 2:
            return False
        elapsed = time.monotonic() - self._began
        late = self._planning_seconds > _GRACE_SECONDS + _PLANNING_SHARE * elapsed
        if late and state.plans:
            return False
        known = state.plans.get(step.signature)
        if known is None:
            return True
        stale = known.beside != state.highest() != step.signature
        if stale and (known.trouble or now.displaced):
            return True  # what it left behind was in the way, or what another left in its own
        if known.trouble >= _TROUBLE:
            return known.replans < _MOST_REPLANS
        lost = not now.arena_bytes and state.arena_size() > 0  # no memory
        return lost and not state.paged

    def _plan(self, step: Lane, now: Lane, state: _LaneState) -> None:
        record = self._core.step(step.lane, 1)
        assert record is not None
        known = state.plans.get(step.signature)
        if known is not None:
            record = widened(record, known.record)
        highest = state.highest()
        beside = state.plans[highest].plan if highest in state.plans else None
        began = time.monotonic()
        seconds = _LATER_SECONDS if state.plans else _FIRST_SECONDS
        if self._is_tight:
            seconds = _TIGHT_SECONDS
        plan: StepPlan | None
        if state.paged:
            plan = self._plan_pages(record, now, state.arena_size())
        else:
            plan = plan_step(
                record,
                beside=beside,
                room=now.arena_bytes,
                seconds=seconds,
                single=self._is_tight,
            )
        self._planning_seconds += time.monotonic() - began
        if plan is None:
            state.seen.clear()
            return
        size = _arena_size(plan.height)
        left = {i: plan.phases[-1][i] for i in plan.left} if self._is_tight else {}
        larger = size > now.arena_bytes and not state.paged
        if larger and not self._make_room(now, size, state, left):
            return  # a plan that is there stays
        replans = 0
        if known is not None:
            self._core.forget(step.lane, known.number)
            replans = known.replans + 1 if known.beside == highest else 0
        number = self._core.add_plan(step.lane, plan.sizes, plan.phases)
        state.plans[step.signature] = _Known(number, plan, record, highest, replans)
        if len(state.plans) > _MOST_PLANS:
            _, oldest = state.plans.popitem(last=False)
            self._core.forget(step.lane, oldest.number)
        if self._mode is Mode.RECORD:
            self._mode = Mode.REPLAY
            self._core.set_mode(Mode.REPLAY)

    def _plan_pages(self, record: StepRecord, lane: Lane, highest: int) -> StepPlan | None:
        """In the lane's pages, of which as many get memory as the highest plan takes.

        None: not all of it has a place, but steps will need less.

        What the last step has left behind stays where it is, now and in the steps to come. Else it
        would lie in their way, and where room is scarce what has to go elsewhere lies in the way
        of others, step after step.
        """
        room, lasting = self._place.page_room(lane.device), self._core.lasting(lane.lane)
        plan = plan_pages(record, lane.page, room, lasting, self._core.left(lane.lane))
        if plan.missing:
            # Another plan leaves other holes: each time more of it is left than what is missing.
            times = self._lacked[lane.lane]
            self._lacked[lane.lane] += 1
            if times and self._shrink(plan.missing << times, _DEAR):
                return None
            if self._shrink(plan.missing, inf):
                return None
        self._lacked[lane.lane] = 0
        filled = self._core.fill(lane.lane, plan.filled, max(plan.height, highest))
        if not filled and self._shrink(lane.page, inf):
            return None
        windows = dict.fromkeys(plan.pages.values(), -1)
        for pages in windows:
            windows[pages] = self._core.window(lane.lane, pages)
        offsets = list(plan.offsets)
        for i, pages in plan.pages.items():
            offsets[i] = windows[pages]
        return StepPlan(record.sizes, [offsets], [], plan.height, plan.load)

    def _make_room(self, lane: Lane, size: int, state: _LaneState, left: Mapping[int, int]) -> bool:
        if lane.device not in self._settled:
            self._settled.add(lane.device)
            self._place.settle(lane.device)
        self._trim_in = _TRIM_WITHIN
        size = max(size, state.arena_size())
        grows = lane.arena_bytes > 0
        made = self._place.set_arena(lane.lane, size, lane.device, grows=grows, left=left)
        self._core.set_mode(self._mode)  # the place may have needed another one
        if made:
            return True
        if self._shrink(self._place.missing + int(_MORE * size), inf):
            state.seen.clear()
            return False
        state.asked_again = self._marks + state.patience
        if self._is_tight:  # it costs seconds each time
            state.patience *= 2
        if not state.told:
            state.told = True
            self._tell(
                f"pool: device {lane.device} has no room for an arena of {format_bytes(size)}; "
                "training goes on with PyTorch's own allocator"
            )
        return False


def _fits_only_without(lane: Lane) -> bool:
    """Whether its last step was none of those that an arena is for, and had no room beside it."""
    return bool(lane.refused and lane.arena_bytes and lane.plan < 0 and not lane.page)


def _arena_size(height: int) -> int:
    return rounded(height, ARENA_GRAIN) if height >= _SMALLEST_ARENA else 0
