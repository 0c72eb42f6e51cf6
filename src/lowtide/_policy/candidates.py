"""Trace -> what could leave the device: every idle gap of a large enough value.

AutoSwap (Zhang et al. 2019) takes only gaps that span the load peak; here every gap counts, also
across the step's end, because lowering one peak uncovers the next.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from lowtide._analyze.gaps import Gap, idle_gaps
from lowtide._analyze.load import load_curve, rounded_bytes
from lowtide._ir import Kind, OpIndex, Phase, StorageId, Trace, Value, ValueId

GUEST_KINDS = (Kind.PARAMETER, Kind.GRADIENT)  # the program's own, which the runtime can move
_NEVER_THROUGH_SAVES = (Kind.BUFFER, Kind.INPUT)


class Reach(StrEnum):
    """Whose gaps count."""

    ALL = "all"  # every one, as in the paper
    RUNTIME = "runtime"  # those the runtime can use: of what is saved or an optimizer's


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value that nothing uses between op `after` and op `until`.

    Its bytes can be free for ops `earliest <= i < latest` at most: between the first position at
    which they may be released and the last at which they may be fetched. Positions of at least
    the number of ops lie in the next step; `after` never does.
    """

    value: ValueId
    bytes: int  # rounded up as the allocator does
    after: OpIndex
    until: OpIndex
    earliest: OpIndex
    latest: OpIndex


def candidates(
    trace: Trace,
    *,
    smallest: int = 1 << 20,
    reach: Reach = Reach.ALL,
    held: Mapping[ValueId, OpIndex] | None = None,
    movable: Container[ValueId] | None = None,
) -> list[Candidate]:
    """The gaps of values of at least `smallest` bytes on the trace's device.

    `held` says of a saved value up to which position something else, Python mostly, refers to it
    and so keeps it here; of those not in it, all the time. None: nothing is known to be held.
    Values not in `movable` stay; None: all may move.
    """
    found = []
    for gap in _sound_gaps(trace):
        value = trace.values[gap.value]
        if value.device != trace.device or value.bytes < max(smallest, 1):
            continue
        if movable is not None and gap.value not in movable:
            continue
        if reach is Reach.ALL:
            stretch: tuple[int, int] | None = (gap.after + 1, gap.until)
        else:
            stretch = _runtime_stretch(trace, gap)
        if stretch is None:
            continue
        opens, until = stretch
        earliest = opens
        if held is not None and not gap.crosses_step and value.kind not in GUEST_KINDS:
            earliest = max(opens, held.get(gap.value, OpIndex(until)))
        if earliest < until:
            found.append(
                Candidate(
                    gap.value,
                    rounded_bytes(trace, value),
                    gap.after,
                    OpIndex(until),
                    OpIndex(earliest),
                    OpIndex(until),
                )
            )
    return found


def _sound_gaps(trace: Trace) -> list[Gap]:
    """The gaps at whose end the bytes are what they were at their beginning.

    A value that no op uses is idle for a whole step; its stay is cut where the load is lowest.
    """
    count = len(trace.ops)
    before = {value.storage: value.bytes for value in trace.values if value.before}
    made = {value for op in trace.ops for value in op.writes}
    refilled: dict[StorageId, list[int]] = defaultdict(list)  # with content that no op wrote
    for i, value in enumerate(trace.values):
        if not value.before and i not in made:
            refilled[value.storage].append(value.first)
    sound = []
    for gap in idle_gaps(trace):
        value = trace.values[gap.value]
        if gap.after < 0:
            lowest = OpIndex(int(load_curve(trace).argmin()))
            gap = replace(gap, after=lowest, until=OpIndex(lowest + count))
        if gap.crosses_step and (
            value.first > gap.after
            or before[value.storage] != value.bytes
            or any(gap.after < at or at + count <= gap.until for at in refilled[value.storage])
        ):
            continue
        if gap.until - gap.after > 1:
            sound.append(gap)
    return sound


