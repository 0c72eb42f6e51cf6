"""Saves that a plan leaves alone are kept natively, and can still be had back at any time."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tides import BUILDS, STEPS, plain, planned_of
from tight import bits_of, find_difference, state_of
from torch import nn

import lowtide
from lowtide._ir import Machine
from lowtide._machine.link import line
from lowtide._runtime import budget as budgeting
from lowtide._runtime.delta.driver import Dynamic
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.planned import Planned
from lowtide._runtime.delta.tally import Tally
from lowtide._runtime.swap.native_saves import EVENTFUL, PLAIN, NativeSaves
from lowtide._runtime.swap.natively import _flags
from lowtide._runtime.swap.script import is_request

pytestmark = pytest.mark.usefixtures("plans_at_once", "unguarded")

SLOW = Machine("slow", 1 << 40, 1 << 40, line(0.0, 1e5), line(0.0, 1e5))  # whatever else runs


class Row(nn.Module):
    """A row of layers; `between` is called with what each has made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = self.between(i, torch.tanh(layer(x)))
        return x


class Trained:
    """The row under a budget, with steps that go by a plan."""

    def __init__(self, budget: float = 0.7) -> None:
        self.model = Row()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rows = torch.randn(4096, 64)
        self.budget = budget

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(self.rows).square().mean()
        return found

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def fit(self) -> lowtide.Tide:
        gc.collect()  # a budget counts what earlier tests have left in a circle
        return lowtide.fit(self.model, self.optimizer, budget=self.budget, policy="tide")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is swapped if it can be made again."""
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)


@contextmanager
def by_plan(row: Trained) -> Iterator[tuple[Dynamic, NativeSaves]]:
    """In the middle of a run that goes by a plan."""
    with row.fit() as tide:
        for _ in range(STEPS + 2):
            row.step()
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        assert dynamic.room.lax and dynamic.room.counts["dropped"]
        native = dynamic._plain._natively._native
        assert native is not None
        yield dynamic, native


@contextmanager
def unwatched(row: Trained) -> Iterator[tuple[Dynamic, NativeSaves]]:
    """In the middle of a run that nobody need watch."""
    with row.fit() as tide:
        for _ in range(STEPS):
            row.step()
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        assert planned_of(tide).steps[Mode.LOOSE] >= 2
        native = tide._budgeted._dynamic._plain._natively._native
        assert native is not None
        yield tide._budgeted._dynamic, native


def saved_by_python(dynamic: Dynamic) -> int:
    return sum(cell.handles for cell in dynamic.room.cells)


def test_many_saves_are_kept_natively_and_none_is_left(slow: None, untaped: None) -> None:
    row = Trained()
    with by_plan(row) as (dynamic, native):
        before = dynamic.room.counts["dropped"]
        loss = row.loss()
        assert native.kept() > 8 and saved_by_python(dynamic) > 0
        loss.backward()
        assert not native.kept() and dynamic.room.counts["dropped"] > before
        row.optimizer.step()
        planned = planned_of_dynamic(dynamic)
        assert planned.mode is Mode.PLANNED
        script = planned.following.script
        assert script is not None
        script.actions[5], *_ = [one for one in script.actions if one]  # something to do
        flags = _flags(script, frozenset())
        assert flags[5] & EVENTFUL and not flags[0] & PLAIN
        assert [bool(flag & EVENTFUL) for flag in flags] == [
            bool(actions or at in script.reruns or at in script.lets_go)
            for at, actions in enumerate(script.actions)
        ]


def planned_of_dynamic(dynamic: Dynamic) -> Planned:
    assert dynamic.planned is not None
    return dynamic.planned


def gradients(row: Trained) -> list[torch.Tensor]:
    """That there are, and no more afterwards."""
    found = [p.grad for p in row.model.parameters() if p.grad is not None]
    row.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("has_room", [False, True])
def test_a_step_that_departs_has_them_all_in_python(slow: None, has_room: bool) -> None:
    row = Trained()
    other = torch.randn(2048, 64)

    def forward(between: Callable[[], object] = int) -> torch.Tensor:
        loss = row.loss()
        between()
        found: torch.Tensor = loss + row.model(other).sin().mean()
        return found

    with by_plan(row) as (dynamic, native):

        def widen() -> None:
            assert native.kept() and dynamic.room.budget is not None
            dynamic.room.budget *= 4 if has_room else 1  # nothing has to leave

        loss = forward(widen)
        assert planned_of_dynamic(dynamic).mode is Mode.DEPARTED
        assert not native.kept() and saved_by_python(dynamic) > 20
        loss.backward()
        ours = gradients(row)
    forward().backward()
    assert all(map(torch.equal, ours, gradients(row)))


def test_where_memory_is_short_they_may_leave(slow: None) -> None:
    row = Trained()
    with by_plan(row) as (dynamic, native):
        loss = row.loss()
        kept, before = native.kept(), saved_by_python(dynamic)
        dynamic.room._release(1 << 40)
        assert kept and not native.kept() and saved_by_python(dynamic) == before + kept
        assert sum(not cell.holds() for cell in dynamic.room.cells) > 5
        loss.backward()
        ours = gradients(row)
    row.loss().backward()
    assert all(map(torch.equal, ours, gradients(row)))


@pytest.mark.parametrize("budget", [0.7, 256 << 20])  # by a plan, and where nobody watches
def test_one_that_is_modified_in_place_is_told_as_ever(slow: None, budget: float) -> None:
    row = Trained(budget)
    made: list[torch.Tensor] = []

    def spoil(i: int, x: torch.Tensor) -> torch.Tensor:
        made.append(x)
        if i == 7:
            with torch.no_grad():
                made[0].add_(1)
        return x

    def said() -> str:
        made.clear()
        row.model.between = spoil
        loss = row.loss()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        return str(caught.value)

    with by_plan(row) if budget < 1 else unwatched(row) as (_, native):
        ours = said()
        assert native.kept()  # backward has not come that far
    assert ours == said()


class Looks(torch.autograd.Function):
    """Saves a leaf and what is none, and says whether they come back themselves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, marked: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight, marked)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, _, marked = ctx.saved_tensors
        Looks.found = x.requires_grad, getattr(marked, "mark", "")
        return gradients[0] * 2, None, None

    found: tuple[bool, str]


