"""The pool inside PyTorch: streams, graphs, moved weights, short memory, other processes."""

import gc

import pytest
import torch
from nets import MIB, Net, make, train
from torch import nn
from torch.nn import functional as F

import lowtide


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
    torch._C._cuda_clearCublasWorkspaces()  # left alone as long as the graph was there


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


def test_leaving_frees_the_arena_and_keeps_what_lay_in_it() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer) as tide:
        for _ in range(8):
            train(model, optimizer)
        assert tide._pool is not None
        arena = tide._pool.summary().arena_bytes
    gradient = next(model.parameters()).grad
    assert gradient is not None
    expected = gradient.cpu()
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    stays = sum(p.nbytes for p in model.parameters()) * 3
    assert arena > 200 * MIB
    assert torch.cuda.memory_reserved() < stays + 100 * MIB
    torch.ones(arena, dtype=torch.uint8, device="cuda")  # what was freed is written to
    assert torch.equal(gradient.cpu(), expected)
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


def test_arenas_may_go_and_come_again() -> None:
    """With gradients and weights in them and in homes: they wait elsewhere meanwhile."""
    trained = make()
    torch.manual_seed(1)
    plain = [train(*trained).item() for _ in range(20)]
    trained = make()
    torch.manual_seed(1)
    with lowtide.fit(*trained) as tide:
        losses = [train(*trained).item() for _ in range(10)]
        assert tide._pool is not None
        assert tide._place is not None
        assert tide._place.core.count(0).arena_bytes > 0
        tide._pool.mark(anew=True)
        assert tide._place.core.count(0).arena_bytes == 0
        losses += [train(*trained).item() for _ in range(10)]
        assert tide._place.core.count(0).arena_bytes > 0
    assert losses == plain


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
