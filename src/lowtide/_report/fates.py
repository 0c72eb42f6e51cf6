"""The planned step -> what becomes of each storage, and why, in a few words."""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lowtide._analyze.access import producers
from lowtide._analyze.load import load_curve, rounded_bytes
from lowtide._ir import Kind, ValueId
from lowtide._report.planned import PlannedStep
from lowtide._units import format_seconds

_SMALL = 1000  # times smaller than the peak
_LONG = 0.1  # of the step


class Action(StrEnum):
    """What is done to a storage."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"
    BOTH = "swap, recompute"


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one storage of the traced step, and why."""

    action: Action
    bytes: int
    kind: Kind
    label: str  # its name, or the module in which it was made
    op: int | None  # that made it
    away: tuple[tuple[float, float], ...]  # in seconds, perhaps into the next step
    why: str


@dataclass(frozen=True, slots=True)
class Fates:
    """Of the storages that matter most, largest first; and of all: how many, how many bytes."""

    shown: tuple[Fate, ...]
    totals: dict[Action, tuple[int, int]]


def find_fates(planned: PlannedStep, most: int = 300) -> Fates:
    """At least a third of those shown are kept, if so many are, and a third are not."""
    book = _Book(planned)
    ranked = sorted(book.size, key=lambda storage: (-book.size[storage], storage))
    by_action: dict[Action, list[int]] = {action: [] for action in Action}
    for storage in ranked:
        by_action[book.action(storage)].append(storage)
    kept = by_action[Action.KEEP]
    moved = [storage for storage in ranked if book.action(storage) is not Action.KEEP]
    room = max(most - len(moved), most // 3)
    shown = sorted(
        (*kept[:room], *moved[: most - min(room, len(kept))]),
        key=lambda storage: (-book.size[storage], storage),
    )
    totals = {
        action: (len(found), sum(book.size[storage] for storage in found))
        for action, found in by_action.items()
        if found
    }
    return Fates(tuple(book.fate(storage) for storage in shown), totals)


class _Book:
    """What happens to each storage of the traced step."""

    def __init__(self, planned: PlannedStep) -> None:
        trace, step = planned.trace, planned.step
        self._planned = planned
        self._versions: dict[int, list[int]] = defaultdict(list)
        self.size: dict[int, int] = {}
        for number, value in enumerate(trace.values):
            size = rounded_bytes(trace, value)
            if value.device == trace.device and size > 0:
                self._versions[value.storage].append(number)
                self.size[value.storage] = max(self.size.get(value.storage, 0), size)
        self._swaps: dict[int, list[int]] = defaultdict(list)
        for number, swap in enumerate(planned.plan.swaps):
            self._swaps[self._storage(swap.value)].append(number)
        self._remade: dict[int, list[int]] = defaultdict(list)  # old value -> those made again
        for number in range(len(trace.values), len(step.old)):
            if step.trace.values[number].device == trace.device:
                self._remade[step.old[number]].append(number)
        self._maker = producers(trace)
        self._uses: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(step.trace.ops):
            for touched in {self._storage(v) for v in (*op.reads, *op.updates, *op.writes)}:
                self._uses[touched].append(i)
        self._plain = load_curve(trace)

    def _storage(self, number: int) -> int:
        """Of the traced step."""
        return self._planned.trace.values[self._planned.step.old[number]].storage

    def _old(self, swap: int) -> int:
        return self._planned.step.old[self._planned.plan.swaps[swap].value]

    def action(self, storage: int) -> Action:
        again = any(self._remade.get(number) for number in self._versions[storage])
        if self._swaps.get(storage):
            return Action.BOTH if again else Action.SWAP
        return Action.RECOMPUTE if again else Action.KEEP

    def fate(self, storage: int) -> Fate:
        values, versions = self._planned.trace.values, self._versions[storage]
        moved: list[int] = [self._old(number) for number in self._swaps.get(storage, ())]
        moved += [number for number in versions if self._remade.get(number)]
        longest = max(versions, key=lambda number: values[number].end - values[number].first)
        value, first = values[moved[0] if moved else longest], versions[0]
        reasons = [*self._why_swap(storage), *self._why_again(storage)]
        return Fate(
            self.action(storage),
            self.size[storage],
            value.kind,
            value.name or value.module,
            self._maker.get(ValueId(first)),
            tuple(sorted(self._away(storage))),
            "; ".join(reasons or [self._why_kept(storage)]),
        )

    def _away(self, storage: int) -> list[tuple[float, float]]:
        planned = self._planned
        swaps = [planned.plan.swaps[number] for number in self._swaps.get(storage, ())]
        found = [(planned.begins(s.release), planned.arrives(s.fetch)) for s in swaps]
        new = planned.step.trace.values
        for number in self._versions[storage]:
            lives = [number, *self._remade.get(number, ())]
            found += [
                (planned.arrives(new[old].end), planned.arrives(new[again].first))
                for old, again in pairwise(lives)
                if self._wanted(again)
            ]
        return found

    def _wanted(self, again: int) -> bool:
        """Whether it is made again for its own sake: it would still be there in the plain step."""
        step = self._planned.step
        end = self._planned.trace.values[step.old[again]].end
        return step.trace.values[again].first < step.position(end)

    def _why_swap(self, storage: int) -> list[str]:
        planned = self._planned
        numbers = self._swaps.get(storage, [])
        if not numbers:
            return []
        swaps = [planned.plan.swaps[number] for number in numbers]
        idle = max(planned.arrives(s.until) - float(planned.ends[s.after]) for s in swaps)
        waited = sum(planned.waited(number) for number in numbers)
        hidden = f"compute waits {format_seconds(waited)}" if waited else "copies hidden"
        return [f"idle for {format_seconds(idle)}, {hidden}"]

    def _why_again(self, storage: int) -> list[str]:
        """The ops that run for it: those before the same op whose results lead to it."""
        planned, new = self._planned, self._planned.step.trace
        times, runs, seconds, others = 0, 0, 0.0, " for others"
        for number in self._versions[storage]:
            for again in self._remade.get(number, ()):
                others = "" if self._wanted(again) else others
                todo, seen = [int(new.values[again].first)], set()
                while todo:
                    at = todo.pop()
                    if at not in seen:
                        seen.add(at)
                        made = (r for r in new.ops[at].reads if r >= len(planned.trace.values))
                        firsts = (int(new.values[r].first) for r in made)
                        todo += [f for f in firsts if planned.before[f] == planned.before[at]]
                times, runs = times + 1, runs + len(seen)
                seconds += sum(new.ops[at].seconds for at in seen)
        if not times:
            return []
        often = f" {times} times" if times > 1 else ""
        ops = "1 op" if runs == 1 else f"{runs} ops"
        return [f"made again{others}{often} by {ops} in {format_seconds(seconds)}"]

    def _why_kept(self, storage: int) -> str:
        planned, versions = self._planned, self._versions[storage]
        if not planned.plan.swaps and not planned.plan.remakes:
            return "the step fits as it is"
        old, new = planned.trace.values, planned.step.trace.values
        lead, at = planned.step.lead, planned.step.at
        if any(new[n].end > at[old[n].end] for n in versions):
            sourced = any(planned.again[i] for i in self._uses[storage])
            return "held longer" + (": others are made again from it" if sourced else "")
        if any(new[n].end < lead[old[n].end] for n in versions):
            return "let go early: nothing uses it again"
        uses = self._uses[storage]
        if planned.outcome.peak_op in uses:
            return "in use at the peak"
        first, end = min(old[n].first for n in versions), max(old[n].end for n in versions)
        if self._plain[first:end].max(initial=0) <= planned.outcome.peak_bytes:
            return "not there when memory is short"
        if self.size[storage] < planned.outcome.peak_bytes // _SMALL:
            return "small"
        life = [new[n] for n in versions]
        edges = sorted({min(v.first for v in life), max(v.end for v in life), *uses})
        idle = max(
            (planned.arrives(b) - planned.arrives(a + 1) for a, b in pairwise(edges)), default=0.0
        )
        if idle > _LONG * planned.seconds:
            return f"idle for {format_seconds(idle)}, but others cost less"
        return f"idle for at most {format_seconds(idle)}" if idle > 0 else "always in use"
