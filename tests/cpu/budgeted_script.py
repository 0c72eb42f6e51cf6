"""Trains a GPT or a conv net and prints a digest of its weights; run as a process of its own.

budgeted_script.py gpt|conv STEPS plain|BUDGET FOLDER [forever]
"""

import hashlib
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lowtide


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), 0.1)


def gpt() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block(64) for _ in range(6))), torch.randn(48, 128, 64)


def conv() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for i in range(12):
        layers += [
            nn.Conv2d(3 if i == 0 else 12, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers), torch.randn(8, 3, 96, 96)


def main() -> None:
    kind, steps, budget, folder = sys.argv[1:5]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = gpt() if kind == "gpt" else conv()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if budget == "peak":
        trace = lowtide.trace(step)
        from lowtide._analyze.load import find_peak

        print(find_peak(trace).bytes)
        return
    torch.manual_seed(1)
    if budget == "plain":
        for _ in range(int(steps)):
            step()
    else:
        with lowtide.fit(
            model, optimizer, policy="autoswap", budget=int(budget), folder=folder
        ) as tide:
            for i in range(int(steps)):
                step()
                print("step", i, flush=True)
            assert "planned" in tide.summary(), tide.summary()
    content = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
    print(hashlib.sha256(content).hexdigest(), list(Path(folder).iterdir()))


signal.signal(signal.SIGINT, signal.default_int_handler)  # it may run where that is ignored
main()
