"""Times that a GPU has told, corrected where the host came late: no GPU is needed for that."""

import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide._trace.cuda import CudaProbe
from lowtide._trace.text import parse

MIB = 1 << 20


def corrected(late: dict[int, float], slow: Iterable[int] = ()) -> list[float]:
    """Of three ops: one that is alone of its kind, and two that are alike."""
    trace = parse(
        f"""
        have x:{64 * MIB} | input
        f x -> a:{64 * MIB} | 100us
        g a -> b:{128 * MIB} | 500us
        f b -> c:{64 * MIB} | 90us
        """
    )
    probe: Any = CudaProbe.__new__(CudaProbe)
    probe._spans = dict.fromkeys(range(len(trace.ops)))
    probe._late, probe._slow = late, set(slow)
    ops = list(trace.ops)
    probe._correct(trace, ops)
    return [op.seconds for op in ops]


def test_where_the_host_is_in_time_nothing_is_corrected() -> None:
    assert corrected({}) == pytest.approx([100e-6, 500e-6, 90e-6])


def test_what_the_host_was_late_is_not_the_ops() -> None:
    assert corrected({1: 100e-6})[1] == pytest.approx(400e-6)


def test_what_a_slow_host_has_not_queued_in_time_takes_as_long_as_others_do() -> None:
    assert corrected({}, [0]) == pytest.approx([90e-6, 500e-6, 90e-6])
    assert corrected({}, [2])[2] == pytest.approx(90e-6), "it waited for nobody"
    assert corrected({}, [1])[1] == pytest.approx(500e-6), "there is no other"


def test_nothing_is_free() -> None:
    """The fastest of the others moved 192 MiB in 90 us."""
    assert corrected({1: 1.0})[1] == pytest.approx(90e-6 * (64 + 128) / (128 + 64))


@pytest.mark.parametrize("took", [0.0, 1.0])
def test_a_host_is_slow_that_takes_longer_than_the_device_spins(took: float) -> None:
    probe: Any = CudaProbe.__new__(CudaProbe)
    event = SimpleNamespace(record=lambda: None)
    probe._spans, probe._ranges = {0: (event, event)}, {0: (0, 0)}
    probe._cycles, probe._took, probe._late, probe._slow = {"f": 1 << 40}, {}, {}, set()
    if took:
        del probe._cycles["f"]
    probe._moved, probe._counts = 0, lambda: (0, 0)
    probe._began = time.perf_counter() - took
    probe.end(0, "f")
    assert probe._slow == ({0} if took else set()) and not probe._late
