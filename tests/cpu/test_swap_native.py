"""Swapping by a plan: what it leaves alone is kept natively, and Python sees none of it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from moving import Net, make, modes, same, train

import lowtide
from lowtide._runtime.fit import Tide
from lowtide._runtime.swap.driver import Driver
from lowtide._runtime.swap.modes import Mode
from lowtide._runtime.swap.native_saves import NativeSaves

pytestmark = pytest.mark.usefixtures("small")

BATCH = 1024


@contextmanager
def by_plan(net: Net, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Driver, NativeSaves]]:
    """In the middle of a run whose steps go by a plan that moves some of what they save."""
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.7) as tide:
        train(net, optimizer, 6, BATCH)
        driver = _driver(tide)
        assert modes(tide)[-2:] == [Mode.PLANNED] * 2
        native = driver._natively._native
        assert native is not None
        yield driver, native


def _driver(tide: Tide) -> Driver:
    assert tide._budgeted is not None
    return tide._budgeted._driver


def plainly(steps: int, batches: list[int] | None = None) -> Net:
    net, optimizer = make()
    for batch in batches or [BATCH] * steps:
        train(net, optimizer, 1, batch)
    return net


def test_python_sees_only_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [0]

    def packed(driver: Driver, handle: object) -> None:
        seen[0] += 1
        original(driver, handle)  # type: ignore[arg-type]

    original = Driver.packed
    net, optimizer = make()
    with by_plan(net, optimizer) as (driver, native):
        script = driver.following.script
        assert script is not None
        saves = sum(code >= 0 for code in script.codes)
        assert script.wanted and script.plain and len(script.plain) < saves
        monkeypatch.setattr(Driver, "packed", packed)
        train(net, optimizer, 3, BATCH)
        assert seen[0] == 3 * (saves - len(script.plain))
        assert list(driver.modes)[-3:] == [Mode.PLANNED] * 3
        loss = net(torch.randn(BATCH, 64)).square().mean()
        assert native.kept() == len(script.plain)
        loss.backward()
        del loss
        assert native.kept() == 0
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    assert same(net, plainly(10))


def test_a_step_that_departs_can_have_all_of_it_leave() -> None:
    net, optimizer = make()
    with by_plan(net, optimizer) as (driver, native):
        for batch in (BATCH, 2 * BATCH, BATCH):
            train(net, optimizer, 1, batch)
        assert list(driver.modes)[-3:-1] == [Mode.PLANNED, Mode.DEPARTED]
        assert native.kept() == 0
    torch.manual_seed(0)
    assert same(net, plainly(9, [BATCH] * 7 + [2 * BATCH, BATCH]))


def test_what_was_kept_before_a_step_departs_may_leave() -> None:
    net, optimizer = make()
    with by_plan(net, optimizer) as (driver, native):
        made = net(torch.randn(BATCH, 64))
        kept = native.kept()
        assert kept > 0
        loss = made.square().sigmoid().mean()  # no planned step goes on like that
        del made
        assert native.kept() == 0
        assert driver._saved is not None
        large = [cell for cell in driver._saved.cells() if cell.bytes >= BATCH * 64 * 4]
        assert sum(cell.handles for cell in large) >= kept
        driver._relieve()  # unless memory was short at once
        assert any(not cell.holds() for cell in large)
        loss.backward()
        optimizer.step()
    other, optimizer = make()
    train(other, optimizer, 6, BATCH)
    other(torch.randn(BATCH, 64)).square().sigmoid().mean().backward()
    optimizer.step()
    assert same(net, other)


def test_parameters_that_are_added_end_the_plan_and_nothing_else() -> None:
    def use(*, fitted: bool) -> Net:
        net, optimizer = make()
        how = lowtide.fit(net, optimizer, policy="autoswap", budget=0.7)
        with how if fitted else nullcontext() as tide:
            train(net, optimizer, 6, BATCH)
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]})
            train(net, optimizer, 6, BATCH)
            if tide is not None:
                assert modes(tide)[-1] is Mode.PLANNED and Mode.DEPARTED in modes(tide)
        return net

    assert same(use(fitted=True), use(fitted=False))


def test_evaluations_between_steps_are_no_steps_to_plan() -> None:
    """A share of what one of them holds would be no budget at all."""
    net, optimizer = make()
    with by_plan(net, optimizer) as (driver, _):
        for _ in range(5):
            net.eval()
            with torch.no_grad():
                net(torch.randn(BATCH, 64))
            net.train()
        train(net, optimizer, 2, BATCH)
        assert driver.modes[-1] is Mode.PLANNED


def test_what_is_kept_outlives_the_block() -> None:
    net, optimizer = make()
    with by_plan(net, optimizer) as (_, native):
        loss = net(torch.randn(BATCH, 64)).square().mean()
        assert native.kept() > 0
    assert native.kept() == 0
    loss.backward()
    optimizer.step()
    torch.manual_seed(0)
    assert same(net, plainly(7))


def test_what_is_modified_in_place_is_told_as_ever() -> None:
    net, optimizer = make()
    kept: list[torch.Tensor] = []
    net.layers[1].register_forward_hook(lambda _module, given, _made: kept.append(given[0]))
    with by_plan(net, optimizer) as (_, native):
        kept.clear()
        loss = net(torch.randn(BATCH, 64)).square().mean()
        assert native.kept() > 0
        kept[0].detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        kept.clear()
