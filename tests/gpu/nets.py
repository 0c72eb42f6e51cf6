"""A small net to train, and streams that are held up meanwhile."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide._runtime.swap import pinned_tier
from lowtide._runtime.swap.tier import Copy

MIB = 1 << 20
_LONG = 20_000_000  # cycles: longer than any copy here


class Net(nn.Module):
    def __init__(self, width: int = 1024, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout))
                if i % 2 == 0
                else nn.Linear(4 * width, width)
                for i in range(8)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def make(width: int = 1024) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(width).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 512, width: int = 1024
) -> torch.Tensor:
    x = torch.randn(batch, width, device="cuda")
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def hold_open(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every copy hold up the stream that copies "out" or "back", both, or what computes."""
    copy: Callable[..., Copy] = pinned_tier.PinnedTier._copy

    def slow(
        self: pinned_tier.PinnedTier, way: pinned_tier._Way, to: int, of: int, count: int
    ) -> Copy:
        if late in ("compute", "all"):
            torch.cuda._sleep(_LONG)
        name = "out" if way is self._out else "back"
        if late in (name, "copies", "all"):
            with torch.cuda.stream(way._stream):
                torch.cuda._sleep(_LONG)
        return copy(self, way, to, of, count)

    monkeypatch.setattr(pinned_tier.PinnedTier, "_copy", slow)
