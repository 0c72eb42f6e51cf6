"""A long trace -> the trace of one stretch of it, with op indices counted from its start.

What was alive at the start becomes `before`, what is still alive at the end `after`. Used on
recordings of several steps, and on allocator histories.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from lowtide._ir import Kind, Op, Operand, OpIndex, Save, StorageId, Trace, Value, ValueId
from lowtide._trace.order import renumber


def cut(trace: Trace, start: int, stop: int) -> Trace:
    """The ops `start <= i < stop` as a trace of their own, in the common order."""
    # The first op may overwrite a value in place: it is gone at once, but the op refers to it.
    needed = {
        value
        for op in trace.ops[start : start + 1]
        for value in (*op.reads, *op.updates, *(operand.value for operand in op.operands))
    }
    replaced = {(value.storage, value.version - 1) for value in trace.values}
    continued = {(start, value.storage) for value in trace.values if value.first == start}
    kept = [
        ValueId(i)
        for i, value in enumerate(trace.values)
        if value.first < stop
        and (value.end > value.first or (value.storage, value.version) in replaced)
        and (value.end > start or i in needed or (value.end, value.storage) in continued)
    ]
    # Only what was there before has an order to choose; the rest is ordered by the ops.
    rank = _ranks(trace, start, stop)
    was_there = {i for i in kept if trace.values[i].first < start or trace.values[i].before}
    kept = [*sorted(was_there, key=rank), *(i for i in kept if i not in was_there)]
    oldest: dict[int, int] = defaultdict(lambda: 1 << 62)
    for i in kept:
        storage = trace.values[i].storage
        oldest[storage] = min(oldest[storage], trace.values[i].version)
    new_id = {old: ValueId(new) for new, old in enumerate(kept)}
    overwritten_at_stop = {value.storage for value in trace.values if value.first == stop}
    values = tuple(_clip(trace.values[i], oldest, start, stop, overwritten_at_stop) for i in kept)

    def moved(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(Operand(new_id[o.value], o.geometry) for o in operands)

    ops = tuple(
        replace(
            op,
            reads=tuple(new_id[value] for value in op.reads),
            updates=tuple(new_id[value] for value in op.updates),
            writes=tuple(new_id[value] for value in op.writes),
            operands=moved(op.operands),
            results=moved(op.results),
        )
        for op in trace.ops[start:stop]
    )
    return renumber(replace(trace, ops=ops, values=_without_passing_parameters(ops, values)))


def _without_passing_parameters(
    ops: tuple[Op, ...], values: tuple[Value, ...]
) -> tuple[Value, ...]:
    """A leaf with a gradient that no module or optimizer knows is a parameter only if it was
    there before: reentrant checkpointing and attacks on inputs make leaves in every step.
    """
    stays = {value.storage for value in values if value.before}
    made = {value for op in ops for value in op.writes}
    return tuple(
        replace(value, kind=Kind.ACTIVATION if i in made else Kind.INPUT)
        if value.kind is Kind.PARAMETER and not value.name and value.storage not in stays
        else value
        for i, value in enumerate(values)
    )


def _ranks(trace: Trace, start: int, stop: int) -> Callable[[ValueId], tuple[object, ...]]:
    """A sort key free of accidents: first use in the stretch, then what the value is."""
    first_use: dict[ValueId, int] = {}
    for op in trace.ops[start:stop]:
        for value in (*(operand.value for operand in op.operands), *op.reads, *op.updates):
            first_use.setdefault(value, len(first_use))

    def rank(i: ValueId) -> tuple[object, ...]:
        value = trace.values[i]
        use = first_use.get(i, len(first_use))
        return use, value.kind, value.name, value.bytes, value.device, value.module, value.end

    return rank


def _clip(
    value: Value, oldest: dict[int, int], start: int, stop: int, overwritten_at_stop: set[StorageId]
) -> Value:
    return replace(
        value,
        version=value.version - oldest[value.storage],
        first=OpIndex(max(value.first - start, 0)),
        end=OpIndex(max(min(value.end, stop) - start, 0)),
        before=value.before or value.first < start,
        after=value.end > stop
        or (value.end == stop and (value.after or value.storage in overwritten_at_stop)),
        saves=tuple(
            Save(
                op=None if save.op is None or save.op < start else OpIndex(save.op - start),
                node=save.node,
                packed=OpIndex(max(save.packed - start, 0)),
                unpacked=tuple(OpIndex(at - start) for at in save.unpacked if start <= at <= stop),
            )
            for save in value.saves
            if start <= save.packed < stop or any(start <= at < stop for at in save.unpacked)
        ),
    )
