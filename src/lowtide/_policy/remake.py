"""Trace, limit -> which values are dropped and which ops run again, in one pass over the step.

The step is gone through in order. Where the next op would hold too much, values are dropped that
can be made again: those that are cheap to make, large, and not needed for long. "Dynamic Tensor
Rematerialization" (Kirisame et al. 2021) does that at run time and has to guess from the past when
a value is needed again; here the whole step is known. What it costs to drop a value counts those
around it that are gone: they would have to be made for it, or from it. `Taste` says how much each
of these matters, and `weights` correct it for single values: a search tries many. The pass
itself is native (`native/remake`), with a readable form that does just the same (`remake_pass`).
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from lowtide._ir import Hold, Remake, Rerun, Swap
from lowtide._policy import remake_native
from lowtide._policy.ground import Ground
from lowtide._policy.remake_pass import run_pass
from lowtide._policy.taste import Stays, Taste, Weights


def remake(
    ground: Ground,
    limit: int,
    taste: Taste,
    weights: Weights | None = None,
    most_seconds: float = inf,
    swaps: Sequence[Swap] | Stays = (),
    holds: frozenset[int] = frozenset(),
) -> tuple[float, list[Remake]] | None:
    """The seconds of what runs again, and what is done; None: more than `most_seconds`.

    What is away by `swaps` takes no room meanwhile. It comes back earlier where an op that runs
    again reads it, and is never dropped. Values in `holds` stay beyond their end as long as
    something made from them may have to be made again. Raises `Stuck`.
    """
    stays = swaps if isinstance(swaps, Stays) else stays_of(ground, swaps)
    run = remake_native.load() or run_pass
    while True:
        found = run(ground, limit, taste, weights, most_seconds, stays, holds)
        if found is None or not holds:
            return found
        remakes = found[1]
        read = {s for one in remakes if isinstance(one, Rerun) for s in ground.sources[one.op]}
        useless = {one.value for one in remakes if isinstance(one, Hold)} - read
        if not useless:
            return found
        holds -= useless


def stays_of(ground: Ground, swaps: Sequence[Swap]) -> Stays:
    """What is there when the step begins, and what comes and goes."""
    there = [
        value.before and (value.end > 0 or i in ground.reads[0])
        for i, value in enumerate(ground.trace.values)
    ]
    below = [False] * len(there)
    releases: dict[int, list[int]] = defaultdict(list)
    fetches: dict[int, list[int]] = defaultdict(list)
    from_on = list(ground.from_on) if swaps else ground.from_on
    for swap in swaps:
        release, fetch = int(swap.release), int(swap.fetch)
        value = int(swap.value)
        back = ground.found_as[value] if fetch >= ground.ops else value
        for moved in (value, back):
            from_on[moved] = ground.ops
        if release >= ground.ops:
            value, release = back, release - ground.ops
        elif fetch >= ground.ops:
            there[back], below[back] = False, True
        releases[release].append(value)
        fetches[fetch % ground.ops].append(back)
    return Stays(there, below, from_on, releases, fetches)
