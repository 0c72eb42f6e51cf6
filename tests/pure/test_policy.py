import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from strategies import traces

from lowtide import BadInput, Trace, save_trace
from lowtide._analyze.load import load_curve
from lowtide._cli.simulate import simulate_command
from lowtide._ir import Kind, Machine, OpIndex, Phase, Plan, ValueId
from lowtide._machine.link import line
from lowtide._policy import problem as problems
from lowtide._policy.autoswap import SCORES, CannotFit, autoswap
from lowtide._policy.budget import parse_bytes, parse_rate
from lowtide._policy.candidates import Candidate, Grid, Reach, candidates, make_grid, positions
from lowtide._policy.problem import PACES, best_within, choose, make_problem, plain_score
from lowtide._policy.schedule import make_stage, schedule
from lowtide._policy.scores import aoa, doa, lead, make_clock, swdoa, vote, wdoa
from lowtide._policy.select import select
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.reference import simulate_slowly
from lowtide._simulate.simulate import simulate
from lowtide._trace.text import parse

PLAIN = [score for score in SCORES if score != "bayes"]


def machine(bytes_per_second: float = 1e6, *, together: float = 1.0) -> Machine:
    """Copies take so long and not a moment more."""
    link = line(0.0, bytes_per_second)
    return Machine("test", 1 << 40, 1 << 40, link, link, together)


def cand(size: int, after: int, until: int, value: int = 0) -> Candidate:
    return Candidate(
        ValueId(value), size, OpIndex(after), OpIndex(until), OpIndex(after + 1), OpIndex(until)
    )


def problem_of(trace: Trace, link: Machine) -> problems.Problem:
    """Anything may leave, anywhere."""
    return make_problem(
        trace,
        link,
        reach=Reach.ALL,
        held=None,
        movable=None,
        positions=None,
        host_budget=None,
        smallest=1,
    )


def chain(layers: int, size: int = 1000, seconds: str = "1s") -> Trace:
    """So many ops forward, each leaving an activation, and as many backward that use them."""
    forward = [f"f{i} -> a{i}:{size} | {seconds}" for i in range(layers)]
    kinds = [f"is a{i} | activation" for i in range(layers)]
    backward = [f"b{i} a{i} -> | {seconds} backward" for i in reversed(range(layers))]
    saves = [
        f"save a{i} | op={i} node=N packed={i + 1} unpacked={2 * layers - 1 - i}"
        for i in range(layers)
    ]
    return parse("\n".join(forward + kinds + backward + saves))


# Candidates.


def test_every_gap_of_a_large_value_is_a_candidate_also_across_the_step() -> None:
    trace = parse("""
        have m:8 | state
        nop      -> h:8 | 1s
        nop      ->     | 1s
        nop  h   -> s:2 | 1s
        nop      ->     | 1s
        step m s -> m   | 1s optimizer
    """)
    found = candidates(trace, smallest=4)
    assert [(c.value, c.after, c.until) for c in found] == [(1, 0, 2), (3, 4, 9)]
    assert [(c.earliest, c.latest) for c in found] == [(1, 2), (5, 9)]
    assert [c.value for c in candidates(trace, smallest=4, held={})] == [3]  # 1 is always held
    late = candidates(trace, smallest=4, held={ValueId(1): OpIndex(2)})
    assert [c.value for c in late] == [3]  # until it is used again
    early = candidates(trace, smallest=4, held={ValueId(1): OpIndex(1)})
    assert [(c.value, c.earliest) for c in early] == [(1, 1), (3, 5)]


def test_a_value_that_nothing_uses_is_there_only_where_the_load_is_lowest() -> None:
    trace = parse("""
        have idle:8 | state
        nop      -> h:8 | 1s
        nop  h   ->     | 1s
        nop      ->     | 1s
        nop      -> k:8 | 1s
    """)
    [found] = candidates(trace, smallest=4)
    assert (found.after, found.until) == (2, 6)


def test_the_runtime_moves_saved_values_until_they_are_unpacked_and_state() -> None:
    trace = parse("""
        have w:8 | parameter
        have m:8 | state
        mm   w   -> h:8 | 1s
        nop      -> k:8 | 1s
        nop      -> t:8 | 1s
        nop      ->     | 1s
        nop      ->     | 1s
        bmm  h w ->     | 1s backward
        nop  k t ->     | 1s backward
        save w   | op=0 node=N packed=1 unpacked=5
        save h   | op=0 node=N packed=2 unpacked=4
        save k   | op=1 node= packed=2
        step w m -> w m | 1s optimizer
        is m     | state
    """)
    found = candidates(trace, smallest=1, reach=Reach.RUNTIME)
    names = [(trace.values[c.value].kind, c.after, c.earliest, c.until) for c in found]
    assert names == [
        (Kind.PARAMETER, 5, 6, 7),
        (Kind.TEMPORARY, 0, 2, 4),
        (Kind.STATE, 7, 8, 15),
    ]
    assert positions(trace) == [0, 1, 2, 4, 5, 7]


