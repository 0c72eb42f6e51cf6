"""How high a planned step lies, and plans that lie low enough."""

import pytest

from lowtide._ir import OpIndex, Plan, Swap, ValueId
from lowtide._layout.from_plan import Height, height_of
from lowtide._policy.autoswap import CannotFit
from lowtide._runtime.swap.lying import plan_with_layout
from lowtide._trace.text import parse

# b is idle while c is there.
STEP = parse(
    "have w:512 | parameter\n"
    "zero w -> a:512\nfree a\none w -> b:2048\ntwo w -> c:2048\nthree c -> d:512\nfree c\n"
    "four b d -> e:512\nfree b\nfree d\nfree e\n"
)
SWAP = Swap(ValueId(2), OpIndex(1), OpIndex(2), OpIndex(4), OpIndex(4))


def test_what_stays_is_not_part_of_the_pool() -> None:
    found = height_of(STEP, (), enough=0, seconds=0.2)
    assert found == Height(512, 4608, 4608)
    assert found.bytes == 5120


def test_what_is_swapped_takes_no_room_while_it_is_away() -> None:
    assert height_of(STEP, (SWAP,), enough=0, seconds=0.2) == Height(512, 3072, 3072)


class Planner:
    """Plans as they are asked for: with so much between the blocks of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, between: float, least: int = 0) -> None:
        self.limits: list[int] = []
        self._between, self._least = between, least
        monkeypatch.setattr("lowtide._runtime.swap.lying.height_of", self.height)

    def __call__(self, *, limit: int) -> Plan:
        if limit < self._least:
            raise CannotFit("no", self._least, OpIndex(0))
        self.limits.append(limit)
        return Plan((SWAP,), limit, 1.0, 9999, 1.0)

    def height(self, *_: object, enough: int, seconds: float) -> Height:
        assert seconds > 0 and enough == 1000
        load = self.limits[-1] - 200
        return Height(200, int(self._between * load), load)


def test_a_plan_that_lies_low_enough_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(monkeypatch, 1.0)
    assert plan_with_layout(STEP, planner, 990, 1000).peak_bytes == 990
    assert planner.limits == [990]


def test_one_that_does_not_is_made_again_for_as_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for all of it: the pool may find a better layout."""
    planner = Planner(monkeypatch, 1.25)
    assert plan_with_layout(STEP, planner, 990, 1000).peak_bytes < 880
    assert len(planner.limits) == 3 and 840 < planner.limits[1] < 900


def test_what_cannot_be_planned_for_less_is_planned_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(monkeypatch, 1.25, least=900)
    assert plan_with_layout(STEP, planner, 990, 1000).peak_bytes == 990


def test_a_step_in_which_nothing_moves_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Planner(monkeypatch, 1.25)
    plan = Plan((), 990, 1.0, 990, 1.0)
    assert plan_with_layout(STEP, lambda **_: plan, 990, 1000) is plan
