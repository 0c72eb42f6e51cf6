"""Answers as they might be: `pareto.py --dry-run`, and its tests."""

from collections.abc import Mapping

import delta
from delta import Row
from pareto_aims import FULL, GIB, KNOWN, SAME


class Imagined(delta.Imagined):
    """Answers as they might be: shows the plan of a run, and about how long it takes."""

    START = 6.0  # seconds of a process, of which several load at once
    SEARCH = 2.5  # seconds of planning
    ELSE: Mapping[str, tuple[float, float]] = {  # step time, memory over plain's
        "plain": (1.0, 1.0),
        "checkpoint": (1.26, 0.4),
        "selective": (1.2, 0.6),
        "offload_activations": (6.0, 0.4),
    }

    def _once(self, name: str, method: str) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        slower, less = self.ELSE[method]
        row = self._row(known.seconds * slower, less * known.peak, less * known.reserved)
        pinning = known.offload / 1.5 + 6 if method == "offload_activations" else 0
        return self.START + pinning + 10 * row["seconds"], [row]

    def _compile(self, name: str) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        rows = [
            self._row(faster * known.seconds, less * known.peak, less * known.reserved)
            for faster, less in ((0.75, 1.0), (0.9, 0.55))
        ]
        return self.START + 2 * known.compiling + 20 * known.seconds, rows

    def _tide(self, name: str, budgets: list[tuple[str, int]]) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        rows, seconds = [], self.START
        for label, budget in budgets:
            tight = max(0.0, 1 - budget / GIB / known.peak)
            held = min(budget / GIB, known.reserved)
            row = self._row(known.seconds * (1 + 0.7 * tight**2), 0.98 * held, held)
            plan = {"peak_bytes": int(0.97 * held * GIB), "seconds": 1.02 * row["seconds"]}
            plan |= {"swaps": int(40 * tight), "reruns": int(900 * tight)}
            row |= {"budget_bytes": budget, "plan": plan, "search_seconds": [self.SEARCH]}
            seconds += 2 + known.watching + self.SEARCH + 10 * row["seconds"]
            if label == FULL:
                seconds += 20 * known.seconds
                row["beside_seconds"] = known.seconds
            rows.append(row)
        return seconds, rows

    def _same(self, name: str) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        row = self._row(known.seconds, 0.6 * known.peak, 0.6 * known.peak)
        row |= {"plain_repeats": True, "identical": True, "batch": SAME[name][0]}
        row |= {"budget_bytes": int(0.6 * known.peak * GIB), "steps": {"planned": 3}}
        return self.START + 6 + known.watching + self.SEARCH, [row]

    def _row(self, seconds: float, peak: float, reserved: float) -> Row:
        return {
            "seconds": seconds,
            "peak_bytes": int(peak * GIB),
            "reserved_bytes": int(reserved * GIB),
        }
