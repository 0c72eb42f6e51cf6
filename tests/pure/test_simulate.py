"""The simulator: by hand, and against the plainest one there is."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from strategies import traces
from swaps import machines, swap, swapped_steps

from lowtide._analyze.gaps import idle_gaps
from lowtide._analyze.load import load_curve
from lowtide._check import find_flaw
from lowtide._errors import BadInput
from lowtide._ir import Link, Machine, Swap, Trace
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.outcome import Outcome
from lowtide._simulate.reference import simulate_slowly
from lowtide._simulate.simulate import prepare, simulate, simulate_on
from lowtide._trace.text import parse

SECOND_PER_BYTE = Link((0, 100), (0.0, 100.0))


def machine(together: float = 1.0, out: Link = SECOND_PER_BYTE) -> Machine:
    return Machine("by hand", 0, 0, out, SECOND_PER_BYTE, together)


def both(trace: Trace, on: Machine, swaps: list[Swap]) -> Outcome:
    """What both simulators say."""
    assert find_bad_swap(trace, swaps) is None
    fast, slow = simulate(trace, on, swaps), simulate_slowly(trace, on, swaps)
    assert_same(fast, slow)
    return fast


def assert_same(one: Outcome, other: Outcome) -> None:
    assert (one.peak_bytes, one.peak_op) == (other.peak_bytes, other.peak_op)
    for name in ("seconds", "plain_seconds", "stall_seconds", "copy_seconds", "hidden"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-9), name
    for name in ("out_spans", "back_spans"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert len(mine) == len(theirs)
        for span, expected in zip(mine, theirs, strict=True):
            assert span == pytest.approx(expected, rel=1e-9, abs=1e-9), name
    assert one.starts.tolist() == pytest.approx(other.starts.tolist(), rel=1e-9, abs=1e-9)


# One value h of 3 bytes, made by op 0 and used by op 5; every op takes 2 s.
ONE_GAP = parse("""
    make   -> h:3 | 2s
    a      ->     | 2s
    b      ->     | 2s
    c      ->     | 2s
    d      ->     | 2s
    use h  ->     | 2s
""")


def test_without_swaps_a_step_is_its_ops() -> None:
    found = both(ONE_GAP, machine(), [])
    assert (found.seconds, found.stall_seconds, found.copy_seconds, found.hidden) == (12, 0, 0, 1)
    assert found.starts.tolist() == [0, 2, 4, 6, 8, 10]
    assert found.peak_bytes == 3


def test_copies_in_a_long_gap_are_hidden() -> None:
    # compute 0 0 1 1 2 2 3 3 4 4 5 5
    # out         o o o
    # back                b b b
    found = both(ONE_GAP, machine(), [swap(0, 0, 3, 3, 5)])
    assert (found.seconds, found.hidden, found.copy_seconds) == (12, 1, 6)
    assert found.out_spans == ((2, 5),)
    assert found.back_spans == ((6, 9),)


def test_a_late_copy_back_stalls_the_op_that_waits_for_it() -> None:
    # compute 0 0 1 1 2 2 3 3 4 4 . 5 5
    # back                    b b b
    found = both(ONE_GAP, machine(), [swap(0, 0, 3, 4, 5)])
    assert (found.seconds, found.stall_seconds) == (13, 1)
    assert found.hidden == pytest.approx(1 - 1 / 6)
    assert found.starts.tolist() == [0, 2, 4, 6, 8, 11]


def test_an_early_release_stalls_and_delays_what_follows() -> None:
    # compute 0 0 1 1 . 2 2 3 3 4 4 . 5 5
    # out         o o o
    # back                      b b b
    found = both(ONE_GAP, machine(), [swap(0, 0, 2, 4, 5)])
    assert found.starts.tolist() == [0, 2, 5, 7, 9, 12]
    assert found.back_spans == ((9, 12),)
    assert found.seconds == 14


def test_bytes_are_fetched_only_after_those_released_there_are_free() -> None:
    # release, fetch and until at once: compute waits for one copy, then for the other
    found = both(ONE_GAP, machine(), [swap(0, 0, 1, 1, 1 + 4)])
    assert found.out_spans == ((2, 5),)
    assert found.back_spans == ((5, 8),)
    assert found.starts.tolist() == [0, 5, 7, 9, 11, 13]
    found = both(ONE_GAP, machine(), [swap(0, 0, 5, 5, 5)])
    assert (found.back_spans, found.seconds) == (((10, 13),), 15)


# g (2 bytes) and h (3 bytes) made at once, used one after the other.
TWO_GAPS = parse("""
    make   -> g:2 h:3 | 2s
    a      ->         | 4s
    b      ->         | 4s
    use g  ->         | 2s
    use h  ->         | 2s
