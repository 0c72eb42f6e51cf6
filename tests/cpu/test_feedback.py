"""Plans judged by the steps that went by them: others are tried, and the fastest one stays."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from jobs import JOBS
from tides import TOLERANCE, plain, planned_of
from tight import bits_of, find_difference, state_of

import lowtide
from lowtide._ir import Drop, OpIndex, Plan, Rerun, ValueId
from lowtide._policy.host import Host
from lowtide._policy.tide import tide as plan_tide
from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.delta import replans
from lowtide._runtime.delta.feedback import SETTLED, Spent, Verdict, host_of, judge
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.plans import plan_by_tide
from lowtide._runtime.swap.script import Observed, Script, write_script
from lowtide._trace.text import parse

pytestmark = pytest.mark.usefixtures("plans_at_once")


def script(seconds: float, measured: list[float], **known: Any) -> Script:
    empty = Observed(
        trace=parse("nop x:8 -> y:8 | 1s\n"),
        codes=(-1,),
        positions=(0,),  # type: ignore[arg-type]
        saves={},
        states={},
        held={},
        numbers=(-1,),
    )
    found = write_script(empty, Plan((), 16, seconds, 16, 1.0))
    found.plan = replace(found.plan, remakes=(Rerun(OpIndex(1), OpIndex(0)),))
    found.settled = measured
    for name, value in known.items():
        setattr(found, name, value)
    return found


def test_a_plan_is_judged_by_its_last_steps() -> None:
    late = [9.0] * (SETTLED - 4) + [1.0] * 4  # memory was not laid out yet
    assert judge(script(1.0, late[1:])) is Verdict.WAIT
    assert judge(script(1.0, late)) is Verdict.KEEP
    assert judge(script(0.97, late)) is Verdict.KEEP
    assert judge(script(0.9, late)) is Verdict.ANOTHER
    assert judge(script(0.9, late, rounds=2)) is Verdict.KEEP
    assert judge(script(0.9, late, judged=True)) is Verdict.WAIT
    idle = script(0.9, late)
    idle.plan = replace(idle.plan, remakes=())
    assert judge(idle) is Verdict.KEEP, "nothing that is planned takes that long"


def test_the_faster_of_two_plans_stays() -> None:
    old = script(0.9, [1.0] * SETTLED)
    assert judge(script(0.8, [1.1] * SETTLED, rival=old, rounds=1)) is Verdict.BACK
    assert judge(script(0.8, [0.83] * SETTLED, rival=old, rounds=1)) is Verdict.KEEP
    assert judge(script(0.8, [0.95] * SETTLED, rival=old, rounds=1)) is Verdict.ANOTHER


def test_what_the_host_takes_is_what_was_measured_without_what_a_plan_added() -> None:
    one = script(1.0, [2.0] * SETTLED)
    one.plan = replace(one.plan, remakes=one.plan.remakes * 2)
    reruns, acts = Spent(), Spent()
    reruns.seconds, reruns.count = 3.0, 10
    found = host_of(one, reruns, acts, 0.0)
    assert found.seconds == pytest.approx(1.4)
    assert found.rerun_seconds == pytest.approx(0.3)
    assert found.step_seconds(one.plan.remakes, ()) == pytest.approx(2.0)


def test_what_comes_with_moving_is_shared_out_among_acts() -> None:
    one = script(1.0, [2.0] * SETTLED)
    drops = tuple(Drop(OpIndex(1), ValueId(v)) for v in range(2))
    one.plan = replace(one.plan, remakes=(*drops, *one.plan.remakes))
    reruns, acts = Spent(), Spent()
    reruns.seconds, reruns.count = 1.0, 10
    acts.seconds, acts.count = 1.0, 20
    found = host_of(one, reruns, acts, 0.9)
    assert found.act_seconds == pytest.approx(0.4), "0.8 s besides the rerun, for two drops"
    assert found.seconds == pytest.approx(1.1)
    assert host_of(one, reruns, acts, 0.1).act_seconds == pytest.approx(0.05)


def test_coarser_plans_move_nothing_small() -> None:
    one = script(1.0, [2.0] * SETTLED)
    text = "".join(f"nop x{i}:8 -> y{i}:{10 * (i + 1)} | 1s\n" for i in range(10))
    trace = parse(text)
    made = [op.writes[0] for op in trace.ops]
    one.observed = replace(one.observed, trace=trace, saves={v: i for i, v in enumerate(made)})
    one.plan = replace(one.plan, remakes=tuple(Drop(OpIndex(9), v) for v in made))
    assert host_of(one, Spent(), Spent(), 0.0).least == (31, 51, 71, 91)
    one.plan = replace(one.plan, remakes=tuple(Drop(OpIndex(9), v) for v in made[:1]))
    assert host_of(one, Spent(), Spent(), 0.0).least == ()


def train(monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict]) -> tuple[Any, list[Any]]:
    """A job, judged as given whenever a plan has settled: its plans in order, and who asked."""
    asked: list[Host | None] = []

    def plan(*given: Any, host: Host | None, **how: Any) -> Plan | None:
        asked.append(host)
        seeded = partial(plan_tide, seed=len(asked))
        with monkeypatch.context() as patch:
            patch.setattr(plans, "tide", seeded)
            return plan_by_tide(*given, **how)

    def judged(one: Script) -> Verdict:
        if one.judged or len(one.settled) < 2 or not verdicts:
            return Verdict.WAIT
        return verdicts.pop(0)

    monkeypatch.setattr(budgeting, "plan_by_tide", plan)
    monkeypatch.setattr(replans, "judge", judged)
    monkeypatch.setattr(replans, "measured_seconds", lambda _: 1e9)  # any plan is faster
    name, steps = "gpt", 20
    expected = plain(name, steps)
    job = JOBS[name]()
    budget = int(0.5 * max(expected.peaks))
    losses: list[torch.Tensor] = []
    scripts: list[Script] = []
    anew = 0
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        planned = planned_of(tide)
        for _ in range(steps):
            losses.append(job.step())
            anew += planned.replans.anew
            planned.replans.anew = False
            if planned.following.scripts and planned.following.scripts[0] not in scripts[-1:]:
                scripts.append(planned.following.scripts[0])
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        peaks = tide._budgeted._dynamic.watching.peaks
    result = bits_of([*losses, *state_of(job), torch.get_rng_state()])
    assert find_difference(result, expected.result) is None
    assert max(peaks) <= budget * (1 + TOLERANCE)
    assert set(list(planned.modes)[2:]) == {Mode.PLANNED}
    assert anew == len(scripts) - 1, "memory is laid out for another one"
    return scripts, asked


def test_steps_that_take_longer_are_planned_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripts, asked = train(monkeypatch, [Verdict.ANOTHER, Verdict.ANOTHER, Verdict.KEEP])
    assert len({id(one) for one in scripts}) == len(scripts) == 3
    assert [one.rounds for one in scripts] == [0, 1, 2]
    first, *measured = asked
    assert first is None and len(measured) == 2
    assert all(host is not None and host.act_seconds > 0 for host in measured)


def test_a_plan_that_turns_out_slower_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts, _ = train(monkeypatch, [Verdict.ANOTHER, Verdict.BACK])
    first, second, last = scripts
    assert last is first is not second
    assert first.judged and second.rival is first


def test_a_plan_that_is_as_fast_as_planned_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts, asked = train(monkeypatch, [Verdict.KEEP])
    assert len(scripts) == len(asked) == 1
