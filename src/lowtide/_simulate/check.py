"""Trace, swaps -> the first law that a swap breaks, or nothing.

A stay away runs from the end of op `after` to the start of op `until`. The laws:

1. The value exists and lies on the trace's device.
2. The positions are in order and in range: 0 <= after < n, after < release <= fetch <= until,
   until <= after + n, with n ops in the step.
3. Nobody needs the bytes meanwhile: no op strictly inside touches any version of the storage,
   and none gets new content that op `until` did not itself write.
4. There is something to bring back. A stay within the step: the value is there from the end of
   op `after` to op `until`, which may overwrite it. A stay across the boundary: the storage was
   there before the step and is there after it, of one size, and the value is what the step
   leaves in it.
5. Two stays of one storage do not overlap.

Shares no code with what makes swaps.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from lowtide._ir import StorageId, Swap, Trace, Value, ValueId


def find_bad_swap(trace: Trace, swaps: Sequence[Swap]) -> str | None:
    """The first broken law in words, or None."""
    book = _Book(trace)
    for number, swap in enumerate(swaps):
        broken = (
            _position_flaw(trace, swap)
            or _use_flaw(trace, swap, book)
            or _life_flaw(trace, swap, book)
        )
        if broken:
            return f"swap {number}: {broken}"
    return _overlap(trace, swaps)


class _Book:
    """By storage: the ops that touch it, the moments it gets new content, its first version."""

    def __init__(self, trace: Trace) -> None:
        self.uses: dict[StorageId, list[int]] = defaultdict(list)
        self.news: dict[StorageId, list[int]] = defaultdict(list)  # content that no op wrote
        self.before: dict[StorageId, Value] = {}
        self.overwrites: set[tuple[StorageId, int]] = set()  # storage, op
        written: set[ValueId] = set()
        for i, op in enumerate(trace.ops):
            touched = {trace.values[value].storage for value in (*op.reads, *op.updates)}
            made = {trace.values[value].storage for value in op.writes}
            written.update(op.writes)
            self.overwrites |= {(storage, i) for storage in made}
            for storage in touched | made:
                self.uses[storage].append(i)
        for number, value in enumerate(trace.values):
            if value.before:
                self.before[value.storage] = value
            elif number not in written:
                self.news[value.storage].append(value.first)
        for moments in self.news.values():
            moments.sort()


def _position_flaw(trace: Trace, swap: Swap) -> str | None:
    count = len(trace.ops)
    if not 0 <= swap.value < len(trace.values):
        return f"value {swap.value} does not exist"
    device = trace.values[swap.value].device
    if device != trace.device:
        return f"value {swap.value} lies on {device}, not on {trace.device}"
    if not 0 <= swap.after < count:
        return f"it begins after op {swap.after} of {count}"
    if not swap.after < swap.release <= swap.fetch <= swap.until:
        return (
            f"its positions are out of order: after {swap.after}, release {swap.release}, "
            f"fetch {swap.fetch}, until {swap.until}"
        )
    if swap.until > swap.after + count:  # and so until < 2n
        return f"it lasts from op {swap.after} to {swap.until}, more than a step of {count} ops"
    return None


def _use_flaw(trace: Trace, swap: Swap, book: _Book) -> str | None:
    storage = trace.values[swap.value].storage
    count = len(trace.ops)
    used = _first_inside(book.uses[storage], swap.after, swap.until, count)
    if used is not None:
        return f"op {used} uses storage {storage}, away between {swap.after} and {swap.until}"
    new = _first_inside(book.news[storage], swap.after, swap.until + 1, count)
    if new is not None:
        return f"storage {storage} gets new content before op {new}, while it is away"
    return None


def _first_inside(moments: Sequence[int], low: int, high: int, count: int) -> int | None:
    """The first of `moments`, which recur every `count`, strictly between `low` and `high`."""
    at = bisect_right(moments, low)
    if at < len(moments):
        return moments[at] if moments[at] < high else None
    return moments[0] if moments and moments[0] + count < high else None


def _life_flaw(trace: Trace, swap: Swap, book: _Book) -> str | None:
    value = trace.values[swap.value]
    count = len(trace.ops)
    if not value.first <= swap.after < value.end:
        return f"value {swap.value} is not there after op {swap.after}"
    if swap.until < count:
        overwritten = value.end == swap.until and (value.storage, swap.until) in book.overwrites
        if swap.until >= value.end and not overwritten:
            return f"value {swap.value} is gone before op {swap.until}"
        return None
    if value.storage not in book.before or not value.after:
        return f"it crosses the step's end, but value {swap.value} does not"
    if book.before[value.storage].bytes != value.bytes:
        return f"storage {value.storage} changes its size from step to step"
    return None


def _overlap(trace: Trace, swaps: Sequence[Swap]) -> str | None:
    count = len(trace.ops)
    stays: dict[StorageId, list[tuple[int, int, int]]] = defaultdict(list)  # after, until, swap
    for number, swap in enumerate(swaps):
        stays[trace.values[swap.value].storage].append((swap.after, swap.until, number))
    for storage, found in stays.items():
        found.sort()
        after, until, number = found[0]
        for (_, end, one), (begin, _, other) in pairwise(
            [*found, (after + count, until + count, number)]
        ):
            if begin < end:
                return f"swaps {one} and {other} of storage {storage} overlap"
    return None
