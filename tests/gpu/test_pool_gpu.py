"""The pool inside PyTorch: same numbers, true statistics, and what works beside it as ever."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from nets import MIB, make, train
from torch import nn

import lowtide


def outcome(pool: bool, batches: Callable[[int], int], steps: int) -> list[torch.Tensor]:
    model, optimizer = make()
    if pool:
        with lowtide.fit(model, optimizer):
            losses = [train(model, optimizer, batches(i)) for i in range(steps)]
    else:
        losses = [train(model, optimizer, batches(i)) for i in range(steps)]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [t.cpu() for t in (*losses, *model.parameters(), *state)]


@pytest.mark.parametrize("batches", [lambda i: 512, lambda i: (512, 320, 77)[i % 3]])
def test_not_one_bit_changes(batches: Callable[[int], int]) -> None:
    plain, pool = outcome(False, batches, 50), outcome(True, batches, 50)
    assert all(torch.equal(a, b) for a, b in zip(plain, pool, strict=True))


def test_every_allocation_gets_its_planned_address() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer) as tide:
        for _ in range(20):
            train(model, optimizer)
        assert tide._pool is not None
        summary = tide._pool.summary()
        assert summary.replayed >= 15
        assert summary.displaced == 0
        assert summary.unplanned <= 4  # workspaces that cuBLAS makes again, once
        assert "of 20 steps followed a plan" in tide.summary()


def test_reserved_is_what_is_needed() -> None:
    model, optimizer = make(2048)
    with lowtide.fit(model, optimizer):
        for _ in range(8):
            train(model, optimizer, 2048, 2048)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            train(model, optimizer, 2048, 2048)
        assert torch.cuda.max_memory_reserved() <= 1.01 * torch.cuda.max_memory_allocated()


def alive_bytes() -> int:
    """Counted without the allocator: all storages that Python sees, rounded as it rounds."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.is_cuda:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
    return sum(found.values())


def test_statistics_tell_the_truth() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() - alive_bytes()
    model, optimizer = make()
    with lowtide.fit(model, optimizer):
        for _ in range(8):
            train(model, optimizer)
        torch._C._cuda_clearCublasWorkspaces()
        # Blocks of the caching allocator may be a little larger than what they hold.
        assert 0 <= torch.cuda.memory_allocated() - base - alive_bytes() <= 2 * MIB
        stats = torch.cuda.memory_stats()
        snapshot = torch.cuda.memory_snapshot()
        blocks = [block for segment in snapshot for block in segment["blocks"]]
        used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        assert used == stats["allocated_bytes.all.current"]
        assert (
            sum(b["state"] == "active_allocated" for b in blocks) == stats["allocation.all.current"]
        )
        assert sum(segment["total_size"] for segment in snapshot) == torch.cuda.memory_reserved()
        assert sum(block["size"] for block in blocks) == torch.cuda.memory_reserved()
        for key in ("allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes"):
            current = stats[f"{key}.all.current"]
            assert current == stats[f"{key}.all.allocated"] - stats[f"{key}.all.freed"], key
            assert current <= stats[f"{key}.all.peak"], key
        assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
        before = torch.cuda.memory_allocated()
        big = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - before == 64 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
        del big
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == before + 64 * MIB


def test_the_peak_is_that_of_plain_training() -> None:
    def peak(pool: bool) -> int:
        model, optimizer = make()
        if not pool:
            for _ in range(8):
                train(model, optimizer)
            torch.cuda.reset_peak_memory_stats()
            train(model, optimizer)
            return torch.cuda.max_memory_allocated()
        with lowtide.fit(model, optimizer):
            for _ in range(8):
                train(model, optimizer)
            torch.cuda.reset_peak_memory_stats()
            train(model, optimizer)
            return torch.cuda.max_memory_allocated()

    plain, pool = peak(False), peak(True)
    assert abs(plain - pool) <= 0.02 * plain  # blocks of the caching allocator are rounded up


def test_history_has_what_happened_in_the_arena() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer):
        for _ in range(6):
            train(model, optimizer)
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        try:
            train(model, optimizer)
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        allocations = [entry for entry in trace if entry["action"] == "alloc"]
        assert sum(entry["size"] == 512 * 4096 * 4 for entry in allocations) >= 8
        assert any(entry["frames"] for entry in allocations)
        times = [entry["time_us"] for entry in trace]
        assert times == sorted(times)


def test_profiler_sees_the_arena() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer):
        for _ in range(6):
            train(model, optimizer)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            train(model, optimizer)
        assert sum(e.self_device_memory_usage > 0 for e in profile.events()) > 20


def test_the_peak_is_true_after_leaving() -> None:
    fillers = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(200)]
    fillers = fillers[::2]
    model, optimizer = make(512)
    del fillers
    with lowtide.fit(model, optimizer):
        for _ in range(6):
            train(model, optimizer, 512, 512)
        inside = torch.cuda.max_memory_allocated()
    assert torch.cuda.max_memory_allocated() == inside
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_allocated() == before
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del block
    assert torch.cuda.max_memory_allocated() == before + 64 * MIB  # weights lie in homes


def test_both_ways_to_ask_agree() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer):
        for _ in range(8):
            train(model, optimizer)
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
        assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()


def test_evaluation_in_between_does_not_grow() -> None:
    model, optimizer = make()
    x = torch.randn(512, 1024, device="cuda")
    with lowtide.fit(model, optimizer) as tide:
        reserved = []
        for i in range(60):
            train(model, optimizer)
            if i % 5 == 0:
                model.eval()
                with torch.no_grad():
                    for _ in range(3):
                        model(x)
                model.train()
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[-1] <= reserved[30]
        assert tide._pool is not None
        assert tide._pool.summary().planned >= 0.8 * tide._pool.summary().allocations


def test_cudnn_benchmark_and_pinned_loader() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(1)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(96, 3, 32, 32))
    loader = torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True, num_workers=1)
    torch.backends.cudnn.benchmark = True
    try:
        with lowtide.fit(model, optimizer) as tide:
            for _ in range(3):
                for (batch,) in loader:
                    loss = model(batch.cuda(non_blocking=True)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            assert tide._pool is not None
            assert tide._pool.summary().replayed > 8
    finally:
        torch.backends.cudnn.benchmark = False


def test_the_async_allocator_is_left_alone() -> None:
    code = (
        "import torch, lowtide, warnings\n"
        "torch.ones(1).cuda()\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    with lowtide.fit() as tide: torch.ones(1).cuda()\n"
        "print(tide.summary(), len(seen))\n"
    )
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **setting}
    )
    assert "pool: off: PyTorch uses its cudaMallocAsync allocator" in done.stdout, done.stderr
    assert done.stdout.strip().endswith(" 1")