""")


def test_copies_of_one_lane_go_one_after_the_other_in_the_order_of_the_swaps() -> None:
    # compute 0 0 1 1 1 1 . 2 2 2 2 . 3 3 4 4
    # out         g g h h h
    # back                  g g h h h
    swaps = [swap(0, 0, 2, 2, 3), swap(1, 0, 2, 2, 4)]
    found = both(TWO_GAPS, machine(), swaps)
    assert found.out_spans == ((2, 4), (4, 7))
    assert found.back_spans == ((7, 9), (9, 12))
    assert found.starts.tolist() == [0, 2, 7, 11, 13]
    turned = both(TWO_GAPS, machine(), swaps[::-1])
    assert turned.out_spans == ((2, 5), (5, 7))
    assert turned.back_spans == ((7, 10), (10, 12))
    assert turned.starts.tolist() == [0, 2, 7, 12, 14]  # g comes behind h, and op 3 waits for it


def test_lanes_slow_each_other_down_while_both_copy() -> None:
    # g alone; then h out (6 s of work) beside g back (2 s): both at half speed for 4 s
    trace = parse("""
        make   -> g:2 | 1s
        more   -> h:6 | 4s
        a      ->     | 4s
        use g  ->     | 9s
        use h  ->     | 1s
    """)
    swaps = [swap(0, 0, 2, 2, 3), swap(1, 1, 4, 4, 4)]
    alone = both(trace, machine(together=1.0), swaps)
    assert alone.out_spans == ((1, 3), (5, 11))
    assert alone.back_spans == ((5, 7), (18, 24))
    shared = both(trace, machine(together=0.5), swaps)
    assert shared.out_spans == ((1, 3), (5, 13))
    assert shared.back_spans == ((5, 9), (18, 24))
    assert shared.copy_seconds == 2 + 8 + 4 + 6
    dragged = both(trace, replace(machine(together=0.5), drag=0.25), swaps)
    assert dragged.seconds == shared.seconds + 0.25 * 20
    assert dragged.stall_seconds == shared.stall_seconds


def test_a_swap_across_the_boundary_comes_back_in_the_next_step() -> None:
    # w is used by op 1 alone, so it may be away from there to there.
    trace = parse("""
        a       ->  | 2s
        use w:3 ->  | 2s
        b       ->  | 2s
        c       ->  | 2s
    """)
    # op      0 0 1 1 2 2 3 3 | 0 0 . 1 1 2 2 3 3
    # out             o o o             o o o
    # back                      b b b
    found = both(trace, machine(), [swap(0, 1, 4, 4, 5)])
    assert (found.seconds, found.starts.tolist()) == (9, [0, 3, 5, 7])
    assert found.out_spans == ((5, 8),)
    assert found.back_spans == ((0, 3),)
    # fetched before the step ends: the copy put in now comes to its end in the step after
    early = both(trace, machine(), [swap(0, 1, 3, 3, 5)])
    # op      0 0 1 1 2 2 . 3 3 | 0 0
    # out             o o o
    # back                  b b | b
    assert (early.seconds, early.starts.tolist()) == (9, [0, 2, 4, 7])
    assert early.back_spans == ((7, 10),)


def test_a_backlog_at_the_step_end_is_felt_by_the_next_step() -> None:
    # The copy out of 5 s begins as the step ends and is awaited before op 1 of the next.
    trace = parse("""
        a       ->  | 2s
        b       ->  | 2s
        c       ->  | 2s
        use w:5 ->  | 2s
    """)
    found = both(trace, machine(), [swap(0, 3, 5, 6, 7)])
    # op      0 0 . . . 1 1 2 2 . . . 3 3
    # out     o o o o o             (before)
    # back                  b b b b b
    assert found.starts.tolist() == [0, 5, 7, 12]
    assert found.seconds == 14
    assert found.out_spans == ((14, 19),)
    assert found.back_spans == ((7, 12),)


def test_a_copy_that_runs_into_the_next_step_meets_the_copies_of_that_step() -> None:
    trace = parse("""
        a       ->  | 2s
        use v:1 ->  | 2s
        b       ->  | 2s
        use w:3 ->  | 2s
    """)
    # op      0 0 1 1 2 2 . . 3 3 |
    # out     w w w w v v         | w w w w      w at half speed for 2 s
    # back    v v     w w w w     | v v
    found = both(trace, machine(together=0.5), [swap(0, 1, 3, 4, 5), swap(1, 3, 6, 6, 7)])
    assert found.out_spans == ((4, 6), (10, 14))
    assert found.back_spans == ((0, 2), (4, 8))
    assert (found.seconds, found.copy_seconds) == (10, 12)


def test_a_step_has_not_settled_while_its_backlog_grows() -> None:
    trace = parse("""
        a       ->  | 2s
        use y:6 ->  | 2s
        b       ->  | 2s
        c       ->  | 2s
        use x:3 ->  | 2s
    """)
    # The first two steps take 10 s each, but in the second x comes back first and y has 3 s left
    # at the end, not 2: the third step waits for it.
    quick = Link((0, 100), (1.0, 1.0))
    found = both(trace, machine(out=quick), [swap(0, 1, 3, 3, 6), swap(1, 4, 6, 7, 9)])
    assert found.starts.tolist() == [0, 3, 5, 7, 9]
    assert found.back_spans == ((8, 14), (5, 8))
    assert found.seconds == 11


def test_what_is_away_is_not_held() -> None:
    trace = parse("""
        make g:1 w:8 -> h:3 | 2s
        a            -> t:4 | 2s
        b t          ->     | 2s
        use h        ->     | 2s
    """)
    g, w, h = 0, 1, 2
    assert [trace.values[k].bytes for k in (g, w, h)] == [1, 8, 3]
    assert load_curve(trace).tolist() == [12, 16, 16, 12]
    assert both(trace, machine(), [swap(h, 0, 1, 3, 3)]).peak_bytes == 13
    found = both(trace, machine(), [swap(h, 0, 2, 3, 3)])  # still there in op 1
    assert (found.peak_bytes, found.peak_op) == (16, 1)
    found = both(trace, machine(), [swap(w, 0, 1, 4, 4)])  # away in ops 1, 2, 3
    assert (found.peak_bytes, found.peak_op) == (12, 0)


def test_what_is_away_across_the_boundary_is_missed_at_both_ends() -> None:
    trace = parse("a -> | 1s\nuse w:8 -> | 1s\nb -> | 1s\nc -> | 1s")
    found = both(trace, machine(), [swap(0, 1, 3, 5, 5)])  # away in op 3 and op 0
    assert (found.peak_bytes, found.peak_op) == (8, 1)
    found = both(trace, machine(), [swap(0, 1, 2, 4, 5)])  # away in ops 2 and 3
    assert (found.peak_bytes, found.peak_op) == (8, 0)


def test_an_empty_trace_is_refused() -> None:
    for run in (simulate, simulate_slowly):
        with pytest.raises(BadInput, match="empty"):
            run(Trace((), ()), machine(), [])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(swapped_steps(), machines())
def test_the_fast_simulator_says_what_the_slow_one_says(
    step: tuple[Trace, tuple[Swap, ...]], on: Machine
) -> None:
    trace, swaps = step
    assert find_flaw(trace) is None
    crossing = sum(one.until >= len(trace.ops) for one in swaps)
    event(f"{len(swaps)} swaps, {crossing} across the boundary")
    fast, slow = simulate(trace, on, swaps), simulate_slowly(trace, on, swaps)
    event(f"stalls: {fast.stall_seconds > 0}")
    assert_same(fast, slow)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(swapped_steps(), machines())
def test_what_holds_of_every_outcome(step: tuple[Trace, tuple[Swap, ...]], on: Machine) -> None:
    trace, swaps = step
    found = simulate_on(prepare(trace, on), swaps)
    assert found.seconds >= found.plain_seconds
    assert 0.0 <= found.hidden <= 1.0
    assert found.peak_bytes <= load_curve(trace).max()
    for one, out, back in zip(swaps, found.out_spans, found.back_spans, strict=True):
        ended = found.starts[one.after] + trace.ops[one.after].seconds
        assert ended <= out[0] + 1e-9 <= out[1] + 2e-9
        assert back[0] <= back[1] + 1e-9
        if one.until < len(trace.ops):
            assert out[1] <= found.starts[one.release] + 1e-9
            assert out[1] <= back[0] + 1e-9
            assert back[1] <= found.starts[one.until] + 1e-9


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(swapped_steps(), machines())
def test_faster_copies_never_make_a_step_within_itself_longer(
    step: tuple[Trace, tuple[Swap, ...]], on: Machine
) -> None:
    """Without contention every moment is a maximum of sums of ops and copies: it only grows."""
    trace, swaps = step
    on = replace(on, together=1.0)
    faster = replace(on, out=replace(on.out, seconds=tuple(s / 2 for s in on.out.seconds)))
    inside = [one for one in swaps if one.until < len(trace.ops)]
    quick, slow = simulate(trace, faster, inside), simulate(trace, on, inside)
    assert quick.seconds <= slow.seconds + 1e-9


@given(traces())
def test_every_idle_gap_of_a_trace_makes_a_lawful_swap_unless_its_content_changes(
    trace: Trace,
) -> None:
    for gap in idle_gaps(trace):
        if gap.after < 0:
            continue
        bad = find_bad_swap(
            trace, [swap(gap.value, gap.after, gap.after + 1, gap.until, gap.until)]
        )
        assert bad is None or trace.values[gap.value].device != trace.device or "content" in bad


# op 0 makes h, op 3 overwrites it in place, op 4 uses it last; w persists; m gets new content
LAWS = parse("""
    have w:8  | parameter
    have c:8  | parameter device=other
    have m:4  | buffer
    make w    -> h:3 | 1s
    a m       -> t:2 | 1s
    b t       ->     | 1s
    inplace h -> h   | 1s
    use h     ->     | 1s
    opaque m
    last w m  -> k:1 | 1s
    keep k
