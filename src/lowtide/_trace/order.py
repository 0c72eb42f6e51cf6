"""Trace -> the same trace, numbered in the one order every producer of traces uses.

Values there before the step come first, in the order given; then values in the order in which
ops make them, those that appear without an op just before the op that first sees them. Storages
and geometries are numbered by first use, and geometries nobody uses are dropped. Two traces of
the same step are then equal field by field.
"""

from collections import defaultdict
from dataclasses import replace

from lowtide._ir import GeometryId, Operand, OpIndex, StorageId, Trace, ValueId


def renumber(trace: Trace) -> Trace:
    """`trace` in the common order."""
    order = _value_order(trace)
    new_value = {old: ValueId(new) for new, old in enumerate(order)}
    new_storage: dict[StorageId, StorageId] = {}
    for old in order:
        new_storage.setdefault(trace.values[old].storage, StorageId(len(new_storage)))
    new_geometry: dict[GeometryId, GeometryId] = {}

    def operand(old: Operand) -> Operand:
        geometry = new_geometry.setdefault(old.geometry, GeometryId(len(new_geometry)))
        return Operand(new_value[old.value], geometry)

    ops = tuple(
        replace(
            op,
            reads=tuple(new_value[value] for value in op.reads),
            updates=tuple(new_value[value] for value in op.updates),
            writes=tuple(new_value[value] for value in op.writes),
            operands=tuple(operand(old) for old in op.operands),
            results=tuple(operand(old) for old in op.results),
        )
        for op in trace.ops
    )
    values = tuple(
        replace(trace.values[old], storage=new_storage[trace.values[old].storage]) for old in order
    )
    return replace(
        trace,
        ops=ops,
        values=values,
        geometries=tuple(trace.geometries[old] for old in new_geometry),
    )


def _value_order(trace: Trace) -> list[ValueId]:
    written = {value for op in trace.ops for value in op.writes}
    appearing: dict[OpIndex, list[ValueId]] = defaultdict(list)
    order: list[ValueId] = []
    for i, value in enumerate(trace.values):
        if value.before:
            order.append(ValueId(i))
        elif i not in written:
            appearing[value.first].append(ValueId(i))
    for i, op in enumerate(trace.ops):
        order += appearing[OpIndex(i)]
        order += op.writes
    return order
