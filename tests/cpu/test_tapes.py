"""Steps that go on without Python: the same bits and bytes, and Python can go on at any time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import Build, Job
from test_plain import SLOW
from tides import BUILDS, entered, plain, planned_of
from tight import Run, find_difference, run
from torch import nn

import lowtide
from lowtide._errors import OutOfBudget
from lowtide._runtime import budget as budgeting
from lowtide._runtime.delta import rehearsal, tapes
from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.driver import Dynamic
from lowtide._runtime.delta.modes import Mode
from lowtide._runtime.delta.rehearsal import CannotTape, Rehearsal
from lowtide._runtime.fused import groups
from lowtide._runtime.swap.cell import State

pytestmark = pytest.mark.usefixtures("plans_at_once", "unguarded")

STEPS = 14  # two are planned as a whole, and two rehearsed
_WHOLE = 4  # the first steps, which are seen as a whole


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is swapped if it can be made again; what runs again in a row runs as one."""
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    monkeypatch.setattr(groups, "DEVICES", {"cpu"})


def dynamic_of(tide: lowtide.Tide) -> Dynamic:
    assert tide._budgeted is not None and tide._budgeted._dynamic is not None
    return tide._budgeted._dynamic


def check(build: Build, expected: Run, share: float) -> Dynamic:
    """The bits of plain training, and steps by a tape hold no more than those before them."""
    so_far: list[int] = []  # steps that went by a tape

    def told() -> Job:
        job = build()

        def step() -> torch.Tensor:
            loss = job.step()
            so_far.append(dynamic_of(made[0]).tapes.steps)
            return loss

        return replace(job, step=step)

    with entered() as made:
        ours = run(told, STEPS, int(share * max(expected.peaks)), policy="tide")
    assert find_difference(ours.result, expected.result) is None
    rows = zip(ours.peaks[1:], so_far[1:], so_far, strict=False)
    by = [(peak, now > before) for peak, now, before in rows][_WHOLE:]
    assert sum(taped for _, taped in by) > 3, dynamic_of(made[0]).tapes.why
    by_python = max(peak for peak, taped in by if not taped)
    assert max(peak for peak, taped in by if taped) <= 1.002 * by_python
    return dynamic_of(made[0])


TAPED = {"mlp": 0.5, "gpt": 0.5, "bert": 0.7, "unet": 0.7, "resnet": 0.5, "accumulation": 0.7}


@pytest.mark.parametrize(("name", "share"), TAPED.items())
def test_bits_and_bytes_are_those_of_steps_by_python(slow: None, name: str, share: float) -> None:
    expected = plain(name, STEPS)
    dynamic = check(BUILDS[name], expected, share)
    assert dynamic.room.counts["dropped"] and not dynamic.room.counts["not dropped"]


@pytest.mark.parametrize("share", [0.7])
def test_parts_of_a_graph_that_is_kept_are_dropped_again(slow: None, share: float) -> None:
    expected = plain("partial", STEPS)
    ours = run(BUILDS["partial"], STEPS, int(share * max(expected.peaks)), policy="tide")
    assert find_difference(ours.result, expected.result) is None


class Chains(nn.Module):
    """From one saved value to the next over many that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            for _ in range(6):
                x = x * 0.9 + 0.1
            x = torch.tanh(x)
        return x


def chains() -> Job:
    torch.manual_seed(0)
    model, rows = Chains(), torch.randn(4096, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, [optimizer], step)


@pytest.mark.parametrize("share", [0.8, 0.7])
def test_what_is_made_on_the_way_is_gone_at_once(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    assert check(chains, run(chains, STEPS), share).replayer.calls > 10 * STEPS


def dropout(x: torch.Tensor, rate: float) -> torch.Tensor:
    """As on a GPU: one op that draws."""
    return torch.native_dropout(x, rate, True)[0]


class Row(nn.Module):
    """A row of layers with dropout; `at` is called before each, and in backward after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.shifts = [torch.full((64,), 0.01 * i) for i in range(8)]
        self.at: Callable[[str, int, torch.Tensor], None] = lambda _how, _i, _x: None
        self.mixed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda a, b: a - b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            self.at("forward", i, x)
            h = layer(x)
            x = dropout(torch.tanh(self.mixed(h * 1.5, h * 0.5) + self.shifts[i]), 0.25)
            self.at("made", i, x)
            x.register_hook(lambda grad, i=i: self.at("backward", i, grad))
        return x


