"""Room on the device: what goes when there is too little, and how."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.choose import Facts, choose
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Recipe, Value
from lowtide._runtime.swap.cell import State
from lowtide._units import format_bytes

_SLACK = 0.01  # of the budget: what is made free beyond what is needed
_BACK_WAITED = 0.3  # of a copy back: the share that prefetching does not hide
_FIRST_PORTION = 1 << 20
_ROUNDING = 1 << 11  # of a few results, up to what the allocator hands out
PUBLISHED = "delta-as-published"


class Room:
    """Keeps what the ledger counts within the budget. `cells` is what could go."""

    def __init__(
        self,
        ledger: Ledger,
        costs: Costs,
        budget: int | None,
        policy: str,
        speed: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._costs = costs
        self.budget = budget
        self.policy = policy
        self._speed = speed  # bytes a second to the tier below
        self._bytes_per_second = 0.0
        self.recipe_of: Callable[[Value], Recipe | None] = lambda _: None
        self.cost_of: Callable[[Value, float], float] = lambda _value, _most: float("inf")
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.cells: list[DeltaCell] = []  # in the order in which they were saved
        self.counts: Counter[str] = Counter()
        self._out_free_at = 0.0  # when the copies out that were asked for will be done
        self._releasing = False

    def run(
        self,
        work: Callable[[], Any],
        need: int,
        name: str = "recomputing",
        *,
        retry: bool = True,
        before_retry: Callable[[], None] | None = None,
    ) -> Any:
        """Run `work` with room for what it makes; if that is too little, with more."""
        published = self.policy == PUBLISHED
        if not published:
            self.make(need, name)
        portion = max(need, _FIRST_PORTION)
        while True:
            try:
                result = work()
                break
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not retry or not is_out_of_memory(error):
                    raise
                self.counts["out of memory"] += 1
                if not self._relieve(portion):
                    raise OutOfBudget(
                        f"{name} ran out of memory: it makes {format_bytes(need)}, "
                        f"{format_bytes(self._ledger.held)} are held and nothing more can leave"
                    ) from error
                portion *= 2
                if before_retry is not None:
                    before_retry()
        if published:
            self.make(0, name)
        return result

    def _relieve(self, count: int) -> bool:
        """The device is full, whatever the ledger says. False: nothing could be done."""
        freed = self._release(count)
        if self._ledger.device.type == "cuda":
            before = torch.cuda.memory_reserved(self._ledger.device)
            torch.cuda.empty_cache()
            freed += before - torch.cuda.memory_reserved(self._ledger.device)
        return freed > 0

    def make(self, count: int, name: str = "bringing back a saved tensor") -> None:
        """So that `count` bytes more are still within the budget."""
        budget = self.budget
        more = count + _ROUNDING if count else 0
        if budget is None or self._ledger.held + more <= budget or self._releasing:
            return
        self._release(self._ledger.held + more - budget + int(_SLACK * budget))
        held = self._ledger.held
        if held + more > budget and self.policy != PUBLISHED:
            raise OutOfBudget(
                f"the budget is {format_bytes(budget)} ({budget} bytes), but {name} makes "
                f"{format_bytes(count)} while {format_bytes(held)} are held that cannot leave: "
                f"give at least {held + more} bytes"
            )

    def has(self, count: int) -> bool:
        """Whether so much more is within the budget as things are."""
        return self.budget is None or self._ledger.held + count <= self.budget

    def _release(self, count: int) -> int:
        """Let values go until `count` bytes are free; how many are."""
        began = self._ledger.held
        self._releasing = True
        try:
            with self.lock:
                for cell in self._by_score():
                    if began - self._ledger.held >= count:
                        break
                    if cell.can_go() and cell.alone():
                        self._let_go(cell)
        finally:
            self._releasing = False
        return began - self._ledger.held

    def _by_score(self) -> list[DeltaCell]:
        """Those that could go, the best to lose first."""
        scored = []
        for i, cell in enumerate(self.cells):
            if cell.can_go():
                choice = choose(self.policy, self._facts(cell, quick=True))
                if choice is not None:
                    scored.append((choice.score, i))
        scored.sort()
        return [self.cells[i] for _, i in scored]

    def _facts(self, cell: DeltaCell, *, quick: bool) -> Facts:
        value = cell.value
        copy = cell.bytes / self._rate()
        waits = max(0.0, self._out_free_at - time.perf_counter())
        recompute: float | None = None
        if value is not None and value.call is not None and not value.spoilt:
            if quick:
                recompute = self._costs.seconds(value.call.cost)
            elif self.recipe_of(value) is not None:
                recompute = self.cost_of(value, 10 * copy + 1.0)
        return Facts(
            bytes=cell.bytes,
            stale=self._ledger.now - cell.last,
            recompute_seconds=recompute,
            swap_seconds=waits + copy + _BACK_WAITED * copy,
            copy_seconds=copy,
            bounces=cell.bounces,
        )

    def _let_go(self, cell: DeltaCell) -> None:
        """Swap it or drop it, as the director says."""
        if cell.state is State.LEAVING:
            cell.release()
            return
        if cell.state is State.COMING:
            cell.send_back()
            self.counts["sent back"] += 1
            return
        choice = choose(self.policy, self._facts(cell, quick=False))
        if choice is None:
            return
        if not choice.drop and self.policy != "dtr" and self._swap(cell):
            return
        recipe = self.recipe_of(cell.value) if cell.value is not None else None
        if recipe is not None and cell.state is State.HERE:
            cell.forgo(recipe.sources)
            self.counts["dropped"] += 1
            self.counts["dropped bytes"] += cell.bytes
        elif choice.drop and self.policy != "dtr":
            self._swap(cell)

    def _swap(self, cell: DeltaCell) -> bool:
        """False: there was no room below, or the copy failed."""
        if not cell.leave():
            return False
        copy = cell.bytes / self._rate()
        self._out_free_at = max(time.perf_counter(), self._out_free_at) + copy
        if not cell.release():
            return False
        self.counts["swapped"] += 1
        self.counts["swapped bytes"] += cell.bytes
        return True

    def _rate(self) -> float:
        if not self._bytes_per_second:
            self._bytes_per_second = self._speed()
        return self._bytes_per_second


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an op failed because there was no memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
