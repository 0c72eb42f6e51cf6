"""Steps that go by a plan hold what it says, to the last tensor."""

import pytest
from tides import BUILDS, entered, plain, planned_of
from tight import find_difference, run

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
