"""`lowtide.fit` under a budget, on the CPU: main memory and a file below it."""

import copy
import ctypes
import errno
import gc
import re
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from moving import Net, everything, make, modes, same, states_away, swaps, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO

import lowtide
from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.fit import Tide
from lowtide._runtime.swap import file_tier
from lowtide._runtime.swap.file_tier import _write
from lowtide._runtime.swap.modes import Mode

pytestmark = pytest.mark.usefixtures("small")

NOTHING_TO_MOVE = (
    *("checkpointing", "reentrant_checkpointing"),  # the scripts have hooks of their own
    "sparse_embedding",  # nothing is idle that is worth a file
)


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_trains_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "autoswap", everything)

    def train(budget: float | None) -> tuple[list[torch.Tensor], Tide | None]:
        torch.manual_seed(0)
        loop = ZOO[name]()
        torch.manual_seed(1)
        if budget is None:
            for _ in range(8):
                loop.step()
            return loop.state(), None
        with lowtide.fit(policy="autoswap", budget=budget) as tide:
            for _ in range(8):
                loop.step()
        return loop.state(), tide

    plain, _ = train(None)
    ours, tide = train(0.5)
    assert tide is not None
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)
    if name in ("manual_update", "never_backward"):
        return  # no optimizer steps, so no step is seen
    assert Mode.PLANNED in modes(tide), tide.summary()
    assert swaps(tide) or name in NOTHING_TO_MOVE, tide.summary()


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("kind", ["adamw", "fused", "foreach", "momentum", "groups"])
def test_optimizer_state_leaves_and_comes_back(kind: str) -> None:
    plain, optimizer = make(kind)
    schedule_of = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    torch.manual_seed(1)
    for _ in range(10):
        train(plain, optimizer, 1)
        schedule_of.step()
    net, optimizer = make(kind)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    schedule_of = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    torch.manual_seed(1)
    seen = []

    def look(_module: nn.Module, _args: object) -> None:
        seen.append(len(states_away(tide)))

    handle = net.layers[4].register_forward_pre_hook(look)
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        for _ in range(10):
            train(net, optimizer, 1)
            schedule_of.step()
    handle.remove()
    assert same(net, plain)
    assert max(seen) >= 4, seen
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    assert all(
        tensor.untyped_storage().nbytes() >= tensor.nbytes
        for state in optimizer.state.values()
        for tensor in state.values()
    )


