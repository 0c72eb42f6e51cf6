"""Weights and gradients between a GPU and pinned memory: streams, bits, what is reserved."""

import gc
from collections.abc import Iterator

import pytest
import torch
from nets import MIB, hold_open
from torch import nn

import lowtide
from lowtide._runtime import budget as budgeting
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.guests import GuestCell
from lowtide._runtime.swap.pinned_tier import PinnedTier

WIDTH, DEPTH = 2048, 16  # a budget of 256 MiB and more is held by PyTorch's allocator, too


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeting, "_SMALLEST", 1 << 16)
    monkeypatch.setattr(budgeting, "_PIECE", 16 << 20)


@pytest.fixture
def tier() -> Iterator[PinnedTier]:
    found = PinnedTier(torch.device("cuda", torch.cuda.current_device()), 256 * MIB)
    yield found
    found.close()


def heavy() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights, gradients and Adam's state take nearly all."""
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        loss = model(torch.randn(256, WIDTH, device="cuda")).square().mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-1e-3, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("late", ["nothing", "out", "back", "compute", "all"])
def test_one_may_be_read_and_written_at_any_time(
    late: str, tier: PinnedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream held up in turn: a wait that is missing would show."""
    hold_open(late, monkeypatch)
    weight = nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    cell = GuestCell(weight, tier, 0, 0, is_gradient=False)
    total = 0.0
    for state in (State.LEAVING, State.AWAY, State.COMING):
        assert cell.leave()
        if state is not State.LEAVING:
            assert cell.release()
        if state is State.COMING:
            assert cell.fetch()
        assert cell.state is state and weight.is_cuda
        assert cell.written_to(weight.untyped_storage())
        weight.data.add_(1)
        total += 1
        assert torch.equal(weight, torch.full_like(weight, total))
        cell.have()
        assert torch.equal(weight, torch.full_like(weight, total))
    cell.drop()


@pytest.mark.parametrize("policy", ["tide", "delta"])
@pytest.mark.parametrize("late", ["nothing", "all"])
def test_they_leave_where_state_is_not_enough(
    late: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and gradients alone take half of the plain peak."""
    model, optimizer = heavy()
    plain = losses(model, optimizer, 12)
    weights = [p.detach().cpu() for p in model.parameters()]
    del model, optimizer
    gc.collect()
    stays = torch.cuda.memory_allocated()
    model, optimizer = heavy()
    held = torch.cuda.memory_allocated() - stays
    budget = stays + int(4 * 0.47 * held)
    hold_open(late, monkeypatch)
    with lowtide.fit(model, optimizer, budget=f"{budget}B", policy=policy) as tide:
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        torch.cuda.reset_peak_memory_stats()
        found = losses(model, optimizer, 12)
        assert torch.cuda.max_memory_reserved() <= budget
        assert tide._budgeted._dynamic.idle.optimizers._guests_move
    assert found == plain
    for ours, theirs in zip(model.parameters(), weights, strict=True):
        assert ours.is_cuda and torch.equal(ours.detach().cpu(), theirs)
