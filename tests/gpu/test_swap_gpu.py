"""Swapping between a GPU and pinned memory: streams, peaks, pinned bytes."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from moving import everything
from nets import MIB, hold_open, make, train
from torch import nn

import lowtide
from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.fit import Tide
from lowtide._runtime.swap import cuda_driver
from lowtide._runtime.swap.modes import Mode
from lowtide._runtime.swap.pinned_tier import PinnedTier


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeting, "_SMALLEST", 1 << 16)
    monkeypatch.setattr(budgeting, "_PIECE", 32 << 20)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    torch.manual_seed(1)
    return [train(model, optimizer).item() for _ in range(steps)]


def plan_of(tide: Tide) -> lowtide._ir.Plan:
    assert tide._budgeted is not None
    return tide._budgeted._driver.following.scripts[0].plan


@pytest.mark.parametrize("late", ["nothing", "out", "back", "compute", "all"])
@pytest.mark.parametrize("lies", ["anywhere", "in an arena", "in pages"])
def test_windows_held_open_change_no_bit(
    late: str, lies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream held up in turn: a wait that is missing would show."""
    pool = lies != "anywhere"
    if lies == "in pages":
        monkeypatch.setattr(budgeting, "_LEAST_PAGED", 0)
    model, optimizer = make()
    plain = losses(model, optimizer, 12)
    weights = [p.detach().clone() for p in model.parameters()]
    model, optimizer = make()
    monkeypatch.setattr(plans, "autoswap", everything)
    hold_open(late, monkeypatch)
    with lowtide.fit(model, optimizer, policy="autoswap", budget=0.3, pool=pool) as tide:
        found = losses(model, optimizer, 12)
        if lies == "in pages":
            assert tide._place is not None and tide._place.core.count(0).page_bytes > 0
    assert len(plan_of(tide).swaps) > 20
    assert any(swap.until >= swap.after + 1 for swap in plan_of(tide).swaps)
    assert found == plain
    for ours, theirs in zip(model.parameters(), weights, strict=True):
        assert torch.equal(ours, theirs)


def test_the_peak_is_the_planned_one_and_little_is_pinned() -> None:
    model, optimizer = make(2048)

    def step() -> None:
        train(model, optimizer, 2048, 2048)

    step()
    with lowtide.fit(model, optimizer, policy="autoswap", budget=0.7, pool=False) as tide:
        for _ in range(6):
            step()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            step()
        assert tide._budgeted is not None
        plan = plan_of(tide)
        assert torch.cuda.max_memory_allocated() <= 1.02 * plan.peak_bytes
        assert plan.peak_bytes <= 0.7 * plan.plain_peak_bytes
        assert tide._budgeted._driver.modes[-1] is Mode.PLANNED
        summary = tide._budgeted.summary()
        assert summary.below_bytes <= 1.05 * summary.swapped_bytes


def test_what_is_reserved_is_within_the_budget_once_there_is_a_plan() -> None:
    """What lies between blocks included: memory goes in pages."""
    model, optimizer = make(2048)
    train(model, optimizer, 2048, 2048)
    with lowtide.fit(model, optimizer, policy="autoswap", budget=0.6) as tide:
        for _ in range(10):
            train(model, optimizer, 2048, 2048)
        assert tide._budgeted is not None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            train(model, optimizer, 2048, 2048)
        budget = tide._budgeted._bytes
        assert budget is not None
        assert torch.cuda.max_memory_reserved() <= budget
        assert torch.cuda.max_memory_allocated() >= 0.9 * budget
        assert tide._budgeted._driver.modes[-1] is Mode.PLANNED
        assert tide._pool is not None
        assert tide._pool.summary().displaced == 0


