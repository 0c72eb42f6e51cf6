"""Trace -> when each value is touched, and by which op it was made."""

from lowtide._ir import OpIndex, Trace, ValueId


def accesses(trace: Trace) -> list[list[OpIndex]]:
    """For every value the ops that use its bytes, in order; the op that makes it comes first."""
    touched: list[list[OpIndex]] = [[] for _ in trace.values]
    for i, op in enumerate(trace.ops):
        for value in {*op.reads, *op.updates, *op.writes}:
            touched[value].append(OpIndex(i))
    return touched


def producers(trace: Trace) -> dict[ValueId, OpIndex]:
    """The op that made each value, for those that an op made."""
    return {value: OpIndex(i) for i, op in enumerate(trace.ops) for value in op.writes}
