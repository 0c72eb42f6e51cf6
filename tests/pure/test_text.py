import pytest
from hypothesis import given
from strategies import traces

from lowtide import BadInput
from lowtide._check import find_flaw
from lowtide._ir import Kind, Phase, Save, Trace
from lowtide._trace.order import renumber
from lowtide._trace.text import format_trace, parse


def test_the_example_of_the_style_guide() -> None:
    trace = parse("""
        mm    x:8 w:8 -> h:8
        relu_ h       -> h
        mm    h v:8   -> y:8
    """)
    assert [op.name for op in trace.ops] == ["mm", "relu_", "mm"]
    x, w, h, h_after, v, y = trace.values
    assert x.before and x.after and w.before and v.before
    assert (h.storage, h.version, h.first, h.end) == (2, 0, 0, 1)
    assert (h_after.storage, h_after.version, h_after.first, h_after.end) == (2, 1, 1, 3)
    assert trace.ops[2].reads == (3, 4)
    assert (y.first, y.end, y.after) == (2, 3, False)


def test_everything_behind_the_bar() -> None:
    trace = parse("""
        device cuda:0
        granularity 512
        have w:8 | parameter @Net.fc name=Net.fc.weight
        mm w ~w -> h:8 | 1.5ms backward @Net.fc random workspace=64 node=MmBackward0
        is h | activation @Net.fc
        save h | op=0 node=MmBackward0 packed=1 unpacked=2,3
        nop -> | 1us factory
        nop -> | view
        keep h
    """)
    op, (w, h) = trace.ops[0], trace.values
    assert (op.seconds, op.phase, op.module, op.node) == (
        1.5e-3,
        Phase.BACKWARD,
        "Net.fc",
        "MmBackward0",
    )
    assert op.random and op.workspace_bytes == 64
    assert op.updates == (0,)
    assert (w.kind, w.name, w.device) == (Kind.PARAMETER, "Net.fc.weight", "cuda:0")
    assert h.saves == (Save(0, "MmBackward0", 1, (2, 3)),)  # type: ignore[arg-type]
    assert h.after and trace.ops[1].factory and trace.ops[2].view


def test_names_may_have_spaces_and_bars() -> None:
    trace = parse(
        "have w:8 | @a%20b name=x%7Cy\nmm w -> h:8 | @(anonymous%20namespace)::f node=%7B"
    )
    assert (trace.values[0].module, trace.values[0].name) == ("a b", "x|y")
    assert (trace.ops[0].module, trace.ops[0].node) == ("(anonymous namespace)::f", "{")
    assert parse(format_trace(trace)) == trace


@given(traces())
def test_text_round_trips(trace: Trace) -> None:
    assert find_flaw(trace) is None
    trace = renumber(trace)
    assert parse(format_trace(trace)) == trace


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mm x y", "line 1 of the trace text: 'mm' begins no line"),
        ("mm x:8 -> y:8\nmm z -> q:8", "line 2 of the trace text: no storage is called 'z'"),
        ("mm x:eight -> y:8", "is not name:bytes"),
        ("mm x:8 -> y:8\nmm y -> y:8", "'y' exists already"),
        ("mm x:8 -> y:8 | quickly", "'quickly' says nothing about an op"),
        ("mm x:8 -> y:8\nfree y\nmm y -> z:8", "'y' was freed"),
        ("mm x:8 -> y:8\nis y | precious", "'precious' says nothing about a value"),
        ("mm x:8 -> y:8\nsave y | packed=7", "cannot be true"),
    ],
)
def test_bad_text_is_one_line_that_names_the_place(text: str, complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(text)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
