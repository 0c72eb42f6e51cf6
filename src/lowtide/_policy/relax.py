"""Ground, load, limit -> what should be made again and what held for it, as if values were sand.

A linear programme. Values may go in part, and ops run again in part: an op as much as is wanted of
what it makes, and then what it reads must be there. It is, or it is made again, or it was held.
What is away while an op runs makes up for what is above the limit there.

The answer is a guide, no bound: what is over is taken to be needed when it is first wanted, and
what ops that run again hold meanwhile is not counted. It is mostly whole, so that a search can
start from it.
Needs `lowtide[plan]`.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lowtide._analyze.load import Curve
from lowtide._errors import BadInput
from lowtide._policy.ground import Ground

_MOST_OPS = 150  # at which the limit is looked at


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Seconds of what runs again, and the shares of the values that are dropped, or held for it."""

    seconds: float
    dropped: dict[int, float]
    held: dict[int, float]


def can_relax() -> bool:
    """Whether there is a solver."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        return False
    return True


def relax(ground: Ground, load: Curve, limit: int, stay: Container[int] = ()) -> Relaxed | None:
    """The best in parts, where each op holds `load` bytes, and values in `stay` are not dropped.

    None: there is nothing.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix
    except ImportError:
        raise BadInput("this needs SciPy: pip install 'lowtide[plan]'") from None
    above = np.flatnonzero(load > limit)
    if not len(above):
        return Relaxed(0.0, {}, {})
    step = max(1, len(above) // _MOST_OPS)
    looked_at = np.array(sorted({*above[::step].tolist(), int(load.argmax())}))
    model = _Model(ground, looked_at, (load - limit)[looked_at], stay)
    if not model.entries:
        return None
    rows, columns, entries = (np.array(part) for part in zip(*model.entries, strict=True))
    shape = (len(model.limits), len(model.costs))
    found = linprog(
        model.costs,
        A_ub=coo_matrix((entries, (rows, columns)), shape=shape).tocsr(),
        b_ub=model.limits,
        bounds=(0.0, 1.0),
        method="highs",
    )
    if found.status != 0:
        return None
    dropped: dict[int, float] = {}
    for (value, _, _), column in model.stays.items():
        dropped[value] = max(dropped.get(value, 0.0), float(found.x[column]))
    held = {value: float(found.x[column]) for value, column in model.holds.items()}
    again = sum(ground.again[op] * float(found.x[column]) for op, column in model.reruns.items())
    return Relaxed(again, dropped, held)


class _Model:
    """Rows are sums that are at most their limit; a column for each stay, rerun and hold."""

    def __init__(
        self,
        ground: Ground,
        looked_at: npt.NDArray[np.int64],
        over: Curve,
        stay: Container[int],
    ) -> None:
        self._ground = ground
        self.costs: list[float] = []
        self.limits: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.stays: dict[tuple[int, int, int], int] = {}
        self.reruns: dict[int, int] = {}
        self.holds: dict[int, int] = {}
        unit = max(float(over.max()), 1.0)  # numbers near 1, as solvers like them
        seconds = max(ground.starts[-1], 1e-9)
        memory = [self._row(-float(count) / unit) for count in over]
        first_need: dict[int, int] = {}
        for value, after, until in self._gaps():
            low, high = np.searchsorted(looked_at, (after, until))
            if low == high or value in stay:
                continue
            column = self._column(1e-9)
            self.stays[value, after, until] = column
            for row in memory[low:high]:
                self.entries.append((row, column, -ground.size[value] / unit))
            maker = ground.maker[value]
            first_need[maker] = min(first_need.get(maker, until), until)
            rerun = self._rerun(maker, seconds)
            self._at_most(column, (rerun,))
        self._require_sources(first_need, seconds)
        for value, column in self.holds.items():
            end = ground.trace.values[value].end
            low, high = np.searchsorted(looked_at, (end, ground.holdable[value] + 1))
            for row in memory[low:high]:
                self.entries.append((row, column, ground.size[value] / unit))

    def _gaps(self) -> Iterator[tuple[int, int, int]]:
        """A value, and from where to where it could be away."""
        ground = self._ground
        for value, from_on in enumerate(ground.from_on):
            if from_on >= ground.ops:
                continue
            for after, until in pairwise([ground.maker[value], *ground.uses[value]]):
                begin = max(after + 1, from_on)
                if begin < until:
                    yield value, begin, until

    def _require_sources(self, first_need: dict[int, int], seconds: float) -> None:
        """What is read by an op that runs again, and is over by then, is made again or held."""
        ground = self._ground
        values = ground.trace.values
        waiting = list(first_need)
        while waiting:
            op = waiting.pop()
            for source in ground.sources[op]:
                if values[source].after or values[source].end > first_need[op]:
                    continue
                ways = []
                if ground.can[source]:
                    maker = ground.maker[source]
                    known = maker in first_need
                    if not known or first_need[op] < first_need[maker]:
                        first_need[maker] = first_need[op]
                        waiting.append(maker)
                    ways.append(self._rerun(maker, seconds))
                if source in ground.holdable:
                    if source not in self.holds:
                        self.holds[source] = self._column(1e-9)
                    ways.append(self.holds[source])
                self._at_most(self.reruns[op], ways)

    def _rerun(self, op: int, seconds: float) -> int:
        if op not in self.reruns:
            self.reruns[op] = self._column(self._ground.again[op] / seconds)
        return self.reruns[op]

    def _at_most(self, column: int, others: "list[int] | tuple[int, ...]") -> None:
        """One is at most the sum of others."""
        row = self._row(0.0)
        self.entries.append((row, column, 1.0))
        self.entries += [(row, other, -1.0) for other in others]

    def _column(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def _row(self, limit: float) -> int:
        self.limits.append(limit)
        return len(self.limits) - 1
