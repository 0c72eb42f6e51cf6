"""Element-wise ops of backward that run as one, on a GPU: the same bits, on any stream."""

import math

import pytest
import torch
from torch import nn
from waits import waiting

import lowtide
from lowtide._runtime.fused.kernels import Kernels
from lowtide._runtime.fused.program import GRADIENTS

CUDA = torch.device("cuda")
ROUNDS = 4


def test_every_gradient_makes_what_pytorch_makes() -> None:
    found = Kernels(CUDA, verify=True, tell=pytest.fail)
    wrong = [
        (op, dtype)
        for op in GRADIENTS
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not found.can(op, dtype)
    ]
    assert not wrong


def gelu(x: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def backward(rows: torch.Tensor, stream: torch.cuda.Stream | None = None) -> list[torch.Tensor]:
    """Gradients of two layers; between their kernels the GPU is kept waiting."""
    first = torch.randn(512, 2048, device=CUDA, generator=drawn(1)).requires_grad_()
    last = torch.randn(2048, 512, device=CUDA, generator=drawn(2)).requires_grad_()
    hidden: list[torch.Tensor] = []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16):
        torch.cuda._sleep(20_000_000)
        inner = rows @ first
        made = gelu(inner) * torch.sigmoid(inner) + nn.functional.silu(inner)
        hidden.append(made)
        loss = (made @ last).float().square().mean()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        loss.backward()
    torch.cuda.synchronize()
    assert first.grad is not None and last.grad is not None
    return [first.grad, last.grad]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator(CUDA).manual_seed(seed)


@pytest.mark.parametrize("side", [False, True])
def test_bits_are_the_same_on_any_stream(side: bool) -> None:
    rows = torch.randn(4096, 512, device=CUDA, generator=drawn(0))
    stream = torch.cuda.Stream() if side else None
    expected = backward(rows, stream)
    with waiting(CUDA) as chains:
        for _ in range(ROUNDS):
            chains.take_counts()
            found = backward(rows, stream)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        joined, run = chains.take_counts()
    assert joined > 15 and run >= 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.wide, self.narrow = nn.Linear(512, 2048), nn.Linear(2048, 512)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.dropout(self.narrow(gelu(self.wide(self.norm(x)))))
        return made


def trained(budget: float | None) -> tuple[list[float], tuple[int, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, counts = [], (0, 0)

    def step() -> None:
        rows = torch.randn(8192, 512, device=CUDA)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if budget is None:
        for _ in range(16):
            step()
        return losses, counts
    with lowtide.fit(model, optimizer, budget=budget) as tide:
        for _ in range(16):
            step()
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        chains = tide._budgeted._dynamic.seer.chains
        assert chains is not None
        counts = chains.take_counts()
    return losses, counts


def test_training_is_the_same_bit_for_bit() -> None:
    plain, _ = trained(None)
    ours, (joined, run) = trained(0.6)
    assert ours == plain
    assert joined > 4 * run > 0
