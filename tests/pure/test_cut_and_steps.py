from hypothesis import given
from hypothesis import strategies as st
from strategies import traces

from lowtide import Trace
from lowtide._analyze.load import load_curve
from lowtide._check import find_flaw
from lowtide._ir import Save
from lowtide._trace.cut import cut
from lowtide._trace.digest import digest
from lowtide._trace.order import renumber
from lowtide._trace.steps import Bounds, Mark, closing_marks, last_step, repeating_step
from lowtide._trace.text import parse


@given(traces(), st.data())
def test_a_cut_is_true_and_has_the_load_of_its_stretch(trace: Trace, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(trace.ops) - 1))
    stop = data.draw(st.integers(start + 1, len(trace.ops)))
    part = cut(trace, start, stop)
    assert find_flaw(part) is None
    assert load_curve(part).tolist() == load_curve(trace)[start:stop].tolist()
    assert [op.name for op in part.ops] == [op.name for op in trace.ops[start:stop]]


@given(traces())
def test_the_common_order_is_one_order(trace: Trace) -> None:
    ordered = renumber(trace)
    assert renumber(ordered) == ordered
    assert find_flaw(ordered) is None
    assert load_curve(ordered).tolist() == load_curve(trace).tolist()


def test_what_crosses_the_border_is_before_and_after() -> None:
    whole = parse("""
        mm x:8 -> old:8
        save old | op=0 node=N packed=1 unpacked=2
        save x | op=0 node=M packed=0
        mm old -> new:8
        nop ->
        mm new old -> z:8
    """)
    step = cut(whole, 1, 3)
    old, _, new = step.values
    assert old.before and old.after
    assert new.after and not new.before
    assert old.saves == (Save(None, "N", 0, (1,)),)  # type: ignore[arg-type]
    assert all(value.saves == () for value in step.values if value is not old)


def test_what_is_alive_at_the_border_outlives_the_stretch() -> None:
    whole = parse("mm x:8 -> w:8\nadd_ w -> w\nmm w -> y:8\nkeep y")
    (w,) = (v for v in cut(whole, 0, 1).values if v.bytes == 8 and not v.before)
    assert w.after  # its storage goes on, overwritten by the next op
    ended = cut(whole, 2, 3)
    assert [v.after for v in ended.values] == [False, True, True]  # w, x, y


def test_a_value_overwritten_by_the_first_op_is_kept_for_its_reading() -> None:
    whole = parse("mm x:8 -> w:8\nadd_ w -> w\nmm w -> y:8")
    step = cut(whole, 1, 3)
    assert find_flaw(step) is None
    assert step.ops[0].reads != ()


def test_the_digest_is_of_what_happens_not_of_how_fast() -> None:
    step = parse("mm x:8 -> y:8 | 1us")
    assert digest(step) == digest(parse("mm x:8 -> y:8 | 2us workspace=9"))
    others = ["mm x:8 -> y:9", "mm x:8 -> y:8\nfree x", "bmm x:8 -> y:8", "mm x:8 -> y:8 | view"]
    for other in others:
        assert digest(step) != digest(parse(other))


def test_gradient_accumulation_is_one_step() -> None:
    assert last_step([Mark(10, 0), Mark(50, 0), Mark(90, 0)]) == Bounds(50, 90)
    assert last_step([Mark(10, 0)]) is None
    assert last_step([Mark(10, 0), Mark(10, 0)]) is None  # nothing ran in between
    assert last_step([]) is None


def test_a_round_of_several_optimizers_is_one_step() -> None:
    critic, generator = 0, 1
    marks = [Mark(10, critic), Mark(20, generator), Mark(30, critic), Mark(40, generator)]
    assert last_step(marks) == Bounds(20, 40)
    marks += [Mark(50, critic)]
    assert last_step(marks) == Bounds(20, 40)
    rounds = [Mark(at, critic if at % 30 else generator) for at in range(10, 100, 10)]
    assert [mark.at for mark in closing_marks(rounds)] == [30, 60, 90]


LOOP = """
    mm_{i} w -> a{i}:8 | forward
    mm_{i} a{i} -> b{i}:8 | forward
    back b{i} a{i} -> g{i}:8 | backward
    add_ w g{i} -> w | forward
    free a{i}
    free b{i}
    free g{i}
"""


def test_a_loop_without_optimizer_is_cut_where_least_is_held() -> None:
    text = "have w:8\ninit -> t:99\nfree t\n" + "".join(
        LOOP.replace("_{i}", "").replace("{i}", str(i)) for i in range(4)
    )
    # the period is four ops; least is held at the border between two rounds
    assert repeating_step(parse(text), times=3) == Bounds(13, 17)
    assert repeating_step(parse(text), times=5) is None


def test_layers_of_one_pass_are_not_a_step() -> None:
    calls = "".join(f"mm h{i}:8 -> a{i}:8 | forward @Net\n" for i in range(5))
    assert repeating_step(parse(calls)) is not None  # a loop that never goes backward
    assert repeating_step(parse(calls + "back h0 -> g:8 | backward")) is None
    layers = "".join(f"mm h{i}:8 -> a{i}:8 | forward @Net.{i}\n" for i in range(5))
    assert repeating_step(parse(layers)) is None
    initialisation = "".join(f"uniform -> a{i}:8 | forward\n" for i in range(5))
    assert repeating_step(parse(initialisation)) is None
