"""What ops of backward take that run as one: the part that is for bytes from elsewhere."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

from lowtide._analyze.chained import with_chains
from lowtide._analyze.fusable import LEAST_SECONDS
from lowtide._ir import (
    Geometry,
    GeometryId,
    Kind,
    Op,
    Operand,
    OpIndex,
    Phase,
    StorageId,
    Trace,
    Value,
    ValueId,
)

SIZE = 1 << 20  # bytes of every value, and the seconds of each that is read or written


def step(*rows: tuple[str, str, str]) -> Trace:
    """Ops of backward by their names, with what they read and make, a letter each."""
    names: list[str] = []
    for _, reads, makes in rows:
        names += [one for one in reads + makes if one not in names]
    number = {name: ValueId(i) for i, name in enumerate(names)}
    made = {makes: i for i, (_, _, makes) in enumerate(rows)}
    last = {name: i for i, (_, reads, makes) in enumerate(rows) for name in reads + makes}
    values = [
        Value(
            *(StorageId(i), 0, SIZE, Kind.TEMPORARY),
            OpIndex(made.get(name, 0)),
            OpIndex(last[name] + 1),
            before=name not in made,
        )
        for i, name in enumerate(names)
    ]
    ops = [
        Op(
            f"aten.{op}",
            reads=tuple(number[one] for one in reads),
            writes=(number[makes],),
            operands=tuple(Operand(number[one], GeometryId(0)) for one in reads),
            results=(Operand(number[makes], GeometryId(0)),),
            seconds=float(len({*reads, makes})),
            phase=Phase.BACKWARD,
        )
        for op, reads, makes in rows
    ]
    geometry = Geometry("float32", (SIZE // 4,), (1,), 0)
    return Trace(tuple(ops), tuple(values), (geometry,))


def times(trace: Trace, waiting: set[int]) -> list[float]:
    return [round(op.seconds, 3) for op in with_chains(trace, waiting).ops]


def test_what_is_made_for_the_next_op_takes_no_time() -> None:
    # g, a and b are read; d is wanted: c is made for the next op, and a is read once.
    trace = step(
        ("mul.Tensor", "ga", "c"), ("tanh_backward.default", "ca", "d"), ("mm.default", "db", "e")
    )
    assert times(trace, {0, 1}) == [2, 1, 3]
    assert times(trace, {0, 1, 2}) == [2, 1, 3], "no kernel makes a product of matrices"


def test_what_may_not_wait_parts_a_chain() -> None:
    trace = step(("neg.default", "a", "b"), ("neg.default", "b", "c"), ("neg.default", "c", "d"))
    assert times(trace, {0, 1, 2}) == [1, 0, 0]  # nobody reads d: it is not made
    assert times(trace, {0, 2}) == [2, 2, 2]
    assert times(trace, {0, 1}) == [1, 1, 2]
    assert times(trace, set()) == [2, 2, 2]


def test_tensors_of_other_sizes_begin_another_chain() -> None:
    trace = step(("neg.default", "a", "b"), ("neg.default", "b", "c"), ("mm.default", "c", "d"))
    small = replace(trace.geometries[0], shape=(1,))
    second = replace(trace.ops[1], results=(Operand(ValueId(2), GeometryId(1)),))
    trace = replace(
        trace,
        ops=(trace.ops[0], second, trace.ops[2]),
        geometries=(*trace.geometries, small),
    )
    assert times(trace, {0, 1}) == [2, 2, 2]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@settings(max_examples=40, deadline=None)
@given(trace=traces(), draw=st.randoms(use_true_random=False))
def test_no_op_takes_longer_and_nothing_else_changes(
    share: float, trace: Trace, draw: Random
) -> None:
    waiting = {i for i in range(len(trace.ops)) if draw.random() < share}
    found = with_chains(trace, waiting)
    for before, after in zip(trace.ops, found.ops, strict=True):
        assert replace(after, seconds=before.seconds) == before
        assert after.seconds <= before.seconds
        assert after.seconds > 0 or not before.seconds or after.seconds >= LEAST_SECONDS
    assert found.values == trace.values