class Normed(Row):
    """With norms, whose statistics move along, and sums and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(8))
        self.in_place, self.turned = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            self.at("forward", i, x)
            one, other = norm(layer(x)), x * 0.5
            if self.turned:
                one, other = other, one
            one -= other
            x = torch.relu_(one) if self.in_place else torch.relu(one)
            self.at("made", i, x)
            x.register_hook(lambda grad, i=i: self.at("backward", i, grad))
        return x


class Trained:
    """It, in a loop of its own."""

    def __init__(self, model: Row | None = None) -> None:
        self.model = model or Row()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        torch.manual_seed(1)
        self.rows = torch.randn(4096, 64)
        self.kept: list[torch.Tensor] = []

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(self.rows).square().mean()
        return found

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def bits(self) -> list[torch.Tensor]:
        state = (*self.model.parameters(), *self.model.buffers())
        return [one.detach().clone() for one in state] + self.kept


Meddle = Callable[[Trained, Dynamic | None], None]


def trained(
    meddle: Meddle, model: type[Row], *, fitted: bool
) -> tuple[list[torch.Tensor], Dynamic | None]:
    """Steps by a tape, a few with `meddle`, and some more."""
    row = Trained(model())
    share = 0.7 if model is Row else 0.5
    around = lowtide.fit(row.model, row.optimizer, budget=share) if fitted else nullcontext()
    with around as tide:
        dynamic = None
        for _ in range(STEPS):
            row.step()
        if tide is not None:
            dynamic = dynamic_of(tide)
            assert dynamic.tapes.steps > 3, dynamic.tapes.why
        meddle(row, dynamic)
        row.model.at = lambda _how, _i, _x: None
        for _ in range(2):
            row.step()
    return row.bits(), dynamic


def both_ways(meddle: Meddle, model: type[Row] = Row) -> Dynamic:
    """The same bits as without lowtide."""
    ours, dynamic = trained(meddle, model, fitted=True)
    expected, _ = trained(meddle, model, fitted=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert dynamic is not None
    return dynamic


@pytest.mark.parametrize("layer", [2, 7])
@pytest.mark.parametrize("how", ["forward", "made", "backward"])
@pytest.mark.parametrize("model", [Row, Normed])
def test_python_can_go_on_from_any_moment(
    slow: None, model: type[Row], how: str, layer: int
) -> None:
    handed: list[int] = []
    before: list[int] = []  # steps by the tape

    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        def at(where: str, i: int, _: torch.Tensor) -> None:
            if dynamic is not None and (where, i) == (how, layer):
                assert dynamic.tapes.on
                dynamic.tapes.hand_over()
                assert not dynamic.tapes.on
                dropped = [c for c in dynamic.room.cells if c.state is State.DROPPED]
                assert all(cell.bytes and cell.sources for cell in dropped)
                handed.append(len(dropped))
                before.append(dynamic.tapes.steps)

        row.model.at = at
        row.step()
        if dynamic is not None:
            assert dynamic.planned is not None and dynamic.planned.modes[-1] is Mode.PLANNED

    dynamic = both_ways(meddle, model)
    assert len(handed) == 1 and (handed[0] or (how, layer) != ("forward", 7))
    assert not dynamic.ledger.away
    assert dynamic.tapes.steps == before[0] + 2  # the next steps went by it again


@pytest.mark.parametrize("model", [Row, Normed])
def test_memory_that_is_short_meanwhile_is_had_from_what_is_left(
    slow: None, model: type[Row]
) -> None:
    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        loss = row.loss()
        if dynamic is not None:
            assert dynamic.tapes.on
            dynamic.room._release(1 << 40)
            assert not dynamic.tapes.on
            assert sum(not cell.holds() for cell in dynamic.room.cells) > 5
        loss.backward()
        row.optimizer.step()
        row.optimizer.zero_grad()

    both_ways(meddle, model)


def test_what_is_made_in_place_is_made_so_again(slow: None) -> None:
    """Norms and activations run again, without moving statistics along once more."""

    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        row.step()
        if dynamic is not None:
            tape = dynamic.tapes._put
            assert tape is not None
            assert sum(bool(op.writes) for op in tape.ops) > 2
            assert sum(-1 in op.reads for op in tape.ops) > 2

    both_ways(meddle, Normed)


@pytest.mark.parametrize("layer", [1, 4, 7])
def test_a_write_past_versions_to_what_was_made_in_place_is_seen(slow: None, layer: int) -> None:
    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        def at(how: str, i: int, x: torch.Tensor) -> None:
            if (how, i) == ("made", layer):
                x.data.add_(0.25)

        row.model.at = at
        row.step()

    both_ways(meddle, Normed)


@pytest.mark.parametrize("what", ["in_place", "turned"])
def test_another_way_to_write_for_once_is_seen(slow: None, what: str) -> None:
    """Not in place; or by the same op to another value, which nothing else tells."""

    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        before = 0 if dynamic is None else dynamic.tapes.steps
        as_ever = getattr(row.model, what)
        setattr(row.model, what, not as_ever)
        row.step()
        setattr(row.model, what, as_ever)
        assert dynamic is None or dynamic.tapes.steps == before

    both_ways(meddle, Normed)


def test_statistics_that_are_read_for_once_are_what_they_are(slow: None) -> None:
    """In a step that does not move them along, they are sources like others."""

    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        row.model.eval()
        loss = row.loss()
        norm = row.model.get_submodule("norms.3")
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
        norm.running_mean.data.add_(0.5)  # what was made from it is to stay as it was
        loss.backward()
        row.optimizer.step()
        row.optimizer.zero_grad()
        row.model.train()
        before = 0 if dynamic is None else dynamic.tapes.steps
        for _ in range(6):
            row.step()
        assert dynamic is None or dynamic.tapes.steps > before + 1

    both_ways(meddle, Normed)


def test_other_values_in_the_same_places_are_seen(slow: None) -> None:
    """The ops are the same, and what they read is not."""

    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        def skips(self: Row, x: torch.Tensor) -> torch.Tensor:
            made = [x]
            for i, layer in enumerate(self.layers):
                given = made[4] if i == 5 else made[-1]
                made.append(dropout(torch.tanh(layer(given)), 0.25))
            return made[-1]

        before = 0 if dynamic is None else dynamic.tapes.steps
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Row, "forward", skips)
            row.step()
        assert dynamic is None or dynamic.tapes.steps == before

    both_ways(meddle)


def test_what_nobody_saves_is_known_by_who_reads_it(slow: None) -> None:
    """Two values that are read in the other order, by the same op: nothing else tells."""

    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        before = 0 if dynamic is None else dynamic.tapes.steps
        row.model.mixed = lambda a, b: b - a
        row.step()
        row.model.mixed = lambda a, b: a - b
        assert dynamic is None or dynamic.tapes.steps == before

    both_ways(meddle)


def test_what_was_made_from_something_that_is_no_more_stays(slow: None) -> None:
    """It was written to before the value was to be dropped."""

    def meddle(row: Trained, _dynamic: Dynamic | None) -> None:
        def at(how: str, i: int, _: torch.Tensor) -> None:
            if how == "made":
                row.model.shifts[i].add_(1.0)

        row.model.at = at
        row.step()

    both_ways(meddle)


def test_what_somebody_keeps_stays(slow: None) -> None:
    """What is saved for backward is there for others as well, until they let go of it."""

    def meddle(row: Trained, _dynamic: Dynamic | None) -> None:
        kept: list[torch.Tensor] = []

        def keeps(self: Row, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                h = layer(x)
                h = torch.tanh(self.mixed(h * 1.5, h * 0.5) + self.shifts[i])
                x, mask = torch.native_dropout(h, 0.25, True)
                kept.extend(one.detach() for one in (h, x, mask))
            return x

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Row, "forward", keeps)
            loss = row.loss()
        row.kept = [one.clone() for one in kept]  # before backward has some of them made again
        kept.clear()
        loss.backward()
        row.optimizer.step()
        row.optimizer.zero_grad()

    both_ways(meddle)


def test_weights_may_be_others_in_the_next_step(slow: None) -> None:
    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        layers = row.model.layers
        layers[2], layers[5], layers[3] = layers[5], layers[2], layers[4]
        before = 0 if dynamic is None else dynamic.tapes.steps
        row.step()
        assert dynamic is None or dynamic.tapes.steps == before + 1

    both_ways(meddle)


def test_another_dropout_is_drawn_and_made_again(slow: None) -> None:
    """A number that has changed: its op is none of the tape's."""

    def meddle(row: Trained, _dynamic: Dynamic | None) -> None:
        def other(self: Row, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = dropout(torch.tanh(layer(x)), 0.25 if i < 4 else 0.5)
            return x

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Row, "forward", other)
            for _ in range(3):
                row.step()

    both_ways(meddle)


