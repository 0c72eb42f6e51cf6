"""`lowtide.fit` by policy "tide": the steps of twelve jobs, planned, on the CPU."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from jobs import JOBS, Job, job_of
from moving import same_machine
from tides import CHANGING, STEPS, TOLERANCE, Gates, check, entered, hold_all, plain, planned_of
from tight import bits_of, find_difference, holding_nothing, run, state_of
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide._errors import LowtideWarning
from lowtide._ir import Hold, Plan, Rerun
from lowtide._machine.link import line
from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.delta import replans
from lowtide._runtime.delta.cap import Cap
from lowtide._runtime.delta.feedback import Verdict
from lowtide._runtime.delta.holds import Holds
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.recipe import Call, Value
from lowtide._runtime.delta.replans import _OFTEN, _SHORT
from lowtide._runtime.swap.script import Act

pytestmark = pytest.mark.usefixtures("plans_at_once")


@pytest.mark.parametrize("share", [0.7, 0.4])
@pytest.mark.parametrize("name", JOBS)
def test_jobs_train_bit_for_bit_within_the_budget(name: str, share: float) -> None:
    planned, _ = check(name, share)
    if name not in CHANGING:
        assert planned.steps == {Mode.DYNAMIC: 1, Mode.TRACED: 1, Mode.PLANNED: STEPS - 2}


def test_every_value_that_was_made_again_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = line(1.0, 1e3)  # nothing is swapped
    machine = replace(same_machine(), out=slow, back=slow)
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: machine)
    planned, _ = check("resnet", 0.5, verify="always")
    [script] = planned.following.scripts
    assert any(isinstance(one, Rerun) for one in script.plan.remakes)


@pytest.mark.parametrize(("name", "share"), [("odd", 0.6), ("rnn", 0.5), ("bert", 0.6)])
def test_the_peak_is_what_was_planned(
    name: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as a search takes to settle, also on a busy machine: after the tenth of a second that
    # other tests give it, one of six plans there held up to 5 % more than planned.
    monkeypatch.setattr(plans, "_SECONDS", 0.6)
    budget = int(share * max(plain(name).peaks))
    job = JOBS[name]()
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in range(STEPS):
            job.step()
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        peaks = list(tide._budgeted._dynamic.watching.peaks)
        [script] = planned_of(tide).following.scripts
    assert len(set(peaks[4:])) == 1
    assert peaks[4] <= peaks[3]  # generators' states that are not written down take nothing
    assert script.recorded is not None and script.trouble == 0
    assert peaks[-1] == pytest.approx(script.plan.peak_bytes, rel=0.02)
    page = tmp_path / "report.html"
    tide.save_report(page)
    assert "measured" in page.read_text()
    said = tide.summary()
    assert f"1 dynamic, 1 traced, {STEPS - 2} planned" in said
    assert "planned   peak" in said and "measured  peak" in said


class _Scheduled(nn.Module):
    """What it multiplies by and how much it drops out differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.at = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x) * (1 + 0.1 * self.at)), 0.1 + 0.05 * self.at) + x
        return torch.as_tensor(x.square().mean())


def scheduled() -> Job:
    torch.manual_seed(0)
    model = _Scheduled()

    def loss() -> torch.Tensor:
        found = torch.as_tensor(model(torch.randn(512, 64)))
        model.at += 1
        return found

    return job_of(model, loss)


def sized(rows: list[int]) -> Job:
    """A step on as many rows as it says, in turn."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(8)])
    left = iter(rows)
    return job_of(
        model, lambda: torch.as_tensor(model(torch.randn(next(left), 96)).square().mean())
    )


def gates() -> Job:
    torch.manual_seed(0)
    model = Gates()
    return job_of(model, lambda: torch.as_tensor(model(torch.randn(512, 192))))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan stays for good."""
    monkeypatch.setattr(replans, "judge", lambda _: Verdict.KEEP)


