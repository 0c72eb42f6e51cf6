"""Weights and gradients that leave: by plan where state is not enough, and as a last resort."""

import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import Job, heavy
from tides import BUILDS, STEPS, check, plain, planned_of
from tight import bits_of, find_difference, fitted, run, state_of
from torch import nn

import lowtide
from lowtide._runtime import budget as budgeting
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.swap import optimizers
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.file_tier import FileTier
from lowtide._runtime.swap.guests import GuestCell
from lowtide._runtime.swap.script import Script

pytestmark = pytest.mark.usefixtures("plans_at_once", "pieces")


def moved_guests(script: Script) -> set[int]:
    guests = script.observed.guests
    return {guests[swap.value] for swap in script.plan.swaps if swap.value in guests}


def test_they_come_and_go_by_plan_where_state_is_not_enough() -> None:
    """Weights and gradients take half of what there is, and at no time are all of them there."""
    planned, peaks = check("tidy", 0.47)
    assert planned.steps == {Mode.DYNAMIC: 1, Mode.TRACED: 1, Mode.PLANNED: STEPS - 2}
    (script,) = planned.following.scripts
    moved = moved_guests(script)
    assert len(script.observed.guests) >= 2 * 16
    assert any(number % 2 for number in moved), "no gradient leaves"
    assert all(peak <= 1.01 * script.plan.peak_bytes for peak in peaks[3:])


def test_weights_are_back_before_they_are_read() -> None:
    job = heavy(tidy=True)
    budget = int(0.47 * max(plain("tidy").peaks))
    below: list[Mode] = []
    with lowtide.fit(job.model, job.optimizers, budget=budget) as tide:
        planned = planned_of(tide)

        def look(module: nn.Module, _given: object, _made: object) -> None:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            if not weight.untyped_storage().resizable():
                below.append(planned.mode)

        for module in job.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(look)
        for _ in range(6):
            job.step()
        (script,) = planned.following.scripts
    assert any(number % 2 == 0 for number in moved_guests(script)), "no weight leaves"
    assert planned.steps[Mode.PLANNED] == 4 and Mode.PLANNED not in below


def test_they_stay_where_state_is_enough() -> None:
    planned, _ = check("tidy", 0.8)
    (script,) = planned.following.scripts
    assert script.plan.swaps and not moved_guests(script)


@pytest.mark.parametrize("name", ["heavy", "tidy", "at once"])
@pytest.mark.parametrize("share", [0.33])
def test_without_a_plan_they_are_the_last_that_goes(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgeting, "_PIECE", 1 << 19)
    check(name, share)


def clipping(optimizer: Callable[..., torch.optim.Optimizer], **how: Any) -> Callable[[], Job]:
    """Gradients are added to, looked at and written to before the optimizer steps."""

    def build() -> Job:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
        steps = optimizer(model.parameters(), **how)

        def step() -> torch.Tensor:
            for _ in range(2):
                loss: torch.Tensor = model(torch.randn(64, 256)).square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            steps.step()
            steps.zero_grad()
            return loss.detach()

        return Job(model, [steps], step)

    return build


@pytest.mark.parametrize("policy", ["tide", "delta"])
@pytest.mark.parametrize("share", [0.7])
@pytest.mark.parametrize(
    "build",
    [
        clipping(torch.optim.AdamW, lr=1e-3),
        clipping(torch.optim.AdamW, lr=1e-3, foreach=True),
        clipping(torch.optim.SGD, lr=0.1, momentum=0.9),
        clipping(torch.optim.SGD, lr=0.1),
    ],
    ids=["adamw", "foreach", "momentum", "sgd"],
)
def test_gradients_are_clipped_and_added_to_wherever_they_are(
    build: Callable[[], Job], share: float, policy: str
) -> None:
    plainly = run(build, 5)
    budget = int(share * max(plainly.peaks))
    ours = run(build, 5, budget, policy=policy)
    assert find_difference(ours.result, plainly.result) is None
    assert max(ours.peaks) <= 1.01 * budget


def test_swapping_alone_leaves_them_where_they_are() -> None:
    """Nobody would see who writes to them."""
    job = BUILDS["tidy"]()
    budget = int(0.5 * max(plain("tidy").peaks))
    with pytest.raises(lowtide.LowtideError, match="cannot go below"):
        train_by_swapping(job, budget)


