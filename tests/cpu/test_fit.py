"""`lowtide.fit` where there is no CUDA, its marks, and what the pool is built against."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import lowtide
from lowtide._native import NoNative
from lowtide._runtime import torch_build
from lowtide._runtime.marks import Marks


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_without_cuda_one_line_says_so_and_training_goes_on() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer) as tide:
        with pytest.warns(lowtide.LowtideWarning, match="the pool is off: CUDA is not in use"):
            train(model, optimizer)
        train(model, optimizer)  # said once: here a warning would be an error
    assert tide.summary() == "pool: off: CUDA is not in use"
    assert not model._forward_pre_hooks
    assert not _global_optimizer_post_hooks


def test_everything_is_undone_when_the_loop_raises() -> None:
    model, optimizer = make()

    def loop() -> None:
        with lowtide.fit(model, optimizer):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert not model._forward_pre_hooks
    assert not _global_optimizer_post_hooks
    with lowtide.fit(model, optimizer) as tide:  # and another may begin
        pass
    assert tide.summary() == "pool: off: CUDA is not in use"


def test_bad_arguments_are_one_line() -> None:
    model, optimizer = make()
    with pytest.raises(lowtide.BadInput, match=r"model is a SGD: give an nn\.Module or None"):
        lowtide.fit(optimizer)  # type: ignore[arg-type]
    for wrong in (model, [model], 3):
        with pytest.raises(lowtide.BadInput, match=r"optimizer is a .*: give a torch optimizer"):
            lowtide.fit(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(lowtide.BadInput, match="pool=False and no budget leave nothing to do"):
        lowtide.fit(model, optimizer, pool=False)
    with lowtide.fit(model, optimizer) as tide, pytest.raises(lowtide.BadInput, match="entered"):
        tide.__enter__()


def test_a_fit_inside_another_leaves_the_pool_to_it() -> None:
    model, optimizer = make()
    with lowtide.fit(model, optimizer):
        inner = lowtide.fit(model, optimizer)
        with pytest.warns(lowtide.LowtideWarning, match="another fit is under way"), inner:
            pass
        assert inner.summary() == "pool: off: another fit is under way, and has it"
    with lowtide.fit(model, optimizer) as tide:  # and then it is free again
        pass
    assert tide.summary() == "pool: off: CUDA is not in use"


def test_a_build_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA in use, but without a compiler: training goes on, and a line says why."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    model, optimizer = make()
    why = "the pool is off: no-such-compiler could not be run .*; training goes on"
    tide = lowtide.fit(model, optimizer)
    with pytest.warns(lowtide.LowtideWarning, match=why):
        tide.__enter__()
    train(model, optimizer)
    tide.__exit__(None, None, None)
    assert tide.summary().startswith("pool: off: no-such-compiler could not be run")


def test_a_bug_of_ours_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def mark(self, **_: object) -> None:
            raise AssertionError("a law was broken")

        def stop(self) -> None:
            pass

        def capturing(self) -> bool:
            return False

    model, optimizer = make()
    with lowtide.fit(model, optimizer) as tide:
        monkeypatch.setattr(tide, "_pool", Broken())
        monkeypatch.setattr(tide, "_place", Broken())
        with pytest.warns(lowtide.LowtideWarning, match=r"it failed \(AssertionError: a law"):
            train(model, optimizer)
        train(model, optimizer)
    assert "please report it" in tide.summary()


def test_the_pool_is_told_once_that_steps_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self) -> None:
            self.told: list[bool] = []

        def mark(self, *, anew: bool) -> None:
            self.told.append(anew)

        def capturing(self) -> bool:
            return False

    model, optimizer = make()
    pool = Pool()
    with lowtide.fit(model, optimizer, budget="1GiB") as tide:
        monkeypatch.setattr(tide, "_pool", pool)
        monkeypatch.setattr(tide, "_place", pool)
        assert tide._budgeted is not None and tide._budgeted._dynamic is not None
        planned = tide._budgeted._dynamic.planned
        assert planned is not None
        train(model, optimizer)
        planned.replans.anew = True
        train(model, optimizer)
        train(model, optimizer)
        assert pool.told == [False, True, False]
        monkeypatch.setattr(tide, "_pool", None)  # it has nothing to render


def test_a_fit_does_not_start_cuda() -> None:
    code = (
        "import torch, lowtide\n"
        "model = torch.nn.Linear(2, 2)\n"
        "with lowtide.fit(model): pass\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


class Counter:
    def __init__(self) -> None:
        self.marks = 0

    def __call__(self) -> None:
        self.marks += 1


def test_a_step_ends_where_the_optimizer_steps() -> None:
    model, optimizer = make()
    count = Counter()
    with ExitStack() as undo:
        Marks(model, [optimizer], count, undo)
        for _ in range(5):
            train(model, optimizer)
        assert count.marks == 5
        train(*make())  # another optimizer, not named
        assert count.marks == 5
    train(model, optimizer)
    assert count.marks == 5


def test_a_round_of_several_optimizers_is_one_step() -> None:
    critic, generator = make(), make()
    count = Counter()
    with ExitStack() as undo:
        Marks(None, [], count, undo)
        for _ in range(10):
            train(*critic)
            train(*critic)
            train(*generator)
    assert 10 <= count.marks <= 12  # until it is known which steps most rarely


def test_an_optimizer_that_has_had_its_day_closes_nothing() -> None:
    head, whole = make(), make()
    count = Counter()
    with ExitStack() as undo:
        Marks(None, [], count, undo)
        for _ in range(100):
            train(*head)
        assert count.marks == 100
        for _ in range(300):
            train(*whole)
    assert count.marks >= 360


def test_each_evaluation_is_a_step_of_its_own() -> None:
    model, optimizer = make()
    count = Counter()
    with ExitStack() as undo:
        Marks(model, [optimizer], count, undo)
        train(model, optimizer)
        assert count.marks == 1
        model.eval()
        for i in range(3):
            model(torch.ones(1, 4))
            assert count.marks == 2 + i  # what comes before an evaluation is no part of it
        model.train()
        model(torch.ones(1, 4))
        assert count.marks == 5  # nor is it part of the next training step
        train(model, optimizer)
        assert count.marks == 6


def test_an_allocator_interface_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = Path(torch.__file__).parent / "include"
    header = (include / "c10/cuda/CUDACachingAllocator.h").read_text()
    functions = torch_build.virtual_functions(header)
    assert {"raw_alloc", "snapshot", "memcpyAsync", "name", "recordHistory"} <= functions
    fake = tmp_path / "include/c10/cuda/CUDACachingAllocator.h"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        header.replace(
            "virtual void raw_delete",
            "virtual void shrinkTo(size_t n) {}\n virtual void raw_delete",
        )
    )
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(NoNative, match=re.escape("has shrinkTo, which this lowtide does not know")):
        torch_build.recipe()
    fake.unlink()
    with pytest.raises(NoNative, match="torch's headers are missing"):
        torch_build.recipe()


def test_missing_cuda_headers_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _self: False)
    monkeypatch.setattr(Path, "glob", lambda _self, _pattern: iter(()))
    with pytest.raises(NoNative, match="CUDA's headers are missing: pip install"):
        torch_build._cuda_headers()