def test_what_was_saved_comes_back_itself(slow: None) -> None:
    """Where PyTorch hands back the very tensor, with what hangs on it."""
    row = Trained()
    weight = row.model.layers[0].weight
    looking: Any = Looks.apply

    def between(i: int, x: torch.Tensor) -> torch.Tensor:
        if i != 4:
            return x
        marked = torch.ones(3)  # nobody else keeps it
        marked.mark = "here"  # type: ignore[attr-defined]
        found: torch.Tensor = looking(x, weight, marked)
        return found

    row.model.between = between
    with by_plan(row):
        row.step()
    assert Looks.found == (True, "here")


def test_backward_twice_and_after_the_end(slow: None) -> None:
    row = Trained()
    with by_plan(row) as (_, native):
        loss = row.loss()
        loss.backward(retain_graph=True)
        once = gradients(row)
        assert native.kept()
    assert not native.kept()
    loss.backward()
    assert all(map(torch.equal, once, gradients(row)))


def test_a_weight_that_is_frozen_meanwhile_stays(slow: None) -> None:
    row = Trained()
    scale = nn.Parameter(torch.ones(4096, 64))  # saved itself
    row.model.scale = scale
    row.optimizer = torch.optim.SGD(row.model.parameters(), lr=0.1)
    row.model.between = lambda i, x: x * scale if i == 4 else x
    with by_plan(row) as (dynamic, native):
        loss = row.loss()
        assert native.kept()
        for parameter in row.model.parameters():
            parameter.requires_grad_(False)
        dynamic.room._release(1 << 40)
        assert not native.kept()
        itself = scale.untyped_storage()._cdata
        assert all(cell.first_key != itself for cell in dynamic.room.cells)
        for parameter in row.model.parameters():
            parameter.requires_grad_(True)
        loss.backward()


