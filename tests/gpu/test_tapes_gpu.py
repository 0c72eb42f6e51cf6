"""Steps by a tape on a GPU: kernels are launched, and random numbers drawn again, natively."""

import math

import pytest
import torch
from torch import nn

import lowtide
from lowtide._runtime.delta.driver import Dynamic

STEPS = 16


class Block(nn.Module):
    """An MLP with a GELU written out, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.wide, self.narrow = nn.Linear(512, 2048), nn.Linear(2048, 512)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.wide(self.norm(x))
        h = (
            0.5
            * h
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        )
        found: torch.Tensor = x + self.dropout(self.narrow(h))
        return found


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8))).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        rows = torch.randn(16384, 512, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def dynamic_of(tide: lowtide.Tide) -> Dynamic:
    assert tide._budgeted is not None
    assert tide._budgeted._dynamic is not None
    return tide._budgeted._dynamic


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_steps_by_a_tape_are_the_same(share: float) -> None:
    torch.cuda.reset_peak_memory_stats()
    plain = losses(*make(), STEPS)
    budget = int(share * torch.cuda.max_memory_allocated())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trained = make()
    with lowtide.fit(*trained, budget=budget, policy="tide") as tide:
        assert losses(*trained, STEPS) == plain, tide.summary()
        tapes = dynamic_of(tide).tapes
        assert tapes.steps >= 2, (tapes.why, tide.summary())
        assert tapes._put is not None
        assert any(one.kernel.function for one in tapes._put.kernels)
        assert torch.cuda.max_memory_reserved() <= budget, tide.summary()


@pytest.mark.parametrize("after", ["forward", "half of backward"])
def test_python_goes_on_where_a_tape_ends(after: str) -> None:
    plain = losses(*make(), STEPS + 2)
    torch.cuda.reset_peak_memory_stats()
    losses(*make(), 2)
    budget = int(0.6 * torch.cuda.max_memory_allocated())
    model, optimizer = make()
    found: list[lowtide.Tide] = []
    handed: list[str | None] = []

    def hand_over(*_: object) -> None:
        tapes = dynamic_of(found[0]).tapes if found else None
        if tapes is not None and tapes.on and tapes.steps:
            tapes.hand_over()
            assert not tapes.on
            handed.append(tapes.why)

    assert isinstance(model, nn.Sequential)
    if after == "forward":
        model.register_forward_hook(hand_over)
    else:
        model[4].register_full_backward_hook(hand_over)
    with lowtide.fit(model, optimizer, budget=budget, policy="tide") as tide:
        found.append(tide)
        assert losses(model, optimizer, STEPS + 2) == plain, tide.summary()
        assert handed[:1] == ["Python has asked for it"], dynamic_of(tide).tapes.why
