"""Trace -> the stretches in which a value's bytes lie idle: what could leave the device.

A gap (r, d) runs from the end of op r, which used the bytes, to the start of op d, which uses
them next. A storage that persists from step to step has one more, across the boundary: d is then
the next step's op index plus the number of ops. Values that no op of the step uses are idle all
the time and have one gap of a whole step.
"""

from dataclasses import dataclass
from itertools import pairwise

from lowtide._analyze.access import accesses
from lowtide._ir import OpIndex, StorageId, Trace, ValueId


@dataclass(frozen=True, slots=True)
class Gap:
    """`value` is idle for the ops strictly between `after` and `until`."""

    value: ValueId
    after: OpIndex
    until: OpIndex
    crosses_step: bool = False


def idle_gaps(trace: Trace) -> list[Gap]:
    """Every idle gap of at least one op, value by value, in order of time."""
    touched = accesses(trace)
    gaps = [
        Gap(ValueId(i), r, d)
        for i, uses in enumerate(touched)
        for r, d in pairwise(uses)
        if d - r > 1
    ]
    return gaps + _gaps_across_steps(trace, touched)


def _gaps_across_steps(trace: Trace, touched: list[list[OpIndex]]) -> list[Gap]:
    count = len(trace.ops)
    uses: dict[StorageId, list[OpIndex]] = {}
    last_version: dict[StorageId, ValueId] = {}
    persists: set[StorageId] = set()
    for i, value in enumerate(trace.values):
        uses.setdefault(value.storage, []).extend(touched[i])
        if value.before:
            persists.add(value.storage)
        if value.after:
            last_version[value.storage] = ValueId(i)
    gaps = []
    for storage, value_id in last_version.items():
        if storage not in persists:
            continue
        last = max(uses[storage], default=OpIndex(-1))
        first_again = min(uses[storage], default=OpIndex(0)) + count
        if first_again - last > 1:
            gaps.append(Gap(value_id, OpIndex(last), OpIndex(first_again), True))
    return gaps
