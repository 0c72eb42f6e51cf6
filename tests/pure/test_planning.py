"""Recorded steps -> plans."""

import json
from pathlib import Path

from lowtide._runtime.core import StepRecord
from lowtide._runtime.planning import plan_step, widened


def record(sizes: list[int], made: list[int], freed: list[int], ticks: int) -> StepRecord:
    return StepRecord(sizes, made, freed, [], [], ticks)


def test_a_plan_needs_no_more_than_the_load() -> None:
    # bytes 1..2 | . b b .
    # bytes 0..1 | a a c c
    plan = plan_step(record([512, 512, 512], [0, 1, 3], [2, 5, 6], 6))
    assert plan.phases == [[0, 512, 0]]
    assert plan.height == plan.max_load == 1024


def test_a_step_that_cannot_be_laid_out_in_its_load_is_laid_out_low() -> None:
    """A step by a plan: what is made again lives in holes of all sizes."""
    data = json.loads((Path(__file__).parents[1] / "data" / "planned-step.json").read_text())
    step = record(data["sizes"], data["made"], data["freed"], data["ticks"])
    plan = plan_step(step, seconds=2.0, single=True)
    assert plan.height <= 1.05 * plan.max_load


def test_what_lives_longer_than_a_step_is_left_outside_where_that_is_laid_out_once() -> None:
    #           | first step | second step
    # lives     | x..........x..
    step = record([512, 1024], [0, 1], [5, 2], 4)
    assert len(plan_step(step).phases) == 2
    assert plan_step(step, single=True).phases == [[-1, 0]]


def test_what_outlives_two_steps_is_left_outside() -> None:
    plan = plan_step(record([512, 512], [0, 1], [2, -1], 4))
    assert plan.phases == [[0, -1]]
    plan = plan_step(record([512, 512], [0, 1], [2, 99], 4))
    assert [phase[1] for phase in plan.phases] == [-1, -1]


def test_lower_plans_leave_their_gradients_where_the_highest_does() -> None:
    high = plan_step(record([4096, 1024], [0, 1], [2, 5], 4))
    low = plan_step(record([2048, 1024], [0, 1], [2, 5], 4), beside=high, room=high.height)
    assert low.phases[0][1] == high.phases[0][1]
    assert low.height == high.height
    cramped = plan_step(record([2048, 1024], [0, 1], [2, 5], 4), beside=high, room=3072)
    assert cramped.height == 3072  # no room to follow suit: as low as can be


def test_widened_lives_are_the_longest_seen() -> None:
    first = record([512, 512, 512], [0, 1, 2], [3, 4, -1], 6)
    second = record([512, 512, 512], [0, 1, 2], [4, 3, 5], 6)
    assert widened(first, second).freed == [4, 4, -1]


def test_what_is_freed_first_in_the_next_step_is_also_in_a_wider_one() -> None:
    short, long = record([512], [1], [4], 4), record([512], [1], [6], 6)
    assert widened(short, long).freed == widened(long, short).freed == [6]
    assert widened(short, record([512], [1], [3], 6)).freed == [6]
