"""Kernels that run several ops again as one, on a GPU."""

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide._runtime.fused.groups import Fuser, make_fuser
from lowtide._runtime.fused.kernel import make_kernel
from lowtide._runtime.fused.program import Input, Made, Program, Read, Step

CUDA = torch.device("cuda")
F32, BF16 = torch.float32, torch.bfloat16


def test_every_op_makes_what_pytorch_makes() -> None:
    fuser = make_fuser(CUDA, "first", pytest.fail)
    assert fuser is not None and fuser.works()


@pytest.mark.parametrize("count", [1 << 20, (1 << 20) + 5])
def test_what_is_read_by_strides(count: int) -> None:
    # A row's factor and a column's, as norms have them: [rows, 96] times [96] times [rows, 1].
    rows = count // 96
    program = Program(
        rows * 96,
        (Input(BF16, ()), Input(F32, ((96, 1),)), Input(F32, ((96, 0), (rows, 1)))),
        (
            Step("_to_copy", (Read(0),), F32),
            Step("mul", (Made(0), Read(2)), F32),
            Step("_to_copy", (Made(1),), BF16),
            Step("mul", (Read(1), Made(2)), F32),
        ),
        (1, 3),
    )
    x = torch.randn(rows, 96, device=CUDA).bfloat16()
    weight, scale = torch.randn(96, device=CUDA), torch.rand(rows, 1, device=CUDA)
    kernel = make_kernel(program, CUDA)
    assert kernel is not None
    made = [torch.full((program.count,), torch.nan, device=CUDA) for _ in range(2)]
    kernel([x, weight, scale], made, 0, program.count)
    inner = x.float() * scale
    assert torch.equal(made[0].view(rows, 96), inner)
    assert torch.equal(made[1].view(rows, 96), weight * inner.bfloat16())


class Gelu(nn.Module):
    """As Hugging Face writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


def trained(budget: float | None) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    with CUDA:
        parts = [part for _ in range(8) for part in (nn.Linear(512, 512), Gelu())]
        model = nn.Sequential(*parts)
        rows = torch.randn(1 << 14, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    fuser: Fuser | None = None

    def step() -> None:
        with torch.autocast("cuda", BF16):
            loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if budget is None:
        for _ in range(8):
            step()
    else:
        with lowtide.fit(model, optimizer, budget=budget) as tide:
            for _ in range(8):
                step()
            budgeted: Any = tide._budgeted
            fuser = budgeted._dynamic.replayer.fuser
    return [p.detach() for p in model.parameters()], fuser


def test_training_is_the_same_bit_for_bit() -> None:
    plain, _ = trained(None)
    ours, fuser = trained(0.6)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert fuser is not None
    assert fuser.right
    assert not fuser.wrong