def test_backward_twice(slow: None) -> None:
    def meddle(row: Trained, _: Dynamic | None) -> None:
        loss = row.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        row.optimizer.step()
        row.optimizer.zero_grad()

    both_ways(meddle)


def test_a_graph_that_outlives_the_fit(slow: None) -> None:
    row = Trained()
    with lowtide.fit(row.model, row.optimizer, budget=0.7) as tide:
        for _ in range(STEPS):
            row.step()
        torch.manual_seed(5)
        loss = row.loss()
        assert dynamic_of(tide).tapes.on
    loss.backward()
    ours = [p.grad for p in row.model.parameters()]
    row.optimizer.zero_grad()
    torch.manual_seed(5)
    row.loss().backward()
    assert all(
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(ours, [p.grad for p in row.model.parameters()], strict=True)
    )


def test_a_saved_tensor_that_is_modified_is_told_as_ever(slow: None) -> None:
    row = Trained()

    def said() -> str:
        made: list[torch.Tensor] = []

        def at(how: str, i: int, x: torch.Tensor) -> None:
            if how == "forward":
                made.append(x)
                if i == 7:
                    with torch.no_grad():
                        made[2].add_(1)

        row.model.at = at
        loss = row.loss()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        row.model.at = lambda _how, _i, _x: None
        return str(caught.value)

    with lowtide.fit(row.model, row.optimizer, budget=0.7) as tide:
        for _ in range(STEPS):
            row.step()
        assert dynamic_of(tide).tapes.steps
        ours = said()
    assert ours == said()