def test_weights_and_gradients_may_leave_where_backward_has_no_view_of_them() -> None:
    trace = parse("""
        have w:8 | parameter
        have v:8 | parameter
        mm   w   -> h:8 | 1s
        cast v   -> c:4 | 1s
        nop      ->     | 1s
        bmm  w h -> g:8 | 1s backward
        is g     | gradient
        save w   | op=0 node=N packed=1 unpacked=3
        nop      ->     | 1s backward
        nop      ->     | 1s backward
        step w g -> w   | 1s optimizer
        step v   -> v   | 1s optimizer
        is w     | parameter
        is v     | parameter
    """)
    found = candidates(trace, smallest=1, reach=Reach.RUNTIME, held={})
    stays = {(trace.values[c.value].kind, c.bytes, c.earliest, c.latest) for c in found}
    weight, gradient = Kind.PARAMETER, Kind.GRADIENT
    assert stays == {
        (weight, 8, 4, 6),  # `w` when backward is through with it, not before
        (weight, 8, 7, 8),  # ... and until the next step needs it
        (weight, 8, 2, 7),  # of `v`, backward has another one
        (weight, 8, 8, 9),
        (gradient, 8, 4, 6),
    }


def test_each_gap_ends_at_its_own_unpacking() -> None:
    trace = parse("""
        mm       -> h:8 | 1s
        nop      ->     | 1s
        nop  h   ->     | 1s backward
        nop      ->     | 1s backward
        nop      ->     | 1s backward
        nop  h   ->     | 1s backward
        save h   | op=0 node=N packed=1 unpacked=2,4
    """)
    found = candidates(trace, smallest=1, reach=Reach.RUNTIME)
    assert [(c.after, c.until) for c in found] == [(0, 2), (2, 4)]


def test_positions_round_releases_up_and_fetches_down_in_every_step() -> None:
    grid = make_grid(chain(5), [0, 3, 7])
    assert [grid.up(p) for p in (0, 1, 3, 8, 10, 11)] == [0, 3, 3, 10, 10, 13]
    assert [grid.down(p) for p in (-1, 0, 2, 9, 12, 13)] == [-3, 0, 0, 7, 10, 13]
    assert grid.fit([cand(1, 3, 6), cand(1, 2, 9)]) == [replace(cand(1, 2, 9), latest=OpIndex(7))]


# op      | 0  1  2  3  4 | 0  1  2  3  4 |     who acts only at 1 and 3 cannot let m go at
# away    |               |    ------     |     the step's end: 6 to 8 of this step are 1 to 3
@pytest.mark.parametrize("last", ["step m -> m", "step m ->"])  # with two versions, with one
def test_a_stay_that_can_begin_only_in_the_next_step_is_one_of_that_step(last: str) -> None:
    ops = ["nop -> | 1s", "nop -> h:5 | 1s", "nop h -> | 1s", "nop -> | 1s", f"{last} | 1s"]
    trace = parse("\n".join(["have m:8 | state", *ops, "is m | state"]))
    for reach in Reach:
        plan = autoswap(trace, machine(), limit=8, reach=reach, positions=[1, 3], smallest=1)
        assert find_bad_swap(trace, plan.swaps) is None
        [swap] = plan.swaps
        assert trace.values[swap.value].before
        assert (swap.after, swap.release, swap.fetch, swap.until) == (0, 1, 3, 4)
        assert plan.peak_bytes == 8 < plan.plain_peak_bytes == 13
        slowly = simulate_slowly(trace, machine(), plan.swaps)
        assert slowly.peak_bytes == 8 and slowly.seconds == pytest.approx(plan.seconds)


def test_so_is_that_of_a_value_that_nothing_uses() -> None:
    trace = parse("""
        have idle:8 | state
        nop     -> h:5 | 1s
        nop h   ->     | 1s
        nop     ->     | 1s
        nop     -> k:5 | 1s
    """)
    [found] = candidates(trace, smallest=6)
    assert (found.after, found.until) == (2, 6)
    fitting = make_grid(trace, [1, 2]).fit([found])
    assert fitting == [cand(8, 0, 2)]
    swaps = schedule(make_stage(trace, [1, 2]), machine(), fitting, 0)
    assert len(swaps) == 1 and find_bad_swap(trace, swaps) is None


# Scores.