def _runtime_stretch(trace: Trace, gap: Gap) -> tuple[int, int] | None:
    """From which position on the runtime can have the gap's value away, and until which.

    It sees a saved value when autograd packs it and must have it back when backward unpacks it,
    which is often a few ops before its bytes are used.
    """
    value = trace.values[gap.value]
    if gap.crosses_step:
        lasts = value.kind in (Kind.STATE, Kind.PARAMETER)
        return (gap.after + 1, gap.until) if lasts else None
    if value.kind in GUEST_KINDS:
        return None if _is_saved_in(value, gap) else (gap.after + 1, gap.until)
    if value.kind in _NEVER_THROUGH_SAVES:
        return None
    wanted = [u for save in value.saves for u in save.unpacked if gap.after < u <= gap.until]
    packed = [save.packed for save in value.saves if save.unpacked]
    if not wanted:
        return None
    return max(gap.after + 1, min(packed)), min(wanted)


def _is_saved_in(value: Value, gap: Gap) -> bool:
    """Whether backward has a view of it for some of the time, so that it stays."""
    return any(
        save.packed <= gap.until and max(save.unpacked, default=gap.until) > gap.after
        for save in value.saves
    )


def positions(trace: Trace) -> list[int]:
    """Where in the step the runtime can act, in order; 0 is also the end of the step before."""
    count = len(trace.ops)
    acts = {0}
    for value in trace.values:
        for save in value.saves:
            acts |= {save.packed, *save.unpacked}
    optimizer = (i for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER)
    acts.add(next(optimizer, 0))
    return sorted({position % max(count, 1) for position in acts})


@dataclass(frozen=True, slots=True)
class Grid:
    """The positions at which releases and fetches may happen, in every step alike."""

    count: int  # ops in a step
    allowed: npt.NDArray[np.int64] | None  # sorted, each below `count`; None: all of them
    found_as: Mapping[ValueId, ValueId]  # what a step leaves in a storage -> what the next finds

    def up(self, position: int) -> int:
        """The first allowed position from `position` on."""
        if self.allowed is None:
            return position
        step, place = divmod(position, self.count)
        at = int(np.searchsorted(self.allowed, place))
        if at == len(self.allowed):
            step, at = step + 1, 0
        return step * self.count + int(self.allowed[at])

    def down(self, position: int) -> int:
        """The last allowed position up to `position`."""
        if self.allowed is None:
            return position
        step, place = divmod(position, self.count)
        at = int(np.searchsorted(self.allowed, place, side="right")) - 1
        if at < 0:
            step, at = step - 1, len(self.allowed) - 1
        return step * self.count + int(self.allowed[at])

    def fit(self, found: Sequence[Candidate]) -> list[Candidate]:
        """`found` with `earliest` and `latest` allowed; those that are left no op are dropped.

        Who can act only at some positions starts a copy at one of them, too. If the first is in
        the next step, the stay is one of that step, and of the value as that step finds it.
        """
        if self.allowed is None:
            return [c for c in found if c.earliest < c.latest]
        rounded = []
        for c in found:
            earliest, latest = self.up(c.earliest), self.down(c.latest)
            if earliest < latest:
                shift = (earliest - 1) // self.count * self.count
                rounded.append(
                    Candidate(
                        self.found_as[c.value] if shift else c.value,
                        c.bytes,
                        OpIndex(earliest - 1 - shift),
                        OpIndex(c.until - shift),
                        OpIndex(earliest - shift),
                        OpIndex(latest - shift),
                    )
                )
        return rounded


def make_grid(trace: Trace, allowed: Sequence[int] | None) -> Grid:
    """The grid of `allowed` positions of `trace`; None allows all."""
    count = len(trace.ops)
    if allowed is None:
        return Grid(count, None, {})
    places = np.array(sorted({p % count for p in allowed} or {0}), dtype=np.int64)
    before = {value.storage: ValueId(i) for i, value in enumerate(trace.values) if value.before}
    found_as = {
        ValueId(i): before[value.storage]
        for i, value in enumerate(trace.values)
        if value.after and value.storage in before
    }
    return Grid(count, places, found_as)
