"""Random small programs, plainly and under budgets between the least they need and their peak."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jobs import Job
from moving import same_machine
from tight import Run, find_difference, run, run_away
from torch import nn
from torch.nn import functional as F

from lowtide._errors import OutOfBudget
from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.delta import room
from lowtide._runtime.swap import file_tier

STEPS = 3
TOLERANCE = 0.01  # of the budget: what an allocator rounds
ROWS, WIDTH = 256, 32  # of every value: 32 KiB
SOME = 8 * 4 * ROWS * WIDTH  # bytes that chance may hold on to, for what it drops: eight values
SPARE = (256 << 10) + 12 * ROWS * WIDTH  # bytes beside the least: a matrix, three values
INNER = 8 * ROWS * WIDTH  # what a kernel takes inside, which nobody is told: two values

Tensor = torch.Tensor


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """PyTorch itself is deterministic then."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Weights(nn.Module):
    """What ops may use beside values."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.row = nn.Parameter(torch.rand(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)


class Gate(torch.autograd.Function):
    """Two outputs; saves an input, an output and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        gate = y.sigmoid()
        product = x * gate
        ctx.save_for_backward(x, gate, product)
        return product, gate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gate, product = ctx.saved_tensors
        return grads[0] * gate, (grads[0] * product + grads[1] * gate) * (1 - gate) + 0 * x


def autocast(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w.square + F.linear(y, w.square)).float()