def test_scores_by_hand() -> None:
    # load above 10 | 4  0  2  6      seconds | 1  2  1  1
    trace = parse("a -> | 1s\nb -> | 2s\nc -> | 1s\nd -> | 1s")
    clock, load = make_clock(trace), np.array([14, 3, 12, 16])
    found = [cand(2, 0, 3), cand(8, 1, 3), cand(4, 2, 6)]  # away: 1 2 · 2 · 3 0 1
    link = machine(2.0)  # a byte takes half a second each way
    assert doa(found, clock, link).tolist() == [3 - 2, 1 - 8, 4 - 4]
    assert aoa(found, clock, link).tolist() == [1 * 2, -7 / 8, 0]
    assert wdoa(found, clock, load, 10).tolist() == [2, 2, 6 + 4]
    # The last goes first and leaves 2 at op 3; the others share op 2, which the first clears.
    assert swdoa(found, clock, load, 10).tolist() == [2, 0, 10]
    assert vote(np.array([1.0, 2, 3]), np.array([5.0, 1, 5])).tolist() == [-2, -3, 0]
    # The peak is at op 3, after 4 seconds; who falls idle when it is over waits for the next.
    assert lead([*found, cand(2, 3, 6)], clock, load).tolist() == [3, 1, 0, 4]


def test_state_that_falls_idle_first_is_out_first() -> None:
    """Four of a size, used one after the other: two are to be out by the peak, in time."""
    lines = ["device cuda:0", *(f"have s{i}:1000 | state" for i in range(4))]
    lines += [*(f"o s{i} -> s{i} | 1s optimizer" for i in range(4)), "f -> h:2000 | 1s"]
    trace = parse("\n".join(lines) + "\n")
    plans = {
        score: autoswap(
            trace, machine(1000.0), limit=4000, score=score, reach=Reach.ALL, smallest=1
        )
        for score in ("lead", "vote", "doa", "swdoa")
    }
    names = {trace.values[swap.value].storage for swap in plans["lead"].swaps}
    assert names == {0, 1}
    assert plans["lead"].seconds == min(plan.seconds for plan in plans.values())


def test_a_candidate_earns_nothing_where_earlier_picks_did_the_work() -> None:
    # Two alike over the higher peak, one over the lower: the lower peak comes second.
    trace = parse("\n".join(["op -> | 1s"] * 6))
    clock, load = make_clock(trace), np.array([0, 20, 0, 0, 15, 0])
    found = [cand(10, 0, 2, 0), cand(10, 0, 2, 1), cand(10, 3, 5, 2)]
    assert wdoa(found, clock, load, 10).tolist() == [10, 10, 5]
    assert swdoa(found, clock, load, 10).tolist() == [10, 0, 5]
    picked = select(found, None, clock, load, 10)
    assert [c.value for c in picked.chosen] == [0, 2]
    assert (picked.peak_bytes, picked.peak_op) == (10, 1)


def test_what_later_picks_made_useless_is_dropped() -> None:
    trace = parse("\n".join(["op -> | 1s"] * 6))
    found = [cand(5, 0, 5, 0), cand(20, 0, 5, 1)]
    best_first = np.array([2.0, 1.0])
    picked = select(found, best_first, make_clock(trace), np.array([0, 30, 0, 0, 30, 0]), 10)
    assert [c.value for c in picked.chosen] == [1]  # the first is not needed beside the second


def test_never_more_away_than_the_tier_below_holds() -> None:
    clock, load = make_clock(chain(3)), np.array([9, 30, 30, 30, 30, 9])
    found = [cand(10, 0, 5, 0), cand(12, 0, 5, 1), cand(10, 0, 5, 2)]
    picked = select(found, np.array([3.0, 2.0, 1.0]), clock, load, 9, 20)
    assert [c.value for c in picked.chosen] == [0, 2]
    assert picked.peak_bytes == 10


def test_what_does_not_help_takes_no_room_below() -> None:
    clock, load = make_clock(chain(3)), np.array([9, 30, 9, 9, 9, 9])
    found = [cand(10, 2, 5, 0), cand(10, 0, 5, 1)]
    picked = select(found, np.array([2.0, 1.0]), clock, load, 20, 10)
    assert [c.value for c in picked.chosen] == [1]


@given(traces(), st.integers(0, 5000))
def test_swdoa_never_exceeds_wdoa_and_the_best_one_equals_it(trace: Trace, limit: int) -> None:
    found, clock = candidates(trace, smallest=1), make_clock(trace)
    if found:
        once, again = (f(found, clock, load_curve(trace), limit) for f in (wdoa, swdoa))
        assert (again <= once + 1e-9).all()
        assert again.max() == pytest.approx(once.max())


