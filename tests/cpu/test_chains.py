"""Element-wise ops of backward that run as one: the same bits, and nobody can tell."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from waits import raw, waiting

from lowtide._runtime.fused import kernels
from lowtide._runtime.fused.chains import Chains
from lowtide._runtime.fused.kernel import make_kernel
from lowtide._runtime.fused.program import GRADIENTS, Program

CPU = torch.device("cpu")
ROUNDS = 4  # ops are asked about in the first, compared in the second, and one from then on


@pytest.fixture
def chains() -> Iterator[Chains]:
    with waiting(CPU) as found:
        yield found


Step = Callable[[], tuple[torch.Tensor, ...]]  # what a step of backward leaves behind


def check(step: Step, rounds: int = ROUNDS) -> tuple[int, int]:
    """The same bits as without chains; ops that joined others, and kernels, in the last round."""
    expected = step()
    with waiting(CPU) as chains:
        for _ in range(rounds):
            chains.take_counts()
            found = step()
            assert all(raw(a) == raw(b) for a, b in zip(found, expected, strict=True))
        return chains.take_counts()


def leaf(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=draw).to(dtype).requires_grad_()


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def gradients(
    build: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32
) -> Step:
    """Of a weight on either side of what is built."""

    def step() -> tuple[torch.Tensor, ...]:
        first, last = leaf(32, 64, dtype=dtype), leaf(64, 8, seed=1, dtype=dtype)
        hidden = build(leaf(128, 32, seed=2, dtype=dtype).detach() @ first)
        (hidden.to(dtype) @ last).float().sum().backward()
        assert first.grad is not None and last.grad is not None
        return first.grad, last.grad

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_of_a_gelu_is_one_kernel(dtype: torch.dtype) -> None:
    joined, run = check(gradients(gelu, dtype))
    assert joined > 8
    assert run == 1


def test_what_is_made_for_the_next_op_is_never_in_memory() -> None:
    def taken() -> float:
        weight, inputs = leaf(32, 1 << 16), leaf(4, 32, seed=1).detach()
        hidden = gelu(inputs @ weight)
        loss = (hidden @ leaf(1 << 16, 1, seed=2).detach()).sum()
        with torch.profiler.profile(profile_memory=True) as profiler:
            loss.backward()
        assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
        rows = profiler.profiler.kineto_results.events()
        taken = [int(one.nbytes()) for one in rows if one.name() == "[memory]"]
        return sum(size for size in taken if size >= hidden.nbytes) / hidden.nbytes

    plain = taken()
    with waiting(CPU):
        for _ in range(ROUNDS):
            ours = taken()
    others = 8 + 1  # the gradients of the weight, and of what the GELU has made
    assert plain >= others + 9
    assert ours == others + 1


OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "cube": lambda x, _: x**3,
    "half": lambda x, _: x * 0.5,
    "mul": torch.mul,
    "narrow": lambda x, _: x.to(torch.bfloat16),
    "neg": lambda x, _: -x,
    "relu": lambda x, _: torch.relu(x),
    "row": lambda x, y: x * y[:1],
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "silu": lambda x, _: nn.functional.silu(x),
    "sub": torch.sub,
    "tanh": lambda x, _: torch.tanh(x),
    "transposed": lambda x, _: x.t().contiguous().t(),
    "view": lambda x, _: x.view(-1).view(x.shape),
    "wide": lambda x, _: x.float(),
}
ROWS = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 5), st.integers(0, 5)),
    min_size=2,
    max_size=14,
)


@settings(deadline=None, max_examples=40)
@given(ROWS, st.sets(st.integers(0, 15), max_size=2), st.sampled_from(["hook", "retain", "none"]))
def test_whatever_is_computed_bits_are_the_same(
    rows: list[tuple[str, int, int]], watched: set[int], how: str
) -> None:
    """And whoever looks at a gradient, at its very address, finds it there."""

    def step() -> tuple[torch.Tensor, ...]:
        weight, seen = leaf(16, 24), []
        values = [leaf(8, 16, seed=2).detach() @ weight]

        def look(gradient: torch.Tensor) -> None:
            if gradient.is_contiguous():
                seen.append(torch.frombuffer(bytearray(raw(gradient)), dtype=torch.uint8))

        for i, (op, one, other) in enumerate(rows):
            made = OPS[op](values[-1 - one % len(values)], values[-1 - other % len(values)])
            if not made.is_contiguous():
                made = made.contiguous()
            if i in watched and how == "hook":
                made.register_hook(look)
            elif i in watched and how == "retain":
                made.retain_grad()
                seen.append(made)
            values.append(made)
        sum(value.float().sum() for value in values).backward()  # type: ignore[union-attr]
        assert weight.grad is not None
        kept = [one if one.dtype is torch.uint8 else one.grad for one in seen]
        return weight.grad, *(one.contiguous() for one in kept if one is not None)

    joined, run = check(step)
    event(f"{'some' if joined else 'no'} ops join, {'some' if run else 'no'} kernels")


def test_gradients_that_meet_where_a_relu_was() -> None:
    """As in a ResNet: nobody reads the sum but the next op, while weights have theirs at once."""

    def step() -> tuple[torch.Tensor, ...]:
        weights = [leaf(32, 32, seed=seed) for seed in range(6)]
        hidden = leaf(64, 32, seed=9).detach()
        for one, other in zip(weights[::2], weights[1::2], strict=True):
            hidden = torch.relu(hidden @ one + hidden @ other)
        hidden.sum().backward()
        return tuple(weight.grad for weight in weights if weight.grad is not None)

    joined, run = check(step, 6)
    assert joined == run == 2


def test_a_weight_that_is_used_twice() -> None:
    """Its gradients are added up where a weight's are left."""

    def step() -> tuple[torch.Tensor, ...]:
        weight = leaf(32, 32)
        hidden = leaf(32, 32, seed=1).detach()  # as large as the weight
        for _ in range(3):
            hidden = torch.relu(hidden @ weight + hidden @ weight)
        hidden.sum().backward()
        assert weight.grad is not None
        return (weight.grad,)

    check(step, 6)


