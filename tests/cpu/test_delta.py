"""`lowtide.fit` with a policy that needs no plan, on the CPU: main memory and a file below it."""

import gc
import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from independent import cpu_peak_bytes
from jobs import JOBS, Job, heavy
from tight import (
    Run,
    bits_of,
    counting,
    find_difference,
    fitted,
    holding_nothing,
    run,
    run_away,
    state_of,
)
from torch import nn
from torch.nn import functional as F
from untouched import installed, untouched

import lowtide
from lowtide._runtime import budget as budgeting
from lowtide._runtime.swap.cell import State

STEPS = 4
TOLERANCE = 0.01  # of the budget: what an allocator rounds
STATES = 32 * 5120  # bytes: of the generator before each random op of a step


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with untouched():
        yield


@cache
def plain(name: str) -> Run:
    return run(JOBS[name], STEPS)


def share_of_peak(name: str, share: float) -> int:
    return int(share * max(plain(name).peaks))


def check(name: str, share: float, **how: Any) -> None:
    """Trained bit for bit, and every step, the first included, within the budget."""
    budget = share_of_peak(name, share)
    ours = run(JOBS[name], STEPS, budget, **how)
    assert find_difference(ours.result, plain(name).result) is None
    assert max(ours.peaks) <= budget * (1 + TOLERANCE), (ours.peaks, budget)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45, 0.35])
@pytest.mark.parametrize("name", JOBS)
def test_jobs_train_bit_for_bit_within_the_budget(name: str, share: float) -> None:
    check(name, share)


@pytest.mark.parametrize("name", ["resnet", "gpt", "tree", "unet"])
def test_so_they_do_by_dtr(name: str) -> None:
    check(name, 0.6, policy="dtr")


@pytest.mark.parametrize("name", ["resnet", "gpt", "tree", "gan"])
def test_the_published_policy_trains_bit_for_bit_in_less(name: str) -> None:
    """It makes room after an op, not before it: nearly within the budget."""
    ours = run(JOBS[name], STEPS, share_of_peak(name, 0.5), policy="delta-as-published")
    assert find_difference(ours.result, plain(name).result) is None
    assert max(ours.peaks) <= share_of_peak(name, 0.65)


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("name", ["resnet", "accumulation"])
def test_so_they_do_however_recipes_are_verified(name: str, verify: str) -> None:
    check(name, 0.5, verify=verify)


@pytest.mark.parametrize("name", ["mlp", "tree"])
def test_a_roomy_budget_costs_no_memory(name: str) -> None:
    budget = share_of_peak(name, 2)
    ours = run(JOBS[name], STEPS, budget)
    assert find_difference(ours.result, plain(name).result) is None
    for our_peak, peak in zip(ours.peaks, plain(name).peaks, strict=True):
        assert our_peak <= peak * (1 + TOLERANCE) + STATES


def test_one_fit_may_follow_another() -> None:
    budgets = [share_of_peak("gpt", share) for share in (0.5, 0.35, 0.6, 0.4)]
    job = JOBS["gpt"]()
    losses = []
    for budget in budgets:
        with fitted(job, budget):
            losses.append(job.step())
    found = bits_of([*losses, *state_of(job), torch.get_rng_state()])
    assert find_difference(found, plain("gpt").result) is None


def compare(
    use: Callable[[Job, int | None], list[torch.Tensor]], name: str = "gpt", share: float = 0.4
) -> None:
    """What `use` makes of a fresh job is the same plainly and at a share of the plain peak."""
    budget = share_of_peak(name, share)
    with holding_nothing():
        expected = bits_of(use(JOBS[name](), None))
        found = bits_of(use(JOBS[name](), budget))
    assert find_difference(found, expected) is None


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (16, 64))