def test_steps_that_are_never_as_rehearsed_are_left_to_python(slow: None) -> None:
    def meddle(row: Trained, dynamic: Dynamic | None) -> None:
        for _ in range(tapes._FAILED):
            loss = row.loss()
            if dynamic is not None:
                assert dynamic.tapes.on
                dynamic.tapes.hand_over()
            loss.backward()
            row.optimizer.step()
            row.optimizer.zero_grad()
        row.step()
        if dynamic is not None:
            assert dynamic.tapes._all[0].tape is None

    both_ways(meddle)


def test_what_was_rehearsed_twice_alike_is_a_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal in which something else is done each time is none."""
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: SLOW)
    end = Rehearsal.end
    count = [0]

    def other(self: Rehearsal, *given: Any) -> rehearsal.Tape:
        found = end(self, *given)
        count[0] += 1
        return replace(found, words=(*found.words, count[0]))

    monkeypatch.setattr(Rehearsal, "end", other)
    row = Trained()
    with lowtide.fit(row.model, row.optimizer, budget=0.7) as tide:
        for _ in range(STEPS):
            row.step()
        assert not dynamic_of(tide).tapes.steps and count[0] > 2


def test_a_tape_knows_where_it_only_lets_go(slow: None) -> None:
    row = Trained()
    with lowtide.fit(row.model, row.optimizer, budget=0.7) as tide:
        for _ in range(STEPS + 2):
            row.step()
        dynamic = dynamic_of(tide)
        assert dynamic.planned is not None and dynamic.tapes.steps
        script, tape = dynamic.planned.following.script, dynamic.tapes._put
        assert script is not None and tape is not None
        assert tape.lets_go and script.reruns and not tape.lets_go & set(script.reruns)


def test_a_step_that_cannot_be_taped_is_made_by_python(
    slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> rehearsal.Tape:
        raise CannotTape("no")

    monkeypatch.setattr(Rehearsal, "end", refuse)
    row = Trained()
    with lowtide.fit(row.model, row.optimizer, budget=0.7) as tide:
        for _ in range(STEPS):
            row.step()
        assert dynamic_of(tide).tapes.why == "no" and not dynamic_of(tide).tapes.steps
        assert planned_of(tide).mode is Mode.PLANNED


class Simple(Row):
    """Of which some plan swaps what others are made from."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.dropout(torch.tanh(layer(x)), 0.25, True)
        return x