""")
W, C, M, H, T, H2, M2, K = range(8)


@pytest.mark.parametrize(
    "swaps",
    [
        [swap(H, 0, 1, 3, 3)],  # until it is overwritten
        [swap(H, 0, 1, 1, 2)],  # until before that
        [swap(H, 1, 2, 2, 3)],  # out later than it could
        [swap(W, 0, 1, 5, 5), swap(W, 5, 6, 6, 6)],  # one ends where the other begins
        [swap(W, 0, 1, 2, 2), swap(W, 2, 3, 3, 4), swap(W, 4, 5, 5, 5)],
        [swap(M2, 5, 6, 6, 7)],
        [swap(M, 1, 2, 4, 4)],  # back before its content changes
    ],
)
def test_lawful_swaps_pass(swaps: list[Swap]) -> None:
    assert find_bad_swap(LAWS, swaps) is None


@pytest.mark.parametrize(
    ("swaps", "words"),
    [
        ([swap(99, 0, 1, 2, 3)], "value 99 does not exist"),
        ([swap(-1, 0, 1, 2, 3)], "value -1 does not exist"),
        ([swap(C, 0, 1, 2, 3)], "value 1 lies on other, not on cpu"),
        ([swap(W, -1, 0, 0, 0)], "begins after op -1 of 6"),
        ([swap(W, 6, 7, 7, 7)], "begins after op 6 of 6"),
        ([swap(W, 0, 0, 3, 5)], "out of order"),
        ([swap(W, 0, 3, 2, 5)], "out of order"),
        ([swap(W, 0, 2, 5, 4)], "out of order"),
        ([swap(W, 0, 2, 5, 7)], "more than a step"),
        ([swap(W, 5, 6, 12, 12)], "more than a step"),
        ([swap(W, 0, 2, 3, 6)], "op 5 uses storage 0"),
        ([swap(W, 5, 6, 7, 7)], "op 0 uses storage 0"),
        ([swap(H, 0, 1, 4, 4)], "op 3 uses storage 3"),  # another version of the storage
        ([swap(M, 1, 2, 5, 5)], "new content before op 5"),
        ([swap(H2, 0, 1, 3, 3)], "not there after op 0"),
        ([swap(H, 3, 4, 4, 4)], "not there after op 3"),
        ([swap(T, 2, 3, 3, 3)], "gone before op 3"),
        ([swap(H2, 4, 5, 5, 6)], "does not"),
        ([swap(K, 5, 6, 6, 7)], "does not"),  # there after the step, not before it
        ([swap(W, 0, 1, 3, 3), swap(W, 2, 3, 4, 4)], "swaps 0 and 1 of storage 0 overlap"),
        ([swap(W, 1, 2, 5, 5), swap(W, 0, 1, 2, 2)], "swaps 1 and 0 of storage 0 overlap"),
        ([swap(M2, 5, 6, 6, 7), swap(M, 1, 2, 2, 3), swap(H, 0, 1, 2, 3), swap(H, 0, 1, 2, 3)],
         "swaps 2 and 3 of storage 3 overlap"),
    ],
)  # fmt: skip
def test_the_broken_law_is_named(swaps: list[Swap], words: str) -> None:
    assert words in (find_bad_swap(LAWS, swaps) or "")


def test_stays_may_not_overlap_around_the_boundary_either() -> None:
    trace = parse("a -> | 1s\nb -> | 1s\nuse w:8 -> | 1s\nc -> | 1s")
    around = swap(0, 2, 3, 5, 6)
    assert find_bad_swap(trace, [around]) is None
    assert find_bad_swap(trace, [swap(0, 2, 3, 4, 4), swap(0, 0, 1, 1, 2)]) is None
    overlap = "swaps 0 and 1 of storage 0 overlap"
    assert find_bad_swap(trace, [around, swap(0, 0, 1, 1, 2)]) == overlap


def test_a_storage_that_the_step_frees_cannot_stay_away_across_its_end() -> None:
    trace = parse("use q:8 -> | 1s\na -> | 1s\nfree q\nb -> | 1s")
    assert find_bad_swap(trace, [swap(0, 0, 1, 1, 1)]) is None
    assert "does not" in (find_bad_swap(trace, [swap(0, 0, 1, 3, 3)]) or "")


def test_a_storage_of_another_size_next_step_cannot_stay_away() -> None:
    trace = parse("use w:8 -> | 1s\na -> w | 1s\nb -> | 1s")
    assert find_bad_swap(trace, [swap(1, 1, 2, 3, 3)]) is None
    first, last = trace.values
    grown = replace(trace, values=(first, replace(last, bytes=9)))
    assert "changes its size" in (find_bad_swap(grown, [swap(1, 1, 2, 3, 3)]) or "")
