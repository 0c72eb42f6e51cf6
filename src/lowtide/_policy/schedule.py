"""Chosen candidates -> swaps: when the bytes of each are released and fetched.

Copies out run one after the other in the order in which values fall idle, copies back in the
order in which they are wanted:

    compute   | op op [after]  op  op  op  op  op  op  op  [until] op
    out lane  |       ▕ copy ▏                                            starts when it can
    back lane |                                     ▕ copy ▏              ends just in time
    bytes     | ███████████████· · · · · · · · · · ·████████████████
                              release              fetch

As the step repeats, so do the lanes: what this step's end leaves to copy is in the way of the
next one's beginning. Both lanes are therefore unrolled over two steps, of which the second is
the steady one: with no more than a step's worth of copies in a lane, nothing waits for longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide._analyze.load import Curve, load_curve
from lowtide._ir import Machine, OpIndex, Swap, Trace
from lowtide._machine.link import seconds
from lowtide._policy.candidates import Candidate, Grid, make_grid
from lowtide._policy.scores import Clock, add, make_clock, ops_between


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What a schedule needs to know of a step; the same for all of them."""

    grid: Grid
    clock: Clock
    load: Curve


def make_stage(trace: Trace, positions: Sequence[int] | None = None) -> Stage:
    """Of a step in which releases and fetches happen at `positions`; None: anywhere."""
    return Stage(make_grid(trace, positions), make_clock(trace), load_curve(trace))


def schedule(
    stage: Stage,
    machine: Machine,
    chosen: Sequence[Candidate],
    limit: int | None,
    *,
    slack: float = 1.0,
    ahead: float = 0.0,
    fetch_first: bool = True,
) -> list[Swap]:
    """When each of `chosen`, best first, leaves and returns; those that need not are left out.

    Without a limit no op ever waits, as far as copies take `slack` times what the link says. With
    one, the load stays within it if that can be had from `chosen`, and compute waits where it
    must; memory to spare shortens stays, at their ends (`fetch_first`) before their beginnings.
    Copies are over so many seconds `ahead` of when they must be, with a limit those back. (With
    slack alone, those wanted first are back much sooner than they must be, and lie in the way of
    others.)
    """
    grid, clock = stage.grid, stage.clock
    fitting = grid.fit(chosen)
    if limit is None:
        return _without_waits(fitting, clock, grid, machine, slack, ahead)
    return _within(fitting, clock, grid, machine, stage.load, limit, slack, ahead, fetch_first)


