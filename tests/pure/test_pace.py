"""An op starts when Python has asked for it and the one before is done."""

import pytest

from lowtide._ir import Trace
from lowtide._runtime.swap.pace import paced
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
