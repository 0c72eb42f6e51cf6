"""Is a layout a layout? It shares no code with what makes layouts."""

import bisect
from collections.abc import Sequence

from lowtide._layout.buffers import Buffer


def find_clash(
    buffers: Sequence[Buffer],
    offsets: Sequence[int],
    *,
    align: int = 1,
    period: int | None = None,
) -> str | None:
    """What is wrong with these offsets, or None.

    Each buffer has one offset, not negative, a multiple of `align`, and the one it was fixed to;
    no two buffers alive at the same moment share a byte, and no two of different lanes ever do.
    """
    if len(offsets) != len(buffers):
        return f"{len(offsets)} offsets for {len(buffers)} buffers"
    for buffer, offset in zip(buffers, offsets, strict=True):
        if offset < 0 or offset % align:
            return f"{buffer.name} at {offset}, not a multiple of {align}"
        if buffer.offset is not None and buffer.offset != offset:
            return f"{buffer.name} at {offset}, though fixed to {buffer.offset}"
    return _in_time(buffers, offsets, period) or _across_lanes(buffers, offsets)


def _in_time(buffers: Sequence[Buffer], offsets: Sequence[int], period: int | None) -> str | None:
    """Walk through the step; those alive are kept by offset, so only neighbours can clash."""
    events: list[tuple[int, int, int]] = []  # moment, 0 ends or 1 starts, buffer
    for i, buffer in enumerate(buffers):
        stretches = [(buffer.lower, buffer.upper)]
        if period is not None and buffer.upper > period:
            if buffer.upper - buffer.lower > period:
                return f"{buffer.name} outlives the period: its next life needs another place"
            stretches = [(buffer.lower, period), (0, buffer.upper - period)]
        for lower, upper in stretches:
            events += [(lower, 1, i), (upper, 0, i)]
    alive: list[tuple[int, int]] = []  # offset, buffer
    for moment, starts, i in sorted(events):
        own = (offsets[i], i)
        at = bisect.bisect_left(alive, own)
        if not starts:
            del alive[at]
            continue
        for neighbour in alive[max(0, at - 1) : at + 1]:
            (_, low), (start, high) = sorted([own, neighbour])
            if start < offsets[low] + buffers[low].size:
                return (
                    f"{buffers[low].name} and {buffers[high].name} share byte {start} "
                    f"at moment {moment}"
                )
        alive.insert(at, own)
    return None


def _across_lanes(buffers: Sequence[Buffer], offsets: Sequence[int]) -> str | None:
    """Walk up the addresses: a lane may not start below where another still goes on."""
    reach: dict[int, tuple[int, str]] = {}  # lane: where its bytes end so far, and whose
    for i in sorted(range(len(buffers)), key=lambda i: offsets[i]):
        buffer = buffers[i]
        for lane, (end, name) in reach.items():
            if lane != buffer.lane and offsets[i] < end:
                return f"{name} and {buffer.name} share byte {offsets[i]} across lanes"
        end = offsets[i] + buffer.size
        if end > reach.get(buffer.lane, (0, ""))[0]:
            reach[buffer.lane] = (end, buffer.name)
    return None
