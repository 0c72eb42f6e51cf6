"""A small net to train in the pool."""

import torch
from torch import nn
from torch.nn import functional as F

MIB = 1 << 20


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