def chunks(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    return torch.cat([right * y[:, ::2], left.tanh()], 1)


def gated(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    product, gate = Gate.apply(x, y)  # type: ignore[no-untyped-call]
    return torch.as_tensor(product + gate)


def in_place_chain(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    fresh = x + y
    fresh.mul_(0.5).add_(w.row).clamp_(-2, 2)
    return fresh.sigmoid_()


def in_place_view(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    fresh = x * 0.5
    fresh[::2].add_(y[1::2])
    fresh.t()[3:7].zero_()
    return fresh


def filled(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    fresh = torch.empty_like(x)
    fresh[: ROWS // 2] = x[ROWS // 2 :]
    fresh[ROWS // 2 :] = y[: ROWS // 2].tanh()
    return fresh


def looked_at(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.square().mean().clamp(min=1)
    return x / scale


def changed(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    """Legal only if nobody has saved the value: plain training tells."""
    return x.add_(0.25) if x.requires_grad and not x.is_leaf else x + 0.25


def shuffled(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    return x[torch.randperm(ROWS)] + y.roll(1, 0)


OPS: dict[str, Callable[[Weights, Tensor, Tensor], Tensor]] = {
    "add": lambda w, x, y: 0.7 * (x + y),
    "mul": lambda w, x, y: x * y.sigmoid(),
    "sub": lambda w, x, y: x.tanh() - y,
    "addcmul": lambda w, x, y: torch.addcmul(x, y, w.row, value=0.1),
    "gelu": lambda w, x, y: F.gelu(x),
    "tanh": lambda w, x, y: x.tanh(),
    "relu": lambda w, x, y: (x + w.row).relu_(),
    "silu": lambda w, x, y: F.silu(x) + y,
    "exp": lambda w, x, y: x.clamp(max=1).exp(),
    "softmax": lambda w, x, y: x.softmax(1) * y,
    "log_softmax": lambda w, x, y: 0.2 * F.log_softmax(x, 1),
    "linear": lambda w, x, y: F.linear(x, w.square, w.row),
    "residual": lambda w, x, y: x + 0.3 * F.linear(F.gelu(F.linear(y, w.up)), w.up.t()),
    "attention": lambda w, x, y: torch.softmax(x @ y.t() / WIDTH, 1) @ x,
    "products": lambda w, x, y: x @ (y.t() @ x / ROWS).tanh(),
    "dropout": lambda w, x, y: F.dropout(x, 0.3),
    "dropout_": lambda w, x, y: F.dropout(x * 2, 0.3, inplace=True),
    "noise": lambda w, x, y: x + 0.1 * torch.randn_like(x) * y,
    "bernoulli": lambda w, x, y: torch.where(torch.rand_like(x) < 0.5, x, y),
    "layer_norm": lambda w, x, y: F.layer_norm(x, [WIDTH], w.row),
    "batch_norm": lambda w, x, y: torch.as_tensor(w.norm(x)),
    "twice": lambda w, x, y: x * x.sigmoid() + x.tanh() * x,
    "square": lambda w, x, y: (x * x).clamp(max=4),
    "view": lambda w, x, y: x.reshape(ROWS // 2, -1).sin().view_as(x),
    "transpose": lambda w, x, y: (x.t().exp().softmax(0) * y.t()).t(),
    "strided": lambda w, x, y: torch.cat([x[::2].tanh(), y[1::2]]),
    "expand": lambda w, x, y: x.mean(1, keepdim=True).expand_as(x) * y.cos(),
    "split": lambda w, x, y: torch.stack(x.split(ROWS // 4)).cumsum(0).view_as(x) * 0.3,
    "max": lambda w, x, y: torch.stack([x, y]).max(0).values,
    "sort": lambda w, x, y: x.sort(1).values - y,
    "topk": lambda w, x, y: x.topk(WIDTH // 2, 1).values.repeat(1, 2),
    "detach": lambda w, x, y: x.detach() + y,
    "cut": lambda w, x, y: x.detach(),
    "alias": lambda w, x, y: x[:].unsqueeze(0).squeeze(0),
    "clone": lambda w, x, y: x.clone(),
    "autocast": autocast,
    "chunks": chunks,
    "gated": gated,
    "in_place_chain": in_place_chain,
    "in_place_view": in_place_view,
    "filled": filled,
    "looked_at": looked_at,
    "changed": changed,
    "shuffled": shuffled,
}


NEWEST = 3  # values that the program itself holds

# A program is text, one op a line: its name, which of the newest values it takes, and when.
lines = st.tuples(
    st.sampled_from(["nothing", *OPS]),  # what it shrinks to
    *[st.integers(0, NEWEST - 1).map(str)] * 2,
    st.sampled_from([*["always"] * 6, "odd", "positive"]),
).map(" ".join)
programs = st.lists(lines, min_size=20, max_size=60).map("\n".join)


def build(program: str) -> Job:
    torch.manual_seed(0)
    weights = Weights()
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.02, momentum=0.9)
    done = [0]

    def forward() -> Tensor:
        x = torch.randn(ROWS, WIDTH)
        values = [x, x @ weights.square, x * weights.row]
        del x
        for line in program.splitlines():
            op, *places, when = line.split()
            first, second = (values[-1 - int(place)] for place in places)
            if op == "nothing" or (when == "odd" and done[0] % 2 == 0):
                continue
            if when == "positive" and float(first.detach().sum()) <= 0:
                continue
            values.append(OPS[op](weights, first, second))
            del values[0], first, second
        end = torch.stack([value.abs().mean() for value in values]).sum()
        return end + weights.square.square().mean()  # also if all values are cut off

    def step() -> Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done[0] += 1
        return loss.detach()

    return Job(weights, [optimizer], step)


def outcome(train: Callable[[], Run]) -> Run | str:
    """What came out, unless PyTorch refuses a program that changes what is saved."""
    try:
        return train()
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return "refused"


def check(program: str, share: float, spare: int = SPARE, steps: int = STEPS, **how: str) -> None:
    """Trained bit for bit and within the budget, or refused as it is plainly."""

    def train(budget: int | None = None) -> Run | str:
        return outcome(lambda: run(lambda: build(program), steps, budget, **how))

    plain = train()
    if isinstance(plain, str):
        with suppress(OutOfBudget):  # it may need more
            assert train(1 << 20) == plain
        return
    least, most = max(run_away(lambda: build(program), steps).peaks), max(plain.peaks)
    budget = int(least + max(spare, share * (most - least)))
    ours = train(budget)
    assert isinstance(ours, Run), ours
    assert find_difference(ours.result, plain.result) is None
    if how["policy"] != "delta-as-published":  # which makes room too late
        assert max(ours.peaks) <= budget * (1 + TOLERANCE) + INNER, (ours.peaks, budget)


_with = settings(
    deadline=None,
    phases=set(Phase) - {Phase.explain},
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(_with, max_examples=80)
@given(program=programs, share=st.floats(0.1, 1))
def test_programs_train_bit_for_bit_within_the_budget(program: str, share: float) -> None:
    check(program, share, policy="delta")


@settings(_with, max_examples=50)
@given(program=programs, share=st.floats(0.1, 1), seed=st.integers(0, 1000))
def test_so_they_do_whatever_the_director_says(program: str, share: float, seed: int) -> None:
    draw = random.Random(seed)

    def drops(
        _policy: str, _copy: float, swap: float | None, recompute: float | None
    ) -> bool | None:
        if swap is None or recompute is None:
            return None if swap is recompute else recompute is not None
        return draw.random() < 0.5

    with patch.object(room, "drops", drops):
        check(program, share, SPARE + SOME, policy="delta")


@settings(_with, max_examples=30)
@given(program=programs, share=st.floats(0.1, 1))
def test_so_they_do_by_dtr_if_it_can(program: str, share: float) -> None:
    with suppress(OutOfBudget):  # what cannot be made again cannot leave
        check(program, share, policy="dtr")


@settings(_with, max_examples=30)
@given(program=programs, share=st.floats(0.1, 1))
def test_programs_train_bit_for_bit_by_the_published_policy(program: str, share: float) -> None:
    check(program, share, policy="delta-as-published")


@settings(_with, max_examples=30)
@given(program=programs, share=st.floats(0.1, 1))
def test_so_they_do_by_plan(program: str, share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgeting, "_SMALLEST", 1 << 14)
        patch.setattr(plans, "_SECONDS", 0.05)
        patch.setattr(budgeting, "machine_here", lambda *_, **__: same_machine())
        check(program, share, SPARE + SOME, steps=6, policy="tide")


LONG = """\
expand 0 0
layer_norm 0 2
max 2 0
layer_norm 1 0
log_softmax 1 2
max 0 1
attention 1 0
relu 1 0
max 1 0
noise 2 2
log_softmax 0 0
filled 0 2
residual 1 1
changed 0 1
products 0 2
tanh 1 1
twice 1 2
"""


def test_so_they_do_however_long_copies_back_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way when there is too little room can still be sent back."""
    quick = file_tier._read

    def slow(file: int, memory: memoryview, offset: int) -> None:
        time.sleep(0.005)
        quick(file, memory, offset)

    monkeypatch.setattr(file_tier, "_read", slow)
    monkeypatch.setattr(room, "drops", lambda _policy, _copy, swap, _recompute: swap is None)
    check("\n".join(f"{line} always" for line in LONG.splitlines()), 0.2, policy="delta")