def test_a_large_step_is_scored_fast() -> None:
    random = np.random.default_rng(0)
    trace = parse("\n".join(["op -> | 1us"] * 3300))
    firsts = random.integers(0, 1600, 500)
    found = [cand(1 << 20, int(a), 3299 - int(a), k) for k, a in enumerate(firsts)]
    load = np.full(3300, 90 << 20)
    for c in found:
        load[c.earliest : c.latest] += c.bytes
    began = time.perf_counter()
    picked = select(found, None, make_clock(trace), load, 100 << 20)
    assert time.perf_counter() - began < 3  # 0.1 s; machines that test are busy
    assert len(picked.chosen) > 100


# Schedules.


def test_copies_hide_behind_the_ops_they_can() -> None:
    # op          | f0 f1 f2 f3 b3 b2 b1 b0     a copy of 1000 bytes takes 1 s
    # out lane    |    a0 a1
    # back lane   |                a1 a0
    trace = chain(4)
    both = [c for c in candidates(trace, smallest=1) if c.value in (0, 1)]
    swaps = schedule(make_stage(trace), machine(1e3), both, None)
    found = {s.value: (s.after, s.release, s.fetch, s.until) for s in swaps}
    assert found == {0: (0, 2, 6, 7), 1: (1, 3, 5, 6)}
    outcome = simulate(trace, machine(1e3), swaps)
    assert outcome.stall_seconds == 0
    assert (outcome.peak_bytes, outcome.peak_op) == (2000, 1)  # f1: a0 is still on its way


def test_releases_wait_for_a_position_at_which_the_runtime_can_act() -> None:
    trace = chain(4)
    first = [c for c in candidates(trace, smallest=1) if c.value == 0]
    [swap] = schedule(make_stage(trace, [0, 2, 3, 5]), machine(1e3), first, None)
    # 0, 2 and 6 if any position would do
    assert (swap.after, swap.release, swap.fetch) == (1, 3, 5)


def test_without_a_limit_what_cannot_be_hidden_stays() -> None:
    trace = chain(4)
    swaps = schedule(make_stage(trace), machine(400.0), candidates(trace, smallest=1), None)
    assert swaps == []  # out after 2.5 s at op 4, back from op 4 on: away for no op
    swaps = schedule(make_stage(trace), machine(500.0), candidates(trace, smallest=1), None)
    assert [(s.value, s.release, s.fetch) for s in swaps] == [(0, 3, 5)]


def test_within_a_limit_compute_waits_and_room_is_used() -> None:
    trace = chain(4)
    plan = autoswap(trace, machine(400.0), limit=2000, reach=Reach.ALL, smallest=1)
    assert plan.peak_bytes == 2000 and plan.plain_peak_bytes == 4000
    assert plan.seconds > plan.plain_seconds == 8
    roomy = autoswap(trace, machine(400.0), limit=3000, reach=Reach.ALL, smallest=1)
    assert plan.seconds > roomy.seconds and len(roomy.swaps) == 1


def _speeds() -> st.SearchStrategy[Machine]:
    speed = st.sampled_from([1e6, 1e8, 1e9, 1e12])
    return st.builds(machine, speed, together=st.sampled_from([1.0, 0.6]))


def _allowed(data: st.DataObject, trace: Trace) -> list[int] | None:
    some = st.lists(st.integers(0, len(trace.ops) - 1))
    return data.draw(st.none() | some)


@given(traces(), _speeds(), st.data())
def test_a_schedule_without_a_limit_never_waits(
    trace: Trace, where: Machine, data: st.DataObject
) -> None:
    chosen = data.draw(st.permutations(candidates(trace, smallest=1)))
    allowed = _allowed(data, trace)
    swaps = schedule(make_stage(trace, allowed), where, chosen, None, slack=1 / where.together)
    assert find_bad_swap(trace, swaps) is None
    outcome = simulate(trace, where, swaps)
    assert outcome.stall_seconds <= 1e-9 * outcome.plain_seconds
    assert outcome.peak_bytes <= load_curve(trace).max()
    if allowed is not None:
        acts = {p for s in swaps for p in (s.release, s.fetch)}
        assert {p % len(trace.ops) for p in acts} <= {*allowed, 0}


def _lowest(trace: Trace, found: list[Candidate], grid: Grid) -> int:
    """Everything away for as long as it can be, op by op."""
    count = len(trace.ops)
    load = load_curve(trace).tolist()
    for c in found:
        first, end = c.earliest, c.latest
        while grid.up(first) != first:
            first = OpIndex(first + 1)
        while grid.down(end) != end:
            end = OpIndex(end - 1)
        for p in range(first, end):
            load[p % count] -= c.bytes
    return int(max(load))


