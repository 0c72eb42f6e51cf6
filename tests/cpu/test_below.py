"""The tier below is as large as planned steps need it to be, and no larger for long."""

from dataclasses import replace

import pytest
import torch
from moving import make, train

import lowtide
from lowtide._runtime.swap.below import Below
from lowtide._runtime.swap.file_tier import FileTier

pytestmark = pytest.mark.usefixtures("small", "moved")


class Slab(FileTier):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[int] = []
        self.trimmed: list[int] = []

    def prepare(self, count: int) -> None:
        self.prepared.append(count)

    def trim(self, count: int) -> None:
        self.trimmed.append(count)


def test_it_is_trimmed_once_steps_have_followed_a_new_plan() -> None:
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        train(net, optimizer, 6)
        assert tide._budgeted is not None
        (script,) = tide._budgeted._driver.following.scripts
    assert script.below_bytes > 0
    slab, below = Slab(), Below()
    below.prepare(slab, [script], script)
    larger = replace(script, below_bytes=2 * script.below_bytes, seconds=type(script.seconds)())
    below.prepare(below.tier, [script, larger], larger)
    assert slab.prepared == [script.below_bytes, larger.below_bytes]
    for _ in range(4):
        below.followed(script, [script, larger])  # it is not the new one's turn
        larger.seconds.append(1.0)
        below.followed(larger, [script, larger])
        assert slab.trimmed == [larger.below_bytes] * (len(larger.seconds) > 1)
    slab.close()


def test_steps_tell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(FileTier, "trim", lambda _, count: told.append(count))
    net, optimizer = make()
    torch.manual_seed(1)
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        train(net, optimizer, 10)
        assert tide._budgeted is not None
        driver = tide._budgeted._driver
        assert told == [driver.following.scripts[0].below_bytes]
