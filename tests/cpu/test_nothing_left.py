"""After tracing everything is as before, however it ended."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import _get_current_dispatch_mode
from zoo import ZOO

import lowtide
from lowtide import NoStep


def global_state() -> list[object]:
    """Everything that tracing installs somewhere."""
    return [
        _get_current_dispatch_mode(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        dict(nn.modules.module._global_forward_hooks),
        dict(nn.modules.module._global_forward_pre_hooks),
        dict(nn.modules.module._global_forward_hooks_always_called),
        dict(optimizer_module._global_optimizer_pre_hooks),
        dict(optimizer_module._global_optimizer_post_hooks),
        torch.autograd.graph.disable_saved_tensors_hooks,
        gc.isenabled(),
        threading.active_count(),
        torch.is_grad_enabled(),
    ]


class Boom(Exception):
    pass


class Bomb(nn.Module):
    """Raises in the middle of the k-th forward."""

    def __init__(self, when: int, where: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.countdown = when
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.countdown -= 1
        h: torch.Tensor = self.fc1(x)
        if self.countdown == 0 and self.where == "forward":
            raise Boom
        if self.countdown == 0 and self.where == "backward":
            h.register_hook(self._explode)
        out: torch.Tensor = self.fc2(h)
        return out

    def _explode(self, grad: torch.Tensor) -> None:
        raise Boom


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("when", [1, 3, 4])
def test_an_exception_undoes_everything_and_comes_through(when: int, where: str) -> None:
    model = Bomb(when, where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    before = global_state()
    attributes = set(vars(model)), set(vars(model.fc1))
    with pytest.raises(Boom):
        lowtide.trace(step)
    assert global_state() == before
    assert (set(vars(model)), set(vars(model.fc1))) == attributes
    step()  # training goes on
    assert lowtide.trace(step).ops[0].module == "Bomb.fc1"


@pytest.mark.parametrize("name", ["gpt", "resnet", "never_backward", "gan"])
def test_nothing_is_installed_and_no_tensor_is_held(name: str) -> None:
    loop = ZOO[name]()
    loop.step()
    before = global_state()
    trace = lowtide.trace(loop.step)
    assert global_state() == before
    watched = [weakref.ref(tensor.untyped_storage()) for tensor in loop.state()]
    del loop
    gc.collect()
    assert all(ref() is None for ref in watched)
    assert trace.ops


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        lowtide.trace(ZOO["dropout"]().step)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_graph_that_outlives_the_trace_still_works() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept[:] = [layer(x).exp().sum()]

    lowtide.trace(step)
    kept[0].backward()
    found = layer.weight.grad
    layer.weight.grad = None
    layer(x).exp().sum().backward()
    assert found is not None and layer.weight.grad is not None
    assert torch.equal(found, layer.weight.grad)


def _modify_saved(where: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    def step() -> None:
        w = torch.ones(3, requires_grad=True)
        y = w * 2
        z = y.exp() * y
        with torch.no_grad():
            where(y)
        z.sum().backward()

    return step


def test_modifying_a_saved_tensor_in_place_still_raises() -> None:
    def plain_message(step: Callable[[], object]) -> str:
        with pytest.raises(RuntimeError) as caught:
            step()
        return str(caught.value)

    step = _modify_saved(lambda y: y.add_(1))
    plain = plain_message(step)
    traced = plain_message(lambda: lowtide.trace(step, warmup=0))
    start = "one of the variables needed for gradient computation has been modified by an inplace"
    assert plain.startswith(start)
    assert traced.startswith(start)
    assert "[torch.FloatTensor [3]]" in traced
    assert "is at version 1; expected version 0 instead." in plain
    assert "is at version 1; expected version 0 instead." in traced


def test_backward_twice_still_raises() -> None:
    def step() -> None:
        y = torch.ones(3, requires_grad=True).exp().sum()
        y.backward()
        y.backward()

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        lowtide.trace(step, warmup=0)


def test_a_step_that_does_nothing_is_refused() -> None:
    with pytest.raises(NoStep, match="ran no torch op"):
        lowtide.trace(lambda: None)


def test_peak_memory_of_the_traced_steps_is_that_of_plain_ones() -> None:
    """The recorder must not keep gradients from being added in place or stolen."""
    from independent import cpu_peak_bytes

    plain = cpu_peak_bytes(lambda: ZOO["gpt"]().step, 5)

    def build() -> Callable[[], object]:
        loop = ZOO["gpt"]()
        for _ in range(4):
            loop.step()
        return lambda: _recorded(loop.step)

    assert cpu_peak_bytes(build, 1) == pytest.approx(plain, rel=0.002)


def _recorded(step: Callable[[], object]) -> None:
    from lowtide._trace.record import Recorder

    with Recorder():
        step()
