"""What a plan runs again, in a live step: those ops, in that order, within what is planned."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from jobs import JOBS, Job, job_of
from moving import same_machine
from tides import hold_all, planned_of
from tight import bits_of, find_difference, run
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide._ir import Drop, Hold, Rerun
from lowtide._machine.link import line
from lowtide._runtime import budget as budgeting
from lowtide._runtime.delta.planned import Mode
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
    monkeypatch.setattr(budgeting, "_PLAN_SECONDS", 1.0)


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
    assert dynamic.peaks[-1] <= script.plan.peak_bytes * (1 + ROUNDING)
    return script


@pytest.mark.parametrize("share", [0.65, 0.5])
@pytest.mark.parametrize("make", [stream, gpt])
def test_steps_run_again_what_is_planned_within_what_is_planned(
    make: Callable[[], Job], share: float
) -> None:
    check(make, share)


def test_what_is_gone_before_another_is_saved_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeting, "tide", hold_all)
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