class Reads(torch.autograd.Function):
    """A function of the program's, which looks at addresses."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(raw(gradient)), dtype=gradient.dtype).view_as(gradient)


class MulBackward0(Reads):
    """One that is named like a node of PyTorch's."""


@pytest.mark.parametrize("function", [Reads, MulBackward0])
def test_a_function_of_the_programs_finds_its_gradient(function: Any) -> None:
    check(gradients(lambda x: gelu(function.apply(gelu(x)))))


def test_what_is_left_behind_is_there() -> None:
    """A weight's gradient that an element-wise op makes, or that is handed on to it."""

    def step() -> tuple[torch.Tensor, ...]:
        scale, bias, weight = leaf(64, 32), leaf(64, 32, seed=1), leaf(32, 8, seed=2)
        x = torch.addmm(bias * 1.0, leaf(64, 32, seed=3).detach(), leaf(32, 32, seed=4).detach())
        gelu(torch.tanh(x * scale) * 2.0 + bias).mm(weight).sum().backward()
        return tuple(one.grad for one in (scale, bias, weight) if one.grad is not None)

    check(step)


def test_what_is_summed_up_for_a_weight_is_there() -> None:
    """A norm as Llama has it, whose weight is smaller than what it scales, and one that is not."""

    def step() -> tuple[torch.Tensor, ...]:
        first, large = leaf(16, 32), leaf(64, 32, seed=1)
        weights = [leaf(32, seed=seed) for seed in (2, 3)]
        hidden = leaf(64, 16, seed=4).detach() @ first
        for weight in weights:
            mean = hidden.pow(2).mean(-1, keepdim=True)
            hidden = hidden + weight * (hidden * torch.rsqrt(mean + 1e-6))
        (torch.tanh(hidden * large) @ leaf(32, 4, seed=5).detach()).sum().backward()
        return tuple(one.grad for one in (first, large, *weights) if one.grad is not None)

    joined, run = check(step)
    assert joined > 6 and run > 2


