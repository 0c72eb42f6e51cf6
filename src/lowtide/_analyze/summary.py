"""Trace -> the numbers every report of a step shows."""

import re
from collections import defaultdict
from dataclasses import dataclass

from lowtide._analyze.access import producers
from lowtide._analyze.gaps import idle_gaps
from lowtide._analyze.load import Peak, find_peak, owned_bytes, rounded_bytes
from lowtide._analyze.recompute import obstacles
from lowtide._ir import Kind, Phase, Trace, ValueId

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Owner:
    """Modules that hold memory at the peak; numbered layers that differ only in the number are
    one owner of several modules.
    """

    module: str
    modules: int
    by_kind: dict[Kind, int]

    @property
    def bytes(self) -> int:
        """All kinds together."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class Holding:
    """One value alive at the peak."""

    bytes: int
    kind: Kind
    name: str
    module: str
    made_by: str
    idle_ops: int  # the longest stretch in which nothing uses it
    obstacle: str  # why it cannot be recomputed, "" if it can


@dataclass(frozen=True, slots=True)
class Summary:
    """A step in numbers."""

    source: str
    device: str
    ops: int
    values: int
    seconds: float
    seconds_by_phase: dict[Phase, float]
    ops_by_phase: dict[Phase, int]
    peak: Peak
    peak_op: str
    peak_module: str
    by_kind: dict[Kind, int]
    owners: tuple[Owner, ...]  # largest first
    largest: tuple[Holding, ...]
    recomputable_bytes: int  # of what is alive at the peak
    saved_bytes: int


def summarize(trace: Trace, *, largest: int = 25) -> Summary:
    """The summary of `trace`, listing so many of the values alive at its peak."""
    peak = find_peak(trace)
    blocked = obstacles(trace)
    alive = [trace.values[i] for i in peak.owners]
    owned = owned_bytes(trace, peak.owners)
    by_kind = {
        kind: total
        for kind in Kind
        if (total := sum(size for (k, _), size in owned.items() if k is kind))
    }
    seconds = dict.fromkeys(Phase, 0.0)
    ops = dict.fromkeys(Phase, 0)
    for op in trace.ops:
        seconds[op.phase] += op.seconds
        ops[op.phase] += 1
    return Summary(
        source=trace.source,
        device=trace.device,
        ops=len(trace.ops),
        values=len(trace.values),
        seconds=sum(seconds.values()),
        seconds_by_phase=seconds,
        ops_by_phase=ops,
        peak=peak,
        peak_op=trace.ops[peak.op].name,
        peak_module=trace.ops[peak.op].module,
        by_kind=by_kind,
        owners=_owners(owned),
        largest=_largest(trace, peak.owners[:largest], [o or "" for o in blocked]),
        recomputable_bytes=sum(
            rounded_bytes(trace, trace.values[i]) for i in peak.owners if blocked[i] is None
        ),
        saved_bytes=sum(rounded_bytes(trace, value) for value in alive if value.saves),
    )


def _owners(owned: dict[tuple[Kind, str], int]) -> tuple[Owner, ...]:
    by_kind: dict[str, dict[Kind, int]] = defaultdict(lambda: defaultdict(int))
    members: dict[str, set[str]] = defaultdict(set)
    for (kind, module), size in owned.items():
        pattern = _INDEX.sub("*", module)
        by_kind[pattern][kind] += size
        members[pattern].add(module)
    owners = [Owner(p, len(members[p]), dict(kinds)) for p, kinds in by_kind.items()]
    return tuple(sorted(owners, key=lambda owner: (-owner.bytes, owner.module)))


def _largest(trace: Trace, values: tuple[ValueId, ...], blocked: list[str]) -> tuple[Holding, ...]:
    maker = producers(trace)
    idle: dict[int, int] = defaultdict(int)
    for gap in idle_gaps(trace):
        idle[gap.value] = max(idle[gap.value], gap.until - gap.after - 1)
    return tuple(
        Holding(
            bytes=rounded_bytes(trace, trace.values[i]),
            kind=trace.values[i].kind,
            name=trace.values[i].name,
            module=trace.values[i].module,
            made_by=trace.ops[maker[i]].name if i in maker else "",
            idle_ops=idle[i],
            obstacle=blocked[i],
        )
        for i in values
    )
