"""Recomputing, planned: the laws, by hand, and random steps against the slow checker."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies import traces
from swaps import busy_traces, machines, swap
from there_and_back import there_and_back

from lowtide._analyze.load import find_peak, load_curve
from lowtide._check import find_flaw
from lowtide._ir import Drop, Hold, Link, Machine, OpIndex, Remake, Rerun, Trace, ValueId
from lowtide._machine.link import line
from lowtide._policy.autoswap import CannotFit, autoswap
from lowtide._policy.bound import least_extra_seconds
from lowtide._policy.candidates import Reach, candidates
from lowtide._policy.ground import Ground
from lowtide._policy.joint import Choice, Task, attempt
from lowtide._policy.relax import Relaxed, relax
from lowtide._policy.remake import remake
from lowtide._policy.taste import Stuck, Taste
from lowtide._policy.tide import tide
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.reference import simulate_slowly
from lowtide._simulate.remade import remade
from lowtide._simulate.remakes import Unlawful, run_remakes
from lowtide._trace.text import parse

# Two layers forward and back; a is cheap to make again, b is not.
STEP = """
have x:10 | input
cheap x -> a:100 | 1us
dear a -> b:100 | 9us
loss b -> l:10 | 1us
back b l -> gb:10 | 1us
free b
free l
back a gb -> ga:10 | 1us
free a
free gb
"""


def drop(before: int, value: int) -> Drop:
    return Drop(OpIndex(before), ValueId(value))


def rerun(before: int, op: int) -> Rerun:
    return Rerun(OpIndex(before), OpIndex(op))


def step() -> Trace:
    return parse(STEP)


def machine_of(speed: float, together: float = 1.0) -> Machine:
    return Machine("m", 1 << 40, 1 << 40, line(0.0, speed), line(0.0, speed), together)


def test_a_plain_step_is_what_the_load_says() -> None:
    found = run_remakes(step(), ())
    assert (found.peak_bytes, found.peak_op) == (find_peak(step()).bytes, 3)
    assert found.seconds == pytest.approx(13e-6)
    assert found.rerun_seconds == 0


def test_a_value_dropped_and_made_again() -> None:
    found = run_remakes(step(), [drop(2, 1), rerun(4, 0)])
    assert found.peak_bytes == 210  # x, a and b when b is made
    assert found.seconds == pytest.approx(14e-6)
    assert found.rerun_seconds == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("remakes", "flaw"),
    [
        ([drop(2, 1)], "before op 4: op 4 needs value 1, which is gone"),
        ([drop(2, 1), drop(3, 1)], "before op 3: value 1 is not there"),
        ([rerun(1, 2)], "before op 1: op 2 has not run yet"),
        ([drop(2, 1), drop(3, 2), rerun(3, 1)], "before op 3: op 1 again needs value 1"),
    ],
)
def test_laws_that_a_plan_may_break(remakes: list[Remake], flaw: str) -> None:
    with pytest.raises(Unlawful, match=flaw):
        run_remakes(step(), remakes)


# x32 and half are made from x, which nothing needs after the forward pass, and saved.
HELD = """
have i:10 | input
dear i -> x:100 | 90us
wide x -> x32:200 | 1us
half x -> half:100 | 1us
free x
loss half -> l:300 | 1us
back half l -> g:10 | 1us
free half
free l
back x32 g -> h:10 | 1us
free x32
free g
"""


def test_what_is_held_makes_others_cheap() -> None:
    trace = parse(HELD)
    assert find_peak(trace).bytes == 10 + 200 + 100 + 300 + 10
    plan = tide(trace, limit=520, seconds=0.5)
    assert Hold(OpIndex(2), ValueId(1)) in plan.remakes
    assert plan.seconds == pytest.approx(96e-6)  # all ops once, and x32 again
    assert run_remakes(trace, plan.remakes).peak_bytes == plan.peak_bytes <= 520
    without = [one for one in plan.remakes if not isinstance(one, Hold)]
    with pytest.raises(Unlawful):
        run_remakes(trace, without)


def test_what_is_held_is_not_overwritten() -> None:
    trace = parse("have x:10 | input\nmm x -> y:5 | 1us\nadd_ y -> y | 1us\nmm y -> z:5 | 1us")
    with pytest.raises(Unlawful, match="op 1 overwrites a value that is held"):
        run_remakes(trace, [Hold(OpIndex(0), ValueId(1))])


def test_what_is_made_from_one_value_is_made_again_together() -> None:
    plan = tide(parse(HELD), limit=420, seconds=0.2)
    reruns = [one for one in plan.remakes if isinstance(one, Rerun)]
    assert len({one.op for one in reruns}) == len(reruns)  # none twice


def test_a_linear_programme_says_what_is_best_in_parts() -> None:
    trace = parse(HELD)
    ground = Ground(trace)
    assert relax(ground, load_curve(trace), 620) == Relaxed(0.0, {}, {})
    found = relax(ground, load_curve(trace), 520)
    assert found is not None
    # 100 bytes too much while the loss is there: x32 goes for x, which takes its place.
    assert found.seconds == pytest.approx(1e-6)
    assert found.dropped[2] == pytest.approx(1.0)
    assert found.held == {1: pytest.approx(1.0)}
    assert relax(ground, load_curve(trace), 5) is None


def test_what_outlives_the_step_is_there_at_its_end() -> None:
    trace = parse("have x:10 | input\nmm x -> y:5 | 1us\nmm x -> z:5 | 1us\nkeep y\nkeep x")
    with pytest.raises(Unlawful, match="value 1 outlives the step"):
        run_remakes(trace, [drop(1, 1)])
    assert run_remakes(trace, [drop(1, 1), rerun(2, 0)]).rerun_seconds == pytest.approx(1e-6)


def test_the_cheap_one_goes() -> None:
    plan = tide(step(), limit=220, seconds=0.1)
    assert plan.remakes == (drop(3, 1), rerun(4, 0))
    assert (plan.peak_bytes, plan.plain_peak_bytes) == (220, 230)
    assert plan.seconds == pytest.approx(14e-6)


def test_a_budget_above_the_peak_changes_nothing() -> None:
    plan = tide(step(), limit=230, seconds=0.1)
    assert plan.remakes == ()
    assert plan.seconds == plan.plain_seconds


def test_what_cannot_be_met_is_told_with_what_can() -> None:
    with pytest.raises(CannotFit, match="recomputing cannot go below") as caught:
        tide(step(), limit=100, seconds=0.1)
    assert tide(step(), limit=caught.value.smallest_bytes, seconds=0.1).peak_bytes >= 210


def test_a_bound_is_what_has_to_run_again_at_least() -> None:
    assert least_extra_seconds(step(), 230) == 0
    # Ten bytes too much at one op: a tenth of a, or of b.
    assert least_extra_seconds(step(), 220) == pytest.approx(0.1e-6)
    assert least_extra_seconds(step(), 5) == float("inf")


# The state has no room beside h: f waits until it is gone, and the optimizer until it is back.
BESIDE = """
have s:100 | state
f -> h:100 | 1s
b h -> | 0s backward
free h
o s -> s | 0s optimizer
"""


@pytest.mark.parametrize(
    ("limit", "extra"), [(200, 0.0), (150, 1.0), (100, 2.0), (50, float("inf"))]
)
def test_a_bound_is_what_copies_take_at_least(limit: int, extra: float) -> None:
    slow = machine_of(100.0)
    assert least_extra_seconds(parse(BESIDE), limit, slow, smallest=1) == pytest.approx(extra)
    if limit == 100:
        plan = tide(parse(BESIDE), slow, limit=limit, seconds=0.1, smallest=1)
        assert plan.seconds == pytest.approx(plan.plain_seconds + extra)


@pytest.mark.parametrize(("together", "extra"), [(1.0, 2.0), (0.8, 2.5), (0.5, 4.0), (0.3, 4.0)])
def test_a_bound_knows_that_both_ways_slow_each_other_down(together: float, extra: float) -> None:
    """Twice in a step one comes back while the other leaves."""
    trace = parse(
        "have s:100 | state\nhave t:100 | state\n"
        "f s -> s | 1us optimizer\no t -> t | 1us optimizer\n"
    )
    found = least_extra_seconds(trace, 100, machine_of(100.0, together), smallest=1)
    assert found == pytest.approx(extra, rel=1e-5)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=400)
@given(
    trace=st.one_of(there_and_back(), there_and_back(), traces(max_ops=16)),
    share=st.floats(0.6, 1),
    taste=st.builds(
        Taste,
        st.sampled_from([0.5, 1.0, 2.0]),
        st.sampled_from([0.5, 1.0]),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.booleans(),
    ),
    held=st.sampled_from([1, 2, 1000]),
)
def test_plans_are_lawful_and_within_the_limit(
    trace: Trace, share: float, taste: Taste, held: int
) -> None:
    limit = int(share * find_peak(trace).bytes)
    ground = Ground(trace)
    holds = frozenset([*ground.holdable][::held])
    try:
        found = remake(ground, limit, taste, holds=holds)
    except Stuck:
        event("stuck")
        return
    if found is None:
        event("without end")
        return
    seconds, remakes = found
    event(f"{min(5, sum(isinstance(one, Rerun) for one in remakes))} reruns")
    event(f"{min(3, sum(isinstance(one, Hold) for one in remakes))} holds")
    result = run_remakes(trace, remakes)
    assert result.peak_bytes <= limit
    assert least_extra_seconds(trace, limit) <= seconds + 1e-9
    assert result.rerun_seconds == pytest.approx(seconds)
    step = remade(trace, remakes)
    assert find_flaw(step.trace) is None
    assert find_peak(step.trace).bytes == result.peak_bytes
    assert sum(op.seconds for op in step.trace.ops) == pytest.approx(result.seconds)
    assert [step.trace.ops[at].name for at in step.at[:-1]] == [op.name for op in trace.ops]


def _quick(link: Link) -> Link:
    """In microseconds, as ops are here."""
    return replace(link, seconds=tuple(1e-6 * seconds for seconds in link.seconds))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=200)
@given(
    trace=st.one_of(there_and_back(), there_and_back(), busy_traces(), traces(max_ops=16)),
    machine=machines(),
    share=st.floats(0.4, 1),
    seed=st.integers(0, 9),
)
def test_both_together_are_lawful_and_what_the_slow_simulator_says(
    trace: Trace, machine: Machine, share: float, seed: int
) -> None:
    machine = replace(machine, out=_quick(machine.out), back=_quick(machine.back))
    limit = int(share * find_peak(trace).bytes)
    try:
        plan = tide(trace, machine, limit=limit, seconds=0.02, seed=seed, smallest=1)
    except CannotFit as refusal:
        event("cannot fit")
        limit = refusal.smallest_bytes
        plan = tide(trace, machine, limit=limit, seconds=0.02, seed=0, smallest=1)
    event(f"swaps: {bool(plan.swaps)}, reruns: {bool(plan.remakes)}")
    run_remakes(trace, plan.remakes)
    step = remade(trace, plan.remakes).trace
    assert find_bad_swap(step, plan.swaps) is None
    outcome = simulate_slowly(step, machine, plan.swaps)
    assert outcome.peak_bytes == plan.peak_bytes <= limit
    assert outcome.seconds == pytest.approx(plan.seconds)
    least = least_extra_seconds(trace, limit, machine, smallest=1)
    event(f"bound: {least > 0}")
    assert plan.plain_seconds + least <= plan.seconds * (1 + 1e-6) + 1e-9


def test_what_is_dear_to_make_again_is_swapped() -> None:
    fast = machine_of(1e9)
    trace = parse(
        "have x:10 | input\n"
        "dear x -> a:100 | 9us\ncheap a -> b:10 | 1us\nlong b -> c:100 | 5us\nfree b\n"
        "long c -> d:10 | 5us\nfree c\nlong d -> e:10 | 5us\nback a e -> f:10 | 1us\n"
    )
    limit = 150
    plan = tide(trace, fast, limit=limit, seconds=0.1, smallest=1)
    assert [swap.value for swap in plan.swaps] == [1]
    assert plan.remakes == ()
    assert tide(trace, limit=limit, seconds=0.1).seconds > plan.seconds
    little = tide(trace, fast, limit=limit, seconds=0.1, smallest=1, host_budget=50)
    assert little.swaps == ()  # there is no room below
    assert little.remakes != ()


def test_what_an_op_that_runs_again_reads_may_be_away_until_then() -> None:
    """Before backward itself asks for it."""
    trace = parse(
        "have x:10 | input\n"
        "dear x -> a:100 | 9us\ncheap a -> b:100 | 1us\nlong b -> c:10 | 5us\n"
        "save a | packed=2 unpacked=5\nsave b | packed=3 unpacked=4\n"
        "long c -> d:10 | 5us\nback b d -> e:10 | 1us\nfree b\nback a e -> f:10 | 1us\n"
    )
    step = remade(trace, [drop(3, 2), rerun(4, 1)])
    assert find_flaw(step.trace) is None
    held = {ValueId(1): OpIndex(2)}
    found = candidates(step.trace, smallest=1, reach=Reach.RUNTIME, held=held, movable={ValueId(1)})
    assert (1, 2, 4) in [(one.value, one.earliest, one.latest) for one in found]


def test_a_weight_stays_while_something_that_was_dropped_is_made_from_it() -> None:
    trace = parse(
        "have w:100 | parameter\ncast w -> b:60 | 1us\nlong b -> c:10 | 50us\n"
        "large c -> d:140 | 50us\nsmall d -> f:10 | 50us\nfree d\n"
        "back b f -> e:10 | 1us\nfree b\nstep w e -> w | 1us optimizer\n"
    )
    fast = machine_of(1e12)
    task = Task(Ground(trace), fast, 225, None, 1, None)
    away = Choice((swap(0, 0, 1, 5, 5),), Taste())
    trial = attempt(task, away)
    assert trial is not None and trial.swaps and not trial.remakes
    with_both = replace(task, limit=200)
    assert attempt(with_both, away) is None, "`b` is gone, too, and cannot do without `w`"


def test_what_has_no_bytes_is_always_there() -> None:
    """As the empty cache is that the first keys of a model are put behind."""
    trace = parse(
        "have x:100 | input\nappear none:0 | input\ncat none x -> k:100 | 1us\nfree none\n"
        "large x -> d:150 | 50us\nfree d\nback k x -> e:10 | 1us\n"
    )
    assert trace.values[1].bytes == 0
    plan = tide(trace, limit=300, seconds=0.1)
    assert [type(one) for one in plan.remakes] == [Drop, Rerun]
    assert run_remakes(trace, plan.remakes).peak_bytes <= 300
    step = remade(trace, plan.remakes)
    assert find_flaw(step.trace) is None


@pytest.mark.parametrize(("states", "speed", "limit"), [(6, 2.0, 30), (8, 5.0, 40), (12, 5.0, 30)])
def test_it_is_no_slower_than_swapping_alone(states: int, speed: float, limit: int) -> None:
    """Where nothing can be made again: what an optimizer has, which comes and goes as it steps."""
    lines = ["device cuda:0", *(f"have s{i}:10 | state" for i in range(states))]
    lines += ["f -> h:20 | 6s", "b h -> g:1 | 6s backward"]
    lines += [f"o s{i} -> s{i} | 1s optimizer" for i in range(states)]
    trace = parse("\n".join(lines) + "\n")
    machine = Machine("test", 1 << 40, 1 << 40, line(0.0, speed), line(0.0, speed))
    alone = autoswap(trace, machine, limit=limit, reach=Reach.ALL, smallest=1)
    both = tide(trace, machine, limit=limit, seconds=0.2, smallest=1)
    assert both.seconds <= alone.seconds + 1e-9
