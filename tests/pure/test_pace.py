"""An op starts when Python has asked for it and the one before is done."""

import time

import pytest

from lowtide._ir import Trace
from lowtide._runtime.swap.pace import Pace, paced
from lowtide._trace.text import parse

STEP = """
    a -> x:8 | 2s
    b -> y:8 | 2s
    c -> z:8 | 2s
    d -> w:8 | 2s
"""


def lengths(trace: Trace) -> list[float]:
    return [op.seconds for op in trace.ops]


def test_a_device_that_never_waits_keeps_its_times() -> None:
    assert lengths(paced(parse(STEP), [0, 2], [0.0, 1.0, 2.0])) == pytest.approx([2, 2, 2, 2])


def test_a_late_event_delays_what_follows() -> None:
    assert lengths(paced(parse(STEP), [0, 2], [0.0, 6.0, 6.1])) == pytest.approx([3, 3, 2, 2])


def test_the_end_of_the_step_counts() -> None:
    # Op 3 is asked for at 6.5, halfway from 1 to 12.
    assert lengths(paced(parse(STEP), [0, 2], [0.0, 1.0, 12.0])) == pytest.approx([2, 2, 2.5, 5.5])


def test_of_events_at_one_position_the_last_counts() -> None:
    found = lengths(paced(parse(STEP), [0, 2, 2, 2], [0.0, 1.0, 4.0, 6.0, 8.0]))
    assert found == pytest.approx([3, 3, 2, 2])


CODES = (1, 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def take(pace: Pace, clock: list[float], seconds: float, codes: tuple[int, ...] = CODES) -> None:
    """An ordinary step of so many seconds, with its events evenly in it."""
    pace.begin()
    for _ in codes:
        clock[0] += seconds / (len(codes) + 1)
        pace.note()
    clock[0] += seconds / (len(codes) + 1)
    pace.end(codes)


def test_the_host_is_as_fast_as_it_ever_was(clock: list[float]) -> None:
    pace = Pace(lambda: 0.0)
    for seconds in (9.0, 3.0, 2.7, 3.3):  # others on the machine hold it up now and then
        take(pace, clock, seconds)
    assert pace.of(CODES) == pytest.approx((0.9, 1.8, 2.7))
    assert pace.of((1, 3)) == ()
    take(pace, clock, 6.0, (1, 3))
    assert pace.of(CODES) == ()
    assert pace.of((1, 3)) == pytest.approx((2.0, 4.0, 6.0))


def test_hooks_are_no_part_of_it(clock: list[float]) -> None:
    hooked = [0.0]
    pace = Pace(lambda: hooked[0])
    pace.begin()
    clock[0] += 2.0
    hooked[0] += 0.5
    pace.note()
    clock[0] += 1.0
    pace.end((1,))
    assert pace.of((1,)) == pytest.approx((1.5, 2.5))
