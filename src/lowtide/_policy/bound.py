"""Trace, limit, machine -> seconds that no plan can do without. Needs `lowtide[plan]`.

A value can only be away between two of its uses. Each time it was dropped the op that made it has
to run again; one that makes several values may bring them all back at once, so each carries its
part of the op's time. Each time it was swapped it was copied out after the first use and before it
is away, and back after that and before the second use. A way of the link copies for no longer than
time passes, and time is what ops take and what is added to them. What is away while an op runs must
make up for what is above the limit there. Values may go in part: a linear programme, over some of
the ops.

Known to be imperfect: what has to be there to make a value again costs nothing here, nor does it
matter when an op runs again, so for tight limits the bound is far below what can be done.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lowtide._analyze.load import load_curve
from lowtide._errors import BadInput
from lowtide._ir import Machine, Trace
from lowtide._machine.link import seconds as link_seconds
from lowtide._policy.candidates import candidates
from lowtide._policy.ground import Ground

_MOST_OPS = 300  # at which the limit is looked at
_MOST_WITH_LINK = 60  # ... where it matters, too, when copies are made between them


def least_extra_seconds(
    trace: Trace, limit: int, machine: Machine | None = None, *, smallest: int = 1 << 20
) -> float:
    """No plan takes less than that longer than the plain step; infinite where there is none.

    Without a machine nothing is swapped; with one, only values of `smallest` bytes are.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix
    except ImportError:
        raise BadInput("a bound needs SciPy: pip install 'lowtide[plan]'") from None
    ground = Ground(trace)
    curve = load_curve(trace)
    above = np.flatnonzero(curve > limit)
    if not len(above):
        return 0.0
    most = _MOST_OPS if machine is None else _MOST_WITH_LINK
    over = above[np.append(np.diff(above) > 1, above[-1] + 1 < len(curve))] + 1
    some = (*_some(above, most), *_some(over, most // 4))  # copies have time when that is over
    points = sorted({*some, int(curve.argmax())})
    stays = list(_stays(ground, machine, points, smallest))
    model = _Model(ground, limit, points, machine)
    for point in range(len(points)):
        model.relieve(point, float(curve[points[point]] - limit))
    for stay, amount in _merged(stays):
        model.add(stay, amount)
    rows, columns, entries = (np.array(part) for part in zip(*model.entries, strict=True))
    shape = (len(model.limits), len(model.costs))
    found = linprog(
        model.costs,
        A_ub=coo_matrix((entries, (rows, columns)), shape=shape).tocsr(),
        b_ub=model.limits,
        bounds=(0.0, None),
        method="highs",
    )
    if found.status == 2:
        return float("inf")
    return float(found.fun) * model.seconds_unit if found.status == 0 else 0.0


def _some(positions: npt.NDArray[np.int64], most: int) -> list[int]:
    found: list[int] = positions[:: max(1, -(-len(positions) // most))].tolist()
    return found


@dataclass(frozen=True, slots=True)
class _Stay:
    """Of a value between two uses. Points are counted on from step to step.

    Dropped it is away at the points in `gone`, and costs `again` seconds. Swapped it is at those in
    `away` at most: copied out from point `out` on, and back up to the one after `back`. (Waits that
    come before a point count as between that and the last.)
    """

    gone: range
    again: float
    away: range
    out: int
    back: int
    out_seconds: float
    back_seconds: float


def _stays(
    ground: Ground, machine: Machine | None, points: Sequence[int], smallest: int
) -> Iterator[tuple[_Stay, int]]:
    """With the bytes of each."""
    count = len(points)
    at = np.array([point + step * ground.ops for step in range(-1, 3) for point in points])

    def first(position: int) -> int:
        """The first point from a position on."""
        return int(np.searchsorted(at, position)) - count

    drops = {}
    for value, after, until, again in _drops(ground):
        gone = range(first(after + 1), first(until))
        if gone:
            drops[value, after] = gone, again
    none = range(0)
    if machine is not None:
        for one in candidates(ground.trace, smallest=smallest):
            away = range(first(one.earliest), first(one.latest))
            if away:
                gone, again = drops.pop((one.value, one.after), (none, 0.0))
                yield (
                    _Stay(
                        gone,
                        again,
                        away,
                        first(one.after + 1) - 1,
                        first(one.until) - 1,
                        link_seconds(machine.out, one.bytes),
                        link_seconds(machine.back, one.bytes),
                    ),
                    one.bytes,
                )
    for (value, _), (gone, again) in drops.items():
        yield _Stay(gone, again, none, 0, 0, 0.0, 0.0), ground.size[value]


def _drops(ground: Ground) -> Iterator[tuple[int, int, int, float]]:
    """When each value could have been dropped, and what of an op's time that costs at least."""
    ops = ground.trace.ops
    for value, can in enumerate(ground.can):
        if not can:
            continue
        maker = ground.maker[value]
        able = sum(ground.can[other] for other in ops[maker].writes)
        seconds = ground.again[maker] / able
        end = ground.trace.values[value].end
        uses = [maker, *ground.uses[value]]
        for after, until in pairwise(uses):
            if until - after > 1:
                yield value, after, until, seconds
        if end > uses[-1] + 1:
            yield value, uses[-1], end, 0.0  # nobody needs it any more


def _merged(stays: Sequence[tuple[_Stay, int]]) -> Iterator[tuple[_Stay, int]]:
    """Those that are as long, at the same points, and cost as much for their bytes are one."""
    alike: dict[tuple[object, ...], list[tuple[_Stay, int]]] = defaultdict(list)
    for stay, size in stays:
        costs = (stay.again, stay.out_seconds, stay.back_seconds)
        densities = tuple(float(f"{cost / size:.9e}") for cost in costs)
        alike[stay.gone, stay.away, stay.out, stay.back, densities].append((stay, size))
    for some in alike.values():
        one = some[0][0]
        sums = [sum(getattr(stay, name) for stay, _ in some) for name in _COSTS]
        yield (
            _Stay(one.gone, sums[0], one.away, one.out, one.back, sums[1], sums[2]),
            sum(size for _, size in some),
        )


_COSTS = ("again", "out_seconds", "back_seconds")


class _Model:
    """Rows are sums that are at most their limit. In numbers near 1, as solvers like them:

    shares of values, per cent of the limit, thousandths of the step.
    """

    def __init__(
        self, ground: Ground, limit: int, points: Sequence[int], machine: Machine | None
    ) -> None:
        self.costs: list[float] = []
        self.limits: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.seconds_unit = 0.001 * max(ground.starts[-1], 1e-9)
        self._bytes_unit = 0.01 * limit
        self._points = len(points)
        self._memory: list[int] = []
        self._drag = 0.0 if machine is None else machine.drag
        # What is added between a point and the next; no less than what runs again.
        starts = [ground.starts[point] / self.seconds_unit for point in points]
        ends = [*starts[1:], starts[0] + ground.starts[-1] / self.seconds_unit]
        self._added = [self._column(1.0) for _ in points]
        self._again = self._row(0.0)
        for added in self._added:
            self._put(self._again, added, -1.0)
        # Where both ways are busy each keeps a share of its speed.
        share = 1.0 if machine is None else max(machine.together, 0.5)
        self._beside = (1.0 - share) / share
        self._ways: list[list[int]] = []
        for _ in range(2 if machine is not None else 0):
            lengths = zip(starts, ends, strict=True)
            rows = [self._row(end - start) for start, end in lengths]
            for row, added in zip(rows, self._added, strict=True):
                self._put(row, added, -1.0)
            self._ways.append(rows)

    def relieve(self, point: int, excess: float) -> None:
        """At the next of the points so many bytes are too much."""
        assert point == len(self._memory)
        self._memory.append(self._row(-excess / self._bytes_unit))

    def add(self, stay: _Stay, size: int) -> None:
        """Some of it is dropped, some swapped, and together no more than all."""
        whole = self._row(1.0)
        relief = -size / self._bytes_unit
        if stay.gone:
            dropped = self._column(0.0)
            self._put(self._again, dropped, stay.again / self.seconds_unit)
            self._put(whole, dropped, 1.0)
            for point in stay.gone:
                self._put(self._memory[point % self._points], dropped, relief)
        if stay.away:
            out = [self._copy(0, at, stay.out_seconds) for at in range(stay.out, stay.away[-1])]
            back = [
                self._copy(1, at, stay.back_seconds) for at in range(stay.away[0], stay.back + 1)
            ]
            for copied in out:
                self._put(whole, copied, 1.0)
            left = self._sums(out)  # ... by each point but the first
            to_come = self._sums(back[::-1])[::-1]  # ... from each point on
            for k, point in enumerate(stay.away):
                away = self._column(0.0)
                self._put(self._memory[point % self._points], away, relief)
                self._at_most(away, left[point - stay.out - 1])
                self._at_most(away, to_come[k])

    def _sums(self, parts: Sequence[int]) -> list[int]:
        """Of the first, of the first two, and so on."""
        sums: list[int] = []
        for part in parts:
            column = self._column(0.0)
            self._at_most(column, part, *sums[-1:])
            sums.append(column)
        return sums

    def _at_most(self, column: int, *others: int) -> None:
        """One is at most the sum of others."""
        row = self._row(0.0)
        self._put(row, column, 1.0)
        for other in others:
            self._put(row, other, -1.0)

    def _copy(self, way: int, at: int, seconds: float) -> int:
        """The share that is copied between a point and the next."""
        column = self._column(self._drag * seconds / self.seconds_unit)
        work = seconds / self.seconds_unit
        for each, rows in enumerate(self._ways):
            self._put(
                rows[at % self._points], column, work * (1.0 if each == way else self._beside)
            )
        return column

    def _column(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def _row(self, limit: float) -> int:
        self.limits.append(limit)
        return len(self.limits) - 1

    def _put(self, row: int, column: int, entry: float) -> None:
        self.entries.append((row, column, entry))
