"""`lowtide.fit`: a training loop made to need less memory while a `with` block lasts."""

import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide._errors import BadInput, LowtideWarning, OutOfBudget
from lowtide._files import write_whole
from lowtide._native import NoNative
from lowtide._report.delta_text import render_delta
from lowtide._report.pool_text import render_pool
from lowtide._report.swap_text import render_swap
from lowtide._runtime.budget import POLICIES, Budgeted
from lowtide._runtime.cuda import CudaPlace
from lowtide._runtime.delta.trust import VERIFY
from lowtide._runtime.marks import Marks
from lowtide._runtime.pool import Pool
from lowtide._runtime.swap.quiet import quiet


def fit(
    model: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    budget: str | float | None = None,
    policy: str = "tide",
    verify: str = "first",
    pool: bool = True,
    host_budget: str | int | None = None,
    folder: str | Path | None = None,
) -> "Tide":
    """Train in less memory while the block lasts.

    `budget` is what the device may hold, in bytes (`"16GiB"`) or as a share of what plain training
    peaks at (0.5); `"free"` is as little as costs no time (which is planned as by "autoswap"). What
    there is no room for leaves the device and comes back in time: to pinned main memory, of which
    it takes at most `host_budget`, or on a machine without a GPU to a file in `folder`; or it is
    dropped and made again.

    With policy "delta" that is decided op by op, from the first one on: values are recomputed if
    that costs less than the transfer that cannot be hidden; a recipe is relied on once its result
    was compared with the original (`verify="first"`; "always" compares each, "never" none). "tide"
    begins like that, traces a step, and goes on by a plan. "autoswap" only swaps, by a plan; before
    there is one, a budget may be exceeded. "dtr" only recomputes and "delta-as-published" does what
    that system's code does: they are there to compare with.

    `pool` lays each step's memory out so that nothing is lost to fragments; the model, the loop
    and every bit of the result stay as they are. `optimizer` tells where a step ends (without it:
    any optimizer's step), `model` which evaluations are not part of a step.

    The first steps run as ever and are watched. On leaving, the memory goes with its last tensor.
    Where CUDA is not used, or the pool cannot be built, a warning says so and training goes on as
    without lowtide.
    """
    return Tide(
        model,
        optimizer,
        pool=pool,
        tell=_warn,
        budget=budget,
        policy=policy,
        verify=verify,
        host_budget=host_budget,
        folder=None if folder is None else Path(folder),
    )


