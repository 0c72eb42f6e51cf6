"""Room on the device: what goes when there is too little, and how."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cap import Cap
from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.choose import drops, score
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.idle import IdleState
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Call, Recipe, Value
from lowtide._runtime.swap.cell import State
from lowtide._units import format_bytes

_SLACK = 0.01  # of the budget: what is made free beyond what is needed
_WAITED = 2.0  # copies of a swap that are waited for: short of memory, hardly any is hidden
_MOST_WISHED, _MOST_AT_FIRST = 0.25, 0.5  # of the budget
_PAGES = 8 << 20  # bytes that the allocator may lose where it makes one block out of two
_FIRST_PORTION = 1 << 20
_AHEAD = 8  # cells that may be on their way back before backward asks for them
_ORDERED = 64  # ops: as long the order in which values go holds, but for those used since
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
        self.lax = False  # steps go by a plan, and the device's allocator is held to the budget
        self.blind = False  # nobody sees what is written to: nothing is dropped
        self.calls: dict[int, Call] = {}  # by which dropped values of this step were made
        self.margin = 0  # of it: bytes that the device's allocator needs itself
        self.policy = policy
        self._speed = speed  # bytes a second to the tier below
        self._bytes_per_second = 0.0
        self.recipe_of: Callable[[Value], Recipe | None] = lambda _: None
        self.surely_of: Callable[[Value], Recipe | None] = lambda _: None
        self.spare: Callable[[], None] = lambda: None  # let go of what is held in advance
        self.adopt: Callable[[], None] = lambda: None  # all that is saved is in `cells`, then
        self.cost_of: Callable[[Value, float], float] = lambda _value, _most: float("inf")
        self.dropped: Callable[[DeltaCell, Sequence[Value]], None] = lambda _cell, _from: None
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.cells: list[DeltaCell] = []  # in the order in which they were saved
        self._at: dict[int, int] = {}  # the place of each among them
        self.idle: IdleState | None = None  # what goes when nothing else is left
        self.clear: Callable[[int], None] = lambda _: None  # the device's allocator's cache
        self.flushes: Callable[[], int] = lambda: 0  # of it because there was no memory, so far
        self.failures: Callable[[], int] = lambda: 0  # of the device's allocator, so far
        self.could_give: Callable[..., bool] = lambda *_: True  # blocks of these sizes at once
        self.counts: Counter[str] = Counter()
        self._noted = 0, 0  # failures so far, and those that were told of, when a step ended
        self._out_free_at = 0.0  # when the copies out that were asked for will be done
        self._releasing = False
        self._order: deque[DeltaCell] = deque()  # what goes next
        self._ordered_at = 0

    def ask(self, cap: Cap) -> None:
        """What the device's allocator says."""
        self.clear, self.could_give = cap.clear, cap.could_give
        self.failures, self.flushes = cap.failures, cap.count

    def enough(self, need: int) -> bool:
        """Whether an op that makes so much can run as things are."""
        budget = self.budget
        return budget is None or self._ledger.held + need + _ROUNDING <= budget - self.margin

    def run(
        self,
        work: Callable[[], Any],
        need: int,
        name: str = "recomputing",
        *,
        wish: int = 0,
        retry: bool = True,
        before_retry: Callable[[], None] | None = None,
        failed: bool = False,
        first: bool = False,
    ) -> Any:
        """Run `work` with room for what it makes; if that is too little, with more.

        `failed`: it has run out of memory once already. `first`: a library is about to choose how
        it computes this from now on, by what memory it finds.
        """
        published = self.policy == PUBLISHED
        portion = max(need, _FIRST_PORTION)
        if failed:
            self._relieve(portion, need, name)
        elif not published:
            most = _MOST_AT_FIRST if first else _MOST_WISHED
            wish = min(wish, int(most * (self.budget or 0)))
            self.make(need, name, wish=wish)
            if first:
                self.clear(need + wish)
            if wish:
                self._assure(need, wish)
        while True:
            failures = self.failures()
            try:
                result = work()
                self.made_do(failures)
                break
            except RuntimeError as error:  # out of memory is one
                if not retry or not self.was_short(error, failures):
                    raise
                self._relieve(portion, need, name)
                portion *= 2
                if before_retry is not None:
                    before_retry()
        if published:
            self.make(0, name)
        return result

    def _assure(self, need: int, wish: int) -> None:
        """That the allocator has it all in blocks, too, if that can be by letting values go.

        A library that does not get what it asks for computes in another way, in this run and, as it
        remembers, in all that follow.
        """
        if self.lax or self._releasing:
            return
        sizes = [size for size in (need, wish + _PAGES) if size]
        portion = max(wish // 4, _FIRST_PORTION)
        while not self.could_give(*sizes):
            if not self._release(portion):
                return
            portion *= 2

    def was_short(self, error: BaseException, failures: int) -> bool:
        """Whether an op failed for want of memory; so many `failures` were there before it.

        A library to which the allocator gave nothing may say anything.
        """
        return is_out_of_memory(error) or self.failures() != failures

    def end_step(self) -> None:
        """Of ops that nobody saw, some may have made do with less, too."""
        failures, told = self.failures(), self.counts["made do"] + self.counts["out of memory"]
        before, self._noted = self._noted, (failures, told)
        if failures != before[0] and told == before[1]:
            self.made_do(before[0])

    def made_do(self, failures: int) -> None:
        """An op has run; `failures` were there before it."""
        if self.failures() != failures:
            self.counts["made do"] += 1

    def _relieve(self, count: int, need: int, name: str) -> None:
        """The device is full, whatever the ledger says; PyTorch's own cache is gone already."""
        self.counts["out of memory"] += 1
        if not self._release(count):
            raise OutOfBudget(
                f"{name} ran out of memory: it makes {format_bytes(need)}, "
                f"{format_bytes(self._ledger.held)} are held and nothing more can leave"
            )

    def make(
        self, count: int, name: str = "bringing back a saved tensor", *, wish: int = 0
    ) -> None:
        """So that `count` bytes more are still within the budget; if possible, `wish` besides."""
        budget = self.budget
        more = count + _ROUNDING if count else 0
        if budget is None or self._releasing or self.lax:
            return
        excess = self._ledger.held + more - (budget - self.margin)
        if excess + wish <= 0:
            return
        self._release(excess + wish + int(_SLACK * budget))
        held = self._ledger.held
        if held + more > budget and self.policy != PUBLISHED:
            raise OutOfBudget(
                f"the budget is {format_bytes(budget)} ({budget} bytes), but {name} makes "
                f"{format_bytes(count)} while {format_bytes(held)} are held that cannot leave: "
                f"give at least {held + more} bytes"
            )

    def has(self, count: int) -> bool:
        """Whether so much more is within the budget as things are."""
        if self.lax:
            self._ledger.count_unseen()
        return self.budget is None or self._ledger.held + count <= self.budget - self.margin

    def most(self) -> int:
        """Bytes that may be held, but for what the allocator needs itself."""
        return 0 if self.budget is None else self.budget - self.margin

    def left(self) -> int | None:
        """Bytes that are still within the budget; None: there is none."""
        return None if self.budget is None else max(0, self.budget - self._ledger.held)

    def _release(self, count: int) -> int:
        """Let values go until `count` bytes are free; how many are."""
        ledger = self._ledger
        began = ledger.held
        self._releasing = True

        def enough() -> bool:
            return began - ledger.held >= count

        try:
            with self.lock:
                self.adopt()
                self._release_idle(enough, leaving=True)
                for cell in () if enough() else self._in_order():
                    if cell.can_go() and cell.alone():
                        self._let_go(cell)
                    if enough():
                        break
                if not enough():
                    self.spare()
                self._release_idle(enough, leaving=False)
        finally:
            self._releasing = False
        return began - self._ledger.held

    def add(self, cell: DeltaCell) -> None:
        """One that could go."""
        self._at[id(cell)] = len(self.cells)
        self.cells.append(cell)

    def keep_wanted(self) -> None:
        """Of the cells; a step begins."""
        self.cells = [cell for cell in self.cells if cell.wanted()]
        self._at = {id(cell): i for i, cell in enumerate(self.cells)}
        self.forget_order()

    def fetch_before(self, cell: DeltaCell, spare: int) -> None:
        """What was saved before it is asked for next: some may come back already."""
        at = self._at.get(id(cell))
        if at is None or self.budget is None or self.policy == PUBLISHED:
            return
        for other in reversed(self.cells[max(0, at - _AHEAD) : at]):
            if other.state is State.AWAY and other.handles:
                if not self.has(other.bytes + spare + cell.bytes):
                    return
                other.fetch()

    def forget(self) -> None:
        """Refer to nothing of the program's."""
        self.cells = []
        self._at.clear()
        self.calls.clear()
        self.forget_order()

    def forget_order(self) -> None:
        """It refers to cells that may be no more."""
        self._order.clear()

    def _release_idle(self, enough: Callable[[], bool], *, leaving: bool) -> None:
        if self.idle is not None:
            released = self.idle.release(enough, leaving=leaving)
            self.counts["swapped"] += len(released)
            self.counts["swapped bytes"] += sum(released)

    def _in_order(self) -> Iterator[DeltaCell]:
        """Those that could go, the best to lose first: what is left of the last order, then all."""
        now, at = self._ledger.now, self._ordered_at
        if now - at < _ORDERED:
            while self._order:
                cell = self._order.popleft()
                if cell.last <= at:
                    yield cell
        self._ordered_at = now
        self._order = deque(self._by_score())
        while self._order:
            yield self._order.popleft()

    def _by_score(self) -> list[DeltaCell]:
        now, policy, costs = self._ledger.now, self.policy, self._costs
        scored = []
        for i, cell in enumerate(self.cells):
            if not cell.can_go():
                continue
            value = cell.value
            recompute = None
            if value is not None and value.call is not None and not value.spoilt:
                recompute = costs.seconds(value.call.cost)
            found = score(policy, cell.bytes, now - cell.last, cell.bounces, recompute)
            if found is not None:
                scored.append((found, i))
        scored.sort()
        return [self.cells[i] for _, i in scored]

    def _let_go(self, cell: DeltaCell) -> None:
        """Swap it or drop it, as the director says."""
        if cell.state is State.LEAVING:
            cell.release()
            return
        if cell.state is State.COMING:
            cell.send_back()
            self.counts["sent back"] += 1
            return
        recipe = self.recipe_of(cell.value) if cell.value is not None else None
        drop = self._drops(cell, recipe)
        if drop is None or (not drop and self._swap(cell)):
            return
        if recipe is not None:
            self._forgo(cell, recipe)

    def drop(self, cell: DeltaCell) -> None:
        """Drop it, if it can be made again."""
        with self.lock:
            recipe = self.surely_of(cell.value) if cell.value is not None else None
            if recipe is not None and cell.can_go():
                self._forgo(cell, recipe)
            else:
                self.counts["not dropped"] += 1

    def note(self, cell: DeltaCell) -> None:
        """It went otherwise; what it is made by is needed where it is to be dropped."""
        recipe = self.recipe_of(cell.value) if cell.value is not None else None
        if recipe is not None:
            self._know(recipe)

    def _know(self, recipe: Recipe) -> None:
        """Its calls may have to run again."""
        for call in recipe.calls:
            self.calls[call.number] = call
        for source in recipe.sources:
            cell = source.saved()
            if cell is not None:
                cell.needed = True

    def let_leave(self, cell: DeltaCell) -> bool:
        """Its copy below is made, or waited for: its bytes go. False: it stays."""
        if not cell.release():
            return False
        self.counts["swapped"] += 1
        self.counts["swapped bytes"] += cell.bytes
        return True

    def _forgo(self, cell: DeltaCell, recipe: Recipe) -> None:
        cell.forgo(recipe.sources)
        self.dropped(cell, recipe.sources)
        self._know(recipe)
        self.counts["dropped"] += 1
        self.counts["dropped bytes"] += cell.bytes

    def _drops(self, cell: DeltaCell, recipe: Recipe | None) -> bool | None:
        copy = cell.bytes / self._rate()
        waits = max(0.0, self._out_free_at - time.perf_counter())
        recompute = None
        if recipe is not None:
            assert cell.value is not None
            recompute = self.cost_of(cell.value, 10 * copy + 1.0)
        return drops(self.policy, copy, waits + _WAITED * copy, recompute)

    def _swap(self, cell: DeltaCell) -> bool:
        """False: there was no room below, or the copy failed."""
        if not cell.leave():
            return False
        copy = cell.bytes / self._rate()
        self._out_free_at = max(time.perf_counter(), self._out_free_at) + copy
        return self.let_leave(cell)

    def know_speed(self) -> None:
        """Of copies, before there is a need."""
        self._rate()

    def _rate(self) -> float:
        if not self._bytes_per_second:
            self._bytes_per_second = self._speed()
        return self._bytes_per_second


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an op failed because there was no memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