def train_by_swapping(job: Job, budget: int) -> None:
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="autoswap"):
        for _ in range(6):
            job.step()


def writing(way: str) -> Callable[[], Job]:
    """Weights and gradients are written to by way of `.data`, which no version tells of."""

    def build() -> Job:
        job = heavy(tidy=True)
        (optimizer,) = job.optimizers
        parameters = list(job.model.parameters())

        def step() -> torch.Tensor:
            loss: torch.Tensor = job.model(torch.randn(64, 256)).square().mean()
            loss.backward()
            if way == "gradients":
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter.grad.data.clamp_(-1e-6, 1e-6)
            optimizer.step()
            optimizer.zero_grad()
            if way == "weights":
                for parameter in parameters:
                    parameter.data.mul_(0.999)
            return loss.detach()

        return Job(job.model, [optimizer], step)

    return build


@pytest.mark.parametrize("policy", ["tide", "delta"])
@pytest.mark.parametrize("way", ["gradients", "weights"])
def test_what_is_written_without_a_version_is_not_lost(way: str, policy: str) -> None:
    plainly = run(writing(way), 6)
    ours = run(writing(way), 6, int(0.42 * max(plainly.peaks)), policy=policy)
    assert find_difference(ours.result, plainly.result) is None


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize("again", [False, True])
def test_a_write_to_one_on_its_way_is_seen_where_others_are_not(again: bool) -> None:
    """Also in a step that begins while it is away."""
    job = BUILDS["tidy"]()
    budget = int(0.8 * max(plain("tidy").peaks))  # no guest leaves by plan
    scratch = torch.ones(8)
    with lowtide.fit(job.model, job.optimizers, budget=budget, policy="tide") as tide:
        for _ in range(STEPS):
            job.step()
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        dynamic = tide._budgeted._dynamic
        gate = dynamic.seer._gate
        assert dynamic.room.lax and gate is not None and gate.is_open
        scratch.mul_(0.5)  # such an op is known now
        before = gate.passed()
        scratch.mul_(0.5)
        assert gate.passed() == before + 1, "it is nobody's"
        guest = next(g for g in dynamic.idle.optimizers.guests_to_move() if not g.is_gradient)
        weight = guest.subject()
        assert weight is not None
        expected = weight.detach() * 0.5
        for table in dynamic.ledger.tables():  # nothing was ever made from it
            table.pop(weight.untyped_storage()._cdata, None)
        with dynamic.room.lock:
            assert dynamic.idle._leave(guest)
        if again:
            dynamic.seer.tend_gate(dynamic._mode)
        time.sleep(0.1)  # by now the copy has been made
        weight.data.mul_(0.5)
        with dynamic.room.lock:
            guest.release()
            guest.have()
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("state", [State.LEAVING, State.AWAY, State.COMING])
def test_who_writes_says_so_first(state: State) -> None:
    tier = FileTier()
    weight = nn.Parameter(torch.zeros(1024))
    cell = GuestCell(weight, tier, 0, 0, is_gradient=False)
    assert cell.leave()
    if state is not State.LEAVING:
        assert cell.release()
    if state is State.COMING:
        assert cell.fetch()
    assert cell.state is state
    assert not cell.written_to(torch.zeros(1).untyped_storage())
    assert cell.written_to(weight.untyped_storage())
    weight.data.add_(1)
    if state is State.LEAVING:
        assert cell.state is State.HERE
    cell.have()
    assert torch.equal(weight, torch.ones(1024))
    cell.drop()
    tier.close()


def test_bytes_below_that_somebody_looks_at_are_not_used_again() -> None:
    tier = FileTier()
    weight = nn.Parameter(torch.zeros(1024))
    cell = GuestCell(weight, tier, 0, 0, is_gradient=True)
    weight.grad = torch.ones(1024)
    assert cell.leave() and cell.release()
    looks = weight.grad.view(2, 512)  # another tensor on the bytes below
    weight.grad = None
    cell.settle()
    weight.grad = torch.full((1024,), 2.0)
    assert cell.leave() and cell.release()
    assert torch.equal(looks, torch.ones(2, 512))
    cell.have()
    assert float(weight.grad.sum()) == 2048 and tier._ranges.taken
    del looks
    assert cell.leave() and cell.release()
    cell.have()
    assert not tier._ranges.taken
    cell.drop()
    tier.close()


