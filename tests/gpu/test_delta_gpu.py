"""The driver that needs no plan, on a GPU: bits, streams, and what the device really reserves."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import JOBS, Build
from nets import MIB, hold_open, make, train
from tight import Bits, find_difference, fitted, state_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide._runtime import budget as budgeting
from lowtide._runtime.delta import cap
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.planned import Planned

STEPS = 4


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def trained(build: Build, budget: int | None, **how: Any) -> tuple[list[Bits], list[int]]:
    """Every bit that comes out, and each step's peak of allocated bytes."""
    gc.collect()
    losses, peaks = [], []
    with torch.device("cuda"):
        job = build()
        with fitted(job, budget, **how):
            for _ in range(STEPS):
                torch.cuda.reset_peak_memory_stats()
                losses.append(job.step())
                peaks.append(torch.cuda.max_memory_allocated())
    found = [
        Bits(t.dtype, t.shape, t.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        for t in [*losses, *state_of(job), torch.cuda.get_rng_state()]
    ]
    return found, peaks


@pytest.mark.parametrize(
    ("name", "share"),  # what one cuDNN call of the RNN takes is most of its peak
    [(name, share) for name in JOBS for share in ((0.95,) if name == "rnn" else (0.7, 0.5))],
)
@pytest.mark.parametrize("policy", ["delta", "tide"])
def test_jobs_train_bit_for_bit_within_the_budget(name: str, share: float, policy: str) -> None:
    trained(JOBS[name], None)  # libraries take their workspaces
    gc.collect()
    stays = torch.cuda.memory_allocated()
    plain, peaks = trained(JOBS[name], None)
    again, _ = trained(JOBS[name], None)
    budget = stays + int(share * (max(peaks) - stays))
    ours, held = trained(JOBS[name], budget, policy=policy)
    if find_difference(plain, again) is None:
        assert find_difference(plain, ours) is None
    # What a kernel takes inside is known when it has run once.
    assert max(held) <= budget * 1.01 + 2 * MIB, (held, budget)


Trained = tuple[nn.Module, torch.optim.Optimizer]


def wide(trained: Trained) -> list[float]:
    torch.manual_seed(1)
    return [train(*trained, batch=16384).item() for _ in range(6)]


def plain_and_budget(share: float) -> tuple[list[float], int]:
    """Losses, and what other tests have left besides a share of what training takes."""
    gc.collect()
    stays = torch.cuda.memory_allocated()
    trained = make()
    torch.cuda.reset_peak_memory_stats()
    losses = wide(trained)
    return losses, stays + int(share * (torch.cuda.max_memory_allocated() - stays))


@pytest.mark.parametrize("policy", ["tide", "delta", "dtr", "delta-as-published"])
def test_no_step_reserves_more_than_the_budget(policy: str) -> None:
    """The first included; and PyTorch's allocator is as it was, afterwards."""
    plain, budget = plain_and_budget(0.5)
    settings = cap._settings()
    trained = make()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with lowtide.fit(*trained, budget=budget, policy=policy) as tide:
        assert wide(trained) == plain, tide.summary()
        assert torch.cuda.max_memory_reserved() <= budget, tide.summary()
    assert torch.cuda.get_per_process_memory_fraction() == 1
    assert cap._settings() in (settings, "expandable_segments:False")


def test_steps_go_by_the_plan() -> None:
    plain, budget = plain_and_budget(0.5)
    trained = make()
    with lowtide.fit(*trained, budget=budget, policy="tide") as tide:
        assert wide(trained) == plain, tide.summary()
        planned = planned_of(tide)
        assert list(planned.modes)[2:] == [Mode.PLANNED] * 4, tide.summary()
        script = planned.main_script()
        assert script is not None
        torch.cuda.reset_peak_memory_stats()
        train(*trained, batch=16384)
        held = torch.cuda.max_memory_allocated()  # lowtide does not count what is held within ops
        assert held == pytest.approx(script.plan.peak_bytes, rel=0.02), tide.summary()


def losses(trained: Trained) -> list[float]:
    torch.manual_seed(1)
    return [train(*trained, 64, 2048).item() for _ in range(12)]


def plain_with_state(times: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], int]:
    """Losses of a net of which Adam's state takes most, and so many times its weights' bytes."""
    monkeypatch.setattr(budgeting, "_PIECE", 32 * MIB)
    trained = make(2048)
    return losses(trained), int(times * sum(p.nbytes for p in trained[0].parameters()))


def afresh() -> Trained:
    trained: Trained = make(2048)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return trained


