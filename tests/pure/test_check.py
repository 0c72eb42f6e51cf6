from dataclasses import replace
from typing import Any

import pytest

from lowtide._check import find_flaw
from lowtide._ir import Operand, OpIndex, Save, Trace, ValueId
from lowtide._trace.text import parse

GOOD = parse("""
    geometry float32 [2] [1] 0
    have w:8
    mm x:8 w -> h:8 | {"in":[["w",0]]}
    relu_ h -> h
    add h -> y:8
    keep y
""")  # values: w, x, h, h', y


def test_a_good_trace_has_no_flaw() -> None:
    assert find_flaw(GOOD) is None


def _value(number: int, **changes: Any) -> Trace:
    values = list(GOOD.values)
    values[number] = replace(values[number], **changes)
    return replace(GOOD, values=tuple(values))


def _op(number: int, **changes: Any) -> Trace:
    ops = list(GOOD.ops)
    ops[number] = replace(ops[number], **changes)
    return replace(GOOD, ops=tuple(ops))


@pytest.mark.parametrize(
    ("broken", "flaw"),
    [
        (_value(0, end=OpIndex(9)), "lives for ops 0..9 of 3"),
        (_value(0, bytes=-1), "has -1 bytes"),
        (_value(4, first=OpIndex(3)), "never lives"),
        (_value(4, before=True), "was there before the step but begins at op 2"),
        (_value(3, after=True, end=OpIndex(2)), "outlives the step but ends at op 2"),
        (_value(3, version=2), "misses a version"),
        (_value(3, device="cuda"), "breaks between versions 0 and 1"),
        (_value(2, end=OpIndex(2)), "breaks between versions 0 and 1"),
        (_op(2, writes=(ValueId(3),)), "op 2 (add) writes value 3"),
        (_op(2, reads=(ValueId(2),)), "op 2 (add) touches value 2, alive only for 0..1"),
        (_op(0, reads=(ValueId(9),)), "names a value that does not exist"),
        (_op(0, operands=(Operand(ValueId(0), 3),)), "names a geometry"),  # type: ignore[arg-type]
        (_op(0, seconds=-1.0), "negative or absurd time"),
        (_value(3, saves=(Save(OpIndex(9), "", OpIndex(2)),)), "saved by op 9"),
        (_value(2, saves=(Save(None, "", OpIndex(3)),)), "outside its life"),
        (
            _value(3, saves=(Save(None, "", OpIndex(2), (OpIndex(1),)),)),
            "before it was saved",
        ),
        (_op(0, seconds=float("nan")), "negative or absurd time"),
        (_op(0, workspace_bytes=10**30), "absurd time or workspace"),
        (_value(0, bytes=1 << 62), "more bytes together than any machine"),
        (replace(GOOD, unseen_bytes=10**30), "absurd"),
        (replace(GOOD, granularity_bytes=0), "granularity"),
    ],
)
def test_each_law_is_checked(broken: Trace, flaw: str) -> None:
    assert flaw in (find_flaw(broken) or "")
