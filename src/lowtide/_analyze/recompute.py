"""Trace -> for each value, whether it could be computed again, and if not, why not.

A recipe is the op that made the value. It can be replayed while its sources can be had in the
version the op saw: a source that is merely freed can be held on to, one that is itself
recomputable can be made again, one that is overwritten while the value is still wanted is lost.
"""

from enum import StrEnum
from math import inf

from lowtide._analyze.access import accesses, producers
from lowtide._ir import UNREPLAYABLE, Kind, Op, OpIndex, Trace, Value, ValueId


class Obstacle(StrEnum):
    """Why a value cannot be recomputed."""

    INPUT = "an input: it came from outside the step"
    NO_PRODUCER = "no recorded producer: no op that can be replayed was seen making it"
    OPAQUE = "an opaque write: its bytes were, or may have been, written by no recorded op"
    MUTATED = "mutated later: something it is computed from is overwritten before its last use"


def obstacles(trace: Trace) -> list[Obstacle | None]:
    """One entry a value, None where it can be recomputed."""
    touched = accesses(trace)
    maker = producers(trace)
    result: list[Obstacle | None] = [None] * len(trace.values)
    overwritten = {
        (value.storage, value.version - 1): value.first for value in trace.values if value.version
    }
    until = [0.0] * len(trace.values)  # up to which op the value can be had, kept or made again
    for i in sorted(range(len(trace.values)), key=lambda i: trace.values[i].first):
        value = trace.values[i]
        at = maker.get(ValueId(i))
        kept_until = overwritten.get((value.storage, value.version), inf)
        sources: list[ValueId] = []
        if at is None:
            result[i] = _obstacle_without_producer(value)
        elif UNREPLAYABLE in trace.ops[at].args:
            result[i] = Obstacle.NO_PRODUCER
        elif may_be_filled_unseen(trace.ops[at]):
            result[i] = Obstacle.OPAQUE
        else:
            op = trace.ops[at]
            sources = [*op.reads]
            if value.version:
                sources += [u for u in op.updates if trace.values[u].storage == value.storage]
            if min((until[s] for s in sources), default=inf) < _wanted_until(trace, i, touched):
                result[i] = Obstacle.MUTATED
        until[i] = kept_until
        if result[i] is None:
            until[i] = max(kept_until, min((until[s] for s in sources), default=inf))
    return result


def _wanted_until(trace: Trace, i: int, touched: list[list[OpIndex]]) -> int:
    value = trace.values[i]
    if value.after:
        return len(trace.ops)
    return max([*touched[i], *(u for save in value.saves for u in save.unpacked)])


def may_be_filled_unseen(op: Op) -> bool:
    """Whether a raw kernel may fill what `op` made: it only reserved or blanked the bytes.

    Kernels that bypass the dispatcher (Triton, pybind) write into such tensors. A recorded op
    that writes into one makes a new value, so a value whose own producer is one of these was
    either meant as it is or filled unseen, and nobody can tell which.
    """
    base = op.name.removeprefix("aten.").split(".")[0]
    base = base.removeprefix("new_").removesuffix("_like").removesuffix("_strided")
    return op.factory and base in ("empty", "zeros", "ones", "full", "empty_permuted")


def _obstacle_without_producer(value: Value) -> Obstacle:
    if value.version:
        return Obstacle.OPAQUE
    if value.before or value.kind is Kind.INPUT:
        return Obstacle.INPUT
    return Obstacle.NO_PRODUCER
