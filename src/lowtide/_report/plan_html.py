"""Trace and plan -> one self-contained page: the memory, the schedule, the pool. Opens offline."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtide._analyze.load import rounded_bytes
from lowtide._ir import Machine, Op, Phase, Plan, Trace
from lowtide._report.fates import Action, find_fates
from lowtide._report.page import render_page
from lowtide._report.planned import (
    LAYERS,
    PlannedStep,
    Times,
    labels,
    layers,
    pack_pool,
    plan_step,
)
from lowtide._units import format_bytes, format_seconds

_PART = Path(__file__).with_name("plan.html")
_COLUMNS = 2400  # two for each pixel of a chart: half of it can be looked at closely
_TICKS = 50 * _COLUMNS  # what times are counted in: whole numbers are short
_MOST_OPS = 4000  # drawn one by one; more are drawn as columns
_MOST_PLACES = 6000
_PACK_SECONDS = 1.0
_OPS = ("forward", "backward", "optimizer", "run again", "waiting")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step that went by the plan really held and took."""

    peak_bytes: int
    seconds: float


def render_plan(
    trace: Trace,
    plan: Plan,
    machine: Machine | None,
    measured: Measured | None = None,
    *,
    budget_bytes: int | None = None,
) -> str:
    """The page. `machine` is the one the plan was made for; None, if nothing is swapped."""
    planned = plan_step(trace, plan, machine)
    page = _Page(planned)
    data = {
        "title": trace.source or "one step",
        "facts": _facts(planned, measured, budget_bytes),
        "notes": _notes(planned),
        "budget": budget_bytes,
        "span": page.span,
        "ticks": _TICKS,
        "columns": _COLUMNS,
        **page.charts(),
        "compute": page.compute(),
        "ops": page.ops(),
        "waits": page.waits(),
        "copies": page.copies(),
        "pool": page.pool(),
        "values": _values(planned),
        "strings": list(page.strings),  # last, for it is complete only now
    }
    return render_page(_PART, data)


def _facts(
    planned: PlannedStep, measured: Measured | None, budget: int | None
) -> list[tuple[str, str]]:
    plan, outcome = planned.plan, planned.outcome
    facts = []
    if budget is not None:
        facts.append(("budget", format_bytes(budget)))
    facts += [
        (
            "predicted peak",
            f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.plain_peak_bytes)} plain "
            f"({plan.peak_bytes / max(plan.plain_peak_bytes, 1):.1%})",
        ),
        (
            "predicted step",
            f"{format_seconds(plan.seconds)} of {format_seconds(plan.plain_seconds)} plain "
            f"({_percent(plan.seconds, plan.plain_seconds)})",
        ),
    ]
    if measured is not None:
        facts += [
            (
                "measured peak",
                f"{format_bytes(measured.peak_bytes)} "
                f"({_percent(measured.peak_bytes, plan.peak_bytes)} from predicted)",
            ),
            (
                "measured step",
                f"{format_seconds(measured.seconds)} "
                f"({_percent(measured.seconds, plan.seconds)} from predicted)",
            ),
        ]
    ops = planned.step.trace.ops
    again = [op.seconds for op, rerun in zip(ops, planned.again, strict=True) if rerun]
    if again:
        facts.append(("run again", f"{_count(len(again), 'op')} in {format_seconds(sum(again))}"))
    if plan.swaps:
        values = planned.step.trace.values
        moved = sum(rounded_bytes(planned.trace, values[swap.value]) for swap in plan.swaps)
        facts += [
            ("swapped", f"{format_bytes(moved)} each way, {_count(len(plan.swaps), 'stay')}"),
            ("copies hidden", f"{outcome.hidden:.1%} of {format_seconds(outcome.copy_seconds)}"),
        ]
    if planned.waits.any():
        facts.append(("waiting for copies", format_seconds(outcome.stall_seconds)))
    slowed = outcome.seconds - planned.seconds
    if slowed > 1e-3 * planned.seconds:
        facts.append(("slowed down by copies", format_seconds(slowed)))
    facts.append(("policy", plan.policy or "none"))
    if plan.machine:
        facts.append(("machine", plan.machine))
    return facts


def _notes(planned: PlannedStep) -> list[str]:
    if not planned.timed:
        return ["The trace has no times: each op is drawn as one that takes 1 µs."]
    seconds, expected = planned.outcome.seconds, planned.plan.seconds
    if abs(seconds - expected) > 1e-3 * expected:
        return [
            f"With the times of this trace the step takes {format_seconds(seconds)}: the plan was "
            "made with others."
        ]
    return []


