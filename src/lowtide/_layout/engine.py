"""Buffers -> the search, native where it can be, and its answer in bytes.

What needs numpy is imported when it is asked for: that takes longer than most layouts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide._errors import BadInput
from lowtide._layout import native
from lowtide._layout.buffers import Buffer, rounded
from lowtide._layout.check import find_clash
from lowtide._layout.native import Answer, Request
from lowtide._native import NoNative

_MOST_UNITS = 2**62


@dataclass(frozen=True, slots=True)
class Found:
    """A layout; none is lower than `bound`. `note` says what the user should know."""

    offsets: list[int]
    bound: int
    note: str = ""


def search(
    buffers: Sequence[Buffer],
    *,
    align: int,
    period: int | None,
    goal: int = 0,
    seed: int = 0,
    nodes: int = -1,
    seconds: float = -1.0,
    threads: int = 0,
    engine: Callable[[Request], Answer] | None = None,
) -> Found:
    """Search with `engine`: by default the native one, or the reference where there is none.

    Sizes are rounded up to `align` and counted in their greatest common divisor, so that they may
    be as large as offsets can be. The engines count rounded ends: for true ones their bound is
    less by what the topmost buffer rounds.
    """
    clash = fixed_clash(buffers, period)
    if clash is not None:
        raise BadInput(f"no layout: {clash}")
    sizes = [rounded(b.size, align) for b in buffers]
    unit = math.gcd(*sizes, *(b.offset for b in buffers if b.offset))
    if sum(sizes) // unit + max(b.offset or 0 for b in buffers) // unit > _MOST_UNITS:
        raise BadInput("the buffers add up to more than 2**62 units: give fewer or smaller ones")
    first = 0 if period is not None else min(b.lower for b in buffers)
    request = Request(
        lower=[b.lower - first for b in buffers],
        upper=[b.upper - first for b in buffers],
        size=[size // unit for size in sizes],
        fixed=[-1 if b.offset is None else b.offset // unit for b in buffers],
        period=period or 0,
        goal=min(goal // unit, _MOST_UNITS),
        seed=seed,
        nodes=nodes,
        seconds=seconds,
        threads=threads,
    )
    note = ""
    try:
        answer = (engine or native.search)(request)
    except NoNative as error:
        from lowtide._layout.reference.search import search as reference_search

        note = f"the search ran in Python, slower than native: {error}"
        answer = reference_search(request)
    spare = max(size - b.size for size, b in zip(sizes, buffers, strict=True))
    return Found([at * unit for at in answer.offsets], answer.bound * unit - spare, note)


def fixed_clash(buffers: Sequence[Buffer], period: int | None) -> str | None:
    """Which fixed buffers share bytes, or None."""
    fixed = [buffer for buffer in buffers if buffer.offset is not None]
    return find_clash(fixed, [b.offset or 0 for b in fixed], period=period)
