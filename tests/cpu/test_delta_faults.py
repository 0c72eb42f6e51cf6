"""What goes wrong under policy "delta": training goes on identically, or stops and is undone."""

import errno
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import JOBS, Job
from tight import Run, bits_of, find_difference, fitted, holding_nothing, run, state_of
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from untouched import installed, untouched

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.record import known
from lowtide._runtime.delta.room import Room
from lowtide._runtime.fit import Tide
from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.file_tier import FileTier
from lowtide._trace.tensors import tensors_in

STEPS = 2
NAMES = ("mlp", "gpt", "unet", "rnn")
SHARE = 0.5


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with untouched():
        yield


@cache
def plain(name: str) -> Run:
    return run(JOBS[name], STEPS)


def budget_of(name: str) -> int:
    return int(SHARE * max(plain(name).peaks))


Choose = Callable[[int, OpOverload[..., Any]], BaseException | None]


class Failing(TorchDispatchMode):
    """Below lowtide's own mode: `choose` gives the error with which an op of the program fails.

    An op that is tried again has the number that it had.
    """

    def __init__(self, choose: Choose) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choose = choose
        self.number = 0
        self.fails = 0

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _computes(func, args, kwargs):
            error = self._choose(self.number, func)
            if error is not None:
                self.fails += 1
                try:
                    raise error
                finally:
                    del error  # else it would hold its own frame, and that the op's arguments
            self.number += 1
        return func(*args, **kwargs)


