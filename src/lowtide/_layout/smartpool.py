"""SmartPool's heuristic as published (Zhang et al., 2019): the baseline.

Buffers in order of size, the largest first, equal ones by when they are allocated. Each looks at
the buffers already placed that it shares a moment with, as ranges in order of offset, and takes
the smallest gap between two of them that holds it (best fit) or the lowest (first fit); if none
does it goes above the last. Best fit never looks at the gap below the first range, as published.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lowtide._layout.buffers import Buffer, Fit, pieces, rounded


def smartpool(
    buffers: Sequence[Buffer], fit: Fit, *, align: int = 1, period: int | None = None
) -> list[int]:
    """An offset for each buffer. Fixed buffers, which the paper does not know, are placed first."""
    order = sorted(
        range(len(buffers)),
        key=lambda i: (buffers[i].offset is None, -buffers[i].size, buffers[i].lower, i),
    )
    offsets = [0] * len(buffers)
    # one row for every stretch in which a placed buffer lives: lower, upper, offset, end
    rows = np.zeros((2 * len(buffers), 4), dtype=np.int64)
    count = 0
    for i in order:
        size = rounded(buffers[i].size, align)
        lives = pieces(buffers[i], period)
        place = buffers[i].offset
        if place is None:
            placed = rows[:count]
            alive = np.zeros(count, dtype=bool)
            for lower, upper in lives:
                alive |= (placed[:, 0] < upper) & (lower < placed[:, 1])
            place = _gap(placed[alive, 2:], size, fit)
        offsets[i] = place
        for lower, upper in lives:
            rows[count] = lower, upper, place, place + size
            count += 1
    return offsets


def _gap(ranges: npt.NDArray[np.int64], size: int, fit: Fit) -> int:
    """The offset for `size` bytes among `ranges` of (offset, end)."""
    if not len(ranges):
        return 0
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    floors = np.maximum.accumulate(np.concatenate([[0], ranges[:, 1]]))
    gaps = ranges[:, 0] - floors[:-1]  # the one below the first range, then those between
    if fit is Fit.BEST:
        gaps[0] = -1
    holding = np.flatnonzero(gaps >= size)
    if not len(holding):
        return int(floors[-1])
    chosen = holding[0] if fit is Fit.FIRST else holding[np.argmin(gaps[holding])]
    return int(floors[chosen])
