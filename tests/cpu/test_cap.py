"""The budget as the device's allocator holds it, without a device."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from lowtide._runtime.delta.cap import Cap


@dataclass
class Giver:
    """Of memory in pages."""

    can: bool = True
    free: int = 100  # pages of 10 bytes
    cached: int = 0  # ... that come free when the cache is given back
    asked: list[int] = field(default_factory=list)
    guards: int = 0  # bytes that a step may hold
    most: Callable[[], int | None] | None = None

    def use_pages(self, device: int, most: Callable[[], int | None] | None = None) -> bool:
        self.asked.append(device)
        self.most = most
        return self.can

    def free_pages(self, device: int) -> int:
        return self.free

    def pages_of(self, count: int) -> int:
        return -(-count // 10) + 1

    def guard(self, device: int, most: int, sound: Callable[[], bool] | None) -> bool:
        self.guards = most
        return True

    def guarded(self) -> int:
        return 7

    def flush(self) -> None:
        self.free, self.cached = self.free + self.cached, 0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Cap:
    """As if the allocator were held to a budget."""
    cap = Cap(torch.device("cpu"))
    monkeypatch.setattr(cap, "_before", 1.0)
    return cap


def test_memory_goes_in_pages_only_where_a_budget_is_held() -> None:
    giver = Giver()
    assert not Cap(torch.device("cpu")).use_pages(giver)
    assert not giver.asked


def test_pages_are_asked_for_once_if_they_can_be_had(held: Cap) -> None:
    giver = Giver(can=False)
    assert not held.use_pages(giver) and not held.paged
    giver.can = True
    assert held.use_pages(giver) and held.use_pages(giver) and held.paged
    assert giver.asked == [0, 0]


def test_what_pages_could_give_is_known_without_trying(
    held: Cap, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver = Giver()
    monkeypatch.setattr(torch.cuda, "empty_cache", giver.flush)
    held.use_pages(giver)
    assert held.could_give(490, 490)  # and a page each for where they begin and end
    assert not held.could_give(490, 491)
    giver.cached = 1
    assert held.could_give(490, 491)
    held.clear(1 << 40)  # there is nothing to give back


def test_what_holds_the_budget_may_come_and_go_and_pages_stay(
    held: Cap, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.use_pages(Giver())
    monkeypatch.setattr(held, "_before", None)
    assert held.paged
    held.use_pages(None)  # they are gone
    assert not held.paged


def test_pages_stay_within_the_budget_where_nothing_else_holds_it(held: Cap) -> None:
    giver = Giver()
    held.put(1 << 30)
    held.use_pages(giver)
    assert giver.most is not None and giver.most() == 1 << 30
    held.put(1 << 31)
    assert giver.most() == 1 << 31


def test_in_pages_a_plan_may_use_nearly_all(held: Cap) -> None:
    assert held.left_to_plans(1000 << 20, 100 << 20) == (891 << 20, 990 << 20)
    held.use_pages(Giver())
    most = 980 << 20  # PyTorch's own allocator may take the rest at once
    assert held.left_to_plans(1000 << 20, 100 << 20) == (int(0.99 * most), None)


def test_a_guard_is_had_only_with_pages(held: Cap) -> None:
    giver = Giver()
    assert not held.guard(70, bool) and not held.guarded()
    held.use_pages(giver)
    assert held.guard(70, bool) and giver.guards == 70 and held.guarded() == 7
    held.count_steps(80)
    assert giver.guards == 80
    held.dismiss_guard()
    assert not giver.guards
