"""Memory that cuBLAS takes for itself, made when it suits."""

from contextlib import suppress

import torch
from torch import nn


def make_workspaces(device: int) -> None:
    """Let cuBLAS make its workspaces now, in forward's thread and in backward's.

    Hooks on saved tensors, lowtide's own among them, are not told.
    """
    untold = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    without_autocast = torch.autocast("cuda", enabled=False)
    with torch.cuda.device(device), torch.enable_grad(), without_autocast, untold:
        for dtype in (torch.float32, torch.bfloat16):
            with suppress(
                RuntimeError
            ):  # deterministic algorithms may forbid it, or memory be short
                x = torch.ones(16, 16, device="cuda", dtype=dtype, requires_grad=True)
                nn.functional.linear(x, x, x[0]).sum().backward()
