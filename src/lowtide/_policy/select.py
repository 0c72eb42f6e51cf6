"""Scores -> which candidates leave, so that the load stays within the limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide._analyze.load import Curve
from lowtide._policy.candidates import Candidate
from lowtide._policy.scores import Clock, Scores, Stretches, add, ops_between

_ROUNDING = 1e-9  # sums that differ by no more than this share are equal


@dataclass(frozen=True, slots=True)
class Selection:
    """Those chosen, in the order they were picked, and the peak while each is away all it can."""

    chosen: tuple[Candidate, ...]
    peak_bytes: int
    peak_op: int


def select(
    found: Sequence[Candidate],
    scores: Scores | None,
    clock: Clock,
    load: Curve,
    limit: int,
    host_budget: int | None = None,
    ties: Scores | None = None,
) -> Selection:
    """Pick in order of `scores` until `load` is within `limit`, then drop what was not needed.

    Without scores the order is SWDOA's: the highest WDOA on the load as it is by then. A
    candidate that is away only where the load is within the limit already is passed over, and so
    is one with which more than `host_budget` bytes would be away at once. Of equal scores, as all
    have that span what is left above the limit, the highest in `ties` comes first.
    """
    load = load.copy()
    host = np.zeros_like(load)
    away = Stretches.of(found, clock.count)
    lengths = np.diff(clock.begins)
    sizes = np.array([c.bytes for c in found], dtype=np.int64)
    left = np.ones(len(found), dtype=np.bool_)
    chosen: list[Candidate] = []
    while load.max() > limit:
        over = load > limit
        crossed = away.total(over)
        useful = left & (crossed > 0.5)
        if not useful.any():
            break
        worth = scores if scores is not None else away.total(np.maximum(load - limit, 0) * lengths)
        highest = np.where(useful, worth, -np.inf).max()
        equals = useful & (worth >= highest - _ROUNDING * abs(highest))
        second = crossed * sizes if ties is None else ties
        best = int(np.where(equals, second, -np.inf).argmax())
        left[best] = False
        candidate = found[best]
        stay = _host_ops(candidate, clock.count)
        if host_budget is not None and host[stay].max() + candidate.bytes > host_budget:
            continue
        host[stay] += candidate.bytes
        add(load, candidate.earliest, candidate.latest, -candidate.bytes)
        chosen.append(candidate)
    kept = _drop_useless(chosen, load, limit)
    return Selection(tuple(kept), int(load.max()), int(load.argmax()))


def _host_ops(candidate: Candidate, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """While its bytes are below: from the end of `after` until `until` has them back."""
    first = candidate.after + 1
    return ops_between(first, min(candidate.until + 1, first + count), count)


def _drop_useless(chosen: Sequence[Candidate], load: Curve, limit: int) -> list[Candidate]:
    """Those whose bytes are needed, the last picked tried first; `load` takes back the others."""
    allowed = max(limit, int(load.max()))
    kept = []
    for candidate in reversed(chosen):
        ops = ops_between(candidate.earliest, candidate.latest, len(load))
        if load[ops].max() + candidate.bytes <= allowed:
            load[ops] += candidate.bytes
        else:
            kept.append(candidate)
    return kept[::-1]
