"""What a plan runs again, in a live step: those ops, in that order, within what is planned."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from jobs import JOBS, Job, job_of
from moving import same_machine
from tides import Gates, hold_all, planned_of
from tight import bits_of, find_difference, run
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lowtide
from lowtide._ir import Drop, Hold, Link, Machine, Rerun
from lowtide._machine.link import line
from lowtide._policy.ground import Ground
from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.order import Gone
from lowtide._runtime.delta.recipe import Call
from lowtide._runtime.delta.replay import Replayer
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.observe import runtime_of
from lowtide._runtime.swap.script import Script

STEPS = 8
ROUNDING = 0.001  # of the peak: the driver counts whole blocks


class _Stream(nn.Module):
    """What each block adds is not saved, and gone as soon as it is added."""

    def __init__(self, blocks: int = 8, width: int = 64) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3))))
        return x.square().mean()


def stream() -> Job:
    torch.manual_seed(0)
    model = _Stream()
    return job_of(model, lambda: torch.as_tensor(model(torch.randn(512, 64))))


def gpt() -> Job:
    return JOBS["gpt"]()


@pytest.fixture(autouse=True)
def _nothing_is_swapped(plans_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = line(1.0, 1e3)
    machine = replace(same_machine(), out=slow, back=slow)
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: machine)
    monkeypatch.setattr(plans, "_SECONDS", 1.0)


def check(make: Callable[[], Job], share: float) -> Script:
    """Steps go by their plan, op for op and byte for byte: which that is."""
    expected = run(make, STEPS)
    budget = int(share * max(expected.peaks))
    job = make()
    losses = []
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        for _ in range(STEPS):
            calls, counts = dynamic.replayer.calls, Counter(dynamic.room.counts)
            losses.append(job.step())
            calls = dynamic.replayer.calls - calls
            counts = dynamic.room.counts - counts
        [script] = planned_of(tide).following.scripts
        assert planned_of(tide).modes[-1] is Mode.PLANNED
    assert find_difference(bits_of(losses), expected.result[:STEPS]) is None
    remakes = script.plan.remakes
    assert sum(isinstance(one, Rerun) for one in remakes) == calls > 5
    assert 0 < counts["dropped"] <= sum(isinstance(one, Drop) for one in remakes)
    assert not counts["swapped"] and not counts["remade"]  # nothing goes or comes unplanned
    assert dynamic.watching.peaks[-1] <= script.plan.peak_bytes * (1 + ROUNDING)
    return script


@pytest.mark.parametrize("share", [0.65, 0.5])
@pytest.mark.parametrize("make", [stream, gpt])
def test_steps_run_again_what_is_planned_within_what_is_planned(
    make: Callable[[], Job], share: float
) -> None:
    check(make, share)


def test_what_is_gone_before_another_is_saved_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "tide", hold_all)
    script = check(stream, 0.75)
    held = [one.value for one in script.plan.remakes if isinstance(one, Hold)]
    packed = {
        value: min(save.packed for save in script.trace.values[value].saves)
        for value in script.observed.saves
    }
    gone = [
        value
        for value in held
        for op in script.trace.ops
        if value in op.reads
        and any(packed.get(made, 0) >= script.trace.values[value].end for made in op.writes)
    ]
    assert gone


def trained(make: Callable[[], Job], share: float) -> tuple[lowtide.Tide, list[int]]:
    """Bit for bit as plainly: how that was, and what was held after each step."""
    expected = run(make, STEPS)
    job = make()
    losses, held = [], []
    budget = int(share * max(expected.peaks))
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in range(STEPS):
            losses.append(job.step())
            held.append(planned_of(tide).room._ledger.held)
    assert find_difference(bits_of(losses), expected.result[:STEPS]) is None
    return tide, held


def test_a_source_that_was_written_to_is_not_asked_for() -> None:
    """That brings back what was dropped, so it is there when its turn comes to be made again."""

    def shifted() -> Job:
        torch.manual_seed(0)
        shifts = nn.ParameterList(torch.randn(64) for _ in range(32))
        optimizer = torch.optim.SGD(shifts.parameters(), lr=0.1)
        steps = count()

        def step() -> torch.Tensor:
            x = torch.randn(512, 64)
            for shift in shifts:
                x = torch.tanh(x + shift)
            loss = x.square().mean()
            del x
            if next(steps) == STEPS - 3:
                with torch.no_grad():
                    for shift in shifts:
                        shift.add_(0.01)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Job(shifts, [optimizer], step)

    tide, _ = trained(shifted, 0.3)
    assert set(list(planned_of(tide).modes)[2:]) == {Mode.PLANNED}


def test_what_is_held_in_closures_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "tide", hold_all)

    def closing() -> Job:
        torch.manual_seed(0)
        models = [Gates(), Gates()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

        def step() -> torch.Tensor:
            for model, optimizer in zip(models, optimizers, strict=True):

                def loss_of(model: nn.Module = model, to: Optimizer = optimizer) -> torch.Tensor:
                    to.zero_grad()
                    x = torch.randn(512, 192)
                    if model is models[1]:
                        x = 2 * (x + 1)  # else no two ops would have one number
                    loss: torch.Tensor = model(x)
                    loss.backward()
                    return loss.detach()

                loss = optimizer.step(loss_of)
            return torch.as_tensor(loss)

        return Job(nn.ModuleList(models), [*optimizers[1:]], step)

    tide, held = trained(closing, 0.8)
    [script] = planned_of(tide).following.scripts
    assert script.holds
    assert held[-1] <= held[1] + 64 * STEPS, held


def test_what_was_kept_to_be_read_goes_when_the_last_has_read_it() -> None:
    weight = nn.Parameter(torch.randn(64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    x = torch.randn(512, 64)
    with lowtide.fit(None, optimizer, budget="1GiB", policy="tide") as tide:
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        room = dynamic.room
        source = x + weight
        late = torch.exp(source)
        [dropped_late] = room.cells
        sums = [late.sum()]
        del late
        room.drop(dropped_late)
        sine = torch.sin(source)
        kept = room.cells[-1]
        early = torch.sigmoid(source)
        dropped_early = room.cells[-1]
        sums.append(early.sum())
        del early, source
        room.drop(dropped_early)
        del sine
        assert (dropped_early.state, dropped_late.state) == (State.DROPPED, State.DROPPED)
        assert kept.state is State.HERE and not kept.handles
        calls = [cell.value.call for cell in (dropped_early, dropped_late) if cell.value]
        dynamic.replayer.follow([call for call in calls if call is not None])
        assert (dropped_early.state, dropped_late.state) == (State.HERE, State.HERE)
        assert not kept.wanted()
        sum(sums, torch.zeros(())).backward()


def test_what_cannot_be_made_any_more_is_known_before_anything_runs() -> None:
    """However far back it is."""
    weight, given = nn.Parameter(torch.randn(64)), torch.randn(512, 64)
    with lowtide.fit(None, torch.optim.SGD([weight], lr=0.1), budget="1GiB") as tide:
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        result = torch.exp(2 * (given + weight))
        [cell] = dynamic.room.cells
        assert cell.value is not None and cell.value.call is not None
        call = cell.value.call
        total = result.sum()
        del result
        dynamic.room.drop(cell)
        assert cell.state is State.DROPPED
        del given
        doubled = call.sources[0].value.call
        assert doubled is not None
        added = doubled.sources[0].value.call
        assert added is not None
        added.sources[0].value.held = None  # against all that holds it
        before = dynamic.replayer.calls
        with pytest.raises(Gone):
            dynamic.replayer.follow([call])
        assert dynamic.replayer.calls == before
        del total


def test_ops_that_nobody_writes_down_are_not_planned_to_run_again() -> None:
    """Those without a gradient."""

    def mixed() -> Job:
        torch.manual_seed(0)
        shifts = nn.ParameterList(torch.randn(64) for _ in range(16))

        def loss_of() -> torch.Tensor:
            x = torch.randn(512, 64)
            z = x
            for i, shift in enumerate(shifts):
                with torch.no_grad():
                    wave = torch.sin(x * (i + 1))
                z = torch.exp(-torch.tanh(wave + shift + 0.1 * z))
                del wave
            return z.square().mean()

        return job_of(shifts, loss_of)

    tide, _ = trained(mixed, 0.8)
    [script] = planned_of(tide).following.scripts
    ground = Ground(script.trace, runtime_of(script.observed))
    makers = [op for op, can in zip(ground.maker, ground.can, strict=True) if can]
    assert len(makers) > 16 and all(script.trace.ops[op].grad for op in makers)
    assert not planned_of(tide).room.counts["not dropped"]


@pytest.mark.parametrize("policy", ["tide", "delta"])
def test_what_was_put_behind_nothing_can_be_made_again(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As keys and values are behind an empty cache, gone by the time they are dropped."""
    slow = Link((1, 1 << 30), (1.0, 1e3))
    machine = Machine("slow", 1 << 40, 1 << 40, slow, slow)
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: machine)

    def train(budget: float | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.randn(2048, 64)
        around = lowtide.fit(model, optimizer, budget=budget or 0.5, policy=policy)
        with around if budget else nullcontext():
            for _ in range(6):
                x = rows
                for layer in model:
                    x = torch.cat([torch.tensor([]), layer(x)]).square().cos()
                x.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    replayed: list[Any] = []
    again = Replayer._again

    def noted(replayer: Replayer, call: Call, tensors: Any) -> Any:
        replayed.append(call.func)
        return again(replayer, call, tensors)

    monkeypatch.setattr(Replayer, "_again", noted)
    ours = train(0.5)
    expected = train(None)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert torch.ops.aten.cat.default in replayed
