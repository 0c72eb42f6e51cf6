"""For tests of swapping: a plan that moves all that can move, and a small net to train."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide._analyze.load import find_peak
from lowtide._ir import Machine, Plan, Trace
from lowtide._machine.link import line
from lowtide._policy.candidates import candidates, make_grid
from lowtide._policy.schedule import make_stage, schedule
from lowtide._runtime.fit import Tide
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.modes import Mode
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.simulate import simulate


def everything(trace: Trace, machine: Machine, **asked: Any) -> Plan:
    """A plan that moves all that can move, as early and for as long as can be."""
    found = candidates(
        trace,
        smallest=asked["smallest"],
        reach=asked["reach"],
        held=asked["held"],
        movable=asked["movable"],
    )
    found = make_grid(trace, asked["positions"]).fit(found)
    planned = tuple(schedule(make_stage(trace, asked["positions"]), machine, found, 1))
    assert find_bad_swap(trace, planned) is None
    outcome = simulate(trace, machine, planned)
    plain = find_peak(trace).bytes
    return Plan(planned, outcome.peak_bytes, outcome.seconds, plain, outcome.plain_seconds)


class Net(nn.Module):
    """A few layers that save something each."""

    def __init__(self, width: int = 64, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x


def make(kind: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(net.parameters(), lr=0.01),
        "fused": lambda: torch.optim.AdamW(net.parameters(), lr=0.01, fused=True),
        "foreach": lambda: torch.optim.Adam(net.parameters(), foreach=True, amsgrad=True),
        "momentum": lambda: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "groups": lambda: torch.optim.AdamW(
            [
                {"params": [*net.layers[:2].parameters()], "lr": 0.1},
                {"params": [*net.layers[2:].parameters()], "weight_decay": 0.5},
            ],
            lr=0.01,
        ),
    }
    return net, makers[kind]()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, batch: int = 32) -> None:
    for _ in range(steps):
        loss = net(torch.randn(batch, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def modes(tide: Tide) -> list[Mode]:
    assert tide._budgeted is not None
    return list(tide._budgeted._driver.modes)


def swaps(tide: Tide) -> int:
    assert tide._budgeted is not None
    return sum(len(script.plan.swaps) for script in tide._budgeted._driver.following.scripts)


def states_away(tide: Tide) -> list[Any]:
    assert tide._budgeted is not None
    return [s for s in tide._budgeted._driver.optimizers.cells if s.state is State.AWAY]


def same_machine() -> Machine:
    """On which copies take the same on every run."""
    link = line(1e-6, 1e9)
    return Machine("test", 1 << 40, 1 << 40, link, link)