def test_a_gradient_that_was_put_aside_comes_home() -> None:
    job = heavy()
    with lowtide.fit(job.model, job.optimizers, budget=64 << 20) as tide:
        job.step()
        planned_of(tide).idle.release(lambda: False, leaving=False)
        aside = [p.grad for p in job.model.parameters() if p.grad is not None and p.ndim > 1]
        expected = [gradient.clone() for gradient in aside]
        job.model.zero_grad()
    for gradient, other in zip(aside, expected, strict=True):
        assert torch.equal(gradient, other)
        assert gradient.untyped_storage().resizable(), "it is still below"


def test_conjugated_gradients_stay() -> None:
    def use(*, away: bool) -> torch.Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(256, 256, dtype=torch.complex64))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with lowtide.fit(None, optimizer, budget=64 << 20) as tide:
            for _ in range(3):
                (torch.randn(8, 256, dtype=torch.complex64) @ weight.conj()).abs().sum().backward()
                if away:
                    planned_of(tide).idle.release(lambda: False, leaving=False)
                optimizer.step()
                optimizer.zero_grad()
        return weight.detach()

    assert torch.equal(use(away=True), use(away=False))


def test_one_that_is_frozen_meanwhile_leaves_the_others_where_they_are() -> None:
    job = heavy(tidy=True)
    weights = [p for p in job.model.parameters() if p.ndim > 1]
    with lowtide.fit(job.model, job.optimizers, budget=64 << 20) as tide:
        job.step()
        optimizers = planned_of(tide).idle.optimizers
        planned_of(tide).idle.release(lambda: False, leaving=False)
        before = [guest for guest in optimizers.guests() if guest.parameter() is not weights[0]]
        weights[0].requires_grad_(False)
        assert not optimizers._know_guests(job.optimizers[0], 0)
        assert [*map(id, optimizers.guests())] == [*map(id, before)]
        assert {guest.state for guest in before if not guest.is_gradient} == {State.AWAY}
        assert weights[0].untyped_storage().resizable()


def test_optimizers_that_begin_alike_are_two() -> None:
    job = heavy(tidy=True)
    (whole,) = job.optimizers
    part = torch.optim.SGD(list(job.model.parameters())[:6], lr=0.1)
    with lowtide.fit(job.model, [whole, part], budget=64 << 20) as tide:
        optimizers = planned_of(tide).idle.optimizers
        assert len(optimizers.guests()) == 2 * (16 + 3)
        for _ in range(2):
            job.step()
            part.step()
        assert len(optimizers.guests()) == 2 * (16 + 3)


@pytest.mark.parametrize("policy", ["tide", "delta"])
def test_they_can_be_looked_at_evaluated_and_stored_while_they_are_away(policy: str) -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        found = []
        with fitted(job, budget, policy=policy) as tide:
            for _ in range(3):
                found.append(job.step())
                send_away(tide)
                with torch.no_grad():
                    found.append(job.model(torch.randn(8, 256)))
                stored = io.BytesIO()
                torch.save(job.model.state_dict(), stored)
                found += torch.load(io.BytesIO(stored.getvalue())).values()
                found += [p.grad.clone() for p in job.model.parameters() if p.grad is not None]
        return [*found, *state_of(job)]

    def send_away(tide: Any) -> None:
        if tide is not None:
            idle = tide._budgeted._dynamic.idle
            idle.release(lambda: False, leaving=False)
            assert {guest.state for guest in idle.optimizers.guests()} == {State.AWAY}

    expected = bits_of(use(heavy(), None))
    assert find_difference(bits_of(use(heavy(), 64 << 20)), expected) is None


def test_they_stay_where_a_graph_knows_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "graphs_exist", lambda: True)
    job = heavy()
    with lowtide.fit(job.model, job.optimizers, budget=64 << 20) as tide:
        job.step()
        idle = planned_of(tide).idle
        idle.release(lambda: False, leaving=False)
        assert {cell.state for cell in idle.optimizers.cells} == {State.AWAY}
        assert {guest.state for guest in idle.optimizers.guests()} == {State.HERE}


