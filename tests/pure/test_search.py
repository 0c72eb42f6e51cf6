"""The search for a plan on a step of Llama's, which holds much more while its optimizer steps."""

from collections.abc import Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest

from lowtide._ir import Kind, Trace
from lowtide._machine.find import find_machine
from lowtide._policy import problem as problems
from lowtide._policy import search as searching
from lowtide._policy.ground import Ground
from lowtide._policy.joint import Choice, Task, Trial, attempt
from lowtide._policy.problem import Pace, Problem
from lowtide._policy.remake import remake
from lowtide._policy.schedule import schedule
from lowtide._policy.search import Search
from lowtide._policy.taste import Taste
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.remade import remade
from lowtide._simulate.simulate import simulate
from lowtide._trace.file import load_trace

GIB = 1 << 30


@cache
def llama() -> Trace:
    """As `benchmarks/without_gpu.py` makes it: 33.2 GiB, and 16.5 while the optimizer steps."""
    return load_trace(Path(__file__).parents[1] / "data" / "llama-1b.trace")


@cache
def task() -> Task:
    return Task(Ground(llama()), find_machine("h200"), 12 * GIB, None, 1 << 20, None)


def times(trial: Trial | None) -> float:
    """As long as the plain step."""
    assert trial is not None
    return trial.seconds / task().ground.starts[-1]


def kinds(trial: Trial | None) -> set[Kind]:
    assert trial is not None
    values = remade(llama(), trial.remakes).trace.values
    return {values[swap.value].kind for swap in trial.swaps}


def test_state_leaves_before_gradients_and_weights_do() -> None:
    search = Search(task())
    assert search.begin()
    assert times(search.best) < 2.1, "4.3, where all that cannot be made again leaves"
    assert kinds(search.best) == {Kind.STATE}


@pytest.fixture
def passed_by(monkeypatch: pytest.MonkeyPatch) -> Search:
    """A search that has tried to move state evenly, and nothing else."""
    monkeypatch.setattr(searching, "_MORE", (0.1,))
    search = Search(task())
    assert search._problem is not None
    search._pass_by(search._problem, inf)
    return search


def test_of_state_that_has_to_pass_by_no_more_leaves_than_there_is_time_to_copy(
    passed_by: Search,
) -> None:
    best = passed_by.best
    assert best is not None
    assert times(best) < 1.85
    assert best.peak_bytes <= 12 * GIB
    # It is one that can be followed, and what is said of it is true.
    step = remade(llama(), best.remakes).trace
    assert find_bad_swap(step, best.swaps) is None
    machine = task().machine
    assert machine is not None
    assert simulate(step, machine, best.swaps).seconds == pytest.approx(best.seconds)
    # 4.5 GiB have to, both ways, and nearly all of the 8.2 would.
    sizes = [step.values[swap.value].bytes for swap in best.swaps]
    assert 4.4 * GIB < sum(sizes) < 6 * GIB


def test_what_was_scheduled_with_care_is_scheduled_so_again_at_once(
    passed_by: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a choice is changed a little, it need not look for paces again."""
    best, choice = passed_by.best, passed_by._choice
    assert best is not None and len(choice.paces) > 1
    tried: list[Pace] = []

    def counting(
        problem: Problem, chosen: Any, limit: int, paces: Sequence[Pace]
    ) -> problems.Trial:
        tried.extend(paces)
        return fastest(problem, chosen, limit, paces)

    fastest = problems._fastest
    monkeypatch.setattr(problems, "_fastest", counting)
    again = attempt(task(), choice)
    assert again is not None and again.seconds == best.seconds
    assert tuple(tried) == choice.paces
    once = attempt(task(), Choice(choice.swaps, choice.taste))
    assert once is not None and once.seconds > best.seconds


def test_a_search_looks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("_guide", "_swap", "_climb"):
        monkeypatch.setattr(Search, part, lambda *_, **__: None)
    monkeypatch.setattr(searching, "_MORE", (0.1,))
    assert times(Search(task()).run(60.0)) < 1.85


def test_of_choices_with_the_same_swaps_the_one_by_which_least_runs_again_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = Search(task())
    problem = search._problem
    assert problem is not None
    some = [one for one in problem.found if problem.trace.values[one.value].kind is Kind.STATE]
    swaps = tuple(schedule(problem.stage, problem.machine, some, 0))
    tastes = [Taste(), Taste(distance=0.5), Taste(1.5, 0.75, 0.25), Taste(around=False)]
    seconds = {}
    for taste in tastes:
        found = remake(task().ground, 12 * GIB, taste, swaps=swaps)
        assert found is not None
        seconds[taste] = found[0]
    tried: list[Choice] = []
    monkeypatch.setattr(search, "_try", tried.append)
    search._try_cheapest(swaps, [Choice(swaps, taste) for taste in tastes], inf)
    assert [one.taste for one in tried] == [min(tastes, key=lambda taste: seconds[taste])]
    assert tried[0].taste != tastes[0]