@given(traces(), _speeds(), st.sampled_from(PLAIN), st.sampled_from(Reach), st.data())
def test_the_limit_is_kept_or_said_to_be_impossible(
    trace: Trace, where: Machine, score: str, reach: Reach, data: st.DataObject
) -> None:
    allowed = _allowed(data, trace)
    found = candidates(trace, smallest=1, reach=reach)
    lowest = _lowest(trace, found, make_grid(trace, allowed))
    limit = data.draw(st.integers(0, int(load_curve(trace).max()) + 10))

    def plan(limit: int) -> Plan:
        return autoswap(
            trace, where, limit=limit, score=score, reach=reach, positions=allowed, smallest=1
        )

    if limit < lowest:
        with pytest.raises(CannotFit) as caught:
            plan(limit)
        assert caught.value.smallest_bytes == lowest
        assert 0 <= caught.value.op < len(trace.ops)
        limit = lowest
    made = plan(limit)
    assert find_bad_swap(trace, made.swaps) is None
    outcome = simulate(trace, where, made.swaps)
    assert made.peak_bytes == outcome.peak_bytes <= max(limit, 0)
    assert (made.seconds, made.plain_seconds) == (outcome.seconds, outcome.plain_seconds)
    if allowed is not None:
        acts = {p for s in made.swaps for p in (s.release, s.fetch)}
        assert {p % len(trace.ops) for p in acts} <= {*allowed, 0}


@given(traces(), st.integers(0, 3000), st.integers(0, 4000), st.sampled_from(PLAIN))
def test_the_tier_below_is_never_overfull(trace: Trace, host: int, limit: int, score: str) -> None:
    def plan(limit: int) -> Plan:
        return autoswap(
            trace,
            machine(),
            limit=limit,
            score=score,
            host_budget=host,
            reach=Reach.ALL,
            smallest=1,
        )

    try:
        made = plan(limit)
    except CannotFit as error:
        limit = error.smallest_bytes
        made = plan(limit)
    assert made.peak_bytes <= limit
    sizes = {c.value: c.bytes for c in candidates(trace, smallest=1)}
    count = len(trace.ops)
    away = [0] * count
    for swap in made.swaps:
        for p in range(swap.after + 1, swap.until):
            away[p % count] += sizes[swap.value]
    assert max(away) <= host


@given(traces(), _speeds(), st.sampled_from(PLAIN))
def test_a_free_plan_takes_no_longer(trace: Trace, where: Machine, score: str) -> None:
    made = autoswap(trace, where, limit=None, mode="free", score=score, reach=Reach.ALL, smallest=1)
    assert find_bad_swap(trace, made.swaps) is None
    assert made.seconds <= 1.005 * made.plain_seconds
    assert made.peak_bytes <= made.plain_peak_bytes


def test_free_reaches_what_the_link_allows() -> None:
    fast, slow = (
        autoswap(chain(12), machine(speed), limit=None, mode="free", reach=Reach.ALL, smallest=1)
        for speed in (1e9, 500.0)
    )
    assert fast.plain_peak_bytes == 12_000 and fast.seconds == slow.seconds == 24
    assert fast.peak_bytes < slow.peak_bytes < 0.75 * slow.plain_peak_bytes
    with pytest.raises(CannotFit) as caught:
        autoswap(chain(12), machine(500.0), limit=10, mode="free", reach=Reach.ALL, smallest=1)
    assert caught.value.smallest_bytes == slow.peak_bytes


@pytest.mark.parametrize("speed", [700.0, 1e3, 2e3])
def test_in_a_free_plan_copies_are_over_before_anybody_waits(speed: float) -> None:
    trace, where = chain(12), machine(speed)
    made = autoswap(trace, where, limit=None, mode="free", reach=Reach.ALL, smallest=1)
    outcome = simulate(trace, where, made.swaps)
    assert len(made.swaps) > 3 and outcome.stall_seconds == 0
    for one, (_, left), (_, back) in zip(
        made.swaps, outcome.out_spans, outcome.back_spans, strict=True
    ):
        for copied, position in ((left, one.release), (back, one.until)):
            assert copied <= outcome.starts[position] - 0.02 * outcome.plain_seconds + 1e-9


@pytest.mark.parametrize("speed", [400.0, 700.0, 1.0e3, 1.5e3])
def test_free_allows_for_two_directions_that_slow_each_other_down(speed: float) -> None:
    have = [f"have s{i}:1000 | state" for i in range(6)]
    uses = [f"upd s{i} -> s{i} | 1s" for i in range(6)]
    trace = parse("\n".join([*have, *uses, *["nop -> | 1s"] * 4]))
    where = machine(speed, together=0.3)
    made = autoswap(trace, where, limit=None, mode="free", reach=Reach.ALL, smallest=1)
    assert made.seconds <= 1.005 * made.plain_seconds