@pytest.mark.parametrize("lax", [False, True])
@pytest.mark.parametrize("larger", [640, 768, 2048])
def test_nobody_watches_steps_of_which_nothing_is_to_be_moved(
    judged: None, larger: int, lax: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there is a larger one, which is within the budget all the same."""
    rows = [512] * 12 + [larger] * 2
    expected = run(partial(sized, rows), len(rows))
    budget = int(1.06 * expected.peaks[5])
    assert expected.peaks[-1] > budget
    if lax:  # as on a GPU
        monkeypatch.setattr(Cap, "holds", True)
        monkeypatch.setattr(Ledger, "count_unseen", lambda _: None)
    with entered() as made:
        ours = run(partial(sized, rows), len(rows), budget, policy="tide")
    assert find_difference(ours.result, expected.result) is None
    assert max(ours.peaks) <= budget * (1 + TOLERANCE), (ours.peaks, budget)
    assert planned_of(made[0]).steps[Mode.LOOSE] >= 3
    assert planned_of(made[0]).modes[-1] is not Mode.LOOSE


def test_a_step_that_turns_out_longer_late_is_within_the_budget(judged: None) -> None:
    """What it has saved before is kept natively, and counts."""

    def several(counts: list[int]) -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(6)])
        rows, left = torch.randn(512, 96), iter(counts)
        return job_of(
            model, lambda: sum((model(rows).square().mean() for _ in range(next(left))), rows.sum())
        )

    counts = [3] * 12 + [5] * 2
    expected = run(partial(several, counts), len(counts))
    budget = int(1.15 * expected.peaks[5])
    assert expected.peaks[-1] > 1.1 * budget
    with entered() as made:
        ours = run(partial(several, counts), len(counts), budget, policy="tide")
    assert find_difference(ours.result, expected.result) is None
    assert planned_of(made[0]).steps[Mode.LOOSE] >= 3
    assert max(ours.peaks) <= budget * (1 + TOLERANCE), (ours.peaks, budget)


@pytest.mark.parametrize(("share", "loose"), [(1.06, True), (1.02, False)])
def test_a_little_has_to_be_left_over_for_that(judged: None, share: float, loose: bool) -> None:
    rows = [512] * 8
    budget = int(share * max(run(partial(sized, rows), len(rows)).peaks))
    job = sized(rows)
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in rows:
            job.step()
        assert (Mode.LOOSE in planned_of(tide).steps) is loose


def test_steps_are_not_planned_for_less_if_they_took_too_long_then() -> None:
    job = JOBS["mlp"]()
    budget = int(0.7 * max(plain("mlp").peaks))
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in range(4):
            job.step()
        assert tide._budgeted is not None
        following = planned_of(tide).following
        (old,) = following.scripts
        less = old.plan.peak_bytes // 20
        assert not tide._budgeted.shrink(less, 0.9)
        assert following.scripts == [old]
        assert tide._budgeted.shrink(less)
        (new,) = following.scripts
        assert new.plan.peak_bytes <= old.plan.peak_bytes - less


def test_what_is_held_in_a_live_step_makes_others_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search would choose: all that can be held is, for what is made from it."""
    monkeypatch.setattr(plans, "tide", hold_all)
    expected = run(gates, STEPS)
    budget = int(0.75 * max(expected.peaks))
    ours = run(gates, STEPS, budget, policy="tide", verify="always")
    assert find_difference(ours.result, expected.result) is None
    assert max(ours.peaks) <= budget * (1 + TOLERANCE)
    job = gates()
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in range(STEPS):
            job.step()
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        [script] = planned_of(tide).following.scripts
        held = [one for one in script.plan.remakes if isinstance(one, Hold)]
        reruns = [one for one in script.plan.remakes if isinstance(one, Rerun)]
        assert held and reruns
        names = {script.trace.ops[one.op].name.split(".")[1] for one in reruns}
        assert "addmm" not in names  # no layer runs again
        assert not dynamic.room.counts["not dropped"]
        before = dynamic.replayer.calls
        job.step()
        assert dynamic.replayer.calls - before == len(reruns)

        held_now: list[Value] = []
        hold = Holds.hold

        def noted(holds: Holds, call: Call) -> None:
            hold(holds, call)
            held_now.extend(holds._held.values())

        monkeypatch.setattr(Holds, "hold", noted)
        monkeypatch.setattr(dynamic.room, "drop", lambda _cell: None)  # held for nothing
        job.step()
        assert held_now
        assert all(value.held is None for value in held_now)


def test_what_the_program_begins_to_keep_stays_as_it_is() -> None:
    """The events are those of the plan, which would drop it."""
    budget = int(0.6 * max(plain("mlp").peaks))
    slow = line(1.0, 1e3)
    machine = replace(same_machine(), out=slow, back=slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgeting, "machine_here", lambda *_, **__: machine)
        job = JOBS["mlp"]()
        layers = [*job.model.children()][1:6]
        kept: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []

        def keep(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
            kept.append(output.detach())
            copies.append(output.detach().clone())

        with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
            losses = [job.step() for _ in range(STEPS - 2)]
            [script] = planned_of(tide).following.scripts
            assert any(action.act is Act.DROP for acts in script.actions for action in acts)
            handles = [layer.register_forward_hook(keep) for layer in layers]
            for _ in range(2):
                losses.append(job.step())
                assert planned_of(tide).modes[-1] is Mode.PLANNED
                assert all(map(torch.equal, kept, copies))
            for handle in handles:
                handle.remove()
    assert find_difference(bits_of(losses), plain("mlp").result[:STEPS]) is None


def test_a_scalar_that_changes_is_never_taken_for_the_one_that_was_planned() -> None:
    expected = run(scheduled, 8)
    ours = run(scheduled, 8, int(0.5 * max(expected.peaks)), policy="tide", verify="always")
    assert find_difference(ours.result, expected.result) is None


@pytest.mark.parametrize("often", [1, _OFTEN])
def test_where_memory_stays_short_steps_are_planned_anew_in_less(
    often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an allocator loses between blocks is known only when steps have gone by a plan."""
    flushed = [0]
    monkeypatch.setattr(Cap, "count", lambda _: flushed[0])
    budget = int(0.7 * max(plain("resnet").peaks))
    job = JOBS["resnet"]()
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        planned = planned_of(tide)

        def train(steps: int, flushes: int) -> list[Plan]:
            plans = []
            for _ in range(steps):
                flushed[0] += flushes
                job.step()
                plans += [one.plan for one in planned.following.scripts]
            return plans

        train(4, 0)
        [first] = planned.following.scripts
        assert first.recorded is not None
        assert len({id(plan) for plan in train(_SHORT - 1, 1)}) == 1  # that happens
        assert len({id(plan) for plan in train(1, 0)}) == 1
        plans = train(_SHORT, 1) if often == 1 else train(2, often)
        assert plans[-1] is not first.plan
        assert planned.replans.anew  # memory may be laid out for the old one
        assert plans[-1].peak_bytes <= 0.96 * budget
        for _ in range(5):
            plans += train(2 + _SHORT, 1)
        [last] = planned.following.scripts
        assert last.replans == 3 and len({id(plan) for plan in plans}) == 4  # not for ever
        assert set(list(planned.modes)[2:]) == {Mode.PLANNED}


def test_a_step_that_departs_goes_on_within_the_budget() -> None:
    rows = [512, 512, 512, 700, 512, 300, 512, 512, 300, 512, 300, 512, 300, 512]
    expected = run(lambda: sized(rows), len(rows))
    budget = int(0.5 * max(expected.peaks))
    ours = run(lambda: sized(rows), len(rows), budget, policy="tide")
    assert find_difference(ours.result, expected.result) is None
    assert max(ours.peaks) <= budget * (1 + TOLERANCE)
    job = sized(rows)
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in rows:
            job.step()
        modes = list(planned_of(tide).modes)
    assert modes[:4] == [Mode.DYNAMIC, Mode.TRACED, Mode.PLANNED, Mode.DEPARTED]
    assert modes[-2:] == [Mode.PLANNED, Mode.PLANNED]  # both shapes have a plan by now


class Boom(Exception):
    pass


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_a_traced_or_planned_step(where: str, at: int) -> None:
    def use(budget: int | None) -> list[torch.Tensor]:
        job = JOBS["gpt"]()

        def burn(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
            if where == "forward":
                raise Boom
            output.register_hook(explode)

        def explode(_grad: torch.Tensor) -> None:
            raise Boom

        def train() -> None:
            for i in range(STEPS):
                if i == at:
                    job.model.get_submodule("blocks.3").register_forward_hook(burn)
                losses.append(job.step())

        def train_fitted() -> None:
            with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide"):
                train()

        losses: list[torch.Tensor] = []
        with pytest.raises(Boom):
            (train if budget is None else train_fitted)()
        gradients = [p.grad for p in job.model.parameters() if p.grad is not None]
        return [*losses, *gradients, *state_of(job), torch.get_rng_state()]

    with holding_nothing():
        expected = bits_of(use(None))
        found = bits_of(use(int(0.5 * max(plain("gpt").peaks))))
    gc.collect()
    assert find_difference(found, expected) is None


def test_a_mode_of_the_program_in_the_step_that_is_traced() -> None:
    """The recorder cannot leave the stack of modes then; later it does, and another is traced."""
    expected = plain("mlp").result[:STEPS]
    job = JOBS["mlp"]()
    budget = int(0.5 * max(plain("mlp").peaks))
    losses = []
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for i in range(STEPS):
            with FlopCounterMode(display=False) if i == 1 else nullcontext():
                losses.append(job.step())
        assert torch._C._len_torch_dispatch_stack() == 1  # that which sees ops
        modes = list(planned_of(tide).modes)
    assert modes[1] is Mode.TRACED
    assert modes.count(Mode.TRACED) == 2
    assert modes[-1] is Mode.PLANNED
    assert find_difference(bits_of(losses), expected) is None


def test_a_plan_that_cannot_be_made_is_told_once_and_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(plans, "tide", fail)
    with pytest.warns(LowtideWarning, match="planning failed .ZeroDivisionError: of the test") as w:
        planned, _ = check("mlp", 0.5)
    assert len(w) == 1
    assert planned.steps == {Mode.DYNAMIC: STEPS - 1, Mode.TRACED: 1}


def test_who_watches_sees_that_steps_are_planned() -> None:
    job = JOBS["mlp"]()
    said: list[str] = []
    with lowtide.Tide(
        job.model, job.optimizers, pool=False, tell=print, budget=0.6, live=said.append
    ):
        for _ in range(5):
            job.step()
    planning = [line.startswith("planning") for line in said]
    assert planning.count(True) == 1 and not planning[0] and not planning[-1], said


def test_a_report_without_a_plan_is_refused(tmp_path: Path) -> None:
    job = JOBS["mlp"]()
    with lowtide.fit(job.model, job.optimizers, budget="1GiB", policy="tide") as tide:
        job.step()
    with pytest.raises(lowtide.BadInput, match="no step was planned yet"):
        tide.save_report(tmp_path / "x.html")
    with pytest.raises(lowtide.BadInput, match="there is no budget"):
        lowtide.fit(job.model).save_report(tmp_path / "x.html")
    assert not [*tmp_path.iterdir()]
