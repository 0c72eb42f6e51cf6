"""The pool inside PyTorch: same numbers, true statistics, streams, graphs, out of memory."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # what the pool left behind is gone with it
    assert not _installed()


def _installed() -> bool:
    from lowtide._runtime.cuda import _library

    return bool(_library().lowtide_torch_installed())


class Net(nn.Module):
    def __init__(self, width: int = 1024, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout))
                if i % 2 == 0
                else nn.Linear(4 * width, width)
                for i in range(8)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def make(width: int = 1024) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(width).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 512, width: int = 1024
) -> torch.Tensor:
    x = torch.randn(batch, width, device="cuda")
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


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


def test_bytes_another_stream_uses_are_not_handed_out() -> None:
    """A side stream, held up, still reads a block whose bytes the plan gives to the next one."""
    model, optimizer = make(256)
    side = torch.cuda.Stream()
    with lowtide.fit(model, optimizer) as tide:
        for i in range(12):
            first = torch.full((8 * MIB,), 1.0, device="cuda")
            if i >= 8:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(100_000_000)
                    seen = first.clone()
                first.record_stream(side)
            del first
            second = torch.full((8 * MIB,), 2.0, device="cuda")
            train(model, optimizer, 64, 256)
            if i >= 8:
                side.synchronize()
                assert torch.equal(seen, torch.ones_like(seen)), "bytes were reused too early"
                del seen
            del second
        assert tide._pool is not None
        assert tide._pool.summary().displaced > 0  # it was asked for, and refused


def test_after_leaving_streams_are_still_respected() -> None:
    model, optimizer = make(256)
    side = torch.cuda.Stream()
    with lowtide.fit(model, optimizer):
        for _ in range(8):
            block = torch.full((8 * MIB,), 1.0, device="cuda")
            train(model, optimizer, 64, 256)
            kept = block
            del block
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        seen = kept.clone()
    kept.record_stream(side)
    del kept
    other = [torch.full((8 * MIB,), 2.0, device="cuda") for _ in range(4)]
    side.synchronize()
    assert torch.equal(seen, torch.ones_like(seen))
    del other


def test_graphs_are_captured_and_replayed() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer):
        for _ in range(6):
            train(model, optimizer)
        static = torch.randn(32, 1024, device="cuda")
        weight = torch.randn(1024, 1024, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            static @ weight
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = (static @ weight).relu()
        for _ in range(4):
            train(model, optimizer)
        static.copy_(torch.randn(32, 1024, device="cuda"))
        graph.replay()
        assert torch.equal(result, (static @ weight).relu())
        train(model, optimizer)
        del graph, result


def test_weights_are_not_moved_under_a_graph() -> None:
    model, optimizer = make()
    waste = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del waste[::2]
    x = torch.randn(8, 1024, device="cuda")
    model.eval()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        result = model(x)
    model.train()
    with lowtide.fit(model, optimizer):
        for _ in range(6):
            train(model, optimizer)
        graph.replay()
        model.eval()
        with torch.no_grad():
            assert torch.equal(result, model(x))
        model.train()
    del graph, result, waste


def test_moved_weights_stay_the_same_objects() -> None:
    # Weights of 4 MiB in holes between other tensors, which then go.
    fillers = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(200)]
    fillers = fillers[::2]
    model, optimizer = make(512)
    del fillers
    weight = model.layers[1].weight
    assert isinstance(weight, nn.Parameter)
    view = weight.detach()[3:7]
    kept = dict(model.state_dict())
    addresses = {name: value.data_ptr() for name, value in kept.items()}
    with lowtide.fit(model, optimizer):
        for _ in range(6):
            train(model, optimizer, 512, 512)
        moved = [name for name, value in kept.items() if value.data_ptr() != addresses[name]]
        assert moved, "nothing was in half-empty segments: the test is too tame"
        assert torch.equal(view, weight.detach()[3:7])
        assert view.untyped_storage()._cdata == weight.untyped_storage()._cdata
        for _ in range(3):
            train(model, optimizer, 512, 512)
        assert torch.equal(view, weight.detach()[3:7])
    train(model, optimizer, 512, 512)
    assert torch.equal(view, weight.detach()[3:7])


def test_leaving_frees_the_arena_with_its_last_tensor() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer):
        for _ in range(8):
            train(model, optimizer)
    arena = torch.cuda.memory_reserved()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    expected = gradient.cpu()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == arena  # a gradient still lies in it
    assert torch.equal(gradient.cpu(), expected)
    del gradient
    torch.cuda.empty_cache()
    stays = sum(p.nbytes for p in model.parameters()) * 3
    assert torch.cuda.memory_reserved() < stays + 100 * MIB < arena
    for _ in range(3):
        train(model, optimizer)  # and training goes on as ever


def test_an_exception_leaves_everything_as_it_was() -> None:
    model, optimizer = make()
    hooks = dict(model._forward_pre_hooks)

    def loop() -> None:
        with lowtide.fit(model, optimizer):
            for _ in range(6):
                train(model, optimizer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert dict(model._forward_pre_hooks) == hooks
    train(model, optimizer)


def test_out_of_memory_is_raised_and_survived() -> None:
    model, optimizer = make()
    total = torch.cuda.get_device_properties(0).total_memory
    with lowtide.fit(model, optimizer) as tide:
        for _ in range(8):
            train(model, optimizer)
        try:
            torch.cuda.set_per_process_memory_fraction(
                (torch.cuda.memory_reserved() + 64 * MIB) / total
            )
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
            with pytest.raises(torch.OutOfMemoryError):
                train(model, optimizer, 64 * 1024)
            optimizer.zero_grad()
            gc.collect()
            for _ in range(4):
                assert torch.isfinite(train(model, optimizer))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert tide._pool is not None


def test_an_arena_is_made_where_memory_is_short() -> None:
    """No room for the arena beside the gradients of the last step: they wait in main memory."""
    model, optimizer = make(2048)
    train(model, optimizer, 64, 2048)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, 64, 2048)
    need = torch.cuda.max_memory_allocated()
    gradients = sum(p.nbytes for p in model.parameters())
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((need + gradients // 2) / total)
        with lowtide.fit(model, optimizer) as tide:
            losses = [train(model, optimizer, 64, 2048) for _ in range(10)]
            assert tide._pool is not None
            assert tide._pool.summary().replayed >= 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del model, optimizer
    model, optimizer = make(2048)
    plain = [train(model, optimizer, 64, 2048) for _ in range(12)][2:]
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))


def test_a_larger_shape_does_not_need_both_arenas_at_once() -> None:
    def losses(pool: bool) -> tuple[list[torch.Tensor], int]:
        model, optimizer = make(2048)
        batches = [1024] * 6 + [4096] * 8
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if not pool:
            return [train(model, optimizer, batch, 2048) for batch in batches], 0
        with lowtide.fit(model, optimizer) as tide:
            found = [train(model, optimizer, batch, 2048) for batch in batches]
            assert tide._pool is not None
            assert tide._pool.summary().plans == 2
            allocated = torch.cuda.max_memory_allocated()
            assert torch.cuda.max_memory_reserved() <= 1.5 * allocated
        return found, torch.cuda.max_memory_reserved()

    plain, _ = losses(False)
    pool, _ = losses(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, pool, strict=True))


def test_one_fit_at_a_time() -> None:
    model, optimizer = make(256)
    with lowtide.fit(model, optimizer):
        train(model, optimizer, 64, 256)
        inner = lowtide.fit(model, optimizer)
        with pytest.warns(lowtide.LowtideWarning, match="another fit is under way"), inner:
            train(model, optimizer, 64, 256)
        train(model, optimizer, 64, 256)
    peak = 0
    for _ in range(2):  # but one after the other
        with lowtide.fit(model, optimizer) as tide:
            for _ in range(8):
                train(model, optimizer, 64, 256)
            assert tide._pool is not None
            assert tide._pool.summary().replayed >= 3
        assert torch.cuda.max_memory_allocated() >= peak
        peak = torch.cuda.max_memory_allocated()


def test_a_whole_step_is_captured_inside() -> None:
    """PyTorch's recipe: warm up on a side stream, then forward, backward and step in one graph."""
    torch.manual_seed(0)
    model = Net(256, dropout=0.0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 256, device="cuda")
    stream = torch.cuda.Stream()
    with lowtide.fit(model, optimizer):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                optimizer.zero_grad(set_to_none=True)
                F.mse_loss(model(x), x).backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
        graph.replay()
        before = loss.item()
        for _ in range(20):
            graph.replay()
        assert loss.item() < before
    optimizer.zero_grad(set_to_none=True)
    del graph, loss


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
    import subprocess
    import sys

    code = (
        "import torch, lowtide, warnings\n"
        "torch.ones(1).cuda()\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    with lowtide.fit() as tide: torch.ones(1).cuda()\n"
        "print(tide.summary(), len(seen))\n"
    )
    import os

    setting = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **setting}
    )
    assert "pool: off: PyTorch uses its cudaMallocAsync allocator" in done.stdout, done.stderr
    assert done.stdout.strip().endswith(" 1")


def _reads(
    queue: "torch.multiprocessing.Queue[object]", back: "torch.multiprocessing.Queue[object]"
) -> None:
    tensor = queue.get()
    assert isinstance(tensor, torch.Tensor)
    back.put(float(tensor.sum()))
    del tensor
    queue.get()


def test_tensors_of_the_arena_are_shared_with_other_processes() -> None:
    model, optimizer = make(256)
    context = torch.multiprocessing.get_context("spawn")
    queue, back = context.Queue(), context.Queue()
    with lowtide.fit(model, optimizer):
        for _ in range(8):
            kept = torch.full((3, MIB), 2.0, device="cuda")
            train(model, optimizer, 64, 256)
        process = context.Process(target=_reads, args=(queue, back))
        process.start()
        queue.put(kept[1])
        assert back.get(timeout=120) == 2.0 * MIB
        queue.put(None)
        process.join(60)
    del kept
    gc.collect()
