"""Where nothing is worth moving and there is no budget to hold, nobody is told of anything."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moving import Net, everything, make, modes, same, train

import lowtide
from lowtide._analyze.load import find_peak
from lowtide._ir import Machine, Plan, Trace
from lowtide._runtime import plans
from lowtide._runtime.swap import driver as driving
from lowtide._runtime.swap.driver import Driver
from lowtide._runtime.swap.modes import Mode
from lowtide._trace.saves import Hooks

pytestmark = pytest.mark.usefixtures("small")

REST = 5


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Net, torch.optim.Optimizer]]:
    """Four steps of a loop, the last of which nobody has watched."""

    def nothing(trace: Trace, *_: object, **__: object) -> Plan:
        return Plan((), 1, 1.0, 1, 1.0, "keep", "test")

    monkeypatch.setattr(plans, "autoswap", nothing)
    monkeypatch.setattr(driving, "_REST", REST)
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget="free") as tide:
        train(net, optimizer, 5)
        assert modes(tide) == [Mode.CRUDE] * 2 + [Mode.TRACED, Mode.PLANNED, Mode.PLAIN]
        assert hooks() is None
        yield net, optimizer
    assert hooks() is None


def hooks() -> Hooks | None:
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def _driver() -> Driver:
    tide = lowtide._runtime.fit.Tide._current
    assert tide is not None
    assert tide._budgeted is not None
    return tide._budgeted._driver


def test_once_in_a_while_a_step_is_watched(
    at_rest: tuple[Net, torch.optim.Optimizer],
) -> None:
    net, optimizer = at_rest
    train(net, optimizer, REST - 1)
    assert hooks() is not None, "the next one is"
    train(net, optimizer, REST)
    found = list(_driver().modes)
    assert found[4:] == [Mode.PLAIN] * REST + [Mode.PLANNED] + [Mode.PLAIN] * (REST - 1)
    plain, trained = make()
    train(plain, trained, 5 + REST - 1 + REST)
    assert same(net, plain)


def test_steps_that_have_become_others_are_planned_anew(
    at_rest: tuple[Net, torch.optim.Optimizer],
) -> None:
    net, optimizer = at_rest
    train(net, optimizer, 2 * REST + 8, batch=64)
    assert Mode.TRACED in list(_driver().modes)[5:]
    assert len(_driver().following.scripts) == 2
    assert list(_driver().modes)[-1] is Mode.PLAIN


def test_hooks_of_the_program_are_left_alone(
    at_rest: tuple[Net, torch.optim.Optimizer],
) -> None:
    net, optimizer = at_rest
    with torch.autograd.graph.save_on_cpu():
        own = hooks()
        train(net, optimizer, REST + 3)
        assert hooks() == own
    assert hooks() is None
    train(net, optimizer, 1)
    assert hooks() is not None, "as soon as these are gone"


def test_state_that_is_replaced_meanwhile_is_kept_by_nobody(
    at_rest: tuple[Net, torch.optim.Optimizer],
) -> None:
    net, optimizer = at_rest
    state = optimizer.state[next(net.parameters())]
    gone = weakref.ref(state["exp_avg"].untyped_storage())
    state["exp_avg"] = state["exp_avg"].clone()
    assert gone() is None
    train(net, optimizer, 1)


def test_where_steps_of_another_kind_swap_nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(trace: Trace, machine: Machine, **asked: Any) -> Plan:
        if find_peak(trace).bytes < 1 << 20:
            return Plan((), 1, 1.0, 1, 1.0, "keep", "test")
        return everything(trace, machine, **asked)

    monkeypatch.setattr(plans, "autoswap", some)
    net, optimizer = make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget="free") as tide:
        for batch in (1024, 16) * 8:
            train(net, optimizer, 1, batch)
        kinds = {bool(script.plan.swaps) for script in _driver().following.scripts}
        assert kinds == {False, True}
        assert Mode.PLAIN not in modes(tide)[-6:]
        assert _driver().optimizers.cells


def test_another_thread_does_not_wake_it(at_rest: tuple[Net, torch.optim.Optimizer]) -> None:
    """Hooks are a thread's: they would stay there, and be missing here."""
    net, optimizer = at_rest
    thread = threading.Thread(target=train, args=(net, optimizer, 2 * REST))
    thread.start()
    thread.join()
    assert hooks() is None
    train(net, optimizer, 1)
    assert hooks() is not None


def test_where_the_program_allows_no_hooks_it_rests_on(
    at_rest: tuple[Net, torch.optim.Optimizer],
) -> None:
    net, optimizer = at_rest
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        train(net, optimizer, 2 * REST)
    train(net, optimizer, 1)
    assert hooks() is not None