def _values(planned: PlannedStep) -> dict[str, Any]:
    fates = find_fates(planned)
    unit, scale = next(
        ((u, s) for u, s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if planned.seconds >= 2 * s),
        ("ns", 1e-9),
    )

    def clock(stay: tuple[float, float]) -> str:
        start, length = stay[0] % planned.seconds, stay[1] - stay[0]
        over = start + length - planned.seconds
        if over > 1e-9 * planned.seconds:
            return f"{start / scale:.4g} to {over / scale:.4g} of the next step"
        return f"{start / scale:.4g} to {(start + length) / scale:.4g}"

    rows = []
    for fate in fates.shown:
        away = ", ".join(map(clock, fate.away[:3]))
        more = f" and {len(fate.away) - 3} more" if len(fate.away) > 3 else ""
        made = "" if fate.op is None else planned.trace.ops[fate.op].name.removeprefix("aten.")
        rows.append(
            [
                fate.bytes,
                fate.action,
                fate.kind,
                fate.label,
                f"{made} (op {fate.op})" if made else "",
                f"{away}{more}",
                fate.why,
                round(sum(end - start for start, end in fate.away) / planned.seconds, 6),
            ]
        )
    listed = {action: [f for f in fates.shown if f.action is action] for action in Action}
    return {
        "rows": rows,
        "unit": unit,
        "totals": [[action, *total] for action, total in fates.totals.items()],
        "more": [
            [action, count - len(listed[action]), size - sum(f.bytes for f in listed[action])]
            for action, (count, size) in fates.totals.items()
            if count > len(listed[action])
        ],
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Curve:
    """What each op holds, by layer, when it starts, and when the last one ends.

    `numbers` are those of the traced step, and `elsewhere` is when these start in the other chart.
    """

    ops: tuple[Op, ...]
    held: npt.NDArray[np.int64]
    starts: Times
    numbers: npt.NDArray[np.int64]
    again: npt.NDArray[np.bool_]
    elsewhere: Times


class _Page:
    """Times as ticks and columns, names as numbers of strings."""

    def __init__(self, planned: PlannedStep) -> None:
        self.planned = planned
        self.strings: dict[str, int] = {"": 0}
        plain = sum(op.seconds for op in planned.trace.ops)
        self.span = max(planned.seconds, plain)

    def _string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def _ticks(self, seconds: float) -> int:
        return round(seconds / self.span * _TICKS)

    def charts(self) -> dict[str, Any]:
        """Memory by kind, plain and planned, as far as a kind is in one of them."""
        planned = self.planned
        both = (layers(planned.trace, ()), layers(planned.step.trace, planned.plan.swaps))
        starts = np.concatenate(([0.0], np.cumsum([op.seconds for op in planned.trace.ops])))
        seen = [k for k in range(len(LAYERS)) if any(held[k].any() for held in both)]
        count = len(planned.trace.ops)
        new_starts = np.append(planned.starts, planned.seconds)
        at = list(planned.step.at[:-1])
        return {
            "layers": [LAYERS[k] for k in seen],
            "plain": self._chart(
                _Curve(
                    planned.trace.ops,
                    both[0][seen],
                    starts,
                    np.arange(count),
                    np.zeros(count, np.bool_),
                    new_starts[at],
                )
            ),
            "planned": self._chart(
                _Curve(
                    planned.step.trace.ops,
                    both[1][seen],
                    new_starts,
                    planned.before,
                    planned.again,
                    starts[:-1][planned.before],
                )
            ),
        }

    def _chart(self, curve: _Curve) -> dict[str, Any]:
        """Of the ops that share a column the one that holds most is shown."""
        total = curve.held.sum(axis=0)
        shown = _columns(total, curve.starts, self.span)
        runs = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(shown)))]
        ops = shown[runs]
        peak = int(total.argmax())
        return {
            "at": runs,
            "end": len(shown),
            "ops": curve.numbers[ops].tolist(),
            "again": curve.again[ops].astype(int).tolist(),
            "names": [self._string(curve.ops[i].name) for i in ops],
            "modules": [self._string(curve.ops[i].module) for i in ops],
            "elsewhere": [self._ticks(seconds) for seconds in curve.elsewhere[ops]],
            "held": curve.held[:, ops].tolist(),
            "peak": [self._ticks(curve.starts[peak]), int(total[peak])],
        }

    def compute(self) -> dict[str, Any]:
        """What share of each column compute spends on what, in percent."""
        planned = self.planned
        kind = self._kinds()
        ends = np.linspace(0, self.span, _COLUMNS + 1)
        columns = _width(planned.seconds, self.span)
        times = np.empty(2 * len(kind) + 1)
        times[0], times[1::2], times[2::2] = 0.0, planned.starts, planned.ends
        shares = []
        for number in range(len(_OPS)):
            spent = np.zeros(len(times))
            if number == len(_OPS) - 1:
                spent[1::2] = planned.waits
            else:
                spent[2::2] = np.where(kind == number, planned.ends - planned.starts, 0.0)
            passed = np.interp(ends, times, np.cumsum(spent))
            shares.append(np.rint(np.diff(passed) * _COLUMNS / self.span * 100).astype(int))
        table = np.array(shares)[:, :columns]
        changes = np.any(np.diff(table, axis=1) != 0, axis=0)
        at = [0, *(int(i) + 1 for i in np.flatnonzero(changes))]
        return {
            "kinds": _OPS,
            "at": at,
            "end": columns,
            "shares": [[int(table[k, i]) for i in at] for k in range(len(_OPS))],
        }

    def _kinds(self) -> npt.NDArray[np.int64]:
        phases = {phase: number for number, phase in enumerate(Phase)}
        kind = np.array([phases[op.phase] for op in self.planned.step.trace.ops])
        return np.where(self.planned.again, len(phases), kind)

    def ops(self) -> list[list[int]]:
        """Start, end, name and kind of each, if there are not too many."""
        planned = self.planned
        ops = planned.step.trace.ops
        if len(ops) > _MOST_OPS:
            return []
        return [
            [self._ticks(start), self._ticks(end), self._string(op.name), int(kind)]
            for op, start, end, kind in zip(
                ops, planned.starts, planned.ends, self._kinds(), strict=True
            )
        ]

    def waits(self) -> list[list[int]]:
        """Start and end of each wait of compute."""
        starts, waits = self.planned.starts, self.planned.waits
        where = np.flatnonzero(waits)
        return [[self._ticks(starts[i] - waits[i]), self._ticks(starts[i])] for i in where]

    def copies(self) -> dict[str, list[list[int]]]:
        """Start, end, whose and bytes of each; one that goes on into the next step comes twice."""
        planned = self.planned
        found: dict[str, list[list[int]]] = {"out": [], "back": []}
        named = labels(planned.step.trace)
        spans = {"out": planned.outcome.out_spans, "back": planned.outcome.back_spans}
        for number, swap in enumerate(planned.plan.swaps):
            value = planned.step.trace.values[swap.value]
            facts = [self._string(named[swap.value]), rounded_bytes(planned.trace, value)]
            for way, rows in found.items():
                start, end = spans[way][number]
                begin = start % planned.seconds
                for low, high in _wrapped(begin, begin + end - start, planned.seconds):
                    rows.append([self._ticks(low), self._ticks(high), *facts])
        return found

    def pool(self) -> dict[str, Any]:
        """Start, end, offset, bytes, layer and whose of each place: the largest ones."""
        pool = pack_pool(self.planned, _PACK_SECONDS)
        places = sorted(pool.places, key=lambda place: -place.bytes)
        return {
            "rows": [
                [
                    self._ticks(place.start),
                    self._ticks(place.end),
                    place.offset,
                    place.bytes,
                    place.layer,
                    self._string(place.label),
                ]
                for place in places[:_MOST_PLACES]
            ],
            "more": max(0, len(places) - _MOST_PLACES),
            "kinds": LAYERS,
            "height": pool.height,
            "load": pool.load,
        }


