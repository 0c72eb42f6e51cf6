"""Steps that go by a plan hold what it says, to the last tensor."""

from types import SimpleNamespace
from typing import Any

import pytest
from tides import BUILDS, entered, plain, planned_of
from tight import find_difference, run

from lowtide._runtime.delta.feedback import Spent
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.planned import Planned

STEPS = 12  # in the last of them all is done natively
ODD = 1 << 15  # bytes: what is too small to be traced


@pytest.mark.usefixtures("plans_at_once", "unguarded")
@pytest.mark.parametrize(
    ("name", "share"), [("bert", 0.65), ("gpt", 0.5), ("resnet", 0.5), ("tidy", 0.55)]
)
def test_settled_steps_hold_what_is_planned(name: str, share: float) -> None:
    expected = plain(name, STEPS)
    with entered() as made:
        ours = run(BUILDS[name], STEPS, int(share * max(expected.peaks)), policy="tide")
    assert find_difference(ours.result, expected.result) is None
    script = planned_of(made[0]).main_script()
    assert script is not None and (script.plan.swaps or script.plan.remakes)
    over = [peak - script.plan.peak_bytes for peak in ours.peaks]
    assert max(over[5:]) <= ODD, over


@pytest.mark.parametrize("lets_go", [True, False])
def test_a_tape_lets_go_before_anything_comes_back_unless_it_makes_something(lets_go: bool) -> None:
    order: list[str] = []
    planned: Any = Planned.__new__(Planned)
    script = SimpleNamespace(codes=[7], actions=["back"], reruns=(), lets_go=())
    planned.mode, planned.resume = Mode.PLANNED, lambda: None
    planned.following = SimpleNamespace(
        script=script, agrees=True, codes=[], late=[], act=lambda _: order.append("python")
    )
    planned.tapes = SimpleNamespace(
        on=True,
        log=SimpleNamespace(at=0),
        only_lets_go=lambda _: lets_go,
        happen=lambda _: order.append("tape"),
    )
    planned.tracing = SimpleNamespace(finish_chain=lambda: None)
    planned.replans = SimpleNamespace(acts=Spent())
    planned.event(7)
    assert order == (["tape", "python"] if lets_go else ["python", "tape"])
