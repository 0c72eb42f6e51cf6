"""Steps of whose saves nobody is told: the allocator guards them, here the one that counts."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tides import planned_of
from tight import Bits, Guarded, bits_of, counting, find_difference
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._runtime.delta.cap import Cap
from lowtide._runtime.delta.driver import Dynamic
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.swap.late import Late
from lowtide._runtime.swap.quiet import quiet

pytestmark = pytest.mark.usefixtures("plans_at_once", "unguarded")

WIDE = 64
ROWS = 4096  # of them, a megabyte
BUDGET = 26 << 20
TOLERANCE = 0.01  # of the budget: what an allocator rounds


class Double(torch.autograd.Function):
    """Saves by way of its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x + 1, x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        more, x = ctx.saved_tensors
        grad: torch.Tensor = grads[0] * (more - 1 + x)
        return grad


def doubled(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Double.apply(x)  # type: ignore[no-untyped-call]
    return out


class Row(nn.Module):
    """Layers of all kinds; `between` is called with what each has made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(8))
        self.norm = nn.LayerNorm(WIDE)
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 2:
                x = doubled(x)
            elif i == 4:
                x = torch.cat([x[:, :32], x[:, 32:].relu()], 1)
            elif i == 5:
                x = self.norm(x) * torch.stack([x, x]).sum(0)
            else:
                x = torch.tanh(x)
            x = self.between(i, x)
        return x


@dataclass
class Training:
    """The row, and what came out of every step."""

    model: Row = field(default_factory=Row)
    losses: list[torch.Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.rows = {n: torch.randn(n, WIDE) for n in (ROWS, 4 * ROWS)}

    def steps(self, counter: CDLL, count: int, rows: int = ROWS) -> None:
        for _ in range(count):
            loss = self.model(self.rows[rows]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            del loss
            self.peaks.append(counter.mark())

    def result(self) -> list[Bits]:
        state = [s["momentum_buffer"] for s in self.optimizer.state.values()]
        return bits_of([*self.losses, *self.model.parameters(), *state])


@contextmanager
def asleep(
    model: Callable[[], Row] = Row, budget: int = BUDGET
) -> Iterator[tuple[Training, CDLL, Dynamic, Guarded]]:
    """In the middle of a run that nobody need watch, and of whose saves nobody is told."""
    gc.collect()
    with counting() as counter:
        training, guarded = Training(model()), Guarded()
        with lowtide.fit(training.model, training.optimizer, budget=budget) as tide:
            assert tide._budgeted is not None and tide._budgeted._dynamic is not None
            dynamic = tide._budgeted._dynamic
            dynamic.cap._giver = guarded
            training.steps(counter, 8)
            assert planned_of(tide).modes[-1] is Mode.LOOSE
            assert guarded.most == budget and not has_hooks()
            yield training, counter, dynamic, guarded
        assert not guarded.most and not has_hooks()


def has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def plainly(count: int, rows: list[int]) -> list[Bits]:
    """What comes out without lowtide, after eight steps as ever."""
    with counting() as counter:
        training = Training()
        training.steps(counter, 8)
        for n in rows:
            training.steps(counter, count, n)
    return training.result()


def test_nobody_is_told_of_their_saves() -> None:
    told: list[bool] = []

    def look(_: int, x: torch.Tensor) -> torch.Tensor:
        told.append(has_hooks())
        return x

    with asleep() as (training, counter, dynamic, guarded):
        training.model.between = look
        training.steps(counter, 3)
        assert not any(told) and not guarded.heard
        assert dynamic.watching.peaks[-1] > 0
        assert not dynamic.room.cells
    assert find_difference(training.result(), plainly(3, [ROWS])) is None


def test_a_larger_batch_is_noticed_and_held_to_the_budget() -> None:
    with asleep() as (training, counter, dynamic, guarded):
        training.steps(counter, 3, 4 * ROWS)
        assert guarded.heard == 1
        assert dynamic.room.counts["swapped"] + dynamic.room.counts["dropped"]
        training.steps(counter, 3)
    assert max(training.peaks) <= BUDGET * (1 + TOLERANCE), training.peaks
    assert find_difference(training.result(), plainly(3, [4 * ROWS, ROWS])) is None


def more(at: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """After that layer, much more than in any step before."""

    def between(i: int, x: torch.Tensor) -> torch.Tensor:
        if i == at:
            wide = torch.cat([x, x])
            for _ in range(15):
                wide = wide.sin().cos()
            x = wide[: len(x)] + wide[len(x) :]
        return x

    return between


@pytest.mark.parametrize("at", [0, 3, 7])
def test_what_was_saved_before_it_is_noticed_can_leave_too(at: int) -> None:
    with asleep() as (training, counter, _, guarded):
        training.model.between = more(at)
        training.steps(counter, 3)
        assert guarded.heard == 1
    assert max(training.peaks) <= BUDGET * (1 + TOLERANCE), training.peaks
    with counting() as counter:
        other = Training()
        other.steps(counter, 8)
        other.model.between = more(at)
        other.steps(counter, 3)
    assert max(other.peaks) > 1.5 * BUDGET
    assert find_difference(training.result(), other.result()) is None


def test_what_was_modified_in_place_before_is_told_as_ever() -> None:
    def spoil(i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 3:
            x.data.add_(0)  # unseen
            x.add_(1)  # tanh has saved it
        return more(7)(i, x)

    with asleep() as (training, counter, _, guarded):
        training.model.between = spoil
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            training.steps(counter, 1)
        assert guarded.heard == 1


def test_an_evaluation_is_no_other_step() -> None:
    with asleep() as (training, counter, _, guarded):
        with torch.no_grad():
            training.model(training.rows[4 * ROWS])
        training.steps(counter, 1)
        with torch.inference_mode():
            training.model(training.rows[4 * ROWS])
        training.steps(counter, 1)
        assert not guarded.heard and not has_hooks()
    assert find_difference(training.result(), plainly(2, [ROWS])) is None


def test_nor_is_what_another_thread_makes() -> None:
    with asleep() as (training, counter, _, guarded):
        thread = threading.Thread(target=lambda: torch.ones(8 << 20))
        thread.start()
        thread.join()
        assert not guarded.heard and guarded.most
        training.steps(counter, 1)


def test_what_is_larger_but_not_saved_wakes_nobody() -> None:
    """Where gradients are looked at, say."""
    with asleep() as (training, counter, dynamic, guarded):

        def look(*_: object) -> None:
            torch.ones(BUDGET // 16).max()

        looking = training.optimizer.register_step_pre_hook(look)
        dynamic.seer.ops = 0
        training.steps(counter, 1)
        assert guarded.heard == 1 and not has_hooks()
        looking.remove()
        training.steps(counter, 2)
        assert guarded.heard == 1 and not dynamic.seer.ops


def test_where_nobody_hears_of_more_than_the_budget_steps_are_watched_again() -> None:
    """In backward, say: what it makes is not saved. Programs that do it are told from then on."""
    with asleep() as (training, counter, dynamic, _):

        def look(*_: object) -> None:
            torch.ones(BUDGET // 4).max()

        def add_it(_: int, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                x.register_hook(look)
            return x

        training.model.between = add_it
        training.steps(counter, 1)
        assert training.peaks[-1] > BUDGET
        training.model.between = lambda _, x: x
        assert dynamic._mode is not None
        training.steps(counter, 8)
        assert dynamic._mode is None and has_hooks()
    assert find_difference(training.result(), plainly(9, [ROWS])) is None


def test_what_is_reserved_beyond_the_budget_counts_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: by what lies between blocks, say."""
    with asleep() as (training, counter, dynamic, _):
        training.steps(counter, 1)
        assert dynamic._mode is None
        monkeypatch.setattr(Cap, "reserved", lambda _: BUDGET + 1)
        training.steps(counter, 1)
        assert dynamic._mode is not None


class Several(torch.autograd.Function):
    """Many layers, as compilers make one: it has no gradients inside, and saves in the end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for weight in weights:
            kept.append(torch.tanh(kept[-1] @ weight.t()))
        ctx.save_for_backward(*kept, *weights)
        return kept[-1] * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved, grad, found = list(ctx.saved_tensors), grads[0], []
        half = len(saved) // 2
        for weight, made, x in zip(saved[half + 1 :], saved[1:], saved, strict=False):
            found.append((grad * made).t() @ x + weight)
        return grad * saved[half], *found


class Compiled(Row):
    """The same weights, in three functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [one.weight for one in self.layers if isinstance(one, nn.Linear)]
        for some in (weights[:3], weights[3:6], weights[6:]):
            x = Several.apply(x, *some)  # type: ignore[no-untyped-call]
        return x


def test_what_a_function_makes_inside_is_noticed_before_it_is_saved() -> None:
    budget = 34 << 20
    with asleep(Compiled, budget) as (training, counter, _, guarded):
        with torch.no_grad():  # in which it saves nothing
            training.model(training.rows[4 * ROWS])
        before = guarded.heard
        training.steps(counter, 3, 4 * ROWS)
        assert (before, guarded.heard) == (0, 1)
    assert max(training.peaks) <= budget * (1 + TOLERANCE), training.peaks
    gc.collect()
    with counting() as counter:
        other = Training(Compiled())
        other.steps(counter, 8)
        other.steps(counter, 3, 4 * ROWS)
    assert max(other.peaks) > 1.3 * budget
    assert find_difference(training.result(), other.result()) is None


class Normed(nn.Module):
    """Has statistics, which a second forward would move."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(self.norm(self.linear(x)))
        return found


def test_nobody_asks_for_what_hooks_of_the_programs_have_saved() -> None:
    """A checkpoint would make all of its part again."""

    def normed() -> Row:
        row = Row()
        row.layers[3] = Checkpointed(Normed())
        return row

    gc.collect()
    with counting() as counter:
        plain = Training(normed())
        plain.steps(counter, 8)
        plain.model.between = more(6)
        plain.steps(counter, 3)
    budget = max(plain.peaks[:8]) + (8 << 20)
    with asleep(normed, budget) as (training, counter, _, guarded):
        training.model.between = more(6)
        training.steps(counter, 3)
        assert guarded.heard == 1
    assert max(plain.peaks) > 1.5 * budget
    assert max(training.peaks) <= budget * (1 + TOLERANCE), training.peaks
    assert find_difference(training.result(), plain.result()) is None
    buffers = [bits_of([*one.model.buffers()]) for one in (training, plain)]
    assert find_difference(*buffers) is None


class Cleared(Double):
    """Whoever looks at what it has saved takes it."""

    clear_saved_tensors_on_access = True


def test_what_is_gone_when_it_is_looked_at_is_not_looked_at() -> None:
    packed: list[torch.Tensor] = []
    x = torch.randn(5, requires_grad=True)
    y = Cleared.apply(x.sin()).cos()  # type: ignore[no-untyped-call]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    assert y.grad_fn is not None
    Late((pack, lambda one: one)).hook(y.grad_fn)
    y.sum().backward()
    assert x.grad is not None and len(packed) == 1  # of the cosine: the sine's is a leaf


def test_what_cannot_be_packed_stays_as_it_was() -> None:
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("no memory for it")

    def interrupted(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    grads: list[torch.Tensor] = []
    for pack in (None, fails, interrupted):
        x = torch.ones(3, requires_grad=True)
        y = (x * 2).sin().exp().sum()
        if pack is not None and y.grad_fn is not None:
            with suppress(KeyboardInterrupt):
                Late((pack, lambda one: one)).hook(y.grad_fn)
                assert pack is fails
        y.backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert all(torch.equal(grads[0], grad) for grad in grads)


def test_a_class_with_dispatching_of_its_own_keeps_that_where_a_mode_is_on() -> None:
    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with quiet(tensor):
            return tensor.detach()

    x = torch.randn(4, 4, requires_grad=True)
    two = TwoTensor(torch.ones(4, 4), torch.ones(4, 4)).requires_grad_() * 2
    y = (x.sin() * two).sum()
    assert y.grad_fn is not None
    with Nothing():  # type: ignore[no-untyped-call]
        Late((pack, lambda one: one)).hook(y.grad_fn)
    y.backward()
    assert type(x.grad) is TwoTensor


def test_where_memory_goes_in_pages_no_more_they_are_told() -> None:
    with asleep() as (training, counter, dynamic, guarded):
        training.steps(counter, 1)
        dynamic.use_pages(None)
        assert has_hooks() and not guarded.most
        training.steps(counter, 2)
        assert has_hooks()
        dynamic.cap._giver = guarded
        training.steps(counter, 1)
        assert not has_hooks()
    assert find_difference(training.result(), plainly(4, [ROWS])) is None


def test_hooks_of_the_programs_own_stay_in_charge() -> None:
    with asleep() as (training, counter, _, guarded):
        kept = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with kept:
            training.steps(counter, 1, 4 * ROWS)
        assert not guarded.heard and not has_hooks()
        training.model.layers[3] = Checkpointed(training.model.layers[3])
        training.steps(counter, 2)
    assert not has_hooks()


class Checkpointed(nn.Module):
    """Made again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def test_a_graph_is_hooked_as_far_as_it_can_be() -> None:
    """Not its leaves, nor what was modified, has hooks, or was given back."""
    packed: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    weight = torch.randn(3, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        hooked = torch.randn(7, 3).matmul(weight).exp()
    spoilt = hooked[:6].sin()  # saves hooked[:6]
    before = spoilt.exp()  # saves itself
    late_one = doubled(before)
    stacked = torch.cat([late_one, late_one]).tanh()
    root = stacked.sum().grad_fn
    assert root is not None
    hooks = pack, lambda x: x
    found = Late(hooks)
    found.hook(root)
    assert sorted(packed) == [(6, 5)] * 4 + [(12, 5)]
    packed.clear()
    found.hook(root)
    Late(hooks).hook(root)
    assert not packed
    other = stacked.detach().requires_grad_().cos().exp()
    joined = other.sum() + stacked.sum()
    assert joined.grad_fn is not None
    found.hook(joined.grad_fn)  # of which a part is known
    assert packed == [(12, 5)]
    stacked.sum().backward()
    assert weight.grad is not None


def lengths(training: Training, counter: CDLL, sizes: list[int]) -> None:
    for n in sizes:
        training.rows.setdefault(n, torch.randn(n, WIDE, generator=torch.manual_seed(n)))
        training.steps(counter, 1, n)


# Rows; all but the last have blocks as many, of a megabyte and more.
SIZES = [4096, 12000, 8192, 16384, 6000, 14000, 4096, 16000, 10000, 16384, 100]


@contextmanager
def of_all_lengths(budget: int) -> Iterator[tuple[Training, CDLL, Dynamic, Guarded]]:
    """Guarded from the first step on, of which no two are alike."""
    gc.collect()
    with counting() as counter:
        training, guarded = Training(), Guarded()
        with lowtide.fit(training.model, training.optimizer, budget=budget) as tide:
            assert tide._budgeted is not None and tide._budgeted._dynamic is not None
            dynamic = tide._budgeted._dynamic
            dynamic.cap._giver = guarded
            yield training, counter, dynamic, guarded


def plain_lengths() -> tuple[list[Bits], int]:
    """What comes out without lowtide, and the highest peak."""
    gc.collect()
    with counting() as counter:
        training = Training()
        lengths(training, counter, SIZES)
    return training.result(), max(training.peaks)


def test_steps_of_all_lengths_are_not_watched_where_all_of_them_fit() -> None:
    plain, peak = plain_lengths()
    with of_all_lengths(int(1.3 * peak)) as (training, counter, dynamic, guarded):
        lengths(training, counter, SIZES)
        assert dynamic.planned is not None
        modes = list(dynamic.planned.modes)
        assert modes[2:] == [Mode.LOOSE] * (len(SIZES) - 2), modes
        assert not guarded.heard and not has_hooks()
        told = list(dynamic.watching.peaks)[2:]
        assert told == training.peaks[2:]
    assert find_difference(training.result(), plain) is None


def test_of_those_lengths_that_do_not_fit_each_is_held_to_the_budget() -> None:
    plain, peak = plain_lengths()
    budget = int(0.8 * peak)
    with of_all_lengths(budget) as (training, counter, dynamic, guarded):
        lengths(training, counter, SIZES)
        assert guarded.heard and dynamic.room.counts["swapped"] + dynamic.room.counts["dropped"]
    assert max(training.peaks) <= budget * (1 + TOLERANCE), (training.peaks, budget)
    assert find_difference(training.result(), plain) is None


def test_what_hangs_on_another_branch_is_found_as_soon_as_they_meet() -> None:
    # row -> one --.
    #              mul -> loss     heard in the midst of the other
    # row -> other -'
    with asleep() as (training, _counter, dynamic, guarded):
        other, rows = Row(), training.rows[ROWS]
        one = training.model(rows)
        assert not has_hooks()
        other.between = more(3)
        two = other(rows)
        assert guarded.heard == 1
        found = len(dynamic.room.cells)
        assert found > 8
        loss = (one * two).mean()
        assert len(dynamic.room.cells) > found + 8
        loss.backward()
        ours = grads_of(training)
        training.optimizer.zero_grad()
    (training.model(rows) * other(rows)).mean().backward()
    assert find_difference(grads_of(training), ours) is None


def grads_of(training: Training) -> list[Bits]:
    grads = [p.grad for p in training.model.parameters()]
    return bits_of([grad for grad in grads if grad is not None])