def test_copies_across_the_step_share_the_lane_with_the_others() -> None:
    # State wanted at op 1 of the next step, and an activation at op 0 of it: 1 s each.
    trace = parse("""
        have p:1000 | state
        have m:1000 | state
        upd  p -> p     | 1s
        upd  m -> m     | 1s
        nop  ->         | 1s
        nop  ->         | 1s
        nop  -> h:1000  | 1s
        nop  ->         | 1s
    """)
    found = candidates(trace, smallest=1)
    swaps = schedule(make_stage(trace), machine(1e3), found, None)
    assert find_bad_swap(trace, swaps) is None
    when = {trace.values[s.value].storage: (s.release, s.fetch) for s in swaps}
    assert when == {0: (2, 5), 1: (3, 6)}
    assert simulate(trace, machine(1e3), swaps).stall_seconds == 0


def _ten_ops(state: str, at: int) -> Trace:
    """Seconds 0 to 10: h is idle from 1 to 8, and `state` is used at one op only."""
    uses = {0: "-> h:1000", 8: "h ->"}
    lines = [f"op {uses.get(i, '->')} | 1s" for i in range(10)]
    lines[at] = lines[at].replace("op ", f"op {state.split(':')[0]} ", 1)
    return parse("\n".join([f"have {state} | state", *lines]))


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        # out lane  | p p p h . . . . . .     p goes on into the next step: h waits for it
        (9, {"p": (13, 16), "h": (4, 5)}),
        # back lane | . . . . . . h p p p     p is wanted at 0 of the next step: h goes first
        (0, {"p": (5, 7), "h": (2, 6)}),
    ],
)
def test_what_one_step_leaves_to_copy_is_in_the_way_of_the_next(
    at: int, expected: dict[str, tuple[int, int]]
) -> None:
    trace = _ten_ops("p:3000", at)
    swaps = schedule(make_stage(trace), machine(1e3), candidates(trace, smallest=1), None)
    found = {"p" if trace.values[s.value].before else "h": (s.release, s.fetch) for s in swaps}
    assert found == expected
    assert simulate(trace, machine(1e3), swaps).stall_seconds == 0


def test_a_lane_gets_no_more_than_it_can_copy_in_a_step() -> None:
    have = [f"have s{i}:4000 | state" for i in range(3)]
    ops = [f"op s{i} -> | 1s" for i in range(3)] + ["op -> | 1s"] * 7
    trace = parse("\n".join(have + ops))
    swaps = schedule(make_stage(trace), machine(1e3), candidates(trace, smallest=1), None)
    assert len(swaps) < 3
    assert simulate(trace, machine(1e3), swaps).stall_seconds == 0


def test_a_combination_is_no_slower_than_its_parts() -> None:
    pytest.importorskip("optuna")
    where, trace = machine(700.0), chain(10)

    def seconds(score: str) -> float:
        return autoswap(trace, where, limit=6000, score=score, reach=Reach.ALL, smallest=1).seconds

    assert seconds("bayes") == seconds("bayes")
    assert seconds("bayes") <= 1.02 * min(seconds(score) for score in ("doa", "aoa", "wdoa"))


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(BadInput, match=r"lowtide\[bayes\]"):
        autoswap(chain(4), machine(), limit=3000, score="bayes", reach=Reach.ALL, smallest=1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"score": "luck"}, "swdoa"), ({"mode": "magic"}, "free"), ({"limit": None}, "limit")],
)
def test_wrong_arguments_name_the_right_ones(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        autoswap(chain(2), machine(), **{"limit": 1000, **wrong})


# Budgets and the command.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 << 30),
        ("1.5 kb", 1500),
        ("12345", 12345),
        ("0.5", 500),
        ("1", 1000),
        ("66%", 660),
        (" 150 % ", 1500),
        (".25", 250),
        ("7B", 7),
    ],
)
def test_budgets(text: str, expected: int) -> None:
    assert parse_bytes(text, 1000) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "8G", "-1GiB", "1.5", "nan", "inf", "0", "0%", "8GiB/s", "1e400", "8 8"]
)
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(BadInput, match="no budget"):
        parse_bytes(text, 1000)


def test_speeds_of_links() -> None:
    assert parse_rate("25GB/s") == 25e9
    for text in ("25GB", "GB/s", "0GB/s", "25/s", "-1GB/s", ""):
        with pytest.raises(BadInput, match="25GB/s"):
            parse_rate(text)


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "step.trace"
    save_trace(chain(10, size=2 << 20, seconds="1ms"), path)
    return str(path)


def _run(*args: str) -> Result:
    return CliRunner().invoke(simulate_command, args)


