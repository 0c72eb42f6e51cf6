"""Planned steps of which hardly an op is seen: as where the device's allocator keeps the budget."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from jobs import JOBS
from moving import same_machine
from tides import BUILDS, CHANGING, STEPS, plain, planned_of
from tight import bits_of, find_difference, state_of
from torch import nn

import lowtide
from lowtide._ir import Machine
from lowtide._machine.link import line
from lowtide._policy.tide import tide as plan_tide
from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.delta import planned as planning
from lowtide._runtime.delta.cap import Cap
from lowtide._runtime.delta.forms import Forms
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Call
from lowtide._runtime.delta.unseen import Unseen
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.natively import plain_saves

pytestmark = pytest.mark.usefixtures("plans_at_once")


SLOW = Machine("slow", 1 << 40, 1 << 40, line(0.0, 1e5), line(0.0, 1e5))  # whatever else runs


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("name", BUILDS)
def test_jobs_train_bit_for_bit_where_nobody_counts(name: str) -> None:
    steps = STEPS + 2  # in the last ones hardly anything is looked at
    budget = int(0.6 * max(plain(name, steps).peaks))
    job = BUILDS[name]()
    unseen = []
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        losses = []
        for _ in range(steps):
            losses.append(job.step())
            unseen.append(dynamic.room.lax)
    found = bits_of([*losses, *state_of(job), torch.get_rng_state()])
    assert find_difference(found, plain(name, steps).result) is None
    if name not in CHANGING:
        assert unseen[-2:] == [True, True]


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_what_looks_the_same_is_made_again_from_what_was_told_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    told: list[int] = []
    note = Forms.call

    def counting(forms: Forms, form: int, number: int, *given: Any) -> Call | None:
        told.append(number)
        return note(forms, form, number, *given)

    monkeypatch.setattr(Forms, "call", counting)
    steps = STEPS + 2
    budget = int(0.6 * max(plain(name, steps).peaks))
    job = BUILDS[name]()
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        losses = [job.step() for _ in range(steps)]
    assert told and planned_of(tide).room.counts["dropped"]
    found = bits_of([*losses, *state_of(job), torch.get_rng_state()])
    assert find_difference(found, plain(name, steps).result) is None


@pytest.mark.usefixtures("unguarded")
def test_ops_without_gradients_between_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where averages of weights are kept, or something is logged, every so many steps."""
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    job = JOBS["mlp"]()
    budget = int(0.6 * max(plain("mlp").peaks))
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for number in range(STEPS + 6):
            job.step()
            if number % 3 == 2:
                with torch.no_grad():
                    for parameter in job.model.parameters():
                        parameter.mul_(1.0).add(1.0)
        room = planned_of(tide).room
        assert room.lax and room.counts["dropped"]
        assert room.counts["not dropped"] == 0


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_what_is_to_be_dropped_is_written_down_however_it_went_before(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps that are seen as a whole it may have been swapped first, for want of room."""
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    monkeypatch.setattr(plans, "tide", partial(plan_tide, seed=seed))
    job = JOBS["resnet"]()
    budget = int(0.6 * max(plain("resnet").peaks))
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in range(STEPS):
            job.step()
        assert planned_of(tide).room.lax
        assert planned_of(tide).room.counts["not dropped"] == 0


def shifted() -> tuple[nn.ParameterList, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """Parameters, who trains them, and a loss."""
    torch.manual_seed(0)
    shifts = nn.ParameterList(torch.randn(64) for _ in range(6))
    rows = torch.randn(512, 64)

    def forward() -> torch.Tensor:
        x = rows
        for shift in shifts:
            x = torch.tanh(x + shift)  # the shift is not saved: it may be written to
        return x.square().mean()

    return shifts, torch.optim.SGD(shifts.parameters(), lr=0.1), forward


def test_a_graph_that_outlives_a_step_nobody_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights were written to meanwhile: nothing of it is made again from them."""
    monkeypatch.setattr(Unseen, "may_step", lambda *_: True)

    def gradients(*, fitted: bool) -> list[torch.Tensor]:
        shifts, optimizer, forward = shifted()
        around = lowtide.fit(shifts, optimizer, budget="1GiB", policy="delta")
        with around if fitted else nullcontext():
            forward().backward()
            loss = forward()
            optimizer.step()
            optimizer.zero_grad()
            if fitted:
                assert around._budgeted is not None and around._budgeted._dynamic is not None
                around._budgeted._dynamic.room._release(1 << 30)  # all that can goes
            loss.backward()
        return [p.grad for p in shifts if p.grad is not None]

    expected, ours = gradients(fitted=False), gradients(fitted=True)
    assert len(expected) == 6
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.usefixtures("unguarded")
def test_a_plan_that_drops_as_an_optimizer_steps() -> None:
    """What is made again from weights is made before they change, so that step is seen."""

    def gradients(*, fitted: bool) -> list[torch.Tensor]:
        shifts, optimizer, forward = shifted()
        fit = lowtide.fit(shifts, optimizer, budget="1GiB", policy="tide")
        with fit if fitted else nullcontext() as tide:
            forward().backward()
            loss = forward()
            if tide is not None:
                drop_at_steps(tide)
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
        return [shift.grad for shift in shifts if shift.grad is not None]

    def drop_at_steps(tide: lowtide.Tide) -> None:
        planned = planned_of(tide)
        planned.room.lax = True

        def drop(_code: int) -> None:
            for cell in planned.room.cells:
                if cell.state is State.HERE and cell.can_go() and cell.alone():
                    planned.room.drop(cell)
            assert planned.room.counts["dropped"]

        planned.idle.told = drop

    expected = gradients(fitted=False)
    for found, right in zip(gradients(fitted=True), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stands_before_modes_afterwards_and_what_made_do_is_told(fails: bool) -> None:
    """Also of ops that nobody saw."""
    budget = int(0.6 * max(plain("mlp").peaks))
    job = JOBS["mlp"]()
    fit = lowtide.fit(job.model, job.optimizers, budget=budget)
    with suppress(ZeroDivisionError), fit as tide:
        for _ in range(STEPS):
            job.step()
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        gate = dynamic.seer._gate
        assert gate is not None and gate.is_open and gate.is_there()
        dynamic.room.failures = lambda: 1
        job.step()
        job.step()
        assert dynamic.room.counts["made do"] == 1
        assert 1 / (not fails)  # or it ends by an error
    assert gate is not None
    assert not gate.is_open and not gate.is_there()


def test_a_gate_that_cannot_be_built_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cap, "holds", True)
    monkeypatch.setattr(Ledger, "count_unseen", lambda _: None)
    asked: list[object] = []
    monkeypatch.setattr(budgeting, "load_gate", asked.append)
    budget = int(0.6 * max(plain("mlp").peaks))
    job = JOBS["mlp"]()
    with lowtide.fit(job.model, job.optimizers, budget=budget) as tide:
        losses = [job.step() for _ in range(STEPS)]
        assert planned_of(tide).room.lax
    assert len(asked) == 1
    assert find_difference(bits_of(losses), plain("mlp").result[:STEPS]) is None


def test_what_was_made_before_a_step_nobody_saw_and_is_saved_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a generator's pictures are, which its discriminator sees when it has stepped."""
    monkeypatch.setattr(Unseen, "may_step", lambda *_: True)

    def gradient(*, fitted: bool) -> torch.Tensor:
        torch.manual_seed(0)
        shift, scale = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))
        optimizers = [torch.optim.SGD([one], lr=0.1) for one in (shift, scale)]
        rows = torch.randn(512, 64)
        around = lowtide.fit(None, optimizers[1], budget="1GiB", policy="delta")
        with around if fitted else nullcontext():
            made = rows + shift
            made.square().mean().backward()
            optimizers[0].step()
            made = made.detach()
            loss = (made * scale).square().mean()
            del made
            if fitted:
                assert around._budgeted is not None and around._budgeted._dynamic is not None
                around._budgeted._dynamic.room._release(1 << 30)  # all that can goes
            loss.backward()
            optimizers[1].step()
        assert scale.grad is not None
        return scale.grad

    assert torch.equal(gradient(fitted=True), gradient(fitted=False))


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("how", ["two", "raising"])
def test_ops_are_seen_again_after_any_step_of_an_optimizer(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Unseen, "may_step", lambda self, *_: self._room.lax and not self._ledger.away
    )
    slow = line(1.0, 1e3)  # nothing is swapped
    machine = replace(same_machine(), out=slow, back=slow)
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: machine)

    def train(steps: int, budget: float | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
        early, late = list(model[:6].parameters()), list(model[6:].parameters())
        first = torch.optim.SGD(early, lr=0.1)
        second = torch.optim.SGD(late, lr=0.1)
        raising = [False]

        def hook(*_: object) -> None:
            if raising[0]:
                raising[0] = False
                raise KeyError

        second.register_step_pre_hook(hook)
        around = lowtide.fit(model, second, budget=budget, policy="tide")
        unseen = 0
        with around if budget is not None else nullcontext():
            for _ in range(steps):
                if how == "two":
                    model(torch.randn(512, 64)).square().mean().backward()
                    first.step()
                    first.zero_grad()
                model(torch.randn(512, 64)).square().mean().backward()
                if how == "raising":
                    first.step()
                raising[0] = how == "raising"
                with suppress(KeyError):
                    second.step()
                if how == "raising":
                    second.step()
                second.zero_grad()
                first.zero_grad()
                if budget is not None:
                    assert around._budgeted is not None and around._budgeted._dynamic is not None
                    dynamic = around._budgeted._dynamic
                    assert dynamic._mode is not None and not dynamic._unseen.now
                    unseen += dynamic.room.lax
                    if unseen > 1:
                        assert not dynamic.room.counts["not dropped"]
        return [p.detach() for p in model.parameters()], unseen

    expected, _ = train(8, None)
    ours, unseen = train(8, 0.7)
    assert unseen > 2
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("taped", [True, False])
def test_a_write_to_what_dropped_values_are_made_from_is_seen(
    taped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no step before did that. Other writes are not seen: there are many in a step."""
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    if not taped:
        monkeypatch.setattr(budgeting, "load_tape", lambda: None)
    steps = STEPS + 4

    def train(*, fitted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(64, 64) for _ in range(20))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.randn(2048, 64)
        around = lowtide.fit(model, optimizer, budget=0.7)
        with around if fitted else nullcontext():
            for number in range(steps):
                x, made = rows, []
                for at, layer in enumerate(model):
                    x = layer(x).tanh()
                    if at % 2 == 0:  # the others are what there is to drop
                        made.append(x)  # from which the next one is made
                    with torch.no_grad():
                        x.clone().mul_(0.5)  # is nobody's
                if number == steps - 1:
                    if fitted:
                        dynamic = around._budgeted._dynamic  # type: ignore[union-attr]
                        assert dynamic is not None and dynamic.seer._gate is not None
                        assert dynamic.room.lax and dynamic.seer._gate.is_open
                        assert dynamic.tapes.on == taped
                        cells = dynamic.room.cells
                        assert taped or any(cell.state is State.DROPPED for cell in cells)
                    with torch.no_grad():
                        for one in made:
                            one.data.mul_(0.5)
                    if fitted and taped:
                        assert dynamic is not None
                        assert not dynamic.tapes.on and "written" in str(dynamic.tapes.why)
                x.square().mean().backward()
                del x, made
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    ours, expected = train(fitted=True), train(fitted=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.usefixtures("unguarded")
def test_what_stays_is_kept_natively_also_where_others_are_made_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such sources count as given: what is made from them is right, and they are not let go."""
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    needed: list[int] = []

    def look(cells: Any, moved: frozenset[int], tied: Any) -> frozenset[int]:
        found = plain_saves(cells, moved, tied)
        needed.extend(number for number in found if cells[number] and cells[number].needed)
        return found

    monkeypatch.setattr(planning, "plain_saves", look)
    steps = STEPS + 4
    budget = int(0.6 * max(plain("gpt", steps).peaks))
    job = BUILDS["gpt"]()
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        losses = [job.step() for _ in range(steps)]
        following = planned_of(tide).following
        assert following.script is not None and not following.departed
        assert set(needed) & following.script.plain
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        assert tide._budgeted._dynamic.room.lax
    found = bits_of([*losses, *state_of(job), torch.get_rng_state()])
    assert find_difference(found, plain("gpt", steps).result) is None