def _without_waits(
    chosen: Sequence[Candidate],
    clock: Clock,
    grid: Grid,
    machine: Machine,
    slack: float,
    ahead: float,
) -> list[Swap]:
    """Drop those whose copies cannot both be hidden, the worst ranked first, half at a time."""
    chosen = _within_a_step(chosen, clock, machine, slack)
    while True:
        fetches = _fetches(chosen, clock, grid, machine, slack, ahead)
        releases = _releases(chosen, fetches, clock, grid, machine, slack, ahead)
        late = [k for k in range(len(chosen)) if releases[k] >= fetches[k]]
        if not late:
            return _swaps(chosen, releases, fetches, clock.count)
        dropped = set(late[len(late) // 2 :])
        chosen = [c for k, c in enumerate(chosen) if k not in dropped]


def _within_a_step(
    chosen: Sequence[Candidate], clock: Clock, machine: Machine, slack: float
) -> list[Candidate]:
    """As many of the best as each lane can copy in the time of a step."""
    kept, out, back = [], 0.0, 0.0
    for candidate in chosen:
        more_out = out + slack * seconds(machine.out, candidate.bytes)
        more_back = back + slack * seconds(machine.back, candidate.bytes)
        if max(more_out, more_back) <= clock.period:
            kept.append(candidate)
            out, back = more_out, more_back
    return kept


def _within(
    chosen: Sequence[Candidate],
    clock: Clock,
    grid: Grid,
    machine: Machine,
    load: Curve,
    limit: int,
    slack: float,
    ahead: float,
    fetch_first: bool,
) -> list[Swap]:
    """All away for as long as they can, then back where there is room.

    A stay that shrinks to nothing was not needed: the lanes are laid again without it.
    """
    while True:
        held = load.copy()
        for candidate in chosen:
            add(held, candidate.earliest, candidate.latest, -candidate.bytes)
        ideal_fetches = _fetches(chosen, clock, grid, machine, slack, ahead)
        ideal_releases = _releases(chosen, ideal_fetches, clock, grid, machine, slack)
        releases: list[int] = [c.earliest for c in chosen]
        fetches: list[int] = [c.latest for c in chosen]
        for fetching in (fetch_first, not fetch_first):
            if fetching:
                _fetch_earlier(chosen, releases, fetches, ideal_fetches, held, limit, grid)
            else:
                _release_later(chosen, releases, fetches, ideal_releases, held, limit, grid)
        needed = [k for k in range(len(chosen)) if releases[k] < fetches[k]]
        if len(needed) == len(chosen):
            return _swaps(chosen, releases, fetches, clock.count)
        chosen = [chosen[k] for k in needed]


def _fetch_earlier(
    chosen: Sequence[Candidate],
    releases: Sequence[int],
    fetches: list[int],
    ideal: Sequence[int],
    held: Curve,
    limit: int,
    grid: Grid,
) -> None:
    """Fetch as early as ideal where there is room, never before one that is wanted sooner."""
    count = grid.count
    before: int | None = None
    for k in sorted(range(len(chosen)), key=lambda k: chosen[k].until % count):
        shift = chosen[k].until // count * count
        lowest = max(releases[k], ideal[k])
        if before is not None:
            lowest = max(lowest, before + shift)
        if lowest < fetches[k]:
            ops = ops_between(lowest, fetches[k], count)
            full = np.flatnonzero(held[ops] + chosen[k].bytes > limit)
            if len(full):
                lowest = grid.up(lowest + int(full[-1]) + 1)
            if lowest < fetches[k]:
                add(held, lowest, fetches[k], chosen[k].bytes)
                fetches[k] = lowest
        before = fetches[k] - shift


def _release_later(
    chosen: Sequence[Candidate],
    releases: list[int],
    fetches: Sequence[int],
    ideal: Sequence[int],
    held: Curve,
    limit: int,
    grid: Grid,
) -> None:
    """Release as late as the copy out ends where there is room: first those copied out last.

    Copies out are made in order, so who waits for one of them waits for all before it.
    """
    for k in sorted(range(len(chosen)), key=lambda k: -chosen[k].after):
        latest = min(fetches[k], ideal[k])
        if latest > releases[k]:
            ops = ops_between(releases[k], latest, grid.count)
            full = np.flatnonzero(held[ops] + chosen[k].bytes > limit)
            if len(full):
                latest = grid.down(releases[k] + int(full[0]))
            if latest > releases[k]:
                add(held, releases[k], latest, chosen[k].bytes)
                releases[k] = latest


def _releases(
    chosen: Sequence[Candidate],
    fetches: Sequence[int],
    clock: Clock,
    grid: Grid,
    machine: Machine,
    slack: float,
    ahead: float = 0.0,
) -> list[int]:
    """The first allowed positions at which the copies out have ended, if nothing ever waits."""
    order = _in_order_wanted(chosen, fetches, clock.count)
    order.sort(key=lambda k: chosen[k].after)
    ends = [0.0] * len(chosen)
    free = -np.inf
    for _ in range(2):
        free -= clock.period  # the lane as the step before left it
        for k in order:
            takes = slack * seconds(machine.out, chosen[k].bytes)
            free = ends[k] = max(clock.at(chosen[k].after + 1), free) + takes
    return [
        grid.up(max(c.earliest, clock.first_from(end + ahead)))
        for c, end in zip(chosen, ends, strict=True)
    ]


def _fetches(
    chosen: Sequence[Candidate],
    clock: Clock,
    grid: Grid,
    machine: Machine,
    slack: float,
    ahead: float = 0.0,
) -> list[int]:
    """The last allowed positions from which the copies back are in time, if nothing ever waits."""
    order = sorted(range(len(chosen)), key=lambda k: -(chosen[k].until % clock.count))
    starts = [0.0] * len(chosen)
    taken = np.inf
    for _ in range(2):
        taken += clock.period  # the lane as the step after needs it
        for k in order:
            takes = slack * seconds(machine.back, chosen[k].bytes)
            wanted = clock.at(chosen[k].until % clock.count) - ahead
            taken = starts[k] = min(wanted, taken) - takes
    return [
        grid.down(min(c.latest, clock.last_until(start) + c.until // clock.count * clock.count))
        for c, start in zip(chosen, starts, strict=True)
    ]


def _in_order_wanted(chosen: Sequence[Candidate], fetches: Sequence[int], count: int) -> list[int]:
    """As seen from the step that fetches them; a lane keeps this order in what it gets at once."""

    def wanted(k: int) -> tuple[int, int]:
        return chosen[k].until - fetches[k] // count * count, chosen[k].after

    return sorted(range(len(chosen)), key=wanted)


def _swaps(
    chosen: Sequence[Candidate], releases: Sequence[int], fetches: Sequence[int], count: int
) -> list[Swap]:
    return [
        Swap(
            chosen[k].value,
            chosen[k].after,
            OpIndex(releases[k]),
            OpIndex(fetches[k]),
            chosen[k].until,
        )
        for k in _in_order_wanted(chosen, fetches, count)
    ]
