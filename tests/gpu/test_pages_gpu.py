"""Memory in pages on a GPU: bytes, streams, figures, and what is left afterwards."""

import gc
from random import Random

import pytest
import torch
from nets import MIB, make, train

import lowtide
from lowtide._runtime.core import Mode
from lowtide._runtime.cuda import CudaPlace

PAGE = 2 * MIB


@pytest.fixture
def place() -> CudaPlace:
    torch.cuda.init()
    return CudaPlace()


def holds(tensor: torch.Tensor, written: int) -> bool:
    """Looked at in main memory: where the device is full, there is none to compare in."""
    return bool((tensor.cpu() == written).all())


def fitted_steps(policy: str, share: float, steps: int) -> tuple[list[float], list[float], str]:
    torch.manual_seed(0)
    plain = make()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    expected = [train(*plain, batch=16384).item() for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated()
    del plain
    torch.manual_seed(0)
    model, optimizer = make()
    with lowtide.fit(model, optimizer, budget=int(share * peak), policy=policy) as tide:
        torch.manual_seed(1)
        found = [train(model, optimizer, batch=16384).item() for _ in range(steps)]
        assert tide._place is not None
        counts = tide._place.core.count(0)
        assert counts.page_bytes > 0
        assert torch.cuda.memory_reserved() >= counts.page_bytes
        assert torch.cuda.memory_reserved() <= int(share * peak)
        said = tide.summary()
    return expected, found, said


@pytest.mark.parametrize("policy", ["tide", "delta"])
def test_steps_in_pages_are_the_same_bit_for_bit(policy: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, found, said = fitted_steps(policy, 0.5, 6)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == expected, said


def test_leaving_gives_pages_and_limits_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    fraction = torch.cuda.get_per_process_memory_fraction()
    fitted_steps("delta", 0.5, 3)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    assert torch.cuda.memory_reserved() <= before + 64 * MIB
    assert CudaPlace().core.count(0).page_bytes == 0


def test_a_step_that_repeats_shows_no_new_pages() -> None:
    model, optimizer = make()
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, batch=16384)
    budget = int(0.5 * torch.cuda.max_memory_allocated())
    with lowtide.fit(model, optimizer, budget=budget, policy="tide") as tide:
        calls = []
        for _ in range(14):
            train(model, optimizer, batch=16384)
            assert tide._place is not None
            calls.append(tide._place.core.count(0).page_calls)
        assert calls[-1] == calls[-4], (calls, tide.summary())


def test_blocks_keep_their_bytes_whatever_pages_they_lie_in(place: CudaPlace) -> None:
    random = Random(0)
    limit = 512 * MIB
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + limit) / total)
    most = int(torch.cuda.get_per_process_memory_fraction() * total)
    live: list[tuple[torch.Tensor, int]] = []
    try:
        assert place.use_pages(0)
        place.core.set_mode(Mode.RECORD)
        for number in range(400):
            if live and random.random() < 0.45:
                tensor, written = live.pop(random.randrange(len(live)))
                assert holds(tensor, written)
                del tensor
                continue
            try:
                size = random.choice([random.randrange(1, PAGE), random.randrange(1, 40) * PAGE])
                tensor = torch.full((size,), number % 256, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                continue
            live.append((tensor, number % 256))
        assert place.core.count(0).page_bytes <= torch.cuda.memory_reserved() <= most
        assert all(holds(tensor, written) for tensor, written in live)
    finally:
        live.clear()
        tensor = None  # type: ignore[assignment]
        place.core.stop()
        place.leave()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert place.core.count(0).page_bytes == 0


def test_another_stream_gets_the_memory_of_free_pages(place: CudaPlace) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((reserved + 1024 * MIB) / total)
    try:
        assert place.use_pages(0)  # what there is goes into them, and cuBLAS has some, too
        place.core.set_mode(Mode.RECORD)
        before = place.core.count(0).page_bytes
        limit = torch.cuda.memory_reserved() + 256 * MIB
        torch.cuda.set_per_process_memory_fraction(limit / total)
        block = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        del block
        assert place.core.count(0).page_bytes >= before + 200 * MIB
        with torch.cuda.stream(torch.cuda.Stream()):
            other = torch.ones(160 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert place.core.count(0).page_bytes < before + 100 * MIB
        assert torch.cuda.memory_reserved() <= limit
        assert holds(other, 1)
        del other
    finally:
        place.core.stop()
        place.leave()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_fit_may_begin_with_more_than_its_budget() -> None:
    def trained(budget: int | None) -> tuple[list[float], int]:
        model, optimizer = make(2048)
        torch.manual_seed(1)
        losses = [train(model, optimizer, 64, 2048).item() for _ in range(2)]
        held = torch.cuda.memory_allocated()
        if budget is None:
            losses += [train(model, optimizer, 64, 2048).item() for _ in range(4)]
            return losses, held
        with lowtide.fit(model, optimizer, budget=budget):
            assert torch.cuda.memory_reserved() <= budget
            for _ in range(4):
                losses.append(train(model, optimizer, 64, 2048).item())
                assert torch.cuda.memory_reserved() <= budget
        return losses, held

    expected, held = trained(None)
    gc.collect()
    torch.cuda.empty_cache()
    found, _ = trained(int(0.75 * held))
    assert found == expected