def test_simulate_prints_figures(step: str) -> None:
    done = _run(step, "--budget", "60%", "--link", "1GB/s", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["plain_peak_bytes"] == 20 << 20
    assert found["peak_bytes"] <= 12 << 20
    assert found["overhead"] == pytest.approx(found["seconds"] / found["plain_seconds"] - 1)
    assert found["swapped_bytes"] >= 8 << 20 and found["recomputed_seconds"] == 0.0
    done = _run(step, "--budget", "12MiB", "--reach", "runtime", "--machine", "h200")
    assert done.exit_code == 0 and "of 20.00 MiB plain" in done.stdout


@pytest.mark.parametrize("how", [["--no-swap"], ["--link", "1GB/s"], ["--link", "1kB/s"]])
def test_simulate_by_tide(step: str, how: list[str]) -> None:
    tide = ["--policy", "tide", "--seconds", "0.2", *how]
    done = _run(step, "--budget", "60%", *tide, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["peak_bytes"] <= 0.6 * found["plain_peak_bytes"]
    swaps = "1GB/s" in how
    assert (found["swapped_bytes"] > 0) == swaps
    assert swaps or found["recomputed_seconds"] > 0
    assert ("swaps" if swaps else "run again") in _run(step, "--budget", "60%", *tide).stdout
    done = _run(step, "--budget", "1MiB", *tide)
    assert done.exit_code == 3 and done.stdout == ""
    smallest = done.stderr.split("met is ")[1].split()[0]
    assert _run(step, "--budget", smallest, *tide).exit_code == 0


def test_simulate_names_the_smallest_budget(step: str) -> None:
    done = _run(step, "--budget", "1MiB")
    assert done.exit_code == 3 and done.stdout == ""
    [line] = done.stderr.splitlines()
    smallest = next(word for word in line.split("met is ")[1].split())
    assert _run(step, "--budget", smallest).exit_code == 0
    assert _run(step, "--budget", str(int(smallest) - 1)).exit_code == 3


def test_simulate_sweeps(step: str) -> None:
    done = _run(step, "--sweep", "--link", "1GB/s", "--json")
    found = json.loads(done.stdout)
    assert len(found["rows"]) == 8
    assert all(
        row["ratios"]["swdoa"] is None or row["ratios"]["swdoa"] >= 1 for row in found["rows"]
    )
    assert found["rows"][0]["ratios"]["doa"] == 1.0
    done = _run(step, "--sweep")
    assert done.exit_code == 0 and "swdoa" in done.stdout and "free" in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--budget", "lots"],
        ["--budget", "1", "--sweep"],
        ["--budget", "1", "--score", "x"],
        ["--policy", "tide", "--sweep"],
        ["--budget", "1", "--no-swap"],
    ],
)
def test_simulate_says_what_is_wrong(step: str, args: list[str]) -> None:
    assert isinstance(_run(step, *args).exception, BadInput)


def test_the_best_score_is_no_worse_than_those_it_is_chosen_from() -> None:
    trace = chain(6)
    each = {
        score: autoswap(
            trace, machine(700.0), limit=3000, score=score, reach=Reach.ALL, smallest=1
        ).seconds
        for score in ("swdoa", "doa", "vote", "lead")
    }
    best = autoswap(trace, machine(700.0), limit=3000, reach=Reach.ALL, smallest=1)
    assert best.seconds == min(each.values())
    assert best.policy in {f"autoswap/{score}" for score in each}


def test_bytes_are_freed_in_the_order_of_their_copies() -> None:
    """Op 2 needs room. a is out at 3 and b, behind it, at 5: it waits for a, and not for b."""
    trace = parse("""
        p0 -> a:10 | 1s
        p1 -> b:10 | 1s
        p2 -> c:10 | 1s
        u  c ->    | 1s
        p4 ->      | 1s
        p5 ->      | 1s
        p6 -> e:20 | 1s
        u  e ->    | 1s
        p8 ->      | 9s
        u  b ->    | 1s
        u  a ->    | 1s
    """)
    found = [c for c in candidates(trace, smallest=1) if c.bytes == 10 and c.until > 7]
    assert len(found) == 2
    link = machine(5.0)  # ten bytes take two seconds
    outcome = simulate(trace, link, schedule(make_stage(trace), link, found, 20))
    assert outcome.peak_bytes <= 20
    assert outcome.stall_seconds == pytest.approx(1.0)


@pytest.mark.parametrize(("states", "limit"), [(6, 30), (8, 40), (12, 60)])
def test_a_schedule_is_made_again_for_the_step_that_came_of_it(states: int, limit: int) -> None:
    """All of the state has to come and go while an optimizer steps: ops are late by then."""
    lines = ["device cuda:0", *(f"have s{i}:10 | state" for i in range(states))]
    lines += ["f -> h:20 | 6s", "b h -> g:1 | 6s backward"]
    lines += [f"o s{i} -> s{i} | 1s optimizer" for i in range(states)]
    trace, link = parse("\n".join(lines) + "\n"), machine(2.0 if states == 6 else 5.0)
    problem = problem_of(trace, link)
    chosen = choose(problem, plain_score(problem, "doa", limit), limit).chosen
    once = best_within(problem, chosen, limit, rounds=0)
    again = best_within(problem, chosen, limit)
    assert again.outcome.seconds < once.outcome.seconds
    assert again.outcome.peak_bytes <= limit
    assert find_bad_swap(trace, again.swaps) is None
    slowly = simulate_slowly(trace, link, again.swaps)
    assert slowly.seconds == pytest.approx(again.outcome.seconds)