@pytest.mark.usefixtures("moved")
def test_state_can_be_looked_at_saved_and_loaded_while_it_is_away() -> None:
    def run(budget: float | None) -> tuple[Net, list[torch.Tensor]]:
        net, optimizer = make()
        torch.manual_seed(1)
        found: list[torch.Tensor] = []

        def look(_module: nn.Module, _args: object) -> None:
            if budget is not None and found_at == 5:
                assert states_away(tide)
            if found_at == 5:
                found.extend(
                    state["exp_avg"].clone() for state in optimizer.state.values()
                )  # as it lies below

        handle = net.layers[4].register_forward_pre_hook(look)
        with ExitStack() as stack:
            if budget is not None:
                tide = stack.enter_context(
                    lowtide.fit(net, optimizer, policy="autoswap", budget=budget)
                )
            for found_at in range(12):
                train(net, optimizer, 1)
                if found_at == 6:
                    kept = copy.deepcopy(optimizer.state_dict())
                    assert budget is None or not states_away(tide)
                    found += [
                        state[name]
                        for state in kept["state"].values()
                        for name in ("exp_avg", "exp_avg_sq")
                    ]
                if found_at == 8:
                    optimizer.load_state_dict(kept)
        handle.remove()
        return net, found

    plain, expected = run(None)
    ours, found = run(0.5)
    assert same(ours, plain)
    assert len(found) == len(expected) > 20
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("moved")
def test_parameters_may_be_added_and_optimizers_made_anew() -> None:
    def run(net: Net, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        for i in range(24):
            if i == 8:
                extra = nn.Linear(64, 64)
                net.layers.append(extra)
                optimizer.add_param_group({"params": [*extra.parameters()], "lr": 0.03})
            if i >= 16:
                state = optimizer.state_dict()
                groups = [{**group, "params": group["params"]} for group in optimizer.param_groups]
                optimizer = torch.optim.AdamW(groups, lr=0.01)
                optimizer.load_state_dict(state)
            train(net, optimizer, 1)

    plain, optimizer = make()
    run(plain, optimizer)
    net, optimizer = make()
    with lowtide.fit(net, policy="autoswap", budget=0.5) as tide:
        run(net, optimizer)
    assert same(net, plain)
    assert modes(tide)[7] is Mode.PLANNED
    assert modes(tide)[15] is Mode.PLANNED, tide.summary()


@pytest.mark.usefixtures("moved")
def test_shapes_in_turn_have_a_plan_each() -> None:
    def run(net: Net, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        for i in range(24):
            train(net, optimizer, 1, 32 if i % 3 else 24)

    plain, optimizer = make()
    run(plain, optimizer)
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        run(net, optimizer)
    assert same(net, plain)
    assert tide._budgeted is not None
    assert len(tide._budgeted._driver.following.scripts) == 2
    assert modes(tide)[-6:] == [Mode.PLANNED] * 6, tide.summary()


@pytest.mark.usefixtures("moved")
def test_a_step_that_departs_loses_nothing() -> None:
    """Evaluations, a backward done twice, a graph thrown away, an exception in the forward."""

    def run(net: Net, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(1)
        for i in range(16):
            if i == 6:
                with torch.no_grad():
                    net(torch.randn(8, 64))
            if i == 8:
                net(torch.randn(8, 64)).sum()  # never asked for
            if i == 10:
                loss = net(torch.randn(8, 64)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
            if i == 12:
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    net.layers[1](net.layers[0](torch.randn(8, 64))[:, :3])
            train(net, optimizer, 1)

    plain, optimizer = make()
    run(plain, optimizer)
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        run(net, optimizer)
    assert same(net, plain)
    assert Mode.DEPARTED in modes(tide)
    assert modes(tide)[5] is Mode.PLANNED


@pytest.mark.usefixtures("moved")
def test_a_saved_tensor_modified_in_place_is_told_as_ever() -> None:
    def broken(net: Net) -> str:
        x = torch.randn(8, 64, requires_grad=True)
        y = net.layers[0](x).exp()
        y.add_(1)
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
        return str(caught.value)

    net, optimizer = make()
    expected = broken(net)
    assert "modified by an inplace operation" in expected
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        train(net, optimizer, 4)
        assert broken(net) == expected


@pytest.mark.usefixtures("moved")
def test_what_the_program_keeps_this_time_stays() -> None:
    """The plan moves an activation; in some steps somebody else refers to it, and reads it."""
    net, optimizer = make()
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def keep(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        if len(modes(tide)) % 2:
            kept.append(output)
            copies.append(output.detach().clone())

    handles = [layer.register_forward_hook(keep) for layer in net.layers]
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5) as tide:
        for _ in range(10):
            loss = net(torch.randn(32, 64)).square().mean()
            assert all(map(torch.equal, kept, copies))
            loss.backward()
            assert all(map(torch.equal, kept, copies))
            optimizer.step()
            optimizer.zero_grad()
            kept.clear()
            copies.clear()
    for handle in handles:
        handle.remove()
    assert modes(tide)[-1] is Mode.PLANNED


class _Meter(TorchDispatchMode):
    """The most bytes that the C library has given out, looked at after every op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, given_out())
        return result


class _Holding(nn.Module):
    """Its variables refer to activations for longer than these are used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        bent = nn.functional.gelu(wide)
        result: torch.Tensor = x + self.down(bent).sigmoid().square()
        return result


class _Info(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def given_out() -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Info
    numbers = library.mallinfo2().numbers
    return int(numbers[4] + numbers[7])  # mapped, and in the heap


@pytest.mark.parametrize("budget", [0.8, 0.6, 0.45])
def test_the_peak_is_the_planned_one(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeting, "_SMALLEST", 1 << 16)
    torch.manual_seed(0)
    net = nn.Sequential(*(_Holding() for _ in range(6)))
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.randn(8192, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=budget) as tide:
        for _ in range(5):
            step()
        gc.collect()
        stays = 3 * sum(p.nbytes for p in net.parameters())  # weights and state, on the device
        away = sum(cell.bytes for cell in states_away(tide))
        before = given_out()
        with _Meter() as meter:
            step()
        assert tide._budgeted is not None
        plan = tide._budgeted._driver.following.scripts[0].plan
        assert modes(tide)[-1] is Mode.PLANNED
    measured = meter.peak - before + stays - away
    assert plan.peak_bytes <= budget * plan.plain_peak_bytes
    assert abs(measured - plan.peak_bytes) < 0.02 * plan.peak_bytes + (1 << 20)


@pytest.mark.usefixtures("moved")
def test_a_graph_that_outlives_the_block_still_has_what_it_saved() -> None:
    net, optimizer = make()
    torch.manual_seed(1)
    x = torch.randn(32, 64)
    net(x).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        before = copy.deepcopy(net.state_dict())
        train(net, optimizer, 4)
        net.load_state_dict(before)
        loss = net(x).square().mean()
    net.zero_grad()
    loss.backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("moved")
def test_a_full_disk_keeps_everything_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, optimizer = make()
    torch.manual_seed(1)
    train(plain, optimizer, 10)
    net, optimizer = make()
    torch.manual_seed(1)
    written = []

    def write(file: int, memory: memoryview, offset: int) -> None:
        written.append(len(memory))
        if len(written) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        _write(file, memory, offset)

    monkeypatch.setattr(file_tier, "_write", write)
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5):
        train(net, optimizer, 10)
    assert len(written) > 12
    assert same(net, plain)


@pytest.mark.usefixtures("moved")
def test_no_more_than_the_host_budget_is_taken() -> None:
    plain, optimizer = make()
    torch.manual_seed(1)
    train(plain, optimizer, 8)
    net, optimizer = make()
    torch.manual_seed(1)
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.5, host_budget="64KiB") as tide:
        train(net, optimizer, 8)
        assert tide._budgeted is not None
        assert 0 < tide._budgeted.summary().below_bytes <= 64 << 10
    assert same(net, plain)


def test_a_budget_that_cannot_be_met_is_refused_with_the_smallest_that_can() -> None:
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget="1KiB"):
        refused = r"the budget is 1\.00 KiB .* cannot go below"
        with pytest.raises(lowtide.LowtideError, match=refused):
            train(net, optimizer, 4)
        train(net, optimizer, 2)


def test_bad_arguments_are_one_line() -> None:
    net, optimizer = make()
    with pytest.raises(lowtide.BadInput, match="no policy is called 'magic'"):
        lowtide.fit(net, optimizer, budget=0.5, policy="magic")
    with (
        pytest.raises(lowtide.BadInput, match="'much' is no budget"),
        lowtide.fit(net, optimizer, policy="autoswap", budget="much"),
    ):
        pass
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with (
        hooks,
        pytest.raises(lowtide.BadInput, match="hooks on saved tensors are there already"),
        lowtide.fit(net, optimizer, policy="autoswap", budget=0.5),
    ):
        pass


def test_a_roomy_budget_moves_nothing() -> None:
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget="1GiB") as tide:
        train(net, optimizer, 4)
    assert not swaps(tide)
    assert re.search(r"2 crude, 1 traced, 1 planned", tide.summary())
    assert tide._budgeted is not None
    assert tide._budgeted._model is None  # whoever keeps the summary keeps no model


def test_steps_that_take_more_than_planned_are_planned_anew_for_less() -> None:
    """As where they are laid out: from then on they hold less, by as much as was missing."""
    plain, trained = make()
    train(plain, trained, 16, 1024)
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.8) as tide:
        train(net, optimizer, 6, 1024)
        assert tide._budgeted is not None
        following = tide._budgeted._driver.following
        (old,) = following.scripts
        less = old.plan.plain_peak_bytes // 10
        assert not tide._budgeted.shrink(less, 0.9), "steps would take longer"
        assert tide._budgeted.shrink(less)
        (new,) = following.scripts
        assert new.plan.peak_bytes <= old.plan.peak_bytes - less
        assert new.plan.swaps and old.plan.swaps
        train(net, optimizer, 10, 1024)
        assert modes(tide)[-8:] == [Mode.PLANNED] * 8
        assert following.script is new
        assert not tide._budgeted.shrink(old.plan.peak_bytes), "nothing could be held"
        assert all(tide._budgeted.shrink(1) for _ in range(5))
        assert not tide._budgeted.shrink(1), "it was tried enough"
    assert same(net, plain)


def test_where_shapes_take_turns_the_one_that_took_more_is_planned_anew() -> None:
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.8) as tide:
        for batch in (1024, 512) * 12:
            train(net, optimizer, 1, batch)
        assert tide._budgeted is not None
        following = tide._budgeted._driver.following
        small, large = sorted(following.scripts, key=lambda script: script.plan.plain_peak_bytes)
        assert following.script is large, "the next step is a large one"
        if not small.plan.swaps:  # within the budget of the large ones it has to keep nothing away
            assert not tide._budgeted.shrink(small.plan.peak_bytes)
        train(net, optimizer, 1, 1024)
        assert tide._budgeted.shrink(large.plan.plain_peak_bytes // 10)
        assert small in following.scripts
        assert large not in following.scripts
