"""Programs that are legal and unusual: what runs plain must run traced, and be told truly."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide._analyze.load import find_peak
from lowtide._analyze.recompute import Obstacle, obstacles
from lowtide._check import find_flaw
from lowtide._ir import Kind, Phase
from lowtide._trace.digest import digest


def nested() -> Callable[[], object]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, mask = torch.randn(2, 4, 16), torch.tensor([[False] * 4, [False, False, True, True]])

    def step() -> object:
        with torch.no_grad():
            return model(x, src_key_padding_mask=mask)

    return step


def lazy() -> Callable[[], object]:
    waiting = nn.LazyLinear(4)  # alive, and never given a shape
    layer = nn.Linear(4, 4)
    return lambda: (layer(torch.ones(2, 4)).sum().backward(), waiting)


def forward_mode() -> Callable[[], object]:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    return lambda: torch.func.jvp(lambda x: layer(x), (x,), (x,))


def sparse_parameter() -> Callable[[], object]:
    weight = torch.eye(4).to_sparse().requires_grad_()
    return lambda: torch.sparse.mm(weight, torch.ones(4, 2)).sum().backward()


def complex_numbers() -> Callable[[], object]:
    w = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    return lambda: torch.mm(w.conj(), w).abs().sum().backward()


def own_hooks_inside() -> Callable[[], object]:
    layer = nn.Linear(4, 4)

    def step() -> None:
        with torch.autograd.graph.save_on_cpu():
            layer(torch.ones(2, 4)).exp().sum().backward()

    return step


ODD = {f.__name__: f for f in (nested, lazy, forward_mode, sparse_parameter, complex_numbers)}
ODD["own_hooks_inside"] = own_hooks_inside


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("build", ODD.values(), ids=ODD)
def test_what_runs_plain_runs_traced(build: Callable[[], Callable[[], object]]) -> None:
    trace = lowtide.trace(build())
    assert trace.ops
    assert find_flaw(trace) is None


class LooksAtItsWeight(torch.autograd.Function):
    """Adds into an attribute of the weight that it saved, as fused gradient accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, w = ctx.saved_tensors
        w.main_grad.add_(x.T @ grads[0])
        return grads[0] @ w.T, None


def test_a_saved_leaf_keeps_what_hangs_on_it() -> None:
    w = nn.Parameter(torch.randn(4, 4))
    w.main_grad = torch.zeros(4, 4)  # type: ignore[attr-defined]
    x = torch.randn(2, 4, requires_grad=True)
    lowtide.trace(lambda: LooksAtItsWeight.apply(x, w).sum().backward())  # type: ignore[no-untyped-call]
    assert w.main_grad.abs().sum() > 0  # type: ignore[attr-defined]


def test_weights_swapped_between_forward_and_backward() -> None:
    def train(traced: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, bias=False)
        x = torch.randn(2, 4, requires_grad=True)

        def step() -> None:
            full = layer.weight.data
            layer.weight.data = full.sign()
            loss = layer(x).square().sum()
            layer.weight.data = full
            loss.backward()

        for _ in range(2):
            if traced:
                lowtide.trace(step, warmup=0)
            else:
                step()
                step()
        assert x.grad is not None
        return x.grad

    assert torch.equal(train(False), train(True))


def test_hooks_that_were_there_first_stay_in_charge() -> None:
    calls: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return tensor.detach()

    layer = nn.Linear(4, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lowtide.trace(lambda: layer(torch.ones(2, 4)).exp().sum().backward(), warmup=0)
    assert calls


def test_leaves_made_in_the_step_are_not_parameters() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        attacked = (x.detach() * 1).requires_grad_()
        h = torch.tanh(attacked * 2)
        checkpoint(layer, h, use_reentrant=True).sum().backward()

    trace = lowtide.trace(step)
    parameters = {v.name for v in trace.values if v.kind is Kind.PARAMETER}
    assert parameters == {"Linear.weight", "Linear.bias"}


class MovingAverage(nn.Module):
    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x)
        self.average = self.average * 0.9 + y.detach().mean(0) * 0.1
        return y


