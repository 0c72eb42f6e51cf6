"""The driver that needs no plan, on a GPU: bits, streams, and what the device really reserves."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nets import MIB, make, train
from tight import JOBS, Bits, Build, find_difference, fitted, state_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide._runtime.delta import cap
from lowtide._runtime.swap import pinned_tier
from lowtide._runtime.swap.tier import Copy

STEPS = 4
_LONG = 20_000_000  # cycles: longer than any copy here


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def trained(build: Build, budget: int | None, **how: Any) -> tuple[list[Bits], list[int]]:
    """Every bit that comes out, and each step's peak of allocated bytes."""
    gc.collect()
    losses, peaks = [], []
    with torch.device("cuda"):
        job = build()
        with fitted(job, budget, **how):
            for _ in range(STEPS):
                torch.cuda.reset_peak_memory_stats()
                losses.append(job.step())
                peaks.append(torch.cuda.max_memory_allocated())
    found = [
        Bits(t.dtype, t.shape, t.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        for t in [*losses, *state_of(job), torch.cuda.get_rng_state()]
    ]
    return found, peaks


@pytest.mark.parametrize(
    ("name", "share"),  # what one cuDNN call of the RNN takes is most of its peak
    [(name, share) for name in JOBS for share in ((0.9,) if name == "rnn" else (0.7, 0.5))],
)
def test_jobs_train_bit_for_bit_within_the_budget(name: str, share: float) -> None:
    trained(JOBS[name], None)  # libraries take their workspaces
    gc.collect()
    stays = torch.cuda.memory_allocated()
    plain, peaks = trained(JOBS[name], None)
    again, _ = trained(JOBS[name], None)
    budget = stays + int(share * (max(peaks) - stays))
    ours, held = trained(JOBS[name], budget)
    if find_difference(plain, again) is None:
        assert find_difference(plain, ours) is None
    assert max(held) <= budget * 1.01, (held, budget)


def wide(steps: int) -> list[float]:
    torch.manual_seed(1)
    return [train(*_current, batch=16384).item() for _ in range(steps)]


_current: tuple[nn.Module, torch.optim.Optimizer]


def plain_and_peak() -> tuple[list[float], int]:
    global _current
    _current = make()
    torch.cuda.reset_peak_memory_stats()
    return wide(6), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("policy", ["delta", "dtr", "delta-as-published"])
def test_no_step_reserves_more_than_the_budget(policy: str) -> None:
    """The first included; and PyTorch's allocator is as it was, afterwards."""
    global _current
    plain, peak = plain_and_peak()
    budget = int(0.5 * peak)
    settings = cap._settings()
    _current = make()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with lowtide.fit(*_current, budget=budget, policy=policy) as tide:
        assert wide(6) == plain, tide.summary()
        assert torch.cuda.max_memory_reserved() <= budget, tide.summary()
    assert torch.cuda.get_per_process_memory_fraction() == 1
    assert cap._settings() in (settings, "expandable_segments:False")


@pytest.mark.parametrize("late", ["out", "back", "compute", "all"])
def test_windows_held_open_change_no_bit(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream held up in turn, with all that goes swapped."""
    global _current
    plain, peak = plain_and_peak()
    monkeypatch.setattr("lowtide._runtime.delta.room.drops", lambda *_: False)
    copy: Callable[..., Copy] = pinned_tier.PinnedTier._copy

    def slow(
        self: pinned_tier.PinnedTier, way: pinned_tier._Way, to: int, of: int, count: int
    ) -> Copy:
        if late in ("compute", "all"):
            torch.cuda._sleep(_LONG)
        name = "out" if way is self._out else "back"
        if late in (name, "all"):
            with torch.cuda.stream(way._stream):
                torch.cuda._sleep(_LONG)
        return copy(self, way, to, of, count)

    monkeypatch.setattr(pinned_tier.PinnedTier, "_copy", slow)
    _current = make()
    with lowtide.fit(*_current, budget=int(0.6 * peak), policy="delta") as tide:
        assert wide(6) == plain
        assert " swapped" in str(tide.summary())
        assert not str(tide.summary()).count("0 of 0 B swapped")


def test_an_op_that_ran_with_less_than_it_asked_for_is_told() -> None:
    """Convolutions make do with less memory, and say nothing."""
    cap._watch_failures()
    before = cap._failures
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert cap._failures == before + 1