def gradients(job: Job) -> list[torch.Tensor]:
    return [p.grad.clone() for p in job.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluations_in_between(mode: Callable[[], Any]) -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        found = []
        with fitted(job, budget):
            for _ in range(2):
                found.append(job.step())
                job.model.eval()
                with mode():
                    found.append(job.model(tokens()))
                job.model.train()
                graph = job.model(tokens())  # lives while there is an evaluation
                with mode():
                    found.append(job.model(tokens()))
                graph.backward()
        return [tensor.clone() for tensor in [*found, *state_of(job), torch.get_rng_state()]]

    compare(use)


class Boom(Exception):
    pass


class Fuse:
    """While lit, the module raises when it runs forward, or when backward comes to it."""

    def __init__(self, module: nn.Module, where: str) -> None:
        self.lit = False
        self.where = where
        self.handle = module.register_forward_hook(self._burn)

    def _burn(self, _module: nn.Module, _args: object, output: torch.Tensor) -> None:
        if self.lit and self.where == "forward":
            raise Boom
        if self.lit:
            output.register_hook(self._explode)

    def _explode(self, _grad: torch.Tensor) -> None:
        raise Boom


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_undoes_everything_and_comes_through(where: str) -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        fuse = Fuse(job.model.get_submodule("blocks.3"), where)
        before = installed()

        def train() -> None:
            with fitted(job, budget):
                job.step()
                fuse.lit = True
                job.step()

        with pytest.raises(Boom):
            train()
        gc.collect()
        assert installed() == before
        assert all(t.untyped_storage().nbytes() >= t.nbytes for t in state_of(job))
        fuse.lit = False
        return [*gradients(job), job.step(), *state_of(job), torch.get_rng_state()]

    compare(use)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(where: str) -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        fuse = Fuse(job.model.get_submodule("blocks.3"), where)
        found = []
        with fitted(job, budget):
            for i in range(5):
                fuse.lit = i % 2 == 1
                if fuse.lit:
                    with pytest.raises(Boom):
                        job.step()
                else:
                    found.append(job.step())
        return [*found, *state_of(job), torch.get_rng_state()]

    compare(use)


def test_a_graph_that_outlives_the_block_still_has_what_it_saved() -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        with fitted(job, budget):
            job.step()
            loss = job.model(tokens())
        loss.backward()
        return [loss.detach(), *gradients(job), torch.get_rng_state()]

    compare(use)


def test_the_block_may_be_left_in_the_middle_of_backward() -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        with fitted(job, budget):
            middle, one, two, _ = job.model(torch.randn(1024, 48))
            slopes = torch.autograd.grad(one, [middle], retain_graph=True)
        two.backward(retain_graph=True)
        one.backward()
        return [*slopes, *gradients(job), torch.get_rng_state()]

    compare(use, "partial")


@pytest.mark.parametrize("policy", ["delta", "tide"])
@pytest.mark.parametrize("budget", ["26MiB", "30MiB"])
def test_a_source_may_be_written_to_after_the_step_has_ended(policy: str, budget: str) -> None:
    """Of a value that was dropped, in a graph that outlives the step."""
    torch.manual_seed(0)
    width = 256
    side, main = (nn.Parameter(torch.randn(width, width) / 16) for _ in range(2))
    optimizer = torch.optim.SGD([main], lr=1e-3)
    batches = [torch.randn(2048, width) for _ in range(4)]

    def train(x: torch.Tensor) -> torch.Tensor:
        source = x @ side * 1.5
        unused = source * source  # saves it
        late = torch.exp(source).sum()
        hidden = x @ main
        for _ in range(6):
            hidden = torch.tanh(hidden @ main)
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del unused
        with torch.no_grad():
            source.zero_()
        late.backward()
        assert side.grad is not None
        slope, side.grad = side.grad, None
        return slope

    expected = [train(x) for x in batches]  # what `main` has become by then has no part in it
    with lowtide.fit(None, optimizer, budget=budget, policy=policy):
        found = [train(x) for x in batches]
    assert all(map(torch.equal, found, expected))


def test_a_graph_from_before_the_block_is_finished_in_it() -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        loss = job.model(tokens()[:2])
        with fitted(job, budget):
            (job.model(tokens()) + loss).backward()
        return [*gradients(job), torch.get_rng_state()]

    compare(use)


def test_double_backward() -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        with fitted(job, budget):
            for _ in range(2):
                x = torch.randn(512, 96, requires_grad=True)
                y = job.model(x).square().mean()
                (slope,) = torch.autograd.grad(y, x, create_graph=True)
                (y + 1e6 * (slope.norm() - 1).square()).backward()
                assert x.grad is not None
                found += [y.detach(), slope.detach(), x.grad]
        return [*found, *gradients(job), torch.get_rng_state()]

    compare(use, "mlp", 0.55)  # its gradients alone, waiting for each other, take 40 %


def test_a_saved_tensor_modified_in_place_is_told_as_ever() -> None:
    def broken(job: Job, *, late: bool) -> str:
        y = F.linear(torch.randn(1024, 96), job.model.get_parameter("0.weight")).exp()
        if not late:
            y.add_(1)
        z = job.model(y)  # makes the first ones leave
        if late:
            y.add_(1)
        with pytest.raises(RuntimeError) as caught:
            z.sum().backward()
        return re.sub("output 0 of [A-Za-z]+", "output", str(caught.value))  # of exp or of add_

    budget = share_of_peak("mlp", 0.4)
    job = JOBS["mlp"]()
    for late in (False, True):
        expected = broken(job, late=late)
        assert "has been modified by an inplace operation" in expected
        with fitted(job, budget):
            assert broken(job, late=late) == expected


def test_backward_a_second_time_is_refused_as_ever() -> None:
    job = JOBS["mlp"]()
    with fitted(job, share_of_peak("mlp", 0.4)):
        loss = job.model(torch.randn(1024, 96)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_what_the_program_keeps_stays_as_it_is() -> None:
    """Activations of every layer, as tensors, as views and as arrays that share their memory."""
    job = JOBS["mlp"]()
    kept: list[torch.Tensor] = []
    arrays: list[Any] = []
    copies: list[torch.Tensor] = []

    def keep(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        kept.append((output, output.detach()[3:], output.t())[len(copies) % 3])
        arrays.append(kept[-1].detach().numpy())
        copies.append(kept[-1].detach().clone())

    handles = [layer.register_forward_hook(keep) for layer in [*job.model.children()][:6]]
    with fitted(job, share_of_peak("mlp", 0.6)):
        for _ in range(2):
            job.step()
            assert all(map(torch.equal, kept, copies))
            assert all(map(torch.equal, map(torch.from_numpy, arrays), copies))
            for found in (kept, arrays, copies):
                found.clear()
    for handle in handles:
        handle.remove()


# The tests' own tools.


@pytest.mark.parametrize("name", JOBS)
def test_jobs_repeat_themselves_and_can_be_trained_in_a_third(name: str) -> None:
    again, away = run(JOBS[name], STEPS), run_away(JOBS[name], STEPS)
    assert find_difference(again.result, plain(name).result) is None
    assert again.peaks == plain(name).peaks
    assert find_difference(away.result, plain(name).result) is None
    assert max(away.peaks) <= share_of_peak(name, 0.25)
    losses = plain(name).result[:STEPS]
    assert len({loss.content for loss in losses}) == STEPS
    for loss in losses:
        assert torch.frombuffer(bytearray(loss.content), dtype=loss.dtype).isfinite().all()


@pytest.mark.parametrize("name", JOBS)
def test_jobs_train_all_of_their_parameters_and_little_stays(name: str) -> None:
    limit = share_of_peak(name, 0.2)
    with counting() as counter:
        job = JOBS[name]()
        starts = [p.detach().clone() for p in job.model.parameters()]
        job.step()  # what a copy takes is as much as a gradient takes
        assert counter.held() <= limit
    assert not any(map(torch.equal, starts, job.model.parameters()))


def test_the_counter_sees_every_byte_that_lives() -> None:
    old = torch.empty(1000, dtype=torch.uint8)
    with counting() as counter:
        some = [torch.empty(count, dtype=torch.uint8) for count in (3, 50_000, 7_000_000)]
        assert counter.held() == 7_050_003
        del some[1]
        assert counter.held() == 7_000_003
        assert counter.mark() == 7_050_003
        assert counter.mark() == 7_000_003
        del old
        view = some[1][5:].view(-1)
        some[0].untyped_storage().resize_(100)
        some[1].untyped_storage().resize_(0)
        assert counter.held() == 100
        some[1].untyped_storage().resize_(20)
        assert counter.mark() == 7_000_103
        thread = threading.Thread(target=some.clear)
        thread.start()
        thread.join()
        assert counter.held() == 20
        del view
        assert counter.held() == 0
        torch.ones(1000).neg()
        assert counter.mark() == 8000
    torch.ones(1000)
    assert counter.mark() == 0


@pytest.mark.parametrize("name", ["resnet", "accumulation", "tree"])
def test_the_counter_and_the_profiler_agree(name: str) -> None:
    theirs = cpu_peak_bytes(lambda: JOBS[name]().step, STEPS)
    losses = 4 * (STEPS - 1)  # that `run` keeps
    assert plain(name).peaks[-1] - losses == theirs


def test_a_run_notices_a_held_tensor_and_a_lost_bit() -> None:
    kept: list[torch.Tensor] = []

    def build(*, bits: int, count: int) -> Job:
        job = JOBS["mlp"]()

        def step() -> torch.Tensor:
            kept.append(torch.empty(count, dtype=torch.uint8))
            loss = job.step()
            if len(kept) == 2:
                weight = next(job.model.parameters()).detach()
                weight.view(torch.int32)[0, 0] ^= bits
            return loss

        return Job(job.model, job.optimizers, step)

    same = run(lambda: build(bits=0, count=0), STEPS)
    assert find_difference(same.result, plain("mlp").result) is None
    assert same.peaks == plain("mlp").peaks
    kept.clear()
    other = run(lambda: build(bits=1, count=100), STEPS)
    more = [one - two for one, two in zip(other.peaks, same.peaks, strict=True)]
    assert more == [100, 200, 300, 400]
    assert find_difference(other.result, plain("mlp").result)
    zeros, others = bits_of([torch.zeros(2), -torch.zeros(2)]), bits_of([torch.zeros(3)])
    assert find_difference(zeros[:1], zeros[1:])
    assert find_difference(zeros, others) and find_difference(zeros[:1], others)


def test_a_share_is_one_of_the_plain_peak_of_a_training_step() -> None:
    """The first step tells; an evaluation before it does not."""
    job = JOBS["mlp"]()
    job.model.eval()
    with lowtide.fit(job.model, job.optimizers, budget=0.5, policy="delta") as t:
        with torch.no_grad():
            job.model(torch.randn(4, 96))
        job.model.train()
        for _ in range(STEPS):
            job.step()
    assert t._budgeted is not None
    summary = t._budgeted.dynamic_summary()
    assert summary is not None
    assert summary.budget_bytes is not None
    assert abs(summary.budget_bytes - summary.plain_peak_bytes // 2) < 0.1 * summary.budget_bytes
    assert summary.swapped + summary.dropped > 0


def test_what_was_dropped_is_back_before_its_sources_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward needs no weight here, so PyTorch does not mind that they are changed before it."""
    monkeypatch.setattr(budgeting, "_FILE_SPEED", 1e3)  # so that dropping is preferred

    def train(budget: int | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        weights = nn.ParameterList([0.1 * torch.randn(96, 96) for _ in range(12)])
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
        dropped = 0
        with ExitStack() as stack:
            if budget is not None:
                tide = lowtide.fit(weights, optimizer, budget=budget, policy="delta")
                stack.enter_context(tide)
            for _ in range(3):
                x = torch.randn(1024, 96)
                losses = [(x @ weight).exp().mean() for weight in weights]
                with torch.no_grad():
                    for weight in weights:
                        weight.mul_(1.25)
                torch.stack(losses).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if budget is not None:
                assert tide._budgeted is not None
                summary = tide._budgeted.dynamic_summary()
                assert summary is not None
                dropped = summary.dropped
        return [weight.detach().clone() for weight in weights], dropped

    expected, _ = train(None)
    found, dropped = train(5 << 20)
    assert dropped > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def _small_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeting, "_SMALLEST", 1 << 16)
    monkeypatch.setattr(budgeting, "_PIECE", 1 << 20)


@pytest.mark.usefixtures("_small_state")
@pytest.mark.parametrize(
    ("share", "piece"), [(0.8, 1 << 20), (0.6, 1 << 20), (0.55, 1 << 20), (0.9, 4 << 20)]
)
def test_optimizer_state_goes_when_nothing_else_is_left(
    share: float, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgeting, "_PIECE", piece)
    plainly = run(heavy, 6)
    budget = int(share * max(plainly.peaks))
    ours = run(heavy, 6, budget)
    assert find_difference(ours.result, plainly.result) is None
    assert max(ours.peaks) <= budget * (1 + TOLERANCE), (ours.peaks, budget)


@pytest.mark.usefixtures("_small_state")
def test_state_that_is_away_is_what_is_stored_and_replaced() -> None:
    def use(job: Job, budget: int | None) -> list[torch.Tensor]:
        (optimizer,) = job.optimizers
        stored = io.BytesIO()
        with fitted(job, budget) as tide:
            for _ in range(3):
                job.step()
            send_away(tide)
            torch.save(optimizer.state_dict(), stored)
            job.step()
            send_away(tide)
            optimizer.load_state_dict(torch.load(io.BytesIO(stored.getvalue())))
            losses = [job.step() for _ in range(3)]
        return [*losses, *state_of(job)]

    def send_away(tide: Any) -> None:
        if tide is not None:
            idle = tide._budgeted._dynamic.idle
            idle.release(lambda: False, leaving=False)
            assert {cell.state for cell in idle.optimizers.cells} == {State.AWAY}

    expected = bits_of(use(heavy(), None))
    assert find_difference(bits_of(use(heavy(), 64 << 20)), expected) is None


@pytest.mark.usefixtures("_small_state")
@pytest.mark.parametrize("build", [*(JOBS[n] for n in ("mlp", "gan", "partial", "gpt")), heavy])
def test_nothing_is_left_in_a_circle(build: Callable[[], Job]) -> None:
    """What a run leaves behind is gone with the job, without a collection."""
    budget = int(0.6 * max(run(build, 3).peaks))

    def held() -> int:
        kinds = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        return sum(tensor.untyped_storage().nbytes() for tensor in kinds)

    gc.collect()
    gc.disable()
    try:
        before = held()
        job = build()
        with fitted(job, budget):
            for _ in range(3):
                job.step()
        del job
        assert held() == before
    finally:
        gc.enable()