def test_optimizer_state_goes_when_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients alone take two thirds of the budget."""
    plain, budget = plain_with_state(3, monkeypatch)
    trained = afresh()
    with lowtide.fit(*trained, budget=budget, policy="delta") as tide:
        assert losses(trained) == plain, tide.summary()
        assert torch.cuda.max_memory_reserved() <= budget, tide.summary()
        assert tide._budgeted is not None
        assert tide._budgeted._dynamic is not None
        assert tide._budgeted._dynamic.idle._leaves
    assert losses(trained)  # all of it is there again


@pytest.mark.parametrize("late", [None, "out", "back", "compute", "all"])
def test_optimizer_state_comes_and_goes_by_plan(
    late: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with each stream held up in turn."""
    plain, budget = plain_with_state(3, monkeypatch)
    if late is not None:
        hold_open(late, monkeypatch)
    trained = afresh()
    with lowtide.fit(*trained, budget=budget, policy="tide") as tide:
        assert losses(trained) == plain, tide.summary()
        assert torch.cuda.max_memory_reserved() <= budget, tide.summary()
        script = planned_of(tide).main_script()
        assert script is not None
        assert planned_of(tide).modes[-1] is Mode.PLANNED, tide.summary()
        states = script.observed.states
        assert any(swap.value in states for swap in script.plan.swaps), tide.summary()
    assert losses(trained)  # all of it is there again


def planned_of(tide: lowtide.Tide) -> Planned:
    assert tide._budgeted is not None
    assert tide._budgeted._dynamic is not None
    assert tide._budgeted._dynamic.planned is not None
    return tide._budgeted._dynamic.planned


def test_ops_that_a_plan_does_not_need_stay_out_of_python() -> None:
    trained = make()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    plain = [train(*trained, batch=16384).item() for _ in range(12)]
    budget = int(0.5 * torch.cuda.max_memory_allocated())
    trained = make()
    torch.manual_seed(1)
    with lowtide.fit(*trained, budget=budget, policy="tide", pool=False) as tide:
        assert [train(*trained, batch=16384).item() for _ in range(12)] == plain, tide.summary()
        assert tide._budgeted is not None
        assert tide._budgeted._dynamic is not None
        gate = tide._budgeted._dynamic.seer._gate
        assert gate is not None
        assert gate.is_open
        assert gate.passed() > 0


SCRIPT = """
import torch
from torch import nn

assert not torch.cuda.is_initialized()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(24))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    loss = model(torch.randn(32768, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), torch.cuda.max_memory_reserved())
"""


def test_a_script_runs_within_its_budget_from_the_first_step_on(tmp_path: Path) -> None:
    """It is entered before the script uses CUDA, and takes nothing of it by that."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*command: str) -> tuple[str, int, str]:
        done = subprocess.run(
            [sys.executable, *command, str(script)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        loss, reserved = done.stdout.split()
        return loss, int(reserved), done.stderr

    plain, reserved, _ = run()
    loss, ours, said = run("-m", "lowtide", "run", "--budget", str(reserved // 2))
    assert (loss, ours <= reserved // 2) == (plain, True), said
    assert "budget: tide, 8 steps: 1 dynamic, 1 traced, 6 planned" in said


@pytest.mark.parametrize("late", ["out", "back", "compute", "all"])
def test_windows_held_open_change_no_bit(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream held up in turn, with all that goes swapped."""
    plain, budget = plain_and_budget(0.6)
    monkeypatch.setattr("lowtide._runtime.delta.room.drops", lambda *_: False)
    hold_open(late, monkeypatch)
    trained = make()
    with lowtide.fit(*trained, budget=budget, policy="delta") as tide:
        assert wide(trained) == plain
        assert tide._budgeted is not None
        assert tide._budgeted._dynamic is not None
        assert tide._budgeted._dynamic.room.counts["swapped"] > 0


def test_convolutions_get_the_memory_they_ask_for() -> None:
    """With less, cuDNN computes in another way, and other last bits."""
    models = pytest.importorskip("torchvision").models

    def trained(budget: int | None) -> tuple[list[float], str]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = models.resnet50()
            images, labels = torch.randn(64, 3, 224, 224), torch.randint(1000, (64,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        with (
            nullcontext()
            if budget is None
            else lowtide.fit(model, optimizer, budget=budget, policy="delta") as tide
        ):
            for _ in range(5):
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses, tide.summary() if tide is not None else ""

    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    plain, _ = trained(None)
    peak = torch.cuda.max_memory_allocated()
    again, _ = trained(None)
    ours, said = trained(int(0.6 * peak))
    assert "less memory inside" not in said, said
    assert plain != again or ours == plain, said


def test_an_op_that_ran_with_less_than_it_asked_for_is_told() -> None:
    """Convolutions make do with less memory, and say nothing."""
    cap._watch_failures()
    before = cap._failures
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert cap._failures == before + 1
