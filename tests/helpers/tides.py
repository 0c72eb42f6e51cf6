"""For tests by policy "tide": jobs, trained plainly and by plans."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from jobs import JOBS, heavy
from tight import Run, find_difference, run
from torch import nn

import lowtide
from lowtide._analyze.load import find_peak
from lowtide._ir import Machine, Plan, Trace
from lowtide._policy.ground import Ground
from lowtide._policy.remake import remake
from lowtide._policy.taste import Taste
from lowtide._runtime.delta.planned import Planned
from lowtide._simulate.remade import remade

STEPS = 6
TOLERANCE = 0.01  # of the budget: what an allocator rounds
BUILDS = JOBS | {"heavy": heavy, "at once": partial(heavy, foreach=True)}
BUILDS["tidy"] = partial(heavy, tidy=True)
CHANGING = ("tree", "mixture", "gan", "accumulation")  # their steps are not all alike


@cache
def plain(name: str, steps: int = STEPS) -> Run:
    return run(BUILDS[name], steps)


def planned_of(tide: lowtide.Tide) -> Planned:
    assert tide._budgeted is not None and tide._budgeted._dynamic is not None
    found = tide._budgeted._dynamic.planned
    assert found is not None
    return found


@contextmanager
def entered() -> Iterator[list[lowtide.Tide]]:
    """Those that are entered meanwhile."""
    made: list[lowtide.Tide] = []
    original = lowtide.Tide.__enter__

    def enter(tide: lowtide.Tide) -> lowtide.Tide:
        made.append(tide)
        return original(tide)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowtide.Tide, "__enter__", enter)
        yield made


def check(name: str, share: float, **how: Any) -> tuple[Planned, list[int]]:
    """Trained bit for bit, and every step, the first included, within the budget: their peaks."""
    budget = int(share * max(plain(name).peaks))
    with entered() as made:
        ours = run(BUILDS[name], STEPS, budget, policy="tide", **how)
    assert find_difference(ours.result, plain(name).result) is None
    assert max(ours.peaks) <= budget * (1 + TOLERANCE), (ours.peaks, budget)
    return planned_of(made[0]), ours.peaks


def hold_all(trace: Trace, _machine: Machine, **asked: Any) -> Plan:
    """Whatever the search would choose: all that can be held is, for what is made from it."""
    ground = Ground(trace, asked["runtime"])
    found = remake(ground, asked["limit"], Taste(), holds=frozenset(ground.holdable))
    assert found is not None
    seconds, remakes = found
    plain = ground.starts[-1]
    peak = find_peak(remade(trace, remakes).trace).bytes
    return Plan((), peak, plain + seconds, find_peak(trace).bytes, plain, remakes=tuple(remakes))


class Gates(nn.Module):
    """Of each layer tanh and sigmoid are saved, and not what both are made from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            both = layer(x)
            x = torch.tanh(both) * torch.sigmoid(both)
            del both
        return x.square().mean()