class Tide:
    """A fitted training loop; use it as a context manager."""

    _current: "Tide | None" = None  # one at a time has the pool

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | Iterable[Optimizer] | None,
        *,
        pool: bool,
        tell: Callable[[str], None],
        budget: str | float | None = None,
        policy: str = "tide",
        verify: str = "first",
        host_budget: str | int | None = None,
        folder: Path | None = None,
        live: Callable[[str], None] | None = None,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise BadInput(f"model is a {type(model).__name__}: give an nn.Module or None")
        if policy not in POLICIES:
            raise BadInput(f"no policy is called {policy!r}: known are {', '.join(POLICIES)}")
        if verify not in VERIFY:
            raise BadInput(f"verify is {verify!r}: give {', '.join(VERIFY)}")
        if not pool and budget is None:
            raise BadInput("pool=False and no budget leave nothing to do: give a budget")
        self._budget = budget
        self._policy, self._verify = policy, verify
        self._host_budget = host_budget
        self._folder = folder
        self._wants_pool = pool
        self._budgeted: Budgeted | None = None
        self._model = model
        self._optimizers = _optimizers(optimizer)
        self._tell = tell
        self._live = live  # told of every step
        self._lock = threading.Lock()
        self._undo: ExitStack | None = None
        self._undo_pool = ExitStack()
        self._pool: Pool | None = None
        self._place: CudaPlace | None = None
        self._off = "it has not been entered"  # why there is no pool
        self._waits = False  # for CUDA to be used
        self.told_off = False  # whether it has said why there is no pool

    def __enter__(self) -> Self:
        if self._undo is not None:
            raise BadInput("this fit is entered already: make another one with lowtide.fit")
        if Tide._current is not None:
            self._undo = ExitStack()
            self._turn_off("another fit is under way, and has it")
            return self
        self._off, self._waits = "CUDA is not in use", self._wants_pool
        with ExitStack() as undo:
            self._undo = undo
            Tide._current = self
            undo.callback(_leave)
            self._undo_pool = undo.enter_context(ExitStack())  # after the budget: nothing comes
            if self._wants_pool and torch.cuda.is_initialized():
                self._start()
            if self._budget is not None:
                self._budgeted = Budgeted(
                    self._budget,
                    policy=self._policy,
                    verify=self._verify,
                    host_budget=self._host_budget,
                    folder=self._folder,
                    model=self._model,
                    optimizers=self._optimizers,
                    undo=undo,
                    tell=self._tell,
                    live=self._live,
                )
                self._use_pages()
            Marks(self._model, self._optimizers, self._mark, undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._undo is not None
        undo, self._undo = self._undo, None
        self._model, self._optimizers = None, []  # whoever keeps the summary keeps no model
        undo.close()

    def summary(self) -> str:
        """What it did, in a few lines: planned and measured."""
        parts = []
        if self._budgeted is not None:
            dynamic = self._budgeted.dynamic_summary()
            if dynamic is not None:
                parts.append(render_delta(dynamic))
            elif self._budgeted.waits():
                parts.append("budget: not used so far: no model has run on a GPU, and none stepped")
            else:
                parts.append(render_swap(self._budgeted.summary()))
        if self._pool is not None and self._place is not None:
            parts.append(render_pool(self._pool.summary(), self._place.memory()))
        elif self._wants_pool and (self._budgeted is None or self.told_off):
            parts.append(f"pool: off: {self._off}")
        return "\n".join(parts)

    def save_report(self, path: str | Path) -> None:
        """A page to look at: what was planned for a step and why, beside what was measured."""
        if self._budgeted is None:
            raise BadInput("there is no budget, so nothing was planned: give lowtide.fit one")
        write_whole(Path(path), self._budgeted.render().encode())

    def _start(self) -> None:
        """Put the pool in place, now that CUDA is in use."""
        self._off, self._waits = "", False
        try:
            self._place = CudaPlace()
        except NoNative as error:
            self._turn_off(f"{error}; training goes on with PyTorch's own allocator")
            return
        self._undo_pool.callback(self._place.leave)
        self._undo_pool.callback(self._place.core.stop)
        if self._budget is None:
            self._pool = Pool(self._place.core, self._place, self._tell)

    def _use_pages(self) -> None:
        """Within a budget that PyTorch's allocator is held to, memory goes in pages."""
        budgeted, place = self._budgeted, self._place
        if budgeted is None or place is None or place.capturing():
            return
        if not budgeted.use_pages(place):
            return
        ready = budgeted.is_settled
        self._pool = Pool(place.core, place, self._tell, budgeted.shrink, ready)

    def _turn_off(self, why: str) -> None:
        self._off = why
        self.told_off = True
        self._tell(f"the pool is off: {why}")

    def _mark(self) -> None:
        with self._lock:  # optimizers may step in several threads
            if self._budgeted is not None:
                self._budgeted.mark()
                if self._live is not None:
                    self._live(self._budgeted.status())
                if self._pool is None:
                    self._use_pages()
                if self._pool is None and self._place is not None and self._budgeted.is_settled():
                    core, shrink = self._place.core, self._budgeted.shrink
                    self._pool = Pool(core, self._place, self._tell, shrink)
                    return
            if self._wants_pool:
                self._look()

    def _look(self) -> None:
        if self._pool is not None and self._place is not None:
            if self._place.capturing():
                return  # a graph is being captured: nothing may be freed, moved or waited for
            try:
                anew = self._budgeted is not None and self._budgeted.take_planned_anew()
                with quiet():
                    self._pool.mark(anew=anew)
            except OutOfBudget:
                raise  # something is lost
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self._pool.stop()
                self._pool, self._place = None, None
                if self._budgeted is not None:
                    self._budgeted.use_pages(None)
                what = f"{type(error).__name__}: {error}"
                self._turn_off(f"it failed ({what}), please report it; training goes on")
        elif self._waits and torch.cuda.is_initialized():
            self._start()
        elif self._waits and not self.told_off and self._budgeted is None:
            self._turn_off(self._off)


def _leave() -> None:
    Tide._current = None


def _optimizers(given: object) -> list[Optimizer]:
    if given is None:
        return []
    several = isinstance(given, Iterable) and not isinstance(given, Optimizer)
    found = []
    for one in given if several else [given]:  # type: ignore[attr-defined]
        if not isinstance(one, Optimizer):
            raise BadInput(f"optimizer is a {type(one).__name__}: give a torch optimizer")
        found.append(one)
    return found


def _warn(line: str) -> None:
    warnings.warn(f"lowtide: {line}", LowtideWarning, stacklevel=2)
