from hypothesis import given
from strategies import traces

from lowtide import Trace
from lowtide._analyze.access import accesses
from lowtide._analyze.gaps import Gap, idle_gaps
from lowtide._analyze.load import find_peak, load_by_kind, load_curve, owned_bytes
from lowtide._analyze.recompute import Obstacle, obstacles
from lowtide._analyze.summary import summarize
from lowtide._ir import Kind
from lowtide._trace.text import parse


def test_load_counts_each_storage_while_it_lives() -> None:
    # y     | .  .  4
    # h     | .  2  2     h is overwritten in place: no second copy
    # x     | 8  8  8
    trace = parse("""
        nop   x:8 -> | workspace=1
        mm    x   -> h:2
        relu_ h   -> h
        mm    h   -> y:4
    """)
    assert load_curve(trace).tolist() == [9, 10, 10, 14]


@given(traces())
def test_load_is_the_sum_over_what_is_alive(trace: Trace) -> None:
    grain = trace.granularity_bytes
    for i, load in enumerate(load_curve(trace)):
        alive = [v for v in trace.values if v.first <= i < v.end and v.device == trace.device]
        expected = sum((v.bytes + grain - 1) // grain * grain for v in alive)
        assert load == expected + trace.ops[i].workspace_bytes + trace.unseen_bytes
    assert load_by_kind(trace).shape == (len(Kind), len(trace.ops))


@given(traces())
def test_the_peak_is_the_highest_load_and_its_owners_add_up(trace: Trace) -> None:
    peak = find_peak(trace)
    assert peak.bytes == max(load_curve(trace))
    owned = sum(owned_bytes(trace, peak.owners).values())
    assert owned + peak.workspace_bytes + peak.unseen_bytes == peak.bytes
    summary = summarize(trace)
    assert sum(owner.bytes for owner in summary.owners) == owned == sum(summary.by_kind.values())


def test_gaps_lie_between_uses_and_across_the_step() -> None:
    trace = parse("""
        have w:8 | parameter
        have idle:8
        mm   w   -> h:2
        nop      ->
        nop      ->
        mm   h w -> y:2
    """)
    assert accesses(trace) == [[0, 3], [], [0, 3], [3]]
    assert idle_gaps(trace) == [
        Gap(0, 0, 3),  # type: ignore[arg-type]
        Gap(2, 0, 3),  # type: ignore[arg-type]
        Gap(1, -1, 4, True),  # type: ignore[arg-type]
    ]
    adjacent = parse("mm x:8 -> h:2\nmm h -> y:2\nmm h x -> z:2")
    assert [gap.value for gap in idle_gaps(adjacent)] == [0]  # h is used by every op, x is not
    later = parse("nop ->\nmm w:8 -> h:2\nnop ->")
    assert idle_gaps(later) == [Gap(0, 1, 4, True)]  # type: ignore[arg-type]


@given(traces())
def test_no_op_uses_a_value_inside_its_gap(trace: Trace) -> None:
    count = len(trace.ops)
    for gap in idle_gaps(trace):
        storage = trace.values[gap.value].storage
        for i in range(gap.after + 1, gap.until):
            op = trace.ops[i % count]
            used = {trace.values[v].storage for v in (*op.reads, *op.updates, *op.writes)}
            assert storage not in used or (not gap.crosses_step and gap.value not in op.reads)


def _named(text: str) -> dict[str, Obstacle | None]:
    trace = parse(text)
    found = obstacles(trace)
    return {f"s{v.storage}.{v.version}": found[i] for i, v in enumerate(trace.values)}


def test_why_a_value_cannot_be_recomputed() -> None:
    found = _named("""
        mm x:8 -> a:8
        appear b:8 | temporary
        mm a b -> c:8
        opaque c
        aten.empty.memory_format -> d:8 | factory
        aten.arange.default -> e:8 | factory
        aten.view d -> | view
        odd a -> f:8 | {"args":"[[{\\"unreplayable\\":\\"Thing\\"}],{}]"}
        mm c d e -> g:8
    """)
    assert found == {
        "s0.0": Obstacle.INPUT,
        "s1.0": None,
        "s2.0": Obstacle.NO_PRODUCER,
        "s3.0": None,
        "s3.1": Obstacle.OPAQUE,
        "s4.0": Obstacle.OPAQUE,
        "s5.0": None,
        "s6.0": Obstacle.NO_PRODUCER,
        "s7.0": None,
    }


def test_a_source_overwritten_before_the_last_use_is_lost() -> None:
    # h needs w as it was, and is still wanted after w has changed.
    assert _named("mm w:8 -> h:8\nadd_ w -> w\nmm h -> y:8")["s1.0"] is Obstacle.MUTATED
    # Here w changes only when h is no longer wanted.
    assert _named("mm w:8 -> h:8\nmm h -> y:8\nadd_ w -> w")["s1.0"] is None
    # And here what is overwritten can itself be made again.
    found = _named("mm x:8 -> a:8\nmm a -> h:8\nrelu_ a -> a\nmm h a -> y:8")
    assert set(found.values()) == {None, Obstacle.INPUT}


def test_what_could_be_made_again_only_for_a_while_is_lost_after_it() -> None:
    # e needs s, s needs w; s is overwritten, then w: from there on e is lost
    lost = "mul w:8 -> s:8\nexp s -> e:8\nadd_ s -> s\nmul_ w -> w\nuse e -> y:8"
    assert _named(lost)["s2.0"] is Obstacle.MUTATED
    saved = "mul w:8 -> s:8\nexp s -> e:8\nadd_ s -> s\nuse e -> y:8\nmul_ w -> w"
    assert _named(saved)["s2.0"] is None


def test_statistics_moved_along_do_not_stand_in_the_way() -> None:
    found = _named("bn x:8 ~mean:4 -> y:8 mean\nmm y -> z:8")
    assert found["s2.0"] is None  # y does not depend on the old mean
    assert found["s1.1"] is Obstacle.MUTATED  # the new mean does, and it is gone