@contextmanager
def borrowing() -> Iterator[tuple[Trained, Dynamic, torch.Tensor]]:
    """A forward by a tape that made something from what Python moves, and dropped it."""
    for share in (0.6, 0.7, 0.5, 0.8) * 3:
        row = Trained(Simple())
        with lowtide.fit(row.model, row.optimizer, budget=share) as tide:
            for _ in range(STEPS):
                row.step()
            dynamic = dynamic_of(tide)
            torch.manual_seed(5)
            loss = row.loss()
            if borrowed(dynamic):
                yield row, dynamic, loss
                return
            loss.backward()
            row.optimizer.zero_grad()
    pytest.skip("no plan swaps what it makes others from")


def borrowed(dynamic: Dynamic) -> list[int]:
    """Saves that Python moves, of which some dropped value is made."""
    tape, native, planned = dynamic.tapes._put, dynamic.tapes._native, dynamic.planned
    if not dynamic.tapes.on or tape is None or native is None or planned is None:
        return []
    gone = [value for value in range(len(tape.bytes)) if native.is_dropped(value)]
    sources = {native.storage(source) for value in gone for source in native.sources(value)}
    keys = {storage._cdata for storage in sources if storage is not None}
    wanted = planned.following.wanted
    return [n for n in sorted(tape.lent) if n in wanted and wanted[n].key in keys]


def gradients(row: Trained) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in row.model.parameters() if p.grad is not None]
    row.optimizer.zero_grad()
    return found


def again(row: Trained, number: int | None = None) -> list[torch.Tensor]:
    """The same without lowtide; a saved tensor may be written to."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return kept[-1]

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = row.loss()
    if number is not None:
        write_to(kept[number].untyped_storage())
    loss.backward()
    return gradients(row)


def write_to(storage: torch.UntypedStorage) -> None:
    with torch.no_grad():
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def test_a_write_to_what_python_moves_is_seen() -> None:
    """As by a backward of the program's own that uses what it has saved as a buffer."""
    with borrowing() as (row, dynamic, loss):
        number = borrowed(dynamic)[0]
        assert dynamic.planned is not None
        cell = dynamic.planned.following.wanted[number]
        assert isinstance(cell, DeltaCell)
        cell.bring()
        write_to(cell.storage)
        assert not dynamic.tapes.on
        loss.backward()
        ours = gradients(row)
    assert all(map(torch.equal, ours, again(row, number)))


def test_what_cannot_be_brought_back_just_then_is_asked_for_again() -> None:
    with borrowing() as (row, dynamic, loss):
        bring = DeltaCell.bring
        failed: list[DeltaCell] = []

        def fail_once(cell: DeltaCell) -> None:
            if not failed:
                failed.append(cell)
                raise OutOfBudget("just now there is none")
            bring(cell)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeltaCell, "bring", fail_once)
            loss.backward()
        assert not dynamic.tapes.on or not failed
        ours = gradients(row)
    assert all(map(torch.equal, ours, again(row)))


@pytest.mark.parametrize("where", ["_cells", "_settle"])
def test_a_hand_over_that_is_broken_off_is_gone_on_with(slow: None, where: str) -> None:
    row = Trained()
    with lowtide.fit(row.model, row.optimizer, budget=0.7) as tide:
        for _ in range(STEPS):
            row.step()
        dynamic = dynamic_of(tide)
        torch.manual_seed(5)
        loss = row.loss()
        assert dynamic.tapes.on

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dynamic.tapes, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                dynamic.tapes.hand_over()
        loss.backward()
        ours = gradients(row)
    assert all(map(torch.equal, ours, again(row)))
