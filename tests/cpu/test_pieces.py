"""An optimizer's step in pieces, some of which step at once where nothing moves between them."""

from collections.abc import Iterator

import moving
import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import lowtide
from lowtide._ir import Kind, OpIndex, Plan, Swap, ValueId
from lowtide._runtime import budget as budgeting
from lowtide._runtime.swap import optimizers
from lowtide._runtime.swap import script as script_module
from lowtide._runtime.swap.file_tier import FileTier
from lowtide._runtime.swap.follow import Follower
from lowtide._runtime.swap.modes import Mode
from lowtide._runtime.swap.optimizers import Optimizers
from lowtide._runtime.swap.pieces import step_once
from lowtide._runtime.swap.script import BEGIN, STEPPING, Act, Action, Observed, write_script
from lowtide._trace.text import parse

COUNT, BYTES = 8, 4096  # weights, and of each; two of them are a piece, with four times its state
PIECE = 4 * BYTES
AWAY = 2  # the piece with state that is elsewhere
STEP = """
    device cuda:0
    have s:16384 | state
    have t:16384 | state
    f x:8192     -> h:40960
    b h          -> g:8192 | backward
    o g s        -> s      | optimizer
"""


def make() -> tuple[list[nn.Parameter], Optimizer]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(BYTES // 4)) for _ in range(COUNT)]
    return weights, torch.optim.AdamW(weights, lr=0.01)


def train(weights: list[nn.Parameter], optimizer: Optimizer) -> None:
    sum(weight.square().sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def tier() -> Iterator[FileTier]:
    found = FileTier()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("most", "leaves", "stepped"),
    [  # weights that step before PyTorch goes on with the rest
        (0, False, [2, 2, 2]),
        (PIECE, False, [2, 2, 2]),
        (2 * PIECE + 64, False, [4]),
        (4 * PIECE + 64, False, []),
        (4 * PIECE + 64, True, [4]),
        (2 * PIECE + 64, True, [4]),
        (2 * PIECE, False, [2, 2, 2]),  # counted as a whole: each also has a number of its steps
    ],
)
def test_pieces_that_are_here_step_at_once(
    most: int, leaves: bool, stepped: list[int], tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, optimizer = make()
    for _ in range(3):
        train(plain, optimizer)
    weights, optimizer = make()
    train(weights, optimizer)
    seen: list[int] = []

    def step(some: Optimizer) -> None:
        seen.append(sum(len(group["params"]) for group in some.param_groups))
        step_once(some)

    monkeypatch.setattr(optimizers, "step_once", step)
    events: list[int] = []
    known = Optimizers(lambda _: tier, events.append, smallest=1024, piece_bytes=PIECE + 64)
    known.know(optimizer)
    known.admit(known.movable())

    def stepping(some: Optimizer, _args: object, _kwargs: object) -> None:
        known.step(
            some, (), whole=False, together=lambda code: most if code == events[-1] + 1 else 0
        )

    hook = register_optimizer_step_pre_hook(stepping)
    try:
        for _ in range(2):
            for cell in known.cells:
                if leaves and cell.piece == AWAY:
                    assert cell.leave() and cell.release()
            seen.clear()
            train(weights, optimizer)
            known.stepped(optimizer)
            assert seen == stepped
    finally:
        hook.remove()
        known.leave()
    assert events == [STEPPING + i for i in range(4)] * 2
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


def test_what_cannot_move_counts_as_well(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step makes as much of it: small state, of which no cell knows."""
    weights, optimizer = make()
    train(weights, optimizer)
    seen: list[int] = []
    monkeypatch.setattr(
        optimizers, "step_once", lambda some: seen.append(len(some.param_groups[0]["params"]))
    )
    known = Optimizers(lambda _: tier, lambda _: None, smallest=2 * BYTES, piece_bytes=PIECE + 64)
    known.know(optimizer)
    known.admit(known.movable())
    assert not known.cells

    def stepping(some: Optimizer, _args: object, _kwargs: object) -> None:
        known.step(some, (), whole=False, together=lambda _: 3 * PIECE)

    hook = register_optimizer_step_pre_hook(stepping)
    try:
        train(weights, optimizer)
    finally:
        hook.remove()
    assert seen == [4]


def test_only_with_the_event_that_is_expected_do_pieces_step_at_once() -> None:
    """With another one another script may take over, and move what has not stepped yet."""
    following = Follower(lambda _action, _waits: True)
    script = write_script(observed_step(), Plan((), 65536, 1.0, 65536, 1.0))
    assert script.together > 0
    following.add(script)
    following.begin()
    assert following.next(BEGIN) == ()
    assert following.together(STEPPING) == script.together
    assert following.together(STEPPING + 1) == 0
    script.actions[1] = (Action(Act.LEAVE, -1),)
    assert following.together(STEPPING) == 0
    script.actions[1] = ()
    following.late = [Action(Act.RELEASE, -1)]
    assert following.together(STEPPING) == 0
    following.late = []
    following.next(STEPPING)
    assert following.together(STEPPING + 1) == 0, "it has no more events"


def observed_step() -> Observed:
    step = parse(STEP)
    states = [ValueId(i) for i, value in enumerate(step.values) if value.kind is Kind.STATE]
    return Observed(
        trace=step,
        codes=(BEGIN, STEPPING),
        positions=(OpIndex(0), OpIndex(2)),
        saves={},
        states=dict.fromkeys(states, 0),
        held={},
        numbers=(-1, -1, -1),
    )


def test_what_steps_at_once_has_room_below_the_planned_peak() -> None:
    """Where state is away meanwhile, there is more; a step makes up to twice its state."""
    observed = observed_step()
    values = observed.trace.values
    other = next(value for value in observed.states if values[value].storage == 1)

    def together(swaps: tuple[Swap, ...], peak: int) -> int:
        return write_script(observed, Plan(swaps, peak, 1.0, peak, 1.0)).together

    held = 2 * 16384 + 2 * 8192  # the states, the gradient, and what was given
    assert together((), 65536) == (65536 - held) // 2
    assert together((), held - 1) == 0
    away = Swap(other, OpIndex(0), OpIndex(1), OpIndex(3), OpIndex(3))
    assert together((away,), 65536) == (65536 - held + 16384) // 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("peak", "joins"), [(1, False), (1 << 40, True)])
def test_in_a_loop_the_plan_says_what_steps_at_once(
    peak: int, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing moves, and an optimizer steps in pieces, as it always does before there is a plan."""
    plain, optimizer = moving.make()
    moving.train(plain, optimizer, 9)
    plan = Plan((), peak, 1.0, peak, 1.0)
    monkeypatch.setattr(budgeting, "plan_by_swapping", lambda *_, **__: plan)
    monkeypatch.setattr(script_module, "_steps_whole", lambda *_: False)
    calls: list[int] = []

    def step(some: Optimizer) -> None:
        calls[-1] += 1
        step_once(some)

    monkeypatch.setattr(optimizers, "step_once", step)
    net, optimizer = moving.make()
    with lowtide.fit(net, optimizer, policy="autoswap", budget=0.9) as tide:
        for _ in range(9):
            calls.append(0)
            moving.train(net, optimizer, 1)
        modes = moving.modes(tide)
    assert moving.same(net, plain)
    parted = max(calls)
    assert parted > 1 and Mode.TRACED in modes and Mode.PLANNED in modes
    for mode, count in list(zip(modes, calls, strict=True))[2:]:  # until then there is no state
        assert count == (0 if joins and mode is Mode.PLANNED else parted)