def _computes(func: OpOverload[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    devices = {str(kwargs.get("device")), *(str(t.device) for t in tensors_in((args, kwargs)))}
    return func.namespace == "aten" and not known(func).view and "meta" not in devices


def room_of(tide: object) -> Room:
    assert isinstance(tide, Tide) and tide._budgeted is not None
    assert tide._budgeted._dynamic is not None
    return tide._budgeted._dynamic.room


def something_can_leave(room: Room) -> bool:
    return any(cell.can_go() and cell.alone() for cell in room.cells)


def train(job: Job, steps: int = STEPS) -> list[torch.Tensor]:
    return [job.step() for _ in range(steps)]


def all_of(job: Job) -> list[torch.Tensor]:
    return [*state_of(job), torch.get_rng_state()]


@pytest.mark.parametrize("k", [1, 17])
@pytest.mark.parametrize("name", NAMES)
def test_an_op_that_runs_out_of_memory_runs_again(name: str, k: int) -> None:
    """Every k-th of those that can, once each, while anything can still leave."""
    rooms: list[Room] = []
    failed: set[int] = set()

    def choose(number: int, func: OpOverload[..., Any]) -> BaseException | None:
        if number % k or number in failed or not known(func).retriable or not rooms:
            return None
        if not something_can_leave(rooms[0]):
            return None
        failed.add(number)
        return torch.OutOfMemoryError("injected")

    budget = budget_of(name)
    job = JOBS[name]()
    with holding_nothing(), Failing(choose) as failing, fitted(job, budget) as tide:
        rooms.append(room_of(tide))
        losses = train(job)
    assert failing.fails >= 100 / k
    assert rooms[0].counts["out of memory"] == failing.fails
    assert find_difference(bits_of([*losses, *all_of(job)]), plain(name).result) is None


def test_a_library_that_says_anything_else_for_want_of_memory_runs_again() -> None:
    """The allocator knows that it gave nothing."""
    rooms: list[Room] = []
    failed: set[int] = set()

    def choose(number: int, func: OpOverload[..., Any]) -> BaseException | None:
        if number in failed or "convolution" not in func.name() or not rooms:
            return None
        if not something_can_leave(rooms[0]):
            return None
        failed.add(number)
        return RuntimeError("GET was unable to find an engine to execute this computation")

    budget = budget_of("unet")
    job = JOBS["unet"]()
    with Failing(choose) as failing, fitted(job, budget) as tide:
        rooms.append(room_of(tide))
        rooms[0].failures = lambda: failing.fails
        losses = train(job)
        rooms.clear()
    assert failing.fails > 10
    found = [*bits_of(losses), *bits_of(all_of(job))]
    assert find_difference(found, plain("unet").result) is None


@pytest.mark.parametrize("chooses", [True, False])  # what it chose to take, it takes ever after
def test_what_a_library_takes_inside_is_had_first(
    chooses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the allocator's own blocks: values leave until it could give them, or none is left."""
    wish = 1 << 16
    inside = Costs.inside

    def some(costs: Costs, key: Any, name: str = "", args: Sequence[Any] = ()) -> int:
        return wish if "convolution" in name else inside(costs, key, name, args)

    monkeypatch.setattr(Costs, "inside", some)
    monkeypatch.setattr(Costs, "chooses", lambda _costs, key: chooses and key is not None)
    budget = budget_of("unet")
    job = JOBS["unet"]()
    asked: list[tuple[int, ...]] = []
    gone: list[int] = []

    def could_give(*counts: int) -> bool:
        asked.append(counts)
        gone.append(room.counts["dropped"] + room.counts["swapped"])
        return len(asked) % 3 == 0

    with fitted(job, budget) as tide:
        room = room_of(tide)
        room.could_give = could_give
        losses = train(job)
    assert len(asked) > 10 and all(counts[-1] >= wish for counts in asked)
    assert sum(after > before for before, after in pairwise(gone)) > 5
    found = [*bits_of(losses), *bits_of(all_of(job))]
    assert find_difference(found, plain("unet").result) is None


def test_also_where_it_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "inside", lambda *_: 1 << 16)
    first: Counter[bool] = Counter()
    run_it = Room.run

    def watched(self: Room, work: Callable[[], Any], need: int, *args: Any, **how: Any) -> Any:
        if not args:
            first[how["first"]] += 1
        return run_it(self, work, need, *args, **how)

    monkeypatch.setattr(Room, "run", watched)
    run(JOBS["unet"], STEPS, budget_of("unet"))
    assert first[True] and first[False] > first[True], first


def test_a_thread_chooses_for_itself() -> None:
    costs = Costs(torch.device("cpu"))
    assert [costs.chooses("a") for _ in range(4)] == [True, True, False, False]
    with ThreadPoolExecutor() as other:
        assert other.submit(costs.chooses, "a").result()
    assert costs.chooses("b") and not costs.chooses("a") and not costs.chooses(None)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_so_does_what_is_recomputed(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = count = 0
    run_it = Room.run

    def run_badly(self: Room, work: Callable[[], Any], need: int, *args: Any, **how: Any) -> Any:
        if args:
            return run_it(self, work, need, *args, **how)
        nonlocal count
        count += 1
        bad = count % k == 0

        def try_to() -> Any:
            nonlocal bad, fails
            if bad and something_can_leave(self):
                bad = False
                fails += 1
                raise torch.OutOfMemoryError("injected")
            return work()

        return run_it(self, try_to, need, **how)

    monkeypatch.setattr(Room, "run", run_badly)
    ours = run(JOBS[name], STEPS, budget_of(name))
    assert fails >= 10 / k
    assert find_difference(ours.result, plain(name).result) is None


def stop_at(name: str, number: int, make: Callable[[], BaseException]) -> list[BaseException]:
    """Op `number` always fails. What that leaves and a plain step make is as it is plainly."""
    budget = budget_of(name)
    errors: list[BaseException] = []
    found = []
    for under in (None, budget):
        job = JOBS[name]()
        before = installed()
        choose: Choose = lambda at, _func: make() if at == number else None  # noqa: E731
        try:
            with holding_nothing(), Failing(choose), fitted(job, under):
                train(job)
        except Exception as error:  # noqa: BLE001 - whatever it is
            errors.append(error.with_traceback(None))
        gc.collect()
        assert installed() == before
        assert all(t.untyped_storage().nbytes() >= t.nbytes for t in all_of(job))
        found.append(bits_of([*all_of(job), job.step(), *all_of(job)]))
    assert find_difference(*found) is None
    return errors


def ops_of(name: str) -> int:
    """Of two steps."""
    job = JOBS[name]()
    with Failing(lambda _number, _func: None) as counting:
        train(job, 2)
    found: int = counting.number
    return found


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("name", ["mlp", "gpt", "unet"])
def test_memory_that_never_suffices_stops_it_clearly(name: str, part: int) -> None:
    number = ops_of(name) * (2 * part + 1) // 12
    errors = stop_at(name, number, lambda: torch.OutOfMemoryError("injected"))
    assert len(errors) == 2
    assert isinstance(errors[1], OutOfBudget | torch.OutOfMemoryError)


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("name", ["mlp", "gpt", "rnn"])
def test_an_error_at_any_op_comes_through(name: str, part: int) -> None:
    number = ops_of(name) * (2 * part + 1) // 12 + part
    errors = stop_at(name, number, lambda: ValueError("injected"))
    assert [str(error) for error in errors] == ["injected"] * 2


@pytest.mark.parametrize("host_budget", ["64KiB", 1])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_with_nothing_below_it_recomputes(name: str, host_budget: str | int) -> None:
    budget = int(0.8 * max(plain(name).peaks))
    ours = run(JOBS[name], STEPS, budget, host_budget=host_budget)
    assert find_difference(ours.result, plain(name).result) is None


@pytest.mark.parametrize("host_budget", ["64KiB", 1])
@pytest.mark.parametrize("name", NAMES)
def test_or_says_what_it_lacks(name: str, host_budget: str | int) -> None:
    try:
        ours = run(JOBS[name], STEPS, budget_of(name), host_budget=host_budget)
    except OutOfBudget as error:
        assert "give at least" in str(error)  # noqa: PT017 - or it may pass
    else:
        assert find_difference(ours.result, plain(name).result) is None


@pytest.mark.parametrize("count", [0, 5, 20])
@pytest.mark.parametrize("name", ["mlp", "unet", "rnn"])
def test_a_full_disk_loses_nothing(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `count` writes pass."""
    writes = 0
    write = os.pwrite

    def write_badly(file: int, content: memoryview, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes > count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content, offset)

    expected, budget = plain(name), budget_of(name)
    monkeypatch.setattr(os, "pwrite", write_badly)  # as the file tier calls it
    try:
        ours = run(JOBS[name], STEPS, budget)
    except OutOfBudget as error:
        assert "give at least" in str(error)  # noqa: PT017 - or it may pass
    else:
        assert find_difference(ours.result, expected.result) is None
    assert writes > count or name == "mlp"


def test_what_could_not_be_written_is_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not leave in another way otherwise."""

    def write_badly(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tensor = torch.zeros(1 << 16)
    tier = FileTier()
    gc.disable()
    try:
        cell = Cell(tensor.untyped_storage(), tier)
        cell.handles = 1
        assert cell.alone()
        monkeypatch.setattr(os, "pwrite", write_badly)
        assert cell.leave() and not cell.release()
        assert cell.here() and cell.alone()
    finally:
        gc.enable()
        tier.close()


_INTERRUPTED = """
import _thread, gc, json, random, signal, sys, threading, time
sys.path[:0] = sys.argv[3:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
import torch
from test_delta_faults import all_of, installed, train
from jobs import JOBS
from tight import bits_of, fitted, find_difference

torch.set_num_threads(1)
chance = random.Random(int(sys.argv[1]))
budgets = json.loads(sys.argv[2])
came = 0
for trial in range(5):
    name = chance.choice([*budgets])
    budget = budgets[name]
    job = JOBS[name]()
    before = installed()
    timer = threading.Timer(chance.uniform(0, 0.4), _thread.interrupt_main)
    try:
        with fitted(job, budget):
            timer.start()
            end = time.monotonic() + 1  # in a finalizer, Python itself ignores it
            while time.monotonic() < end:
                job.step()
    except KeyboardInterrupt:
        came += 1
    timer.join()
    gc.collect()
    assert installed() == before, (installed(), before)
    assert all(t.untyped_storage().nbytes() >= t.nbytes for t in all_of(job))
    assert job.step().isfinite()
    found = []
    for under in (None, budget):
        job = JOBS[name]()
        with fitted(job, under):
            losses = train(job, 2)
        found.append(bits_of([*losses, *all_of(job)]))
    assert find_difference(*found) is None
    del job, losses
assert came >= 3, came
print("survived")
"""


@pytest.mark.parametrize("seed", range(2))
def test_it_may_be_interrupted_at_any_moment(seed: int) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "helpers")]
    budgets = json.dumps({name: budget_of(name) for name in NAMES})
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(seed), budgets, *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("survived\n")