def test_where_only_a_bias_is_trained() -> None:
    def step() -> tuple[torch.Tensor, ...]:
        bias = leaf(64, 32)  # as large as what it is added to, so nothing is summed up
        hidden = torch.addmm(bias, leaf(64, 16).detach(), leaf(16, 32).detach())
        torch.tanh(hidden * 0.5).sum().backward()
        assert bias.grad is not None
        return (bias.grad,)

    check(step)


def test_gradients_that_are_asked_for() -> None:
    def step() -> tuple[torch.Tensor, ...]:
        weight = leaf(32, 64)
        inner = leaf(16, 32, seed=1).detach() @ weight
        hidden = torch.tanh(inner)
        loss = gelu(hidden).sum()
        return torch.autograd.grad(loss, [weight, hidden, inner])

    check(step)


def test_gradients_of_gradients() -> None:
    def step() -> tuple[torch.Tensor, ...]:
        weight = leaf(32, 64)
        loss = gelu(leaf(16, 32, seed=1).detach() @ weight).sum()
        (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
        gelu(first).sum().backward()
        assert weight.grad is not None
        return (weight.grad,)

    check(step)


def test_a_gradient_that_is_summed_up_over_steps() -> None:
    weight = leaf(32, 64)
    inputs = leaf(16, 32, seed=1).detach()

    def step() -> tuple[torch.Tensor, ...]:
        weight.grad = None
        for _ in range(3):
            gelu(inputs @ weight).sum().backward()
        assert weight.grad is not None
        return (weight.grad,)

    check(step)


def test_a_hook_that_comes_later_is_heard() -> None:
    """The graph is gone through twice; the second time somebody looks."""
    found: list[bytes] = []

    def step() -> tuple[torch.Tensor, ...]:
        weight = leaf(32, 64)
        hidden = torch.tanh(leaf(16, 32, seed=1).detach() @ weight)
        loss = gelu(hidden).sum()
        loss.backward(retain_graph=True)
        found.clear()
        hidden.register_hook(lambda gradient: found.append(raw(gradient)))
        loss.backward()
        assert weight.grad is not None and len(found) == 1
        return weight.grad, torch.frombuffer(bytearray(found[0]), dtype=torch.uint8)

    check(step)


def test_what_is_not_the_same_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_bit(program: Program, device: torch.device) -> Any:
        kernel = make_kernel(program, device)
        assert kernel is not None
        if len(program.steps) == 1 or program is kernels.PROBE:
            return kernel
        right = kernel

        class Wrong:
            function, scratch = 0, right.scratch

            def __call__(self, inputs: Any, outputs: Any, first: int, count: int) -> None:
                right(inputs, outputs, first, count)
                if count > 5000:  # not where it is tried
                    outputs[-1].view(torch.int16)[-1] ^= 1

        return Wrong()

    monkeypatch.setattr(kernels, "make_kernel", off_by_a_bit)
    joined, run = check(gradients(gelu))
    assert joined
    assert not run


def test_a_backward_that_is_broken_off_leaves_nothing(chains: Chains) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken off")

    held: list[Any] = []

    def step() -> None:
        hidden = leaf(64, 64, seed=3) @ leaf(64, 64)
        inner = hidden * 2.0
        held.append(weakref.ref(inner.untyped_storage()))
        broken: torch.Tensor = Breaks.apply(inner)  # type: ignore[no-untyped-call]
        (torch.tanh(inner) * inner + broken).sum().backward()

    for _ in range(ROUNDS):
        with pytest.raises(ValueError, match="broken off"):
            step()
    chains.close()
    leaf(1).sum().backward()  # until then PyTorch itself keeps some of what has failed
    gc.collect()
    assert all(one() is None for one in held)


def test_every_gradient_makes_what_pytorch_makes() -> None:
    found = kernels.Kernels(CPU, verify=True, tell=pytest.fail)
    for op in GRADIENTS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert found.can(op, dtype), (op, dtype)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_none_of_them() -> None:
    def step() -> tuple[torch.Tensor, ...]:
        weight, parts = leaf(8, 4, seed=2), [leaf(4, 8), leaf(3, 8, seed=1)]
        nested = torch.nested.as_nested_tensor(parts)
        made = torch.nested.to_padded_tensor(nested * 2.0 * nested, 0.0)
        (made @ weight).sum().backward()
        return tuple(one.grad for one in (weight, *parts) if one.grad is not None)

    check(step)


def among_others(hook: Callable[[torch.Tensor, torch.Tensor], object]) -> Step:
    """A hook on another branch runs in the midst of a chain: it is given a buffer that backward has
    read before, and a value that it comes to later.
    """

    def step() -> tuple[torch.Tensor, ...]:
        weight, other, buffer = leaf(16, 16), leaf(5, 5, seed=5), torch.full((16, 16), 2.0)
        flat = other.view(25)
        first = torch.tanh(leaf(16, 16, seed=1).detach() @ weight)
        later = first * 3.0
        branch = flat.view(5, 5)
        last = torch.tanh(torch.tanh(later) * buffer)
        branch.register_hook(lambda _: hook(buffer, later) and None)
        ((last @ leaf(16, 4, seed=3).detach()).sum() + branch.sum()).backward()
        assert weight.grad is not None and other.grad is not None
        return weight.grad, other.grad

    return step


def test_a_hook_may_write_where_no_op_does() -> None:
    def write(buffer: torch.Tensor, _: torch.Tensor) -> None:
        buffer.numpy()[:] = 7.0

    check(among_others(write))


def test_a_hook_may_take_bytes_away() -> None:
    def take(buffer: torch.Tensor, _: torch.Tensor) -> None:
        buffer.untyped_storage().resize_(0)

    check(among_others(take))


def test_a_hook_may_register_another() -> None:
    check(
        among_others(lambda _, later: later.register_hook(lambda gradient: raw(gradient) and None))
    )


def test_saved_tensors_may_come_back_in_one_buffer() -> None:
    def step() -> tuple[torch.Tensor, ...]:
        weight, buffer = leaf(16, 16), torch.empty(16, 16).numpy()

        def unpack(kept: Any) -> torch.Tensor:
            buffer[...] = kept
            return torch.from_numpy(buffer)

        hidden = leaf(16, 16, seed=1).detach() @ weight
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), unpack):
            made = torch.tanh(torch.sigmoid(torch.tanh(hidden)))
        (made @ leaf(16, 4, seed=3).detach()).sum().backward()
        assert weight.grad is not None
        return (weight.grad,)

    check(step)


def test_a_graph_may_be_of_the_step_before(chains: Chains) -> None:
    """Forward in one step, with hooks that unpack, and backward in the next."""
    kept: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        hidden = leaf(16, 16, seed=1).detach() @ leaf(16, 16)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return torch.tanh(torch.sigmoid(torch.tanh(hidden))).sum()

    for _ in range(ROUNDS):
        chains.take_counts()
        if kept:
            kept.pop().backward()
        kept.append(forward())
        chains.open()  # another step begins
    assert chains.take_counts() == (0, 0)


@contextmanager
def mode_again(mode: Any) -> Iterator[None]:
    """In another thread."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


def test_another_thread_may_end_its_step() -> None:
    """Chains are closed and opened again while backwards go on in two threads."""
    step = gradients(lambda x: gelu(gelu(x)))
    expected = [raw(one) for one in step()]
    wrong: list[object] = []
    with waiting(CPU) as chains:
        mode = _get_current_dispatch_mode()

        def many() -> None:
            with mode_again(mode):
                for _ in range(60):
                    if [raw(one) for one in step()] != expected:
                        wrong.append("other bits")

        threads = [threading.Thread(target=many) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            chains.close()
            chains.open()
            time.sleep(0.0005)
    assert not wrong