def test_state_that_is_away_is_on_the_device_for_who_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read by a kernel after a copy that takes long: in the order of streams, and not before."""

    def looked(fitted: bool) -> list[torch.Tensor]:
        model, optimizer = make()
        sums: list[torch.Tensor] = []
        away = 0

        def look(_module: nn.Module, _args: object) -> None:
            nonlocal away
            for state in optimizer.state.values():
                average = state["exp_avg"]
                assert average.is_cuda
                sums.append(average.double().sum())
            if fitted and tide._budgeted is not None:
                cells = tide._budgeted._driver.optimizers.cells
                away += sum(not cell.holds() for cell in cells)

        model.register_forward_pre_hook(look)
        if not fitted:
            losses(model, optimizer, 8)
            return sums
        with lowtide.fit(model, optimizer, policy="autoswap", budget=0.5) as tide:
            losses(model, optimizer, 8)
        assert away
        return sums

    plain = looked(fitted=False)
    monkeypatch.setattr(plans, "autoswap", everything)
    hold_open("copies", monkeypatch)
    ours = looked(fitted=True)
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_leaving_unlocks_the_host_memory() -> None:
    gc.collect()  # of what other tests have made
    before = torch.cuda.memory_allocated()
    model, optimizer = make()
    for _ in range(2):  # registering the same pages twice would fail
        with lowtide.fit(model, optimizer, policy="autoswap", budget=0.8, pool=False):
            losses(model, optimizer, 5)
    held = torch.cuda.memory_allocated() - before
    del model, optimizer
    assert torch.cuda.memory_allocated() - before < held // 4  # nobody keeps them


def test_chunks_that_nobody_needs_any_more_are_unlocked() -> None:
    tier = PinnedTier(torch.device("cuda", torch.cuda.current_device()))
    tier.prepare(8 * MIB)
    full = tier.take(8 * MIB)
    more = tier.take(MIB)  # which it grows for
    assert full is not None and more is not None and more.start >= 8 * MIB
    held = tier.held_bytes()
    content = torch.arange(MIB // 4, dtype=torch.float32, device="cuda")
    copy = tier.out(content.untyped_storage(), more)
    tier.trim(8 * MIB)
    assert tier.held_bytes() == held, "somebody's"
    copy.wait()
    tier.give(more)
    tier.trim(8 * MIB)
    assert tier.held_bytes() == 8 * MIB
    copy = tier.out(content.untyped_storage(), full)  # and the rest is as good as ever
    copy.wait()
    back = torch.zeros_like(content)
    tier.back(back.untyped_storage(), full).wait()
    assert torch.equal(back, content)
    tier.give(full)
    tier.prepare(12 * MIB)  # nothing is in it: one chunk
    first, second = tier.take(12 * MIB), tier.take(MIB)
    assert first is not None and second is not None
    tier.give(first)
    tier.give(second)
    tier.trim(10 * MIB)
    assert tier.held_bytes() == 10 * MIB, "one chunk, and not the first of two"
    whole = tier.take(10 * MIB, 0)
    assert whole is not None
    tier.give(whole)
    tier.close()


def test_leaving_leaves_no_arena_behind() -> None:
    """Optimizer state comes back into it, and would hold all of it."""
    model, optimizer = make(2048)
    with lowtide.fit(model, optimizer, policy="autoswap", budget=0.5) as tide:
        for _ in range(14):
            train(model, optimizer, 2048, 2048)
        assert tide._pool is not None
        assert tide._pool.summary().arena_bytes > 0
        assert any(swap.until >= swap.after + 1 for swap in plan_of(tide).swaps)
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= 1.2 * torch.cuda.memory_allocated() + 64 * MIB
    train(model, optimizer, 2048, 2048)


def test_a_thread_that_has_not_used_cuda_yet_may_copy() -> None:
    """Backward may begin in one: the driver knows no context there."""
    events = cuda_driver.Events(torch.device("cuda"))
    event, stream = events.take(), torch.cuda.current_stream().cuda_stream
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(cuda_driver.record, event, stream).result()
    cuda_driver.wait(stream, event)
    torch.cuda.synchronize()