def test_gradients_that_are_let_go_while_they_are_away_leave_nothing_behind() -> None:
    """As a loop does whose gradients were no numbers."""
    job = heavy(tidy=True)
    with lowtide.fit(job.model, job.optimizers, budget=64 << 20) as tide:
        for _ in range(2):
            job.step()
        dynamic = tide._budgeted._dynamic if tide._budgeted is not None else None
        assert dynamic is not None
        for _ in range(3):
            job.model(torch.randn(64, 256)).square().mean().backward()
            dynamic.idle.release(lambda: False, leaving=False)
            gradients = [g for g in dynamic.idle.optimizers.guests() if g.is_gradient]
            assert {gradient.state for gradient in gradients} == {State.AWAY}
            for optimizer in job.optimizers:
                optimizer.zero_grad()
            for parameter in job.model.parameters():
                parameter.data = parameter.detach().clone()  # nor are these what they were
            job.step()
            optimizers = planned_of(tide).idle.optimizers
            cells = (*optimizers.cells, *optimizers.guests())
            away = sum(cell.bytes for cell in cells if cell.state is State.AWAY)
            assert dynamic.ledger.away == away
    for tensor in job.model.parameters():
        assert tensor.untyped_storage().resizable()


def test_who_looks_at_a_weight_keeps_it_here() -> None:
    tier = FileTier()
    weight = nn.Parameter(torch.arange(1024.0))
    cell = GuestCell(weight, tier, 0, 0, is_gradient=False)
    view = weight.detach()[:8]
    assert not cell.alone()
    del view
    assert cell.alone()
    assert cell.leave()
    view = weight.detach()[:8]  # in the last moment
    assert not cell.release()
    assert cell.state is State.HERE and weight.untyped_storage().resizable()
    assert view.data_ptr() == weight.data_ptr()
    del view
    assert cell.leave()
    assert cell.release()
    assert not weight.untyped_storage().resizable(), "it is shown where it is"
    with torch.no_grad():
        weight[0] = 7
    cell.have()
    assert weight.untyped_storage().resizable()
    assert torch.equal(weight, torch.tensor([7.0, *range(1, 1024)]))
    assert not tier._ranges.taken
    cell.drop()
    tier.close()


def test_a_gradient_is_another_one_in_every_step() -> None:
    tier = FileTier()
    weight = nn.Parameter(torch.zeros(1024))
    cell = GuestCell(weight, tier, 0, 0, is_gradient=True)
    assert cell.alone() and not cell.leave(), "there is none"
    for i in range(3):
        weight.grad = torch.full((1024,), float(i))
        assert cell.leave()
        assert cell.release()
        assert weight.grad is not None and float(weight.grad[5]) == i
        if i == 1:
            weight.grad = None
        cell.have()
        assert cell.state is State.HERE
        there = [] if weight.grad is None else [float(weight.grad.sum())]
        assert there == ([] if i == 1 else [1024.0 * i])
    assert not tier._ranges.taken
    cell.drop()
    tier.close()


def test_a_gradient_without_bytes_of_its_own_stays() -> None:
    tier = FileTier()
    table = nn.Embedding(64, 16, sparse=True)
    table(torch.arange(4)).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    cell = GuestCell(table.weight, tier, 0, 0, is_gradient=True)
    assert cell.alone() and not cell.leave()
    cell.have()
    cell.drop()
    tier.close()


def test_weights_elsewhere_are_no_guests_and_no_news() -> None:
    """Those on a device without a budget: that they are none is no reason to plan anew."""
    tier = FileTier()
    weights = [nn.Parameter(torch.empty(1024, device=device)) for device in ("cpu", "meta")]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    known = optimizers.Optimizers(
        lambda device: tier if device.type == "cpu" else None,
        lambda _: None,
        smallest=1,
        piece_bytes=1,
        make_guest=GuestCell,
    )
    known.know(optimizer)
    assert len(known.guests()) == 2
    assert known._know_guests(optimizer, 0)
    tier.close()


def test_a_budget_above_the_peak_is_never_refused() -> None:
    """A weight of which no gradient is ever made as large as it is."""
    table = nn.Embedding(8192, 64, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with lowtide.fit(table, optimizer, budget=int(1.5 * table.weight.nbytes)):
        for _ in range(3):
            table(torch.arange(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_budget_below_what_a_step_of_the_optimizer_needs_is_refused_at_once() -> None:
    job = heavy()
    with pytest.raises(lowtide.OutOfBudget, match=r"a weight of \(256, 256\): give at least \d+ b"):
        lowtide.fit(job.model, job.optimizers, budget="200KiB").__enter__()
