"""The gate in front of a dispatch mode: which ops still reach it."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lowtide._runtime.delta.gate import Gate, load_gate
from lowtide._runtime.delta.mode import SeeingMode


@pytest.fixture
def gate() -> Gate:
    told: list[str] = []
    found = load_gate(told.append)
    assert found is not None, told
    found.number = 0
    return found


@contextmanager
def seeing(
    gate: Gate,
    written_down: frozenset[int] = frozenset(),
    look: Callable[[], object] = lambda: None,
) -> Iterator[list[str]]:
    """What a mode sees that has seen every op once, so that the gate knows them."""
    seen: list[str] = []

    def see(func: Any, _what: Any, args: Any, kwargs: Any) -> Any:
        look()
        if torch.is_grad_enabled():  # others have no number
            seen.append(f"{gate.take_number()} {func}" if gate.is_open else f"{func}")
        return func(*args, **kwargs)

    mode = SeeingMode(see)
    mode.learn = gate.learn
    mode.begin()
    try:
        work()
        seen.clear()
        gate.open(mode, written_down)
        yield seen
    finally:
        gate.close()
        mode.leave()


def work() -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.ones(4, 4, requires_grad=True)
    hidden = (weight @ weight).t().tanh().sin().cos().exp().neg().abs()
    hidden = torch.nn.functional.dropout(hidden, 0.5)
    hidden.add_(1)
    (hidden * weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_only_ops_of_interest_are_seen_and_each_has_its_number(gate: Gate) -> None:
    expected = work()
    with seeing(gate) as seen:
        before = gate.passed()
        found = work()
        passed = gate.passed() - before
        numbered, closed = gate.number, len(seen)
        gate.close()
        work()
    assert torch.equal(found, expected)
    writing = {one.split()[1] for one in seen[:closed]}
    assert writing >= {"aten.add_.Tensor"}
    assert all(name.split(".")[1].endswith("_") for name in writing), writing
    everything = seen[closed:]
    assert len(everything) == numbered > 2 * closed
    assert passed > numbered - closed > 0  # views have no number
    for one in seen[:closed]:  # each as the mode alone would have counted
        number, name = one.split()
        assert everything[int(number)] == name


def test_what_is_written_down_is_seen(gate: Gate) -> None:
    with seeing(gate) as seen:
        work()
        of_interest = {int(one.split()[0]) for one in seen}
        count = gate.number
        some = frozenset(number for number in range(count) if number % 3 == 0)
        seen.clear()
        gate.number = 0
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        gate.open(mode, some)
        work()
        assert {int(one.split()[0]) for one in seen} == of_interest | some


def test_other_modes_see_everything(gate: Gate) -> None:
    with seeing(gate) as seen:
        with FlopCounterMode(display=False) as flops:
            torch.ones(4, 4) @ torch.ones(4, 4)
        assert flops.get_total_flops() == 2 * 4**3
        assert not seen


def test_tensors_of_another_class_are_left_to_it(gate: Gate) -> None:
    called: list[str] = []

    class Odd(torch.Tensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(str(func))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    odd = torch.Tensor._make_subclass(Odd, torch.ones(4, 4))
    with seeing(gate) as seen:
        assert torch.equal(torch.ones(4, 4) @ odd, torch.full((4, 4), 4.0))
        assert "aten.mm.default" in called
        assert any("aten.mm.default" in one for one in seen)


def test_an_op_that_runs_out_of_memory_is_seen(gate: Gate) -> None:
    with seeing(gate) as seen:
        vast = torch.ones(1).expand(1 << 50)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            vast.tanh()
        assert [one.split()[1] for one in seen] == ["aten.tanh.default"]
        with pytest.raises(
            RuntimeError, match="cannot be multiplied"
        ):  # another error comes through at once
            torch.ones(4, 4) @ torch.ones(3, 3)
        assert len(seen) == 1
        four, three, number = torch.ones(4, 4), torch.ones(3, 3), gate.number
        with suppress(RuntimeError):
            four @ three
        four * four
        assert gate.number == number + 2  # what fails is counted as Python counts it
        assert len(seen) == 1


def test_one_that_draws_random_numbers_has_drawn_none_then(gate: Gate) -> None:
    """It may have, before it ran out of memory."""
    states: list[torch.Tensor] = []
    with seeing(gate, look=lambda: states.append(torch.get_rng_state())) as seen:
        many = torch.ones(1).expand(1 << 26)
        torch.native_dropout(many[: 1 << 24], 0.5, True)  # it is known, and its threads run
        state = torch.get_rng_state()
        states.clear()
        seen.clear()
        before = resource.getrlimit(resource.RLIMIT_AS)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (200 << 20), before[1]))
        try:
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                torch.native_dropout(many, 0.5, True)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert [one.split()[1] for one in seen] == ["aten.native_dropout.default"]
        assert len(states) == 1 and torch.equal(states[0], state)
        assert not torch.equal(torch.get_rng_state(), state)  # as it does without the gate


def test_devices_without_random_numbers_are_left_to_python(gate: Gate) -> None:
    with seeing(gate) as seen:
        torch.native_dropout(torch.ones(4), 0.5, True)
        seen.clear()
        torch.native_dropout(torch.ones(4, device="meta"), 0.5, True)
        torch.rand_like(torch.ones(4), device="meta")
        assert [one.split()[1] for one in seen] == [
            "aten.native_dropout.default",
            "aten.rand_like.default",
        ]


def test_a_generator_of_its_own_is_left_to_python(gate: Gate) -> None:
    with seeing(gate) as seen:
        half = torch.full((4,), 0.5)
        torch.bernoulli(half)
        seen.clear()
        torch.bernoulli(half)
        assert not seen
        torch.bernoulli(half, generator=torch.Generator())
        assert [one.split()[1] for one in seen] == ["aten.bernoulli.default"]


def test_a_mode_that_is_not_its_own_is_none_of_its_business(gate: Gate) -> None:
    seen: list[str] = []

    class Other(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with seeing(gate):  # so that it knows the ops
        pass
    with Other():  # type: ignore[no-untyped-call]
        gate.open(gate, frozenset())
        torch.ones(4, 4) @ torch.ones(4, 4)
        gate.close()
    assert seen.count("aten.mm.default") == 1


def norms(rows: torch.Tensor, norm: torch.nn.BatchNorm1d) -> torch.Tensor:
    made = torch.nn.functional.relu_(norm(rows)) * 2
    made.add_(1)
    made.sum().backward()
    assert norm.running_mean is not None
    return torch.cat([made.detach().flatten(), norm.running_mean])


def test_only_writes_to_what_is_known_are_seen(gate: Gate) -> None:
    rows = torch.randn(16, 8, requires_grad=True)
    made = [torch.nn.BatchNorm1d(8) for _ in range(3)]
    expected = norms(rows, made[0])
    values: dict[int, Any] = {}
    leaves: dict[int, Any] = {}
    row, statistics = torch.zeros(4), (torch.zeros(8), torch.ones(8))
    with seeing(gate) as seen:
        gate.watch((values, leaves))
        try:
            gate.close()
            norms(rows, made[1])  # every op is known now
            names = [one.split()[-1] for one in seen]
            assert {"aten.add_.Tensor", "aten.relu_.default"} <= set(names)
            assert any("batch_norm" in name for name in names)
            seen.clear()
            mode = torch.utils._python_dispatch._get_current_dispatch_mode()
            gate.open(mode, frozenset())
            found = norms(rows, made[2])
            assert not seen, "nobody knows what they write to"
            for table in (values, leaves):
                table[row.untyped_storage()._cdata] = "something"
                row.add_(1)
                row[1:].add_(1)
                assert len(seen) == 2, "it lies in the same storage"
                table.clear()
                seen.clear()
            row.add_(1)
            assert not seen
            values[statistics[0].untyped_storage()._cdata] = "something"
            torch.nn.functional.batch_norm(rows, *statistics, training=True)
            assert ["batch_norm" in one for one in seen] == [True]
            gate.watch(None)
            seen.clear()
            row.add_(1)
            assert len(seen) == 1, "all are seen"
        finally:
            gate.watch(None)
    assert torch.equal(found, expected)
    assert row.tolist() == [4, 6, 6, 6]