def test_a_request_is_told_once_though_memory_is_short_then(
    slow: None, untaped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Trained()
    with by_plan(row) as (dynamic, native):
        planned, told = planned_of_dynamic(dynamic), []
        script, happened = planned.following.script, planned.event
        assert script is not None
        asked = [at for at, code in enumerate(script.codes) if is_request(code)]
        script.lets_go = {at: script.lets_go.get(at, ((), ())) for at in asked}  # it is to be told

        def event(code: int) -> None:
            happened(code)
            if is_request(code):
                told.append(code)
                dynamic._plain._natively.adopt()

        monkeypatch.setattr(planned, "event", event)
        dynamic._plain.halt()
        dynamic._plain._natively.expected = None  # to be read anew
        dynamic._plain.go()
        loss = row.loss()
        assert native.kept()
        loss.backward()
        assert planned.mode is Mode.PLANNED
    assert len(told) == len(set(told)) > 8


def test_hooks_that_nobody_works_for_still_keep_what_is_saved(slow: None) -> None:
    """They are of one thread: `fit` may be left in another, and not have them removed."""
    row = Trained(0.9)
    with by_plan(row) as (dynamic, _):
        dynamic._plain.stop()
        made: list[weakref.ref[torch.Tensor]] = []

        def between(_: int, x: torch.Tensor) -> torch.Tensor:
            made.append(weakref.ref(x))
            return x

        row.model.between = between
        row.loss()
        assert made and not any(one() is not None for one in made)
        x = torch.tanh(row.model.layers[0](row.rows))
        loss = (x * x).sum()
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_those_who_cannot_be_told_leave_nobody_in_charge(slow: None, untaped: None) -> None:
    """What was kept is still there, and others can be worked for."""
    row = Trained()

    def fail(*_: object) -> None:
        raise OSError("no")

    with by_plan(row) as (dynamic, native):
        loss = row.loss()
        native._whom[1] = fail
        native._tell()
        with pytest.raises(OSError, match="no"):
            dynamic._plain.stop()
    loss.backward()
    ours = gradients(row)
    row.loss().backward()
    assert all(map(torch.equal, ours, gradients(row)))
    with by_plan(Trained()):
        pass


def test_nothing_of_the_program_is_held_afterwards(slow: None) -> None:
    row = Trained()
    with by_plan(row):
        row.step()
    gone = weakref.ref(row.model)
    del row
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["mlp", "gpt", "unet"])
def test_so_are_those_of_steps_that_nobody_watches(name: str) -> None:
    budget = int(4 * max(plain(name).peaks))
    job = BUILDS[name]()
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        losses = [job.step() for _ in range(STEPS)]
        assert planned_of(tide).steps[Mode.LOOSE] >= 2
        assert dynamic._plain._natively._native is not None
        assert not dynamic.room.cells
    found = bits_of([*losses, *state_of(job), torch.get_rng_state()])
    assert find_difference(found, plain(name).result) is None


def test_steps_of_which_a_part_was_not_seen_are_compared_as_a_whole() -> None:
    tally, ledger = Tally(), Ledger(torch.device("cpu"))
    rows = [(100, 100), (50, 0), (200, 400)]
    for size, new in rows:
        tally.save(size)
        if new:
            tally.add_storage(new)
    tally.watched(ledger, None)
    tally.begin()
    tally.go_on(2)
    assert tally.is_another() and tally.more() == -400
    tally.save(200)
    tally.add_storage(400)
    assert not tally.is_another() and tally.more() == 0


def test_a_step_that_saves_more_than_any_before_is_held_to_the_budget() -> None:
    row = Trained(128 << 20)
    with unwatched(row) as (dynamic, _):
        row.rows = torch.randn(4096 * 16, 64)
        losses = [row.step() for _ in range(3)]
        assert dynamic.room.counts["swapped"] + dynamic.room.counts["dropped"]
    assert all(torch.isfinite(loss) for loss in losses)
