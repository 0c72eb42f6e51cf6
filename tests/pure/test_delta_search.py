"""benchmarks/delta.py without its GPU: the search for the largest batch, and who is asked what."""

import json
import sys
from pathlib import Path
from typing import Any

import delta
import pytest
from delta import Imagined, Row, batches, largest_fitting, points
from hypothesis import given
from hypothesis import strategies as st


class Device:
    """A device that trains batches up to one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[int] = []

    def fits(self, batch: int) -> bool:
        self.asked.append(batch)
        return batch <= self.most


def test_up_by_a_quarter_then_halves() -> None:
    device = Device(272)
    assert largest_fitting(device.fits, 192, {}, probes=9) == (272, 288)
    assert device.asked == [192, 240, 304, 272, 288]


def test_down_by_a_quarter_then_halves() -> None:
    device = Device(112)
    assert largest_fitting(device.fits, 192, {}, probes=9) == (112, 128)
    assert device.asked == [192, 160, 128, 96, 112]


def test_what_is_known_is_not_asked_again() -> None:
    device = Device(448)
    known = {176: True, 352: True, 528: False}
    assert largest_fitting(device.fits, 528, known, probes=9) == (448, 464)
    assert device.asked == [448, 480, 464]


def test_nothing_fits() -> None:
    device = Device(0)
    assert largest_fitting(device.fits, 48, {}, probes=9) == (0, 16)


def test_out_of_probes_it_says_what_is_open() -> None:
    device = Device(10_000)
    assert largest_fitting(device.fits, 192, {}, probes=3) == (304, None)


@given(
    most=st.integers(0, 3000),
    guess=st.integers(1, 1500),
    known=st.lists(st.integers(1, 100).map(lambda units: 16 * units), max_size=4),
    probes=st.integers(0, 60),
)
def test_it_ends_between_what_fits_and_what_does_not(
    most: int, guess: int, known: list[int], probes: int
) -> None:
    device = Device(most)
    before = {batch: batch <= most for batch in known}
    low, high = largest_fitting(device.fits, guess, before, probes=probes)
    assert len(device.asked) <= probes
    assert len({*device.asked, *before}) == len(device.asked) + len(before)
    assert all(batch > 0 and batch % 16 == 0 for batch in device.asked)
    assert low <= most and (high is None or high > most)
    if probes >= 40:  # enough to get from any guess to any end
        assert low == most // 16 * 16 and high == low + 16


def test_each_method_is_measured_at_multiples_of_plains_largest_batch() -> None:
    work: dict[str, Any] = {}
    batches("ResNet-50", ["delta"], Imagined().ask, work, lambda: None, probes=9)
    assert list(work) == ["plain", "delta"]  # delta needs plain's
    assert work["plain"]["largest_batch"] == 176
    assert work["delta"]["largest_batch"] == 784 and work["delta"]["to_the_unit"]
    assert [row["batch"] for row in work["delta"]["multiples"].values()] == [176, 352, 528]
    assert work["delta"]["times_plain"] == pytest.approx(784 / 176)


def test_a_method_that_breaks_is_left_and_the_rest_goes_on() -> None:
    asked: list[str] = []

    def ask(*task: Any) -> list[Row]:
        asked.append(task[2])
        return [{"error": "TypeError: no"}] if task[2] == "dtr" else Imagined().ask(*task)

    work: dict[str, Any] = {}
    batches("ResNet-101", list(delta.METHODS), ask, work, lambda: None, probes=6)
    assert work["dtr"]["error"] == "TypeError: no"
    assert asked.count("dtr") == 1
    assert work["delta-as-published"]["largest_batch"]


def test_a_point_that_fails_leaves_the_next_to_a_new_process() -> None:
    asked: list[list[int]] = []

    def ask(*task: Any) -> list[Row]:
        if task[2] == "dtr":
            asked.append(task[3])
            if len(task[3]) == 2:
                return [{"error": "out of memory"}]
        return Imagined().ask(*task)

    work: dict[str, Any] = {}
    points("BERT-large 16x384", ["plain", "delta", "dtr"], ask, work, lambda: None)
    assert [len(budgets) for budgets in asked] == [2, 1]
    assert "error" in work["dtr"]["0.4"]
    assert work["dtr"]["0.7"]["held"]
    assert work["delta"]["0.4"]["peak_ratio"] == pytest.approx(0.6)


def test_a_dry_run_walks_through_all_parts_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "delta.json"
    monkeypatch.setattr(sys, "argv", ["delta.py", "--dry-run", "--out", str(out)])
    delta.main()
    shown = capsys.readouterr().out
    told = [line.split("would ask ")[1] for line in shown.splitlines() if "would ask" in line]
    tasks = [json.JSONDecoder().raw_decode(line)[0] for line in told]
    assert {task[0] for task in tasks} == {"warm", *delta.WORKS}
    for part, names in delta.WORKS.items():
        assert {task[1] for task in tasks if task[0] == part} == set(names)
        assert f"{part}: would take about" in shown
    assert not out.exists()