def test_a_buffer_assigned_anew_is_a_buffer() -> None:
    model = MovingAverage()
    trace = lowtide.trace(lambda: model(torch.ones(2, 4)).sum().backward())
    averages = [v for v in trace.values if v.name == "MovingAverage.average"]
    assert averages and {v.kind for v in averages} == {Kind.BUFFER}


def test_state_in_lists_is_state() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=3, history_size=3)

    def step() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.square(layer(torch.ones(2, 4)) - 3).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    trace = lowtide.trace(step, warmup=0)
    names = {v.name for v in trace.values if v.kind is Kind.STATE}
    assert any("old_dirs" in name for name in names)


def test_an_updated_weight_does_not_make_the_next_pass_an_update() -> None:
    w = torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        for _ in range(2):
            torch.tanh(torch.ones(2, 4) @ w).sum().backward()
            with torch.no_grad():
                assert w.grad is not None
                w.sub_(w.grad)
                w.grad = None

    trace = lowtide.trace(step)
    assert {op.phase for op in trace.ops if "tanh.default" in op.name} == {Phase.FORWARD}


def test_an_optimizer_step_that_raised_is_over() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def fail() -> float:
        raise ValueError

    def step() -> None:
        with pytest.raises(ValueError):  # noqa: PT011 - it is ours
            optimizer.step(fail)
        optimizer.zero_grad()
        F.mse_loss(layer(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
        optimizer.step()

    trace = lowtide.trace(step)
    loss = next(op for op in trace.ops if "mse_loss.default" in op.name)
    assert trace.ops[-1].phase is Phase.OPTIMIZER
    assert loss.module == ""


def test_a_conjugated_tensor_is_more_than_its_bytes() -> None:
    trace = lowtide.trace(complex_numbers())
    product = next(op for op in trace.ops if op.name == "aten.mm.default")
    assert obstacles(trace)[product.writes[0]] is Obstacle.NO_PRODUCER


def test_another_slice_of_the_data_is_the_same_step() -> None:
    layer = nn.Linear(4, 4)
    data = torch.randn(64, 4)
    at = iter(range(16))

    def step() -> None:
        i = next(at)
        (layer(data[i * 4 : i * 4 + 4]) * 2).sum().backward()

    traces = {digest(lowtide.trace(step, warmup=0)) for _ in range(4)}
    assert len(traces) == 1


def test_gradients_nobody_looked_at_are_held_too() -> None:
    frozen = nn.Linear(512, 512, bias=False)
    (frozen(torch.ones(1, 512))).sum().backward()
    x = torch.ones(4)
    peak = find_peak(lowtide.trace(lambda: x * 2)).bytes
    assert peak >= 2 * 512 * 512 * 4


def test_a_counter_around_the_trace_counts_the_steps_alone() -> None:
    layer = nn.Linear(8, 8)
    x = torch.ones(4, 8)
    with FlopCounterMode(display=False) as once:
        layer(x)
    with FlopCounterMode(display=False) as traced:
        lowtide.trace(lambda: layer(x), warmup=0)
    assert traced.get_total_flops() == 2 * once.get_total_flops()


def test_what_is_made_again_is_seen_as_it_was() -> None:
    """Conjugated, and with the other sign: both are said of a tensor, and not of its bytes."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    rows = torch.randn(1024, 64)

    def gradient(budget: float | None) -> torch.Tensor:
        weight.grad = None
        around = nullcontext() if budget is None else lowtide.fit(budget=budget, policy="delta")
        with around as tide:
            z = torch.exp(torch.view_as_complex((rows @ weight).mul(0.1).reshape(-1, 32, 2)))
            y = torch.view_as_real(z.conj() * z.sin()).square().mean()
            y = y + (torch.tanh(z).conj().imag * z.real.cos()).mean()
            del z
            if tide is not None:
                assert tide._budgeted is not None and tide._budgeted._dynamic is not None
                room = tide._budgeted._dynamic.room
                for cell in room.cells:
                    if cell.can_go() and cell.alone():
                        room.drop(cell)
                assert room.counts["dropped"] > 2
            y.backward()
        assert weight.grad is not None
        return weight.grad

    expected = gradient(None)
    assert torch.equal(gradient(1 << 30), expected)
