"""Steps of whose saves nobody is told, guarded by the real allocator."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from nets import Net, hold_open, make, train

import lowtide
from lowtide._runtime.delta.driver import Dynamic
from lowtide._runtime.delta.modes import Mode

ROWS, MORE = 8192, 32768
BEFORE = 16  # steps, after which nothing of a loose budget is watched


def has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def losses(model: Net, optimizer: torch.optim.Optimizer, rows: list[int]) -> list[float]:
    return [train(model, optimizer, n).item() for n in rows]


def plainly(rows: list[int]) -> tuple[list[float], int]:
    """What comes out without lowtide, and what the steps before reserve."""
    model, optimizer = make()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found = losses(model, optimizer, [ROWS] * BEFORE)
    reserved = torch.cuda.max_memory_reserved()
    found += losses(model, optimizer, rows)
    return found, reserved


@contextmanager
def asleep(budget: int) -> Iterator[tuple[Net, torch.optim.Optimizer, list[float], Dynamic]]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer = make()
    with lowtide.fit(model, optimizer, budget=budget) as tide:
        found = losses(model, optimizer, [ROWS] * BEFORE)
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        assert dynamic.planned is not None
        assert dynamic.planned.modes[-1] is Mode.LOOSE, tide.summary()
        assert not has_hooks(), tide.summary()
        yield model, optimizer, found, dynamic
        assert torch.cuda.max_memory_reserved() <= budget, tide.summary()


def test_steps_that_nobody_watches_are_the_same() -> None:
    plain, reserved = plainly([ROWS] * 4)
    with asleep(int(1.2 * reserved)) as (model, optimizer, found, dynamic):
        before = dynamic.room.counts["swapped"] + dynamic.room.counts["dropped"]
        found += losses(model, optimizer, [ROWS] * 4)
        assert not has_hooks()
        assert dynamic.room.counts["swapped"] + dynamic.room.counts["dropped"] == before
    assert found == plain


@pytest.mark.parametrize("late", ["nothing", "copies", "compute"])
def test_a_larger_batch_is_noticed_and_held_to_the_budget(
    late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [MORE, ROWS, MORE, ROWS]
    plain, reserved = plainly(rows)
    assert torch.cuda.max_memory_allocated() > 1.5 * reserved
    with asleep(int(1.2 * reserved)) as (model, optimizer, found, dynamic):
        before = dynamic.room.counts["swapped"] + dynamic.room.counts["dropped"]
        if late != "nothing":
            hold_open(late, monkeypatch)
        found += losses(model, optimizer, rows)
        assert dynamic.room.counts["swapped"] + dynamic.room.counts["dropped"] > before
    assert found == plain


def test_a_larger_batch_that_fits_wakes_nobody_for_good() -> None:
    rows = [2 * ROWS] * 2 + [ROWS] * 8
    plain, reserved = plainly(rows)
    with asleep(3 * reserved) as (model, optimizer, found, _):
        found += losses(model, optimizer, rows)
        assert not has_hooks()
    assert found == plain
