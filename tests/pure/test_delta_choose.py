"""The filter and the director of the driver that needs no plan."""

import pytest

from lowtide._runtime.delta.choose import POLICIES, drops, score


@pytest.mark.parametrize("policy", POLICIES)
def test_the_filter_takes_large_and_stale_values_first(policy: str) -> None:
    small, large, stale = (
        score(policy, count, age, 0, 1e-3) for count, age in ((1000, 10), (4000, 10), (1000, 90))
    )
    assert small is not None
    assert large is not None
    assert stale is not None
    assert stale < large < small


def test_what_came_back_before_goes_later_by_delta() -> None:
    found = [score("delta", 1000, 10, bounces, None) for bounces in (0, 1, 3)]
    assert found == sorted(found, key=lambda one: one or 0)
    assert score("delta-as-published", 1000, 10, 3, None) == found[0]


def test_dtr_weighs_what_it_costs_and_keeps_what_it_cannot_make() -> None:
    cheap, dear = (score("dtr", 1000, 10, 0, seconds) for seconds in (1e-4, 1e-2))
    assert cheap is not None
    assert dear is not None
    assert cheap < dear
    assert score("dtr", 1000, 10, 0, None) is None


def test_just_made_is_no_younger_than_one_op() -> None:
    assert score("delta", 1000, 0, 0, None) == score("delta", 1000, 1, 0, None)


@pytest.mark.parametrize(
    ("policy", "swap", "recompute", "expected"),
    [
        ("delta", 2e-3, 1e-3, True),
        ("delta", 1e-3, 2e-3, False),
        ("delta", 1e-3, None, False),
        ("delta", None, 1.0, True),
        ("delta", None, None, None),
        ("dtr", 1e-3, 1.0, True),
        ("dtr", 1e-3, None, None),
        ("delta-as-published", 1.0, 1e-9, True),
        ("delta-as-published", 1.0, 1e-3, False),  # a millisecond is a million nanoseconds
        ("delta-as-published", None, 1.0, True),
        ("delta-as-published", 1.0, None, False),
    ],
)
def test_the_director(
    policy: str, swap: float | None, recompute: float | None, expected: bool | None
) -> None:
    assert drops(policy, 1e-3, swap, recompute) is expected
