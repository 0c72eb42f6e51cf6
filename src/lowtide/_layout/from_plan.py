"""A planned step -> its buffers, and how high they lie: the memory that it really takes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowtide._ir import Swap, Trace
from lowtide._layout.buffers import Buffer
from lowtide._layout.from_trace import step_buffers
from lowtide._layout.pack import pack


@dataclass(frozen=True, slots=True)
class Height:
    """Bytes of what is there all along, and of a pool for the rest.

    `load` is the most of that rest that is there at once.
    """

    stays: int
    pool: int
    load: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.stays + self.pool


def height_of(step: Trace, swaps: Sequence[Swap], *, enough: int, seconds: float) -> Height:
    """Of a step with its reruns in it and these swaps.

    The search ends where it is no more than `enough`.
    """
    buffers, _, period = plan_buffers(step, swaps, lasting=False)
    stays = sum(buffer.size for buffer in buffers if buffer.upper - buffer.lower == period)
    others = [buffer for buffer in buffers if buffer.upper - buffer.lower != period]
    if not others:
        return Height(stays, 0, 0)
    packing = pack(
        others,
        align=step.granularity_bytes,
        period=period,
        capacity=max(0, enough - stays),
        seconds=seconds,
    )
    return Height(stays, packing.height, packing.max_load)


def plan_buffers(
    step: Trace, swaps: Sequence[Swap], *, lasting: bool = True
) -> tuple[list[Buffer], list[int | None], int]:
    """What a pool has to hold, of which storages (None: a workspace), and the period in ops.

    A swapped storage is a buffer for each time it is here: it may come back to another address.
    Buffers are named by their numbers.
    """
    found, period = step_buffers(step, lasting=lasting)
    stays: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for swap in swaps:
        if swap.release < swap.fetch:
            stays[step.values[swap.value].storage].append((swap.release, swap.fetch))
    buffers: list[Buffer] = []
    owners: list[int | None] = []
    for buffer in found:
        name = buffer.name.partition(":")[0]
        storage = None if name == "workspace" else int(name)
        away = [] if storage is None else stays.get(storage, [])
        for lower, upper in present(buffer.lower, buffer.upper, away, period):
            buffers.append(Buffer(str(len(buffers)), lower, upper, buffer.size))
            owners.append(storage)
    return buffers, owners, period


def present(
    lower: int, upper: int, away: Sequence[tuple[int, int]], period: int
) -> list[tuple[int, int]]:
    """The stretches of a life in which the bytes are not away; each begins within the period.

    A life of a whole period has no end: what is there when the step ends is there when it begins.
    """
    if not away or upper - lower > period:
        return [(lower, upper)]
    if upper - lower == period:
        first = min(release % period for release, _ in away)
        lower, upper = first, first + period
    cuts = sorted(
        (release % period + turn, release % period + turn + fetch - release)
        for release, fetch in away
        for turn in (-period, 0, period)
        if release % period + turn < upper and release % period + turn + fetch - release > lower
    )
    edges = [(lower, lower), *cuts, (upper, upper)]
    parts = [(end, begin) for (_, end), (begin, _) in pairwise(edges) if end < begin]
    return [(begin % period, begin % period + end - begin) for begin, end in parts]
