"""Optimizer state by plans: it comes and goes, is looked at, replaced, and stepped once."""

import gc
from contextlib import nullcontext

import pytest
import torch
from jobs import Job, heavy
from tides import STEPS, check, plain, planned_of
from tight import Bits, bits_of, find_difference, state_of

import lowtide
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.planned import Planned
from lowtide._runtime.swap import optimizers, pieces
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.pieces import MOST_PIECES
from lowtide._runtime.swap.script import STEPPING, Script

pytestmark = pytest.mark.usefixtures("plans_at_once")


def moved_states(script: Script) -> set[int]:
    states = script.observed.states
    return {states[swap.value] for swap in script.plan.swaps if swap.value in states}


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("share", [0.9, 0.65])
def test_optimizer_state_comes_and_goes_by_plan(share: float) -> None:
    """Also if much of it was away when the step was traced: it is known where it belongs."""
    planned, peaks = check("heavy", share)
    assert planned.steps == {Mode.DYNAMIC: 1, Mode.TRACED: 1, Mode.PLANNED: STEPS - 2}
    (script,) = planned.following.scripts
    assert abs(script.plan.plain_peak_bytes / max(plain("heavy").peaks) - 1) < 0.002
    assert len(script.observed.states) == 2 * 16 and moved_states(script)
    assert all(abs(peak / script.plan.peak_bytes - 1) < 0.01 for peak in peaks[4:])


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("share", [0.96, 0.85])
def test_steps_are_watched_that_fit_only_because_an_optimizer_steps_in_pieces(share: float) -> None:
    """As a whole it makes copies of all of its state. Nor is there room to try its ops again."""
    planned, _ = check("at once", share)
    assert Mode.LOOSE not in planned.steps


@pytest.mark.usefixtures("pieces")
def test_steps_that_fit_by_far_are_not_watched_whatever_their_optimizer() -> None:
    planned, _ = check("at once", 2.0)
    assert planned.steps[Mode.LOOSE] >= 2


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("how", ["all", "some", "more", "forgotten", "frozen"])
def test_state_that_is_replaced_or_added_to_goes_by_plan_again(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        """A piece of a step: all that it needs is there, and not only shown where it lies."""
        for parameter in optimizer.param_groups[0]["params"]:
            for thing in optimizer.state[parameter].values():
                assert thing.untyped_storage().resizable()
        step_once(optimizer)

    step_once = pieces.step_once
    monkeypatch.setattr(optimizers, "step_once", step)

    def use(budget: int | None) -> tuple[list[Bits], list[Mode]]:
        gc.collect()  # what the last one left in a circle would count, too
        job = heavy()
        (optimizer,) = job.optimizers
        modes: list[Mode] = []
        losses = []
        fit = lowtide.fit(job.model, job.optimizers, budget=budget or 1, policy="tide")
        with fit if budget else nullcontext() as tide:
            for i in range(10):
                optimizer.zero_grad()
                if i == 4 and how in ("all", "some"):
                    for state in optimizer.state.values():
                        state["exp_avg"] = torch.zeros(*state["exp_avg"].shape)
                        if how == "all":
                            state["exp_avg_sq"] = state["exp_avg_sq"].clone()
                    optimizer.load_state_dict(optimizer.state_dict())
                if i == 4 and how == "more":
                    next(iter(optimizer.state.values()))["more"] = torch.zeros(256, 256)
                    optimizer.load_state_dict(optimizer.state_dict())
                if i == 4 and how == "forgotten":
                    optimizer.state.clear()
                if i == 4 and how == "frozen":
                    optimizer.param_groups[0]["params"].pop(0)
                losses.append(job.step())
            if tide is not None:
                modes += planned_of(tide).modes
                cells = planned_of(tide).idle.optimizers.cells
                away = sum(cell.bytes for cell in cells if cell.state is State.AWAY)
                assert planned_of(tide).room._ledger.away == away > 0
        return bits_of([*losses, *state_of(job)]), modes

    expected, _ = use(None)
    found, modes = use(int(0.9 * max(plain("heavy").peaks)))
    assert find_difference(found, expected) is None
    assert modes[3] is modes[-1] is Mode.PLANNED
    if how in ("all", "some"):
        assert modes[4:] == [Mode.PLANNED] * 6
    if how in ("more", "frozen"):
        assert Mode.TRACED in modes[4:]


@pytest.mark.usefixtures("pieces")
def test_state_may_be_looked_at_while_it_is_away() -> None:
    """It is looked at where it is, and takes no room by that."""

    def look(job: Job) -> list[float]:
        (optimizer,) = job.optimizers
        states = optimizer.state.values()
        return [float(thing.sum()) for state in states for thing in state.values()]

    def use(budget: int | None) -> list[list[float]]:
        gc.collect()  # what the last one left in a circle would count, too
        job = heavy()
        fit = lowtide.fit(job.model, job.optimizers, budget=budget or 1, policy="tide")
        with fit if budget else nullcontext():
            return [look(job) for _ in range(STEPS) if job.step() is not None]

    expected = use(None)
    assert use(int(0.65 * max(plain("heavy").peaks))) == expected


def test_a_step_is_traced_in_pieces_even_where_there_is_room() -> None:
    """What can be gained by pieces is seen only so; where they gain nothing, there are none."""
    job = heavy(rows=2048)
    with lowtide.fit(job.model, job.optimizers, budget="56MiB", policy="tide") as tide:
        for _ in range(4):
            job.step()
        (script,) = planned_of(tide).following.scripts
        events = zip(script.codes, script.observed.positions, strict=True)
        pieces = [at for code, at in events if STEPPING <= code < STEPPING + MOST_PIECES]
        assert len(pieces) == len(set(pieces)) > 1
        assert script.steps_whole and not planned_of(tide).steps_parted()


@pytest.mark.usefixtures("unguarded")
def test_an_optimizer_that_steps_in_pieces_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its step need not be seen."""
    monkeypatch.setattr(Planned, "steps_parted", lambda _: True)

    def use(budget: int | None) -> list[Bits]:
        gc.collect()
        job = heavy(rows=2048)
        fit = lowtide.fit(job.model, job.optimizers, budget=budget or 1, policy="tide")
        with fit if budget else nullcontext() as tide:
            losses = [job.step() for _ in range(STEPS)]
            if tide is not None:
                assert planned_of(tide).room.lax
        return bits_of([*losses, *state_of(job)])

    assert find_difference(use(40 << 20), use(None)) is None


@pytest.mark.usefixtures("pieces")
def test_a_new_optimizer_of_some_of_the_parameters() -> None:
    """It has no state yet, and begins with the same one: its pieces are its own."""

    def use(budget: int | None) -> list[Bits]:
        gc.collect()
        job = heavy()
        parameters = [*job.model.parameters()]
        optimizer = job.optimizers[0]
        job.optimizers.clear()
        with lowtide.fit(job.model, budget=budget) if budget else nullcontext():
            for i in range(8):
                if i == 5:
                    del optimizer
                    optimizer = torch.optim.AdamW([*parameters[:4], *parameters[28:]], lr=1e-3)
                loss = job.model(torch.randn(64, 256)).square().mean()
                for parameter in parameters:
                    parameter.grad = None
                loss.backward()
                optimizer.step()
        return bits_of([parameter.detach() for parameter in parameters])

    assert find_difference(use(15 << 20), use(None)) is None