def test_values_are_back_ahead_of_their_use_where_there_is_room() -> None:
    trace = chain(6)
    some = [c for c in candidates(trace, smallest=1) if c.value in (0, 1)]
    stage = make_stage(trace)

    def fetches(ahead: float) -> dict[int, int]:
        swaps = schedule(stage, machine(1e3), some, 5000, ahead=ahead)
        return {swap.value: swap.fetch for swap in swaps}

    assert fetches(0.0) == {0: 10, 1: 9}  # each takes a second
    assert fetches(1.0) == {0: 9, 1: 8}
    assert fetches(9.0)[0] == 7  # not while the others are all there


def test_what_leaves_does_not_meet_what_comes_back_just_in_time() -> None:
    """State leaves as soon as it was stepped: copies back must not slow that down."""
    lines = ["device cuda:0", *(f"have s{i}:10 | state" for i in range(6))]
    lines += [f"f{i} -> h{i}:10 | 1s" for i in range(6)]
    lines += [f"b{i} h{i} -> | 2s backward" for i in reversed(range(6))]
    lines += [f"o s{i} -> s{i} | 1s optimizer" for i in range(6)]
    trace, link, limit = parse("\n".join(lines) + "\n"), machine(5.0, together=0.7), 70
    problem = problem_of(trace, link)
    chosen = choose(problem, plain_score(problem, "lead", limit), limit).chosen
    just_in_time = best_within(
        problem, chosen, limit, paces=[one for one in PACES if not one.ahead]
    )
    ahead = best_within(problem, chosen, limit)
    assert just_in_time.outcome.stall_seconds > 0.4
    assert ahead.outcome.stall_seconds == 0
    assert ahead.outcome.peak_bytes <= limit
    assert simulate_slowly(trace, link, ahead.swaps).stall_seconds == pytest.approx(0)


def with_state(states: int, layers: int, seconds: int, speed: float = 1.0) -> problems.Problem:
    """A step of so many layers, and an optimizer that steps one state after the other."""
    lines = ["device cuda:0", *(f"have s{i}:10 | state" for i in range(states))]
    lines += [f"f{i} -> h{i}:10 | {seconds}s" for i in range(layers)]
    lines += [f"b{i} h{i} -> | {seconds}s backward" for i in reversed(range(layers))]
    lines += [f"o s{i} -> s{i} | 1s optimizer" for i in range(states)]
    return problem_of(parse("\n".join(lines) + "\n"), machine(speed))


def test_while_an_optimizer_steps_what_leaves_is_dealt_with_at_few_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It steps in pieces there. Copies that wait for others can as well be asked for later."""
    problem, link, limit = with_state(8, 8, 9), machine(1.0), 110
    trace = problem.trace
    chosen = choose(problem, plain_score(problem, "lead", limit), limit).chosen
    later = best_within(problem, chosen, limit)
    monkeypatch.setattr(problems, "_postponed", lambda _, trial: trial)
    at_once = best_within(problem, chosen, limit)
    assert find_bad_swap(trace, later.swaps) is None
    assert later.outcome.seconds == pytest.approx(at_once.outcome.seconds)
    assert simulate_slowly(trace, link, later.swaps).seconds == pytest.approx(later.outcome.seconds)

    def moments(trial: problems.Trial) -> set[int]:
        positions = {at for swap in trial.swaps for at in (swap.after + 1, swap.release)}
        return {at for at in positions if 16 < at < 24}

    assert len(moments(at_once)) >= 5
    assert len(moments(later)) <= 2


@pytest.mark.parametrize(("layers", "limit", "speed"), [(8, 160, 10.0), (8, 150, 5.0)])
def test_what_leaves_later_takes_no_room_from_pieces_that_step_at_once(
    layers: int, limit: int, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = with_state(16, layers, 1, speed)
    chosen = choose(problem, plain_score(problem, "lead", limit), limit).chosen
    later = best_within(problem, chosen, limit)
    monkeypatch.setattr(problems, "_postponed", lambda _, trial: trial)
    at_once = best_within(problem, chosen, limit)
    stepping = np.array([op.phase is Phase.OPTIMIZER for op in problem.trace.ops])
    held = [problems._most_held(problem, one.swaps, stepping) for one in (later, at_once)]
    assert held[0] <= held[1]
