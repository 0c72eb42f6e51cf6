"""A budget for a script that has not made its model yet, on a machine with a GPU."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from jobs import JOBS
from tight import Bits, bits_of, find_difference, state_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from untouched import untouched

import lowtide
from lowtide._runtime import awaited
from lowtide._runtime import budget as budgeting


def test_the_first_module_on_a_gpu_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in main memory do not, and CUDA is not asked."""
    found: list[torch.device] = []
    with untouched():
        undo = ExitStack()
        waiting = awaited.Awaited(found.append, undo)
        nn.Linear(2, 2)(torch.ones(2))
        nn.ReLU()(torch.ones(2))
        assert not found
        there = nn.Linear(2, 2)
        monkeypatch.setattr(there, "parameters", lambda: iter([_OnGpu()]))
        there(torch.ones(2))
        there(torch.ones(2))
        waiting.is_on(torch.device("cpu"))
        assert found == [torch.device("cuda", 1)]
        undo.close()


class _OnGpu:
    device = torch.device("cuda", 1)


@pytest.mark.parametrize("policy", ["tide", "delta"])
def test_an_optimizer_says_so_too(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU that the script does not use."""

    def use(budget: int | None) -> list[Bits]:
        gc.collect()
        job = JOBS["mlp"]()
        losses = [job.step()]
        if budget is None:
            losses += [job.step() for _ in range(5)]
        else:
            with lowtide.fit(budget=budget, policy=policy) as tide:
                assert "no model" in tide.summary()
                losses.append(job.step())
                assert tide._budgeted is not None and tide._budgeted._dynamic is not None
                assert tide._budgeted._dynamic.ledger.device == torch.device("cpu")
                losses += [job.step() for _ in range(4)]
                assert f"budget: {policy}" in tide.summary()
        return bits_of([*losses, *state_of(job)])

    monkeypatch.setattr(budgeting, "device_in_use", lambda: None)
    with untouched():
        assert find_difference(use(64 << 20), use(None)) is None


@pytest.mark.parametrize("inside", [lambda: FlopCounterMode(display=False), torch.inference_mode])
def test_it_waits_until_it_can_last(
    inside: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pushed within a mode of the program's would be popped in its place."""
    monkeypatch.setattr(budgeting, "device_in_use", lambda: None)
    monkeypatch.setattr(awaited, "_GPU", "cpu")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    with untouched(), lowtide.fit(budget="64MiB", policy="delta") as tide:
        assert tide._budgeted is not None
        with inside():
            model(torch.randn(4, 64))
        assert tide._budgeted.waits()
        model(torch.randn(4, 64))
        assert not tide._budgeted.waits()
        assert tide._budgeted._dynamic is not None
        seen = tide._budgeted._dynamic.seer.ops
        with inside():
            model(torch.randn(4, 64))
        model(torch.randn(4, 64))
        assert tide._budgeted._dynamic.seer.ops > seen