def _width(seconds: float, span: float) -> int:
    """How many columns something from the step's start takes."""
    return max(1, min(_COLUMNS, int(np.ceil(seconds / span * _COLUMNS - 1e-6))))


def _columns(load: npt.NDArray[np.int64], starts: Times, span: float) -> npt.NDArray[np.int64]:
    """The op to show in each column: every op is in one, however short it is."""
    edges = np.linspace(0, span, _COLUMNS + 1)[: _width(starts[-1], span) + 1]
    begin = starts[:-1]
    under_way = np.searchsorted(begin, edges[:-1], side="right") - 1
    first = np.minimum(np.searchsorted(begin, edges[:-1], side="left"), under_way)
    last = np.searchsorted(begin, edges[1:], side="left") - 1
    last[-1] = len(begin) - 1
    spans = zip(np.maximum(first, 0), np.maximum(last, 0), strict=True)
    return np.array([a + int(load[a : b + 1].argmax()) for a, b in spans])


def _wrapped(begin: float, end: float, seconds: float) -> list[tuple[float, float]]:
    """What goes on after the step's end goes on from its start."""
    if end <= seconds:
        return [(begin, end)]
    return [(begin, seconds), (0.0, min(end - seconds, seconds))]


def _percent(now: float, then: float) -> str:
    """By how much `now` is more than `then`."""
    return f"{now / then - 1:+.1%}" if then > 0 else "+0.0%"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
