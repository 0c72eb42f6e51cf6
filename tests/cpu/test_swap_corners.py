"""Swapping where programs do unusual things: each was once a fault."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moving import Net, make, modes, same, states_away, train
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide._runtime import budget as budgeting
from lowtide._runtime.fit import Tide
from lowtide._runtime.swap.cell import Cell, State
from lowtide._runtime.swap.file_tier import FileTier
from lowtide._runtime.swap.modes import Mode
from lowtide._runtime.swap.pieces import _ONE_BY_ONE
from lowtide._runtime.swap.states import StateCell

pytestmark = pytest.mark.usefixtures("small", "moved")

Loop = Callable[[Net, torch.optim.Optimizer], None]


def both(loop: Loop, kind: str = "adamw") -> Tide:
    """The loop, plain and under a budget: the same weights."""
    plain, optimizer = make(kind)
    torch.manual_seed(1)
    loop(plain, optimizer)
    net, optimizer = make(kind)
    torch.manual_seed(1)
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        loop(net, optimizer)
    assert same(net, plain)
    assert torch.ones(2).add(1).sum() == 4  # PyTorch itself is in order
    assert not torch._C._len_torch_dispatch_stack()
    return tide


def test_evaluation_in_inference_mode() -> None:
    def loop(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(8):
            train(net, optimizer, 1)
            net.eval()
            with torch.inference_mode():
                net(torch.randn(8, 64))
            net.train()

    both(loop)


def test_optimizers_that_step_inside_backward() -> None:
    def loop(net: Net, optimizer: torch.optim.Optimizer) -> None:
        own = {p: torch.optim.AdamW([p], lr=0.01) for p in net.parameters()}

        def step(parameter: torch.Tensor) -> None:
            own[parameter].step()  # type: ignore[index]
            own[parameter].zero_grad()  # type: ignore[index]

        handles = [p.register_post_accumulate_grad_hook(step) for p in net.parameters()]
        for _ in range(6):
            net(torch.randn(32, 64)).square().mean().backward()
        for handle in handles:
            handle.remove()
        train(net, optimizer, 6)

    plain, optimizer = make()
    torch.manual_seed(1)
    loop(plain, optimizer)
    net, optimizer = make()
    torch.manual_seed(1)
    with lowtide.fit(policy="autoswap", budget=0.5):
        loop(net, optimizer)
    assert same(net, plain)
    assert not torch._C._len_torch_dispatch_stack()


def test_a_mode_of_the_program_counts_all_its_ops() -> None:
    counts = []

    def loop(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for i in range(6):
            train(net, optimizer, i)
            with FlopCounterMode(display=False) as counter:
                train(net, optimizer, 1)
                net(torch.randn(32, 64))
            counts.append(counter.get_total_flops())

    both(loop)
    assert len(set(counts)) == 1


def test_a_closure_finds_the_state_it_updates() -> None:
    def loop(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for i in range(24):
            batch = torch.randn(32 if (i * 7) % 5 else 24, 64)

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = net(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]

    both(loop)


def test_what_is_written_into_state_that_is_away_is_kept() -> None:
    written: list[int] = []

    def loop(net: Net, optimizer: torch.optim.Optimizer) -> None:
        def write(_module: nn.Module, _args: object) -> None:
            if len(written) % 2:
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
            written.append(1)

        handle = net.layers[4].register_forward_pre_hook(write)
        train(net, optimizer, 10)
        handle.remove()

    both(loop)


def test_hooks_after_a_step_see_the_whole_optimizer() -> None:
    def loop(net: Net, optimizer: torch.optim.Optimizer) -> None:
        handle = optimizer.register_step_post_hook(lambda own, *_: own.zero_grad())
        for _ in range(8):
            net(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
        handle.remove()

    assert Mode.PLANNED in modes(both(loop))


def test_a_step_that_raises_leaves_the_optimizer_whole() -> None:
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        train(net, optimizer, 5)
        net(torch.randn(32, 64)).square().mean().backward()
        last = [*net.parameters()][-1]
        optimizer.state[last]["exp_avg"] = torch.zeros(3)
        with pytest.raises(RuntimeError):
            optimizer.step()
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 10
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", _ONE_BY_ONE, ids=lambda kind: kind.__name__)
def test_every_optimizer_that_is_parted_is_the_same_in_pieces(kind: Any) -> None:
    def run(budget: float | None) -> Net:
        net, _ = make()
        optimizer = kind(net.parameters(), lr=0.01)
        torch.manual_seed(1)
        if budget is None:
            train(net, optimizer, 7)
        else:
            with lowtide.fit(net, optimizer, policy="autoswap", budget=budget) as tide:
                train(net, optimizer, 7)
            assert modes(tide)[-1] is Mode.PLANNED
        return net

    assert same(run(0.5), run(None))


def test_state_that_cannot_move_stays() -> None:
    def kept_view(net: Net, optimizer: torch.optim.Optimizer) -> None:
        train(net, optimizer, 1)
        views = [state["exp_avg"].view(-1) for state in optimizer.state.values()]
        train(net, optimizer, 7)
        assert len(views) == 10

    both(kept_view)
    net, _ = make()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(32, 64)).square().mean()
        loss.backward()
        return loss

    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        for _ in range(6):
            optimizer.step(closure)


def test_memory_that_other_processes_share_stays() -> None:
    net, optimizer = make()
    x = torch.randn(32, 64).share_memory_()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        for _ in range(6):
            (net(x.clone().share_memory_()) * x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_sparse_tensors_and_empty_steps() -> None:
    net, optimizer = make()
    sparse = torch.eye(32).to_sparse()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        for _ in range(4):
            optimizer.step()  # no gradient yet
        for _ in range(6):
            torch.sparse.mm(sparse, net(torch.randn(32, 64))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_nothing_stays_on_optimizers_and_nothing_of_them_here() -> None:
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        train(net, optimizer, 6)
    assert not optimizer._optimizer_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    assert tide._model is None
    assert tide._optimizers == []


def test_a_leaf_that_got_other_data_gives_what_it_has_now() -> None:
    def gradient(net: Net) -> torch.Tensor:
        weight = torch.ones(64, 64, requires_grad=True)
        x = torch.ones(4, 64)
        y = x @ weight
        x.data = torch.full((4, 64), 3.0)
        y.sum().backward()
        assert weight.grad is not None
        return weight.grad

    net, optimizer = make()
    expected = gradient(net)
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        train(net, optimizer, 4)
        assert torch.equal(gradient(net), expected)


def test_an_interrupt_in_a_wait_loses_no_copy() -> None:
    tier = FileTier()
    content = torch.arange(1024.0)
    tensor = content.clone()
    cell = Cell(tensor.untyped_storage(), tier)
    assert cell.leave()
    copy = cell._copy
    assert copy is not None

    class Interrupted:
        def __init__(self) -> None:
            self.waits = 0

        def wait(self) -> None:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            assert copy is not None
            copy.wait()

    cell._copy = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        cell.release()
    assert cell.state is State.LEAVING
    assert cell.release()
    assert tensor.untyped_storage().nbytes() == 0
    cell.have()
    assert torch.equal(tensor, content)
    cell.drop()
    tier.close()


def test_handles_that_die_in_a_collection_anywhere_block_nobody() -> None:
    """Graphs in cycles: their end comes whenever the collector runs, in copying threads, too."""
    net, optimizer = make()
    done = threading.Event()

    def work() -> None:
        with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
            for _ in range(12):
                train(net, optimizer, 1)
                loop: list[Any] = [net(torch.randn(32, 64)).square().mean()]
                loop.append(loop)
                del loop
        done.set()

    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert done.wait(60), "it hangs"
    finally:
        gc.set_threshold(*before)


def test_state_that_the_optimizer_replaces_is_not_kept() -> None:
    def loop(net: Net, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(10):
            train(net, optimizer, 1)
            for state in optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].clone()

    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        loop(net, optimizer)
        assert len(states_away(tide)) <= 10
        assert tide._budgeted is not None
        cells = tide._budgeted._driver.optimizers.cells
        assert sum(cell.state is State.GONE for cell in cells) == 10  # the first averages
    both(loop)


def test_who_looks_at_state_that_is_away_keeps_its_bytes() -> None:
    tier = FileTier()
    content = torch.arange(1024.0)
    tensor = content.clone()
    cell = StateCell(tensor, tier, 0, 0)
    assert cell.leave()
    assert cell.release()
    alias = tensor.view(-1)
    cell.have()
    other = Cell(torch.zeros(1024).untyped_storage(), tier)
    assert other.leave()
    assert other.release()
    assert torch.equal(alias, content)
    assert torch.equal(tensor, content)
    del alias
    other.drop()
    assert cell.leave()
    assert cell.release()
    cell.have()
    assert not tier._ranges.taken
    cell.drop()
    tier.close()


def test_an_orphan_goes_without_coming_back() -> None:
    tier = FileTier()
    tensor = torch.arange(1024.0)
    cell = StateCell(tensor, tier, 0, 0)
    assert cell.leave()
    assert cell.release()
    del tensor
    storage = cell.storage
    cell.drop()
    assert storage.nbytes() == 0
    tier.close()


def test_a_plan_counts_on_no_more_than_the_tier_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def pinned(device: torch.device, limit: int | None) -> FileTier:
        limits.append(limit)
        return FileTier(None, limit)

    monkeypatch.setattr(budgeting, "PinnedTier", pinned)
    monkeypatch.setattr(budgeting, "available_bytes", lambda: 1 << 20)
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5, pool=False) as tide:
        budgeted = tide._budgeted
        assert budgeted is not None
        budgeted._device = torch.device("cuda", 0)
        assert budgeted._tier(budgeted._device) is not None
        assert limits == [1 << 19] == [budgeted._host_budget]
