"""Buffers -> a layout, by any of the methods, and what is known about how good it is."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lowtide._errors import BadInput
from lowtide._layout.buffers import (
    Buffer,
    Fit,
    check_buffers,
    copies,
    max_load,
    rounded,
)
from lowtide._layout.check import find_clash
from lowtide._layout.engine import fixed_clash, search
from lowtide._layout.exact import exact
from lowtide._layout.native import Answer, Request


class Method(StrEnum):
    """How a layout is made."""

    SEARCH = "search"  # lowtide's own
    SMARTPOOL = "smartpool"  # as published, best fit
    SMARTPOOL_FIRST = "smartpool-first"  # as published, first fit
    EXACT = "exact"  # CP-SAT, for small problems
    REFERENCE = "reference"  # the search in Python


@dataclass(frozen=True, slots=True)
class Packing:
    """Buffers with their offsets, and how good they are.

    `height` is where the highest ends, `max_load` the most bytes alive at one moment, `bound`
    what no layout can be lower than. `note` is for the user: what is worth knowing.
    """

    buffers: tuple[Buffer, ...]
    height: int
    max_load: int
    bound: int
    seconds: float
    method: Method
    note: str = ""

    @property
    def ratio(self) -> float:
        """The height over the max load: 1.0 wastes nothing."""
        return self.height / self.max_load if self.max_load else 1.0

    @property
    def optimal(self) -> bool:
        """Whether it is proved that no layout is lower."""
        return self.height <= self.bound


def pack(
    buffers: Sequence[Buffer],
    *,
    method: Method | str = Method.SEARCH,
    capacity: int | None = None,
    align: int = 1,
    period: int | None = None,
    seconds: float = 5.0,
    seed: int = 0,
    nodes: int | None = None,
    threads: int = 0,
) -> Packing:
    """Give every buffer an offset, so that the highest ends as low as can be found.

    The search ends at the lower bound, at the first layout within `capacity`, after `seconds`, or
    after trying `nodes` placements: with a node budget and no time limit (seconds < 0) the same
    seed gives the same layout on every machine. Whether the capacity was met is for the caller
    to see in the height. With a `period`, buffers that outlive it are returned as several.
    """
    try:
        method = Method(method)
    except ValueError:
        known = ", ".join(Method)
        raise BadInput(f"method {method!r} is not known: choose one of {known}") from None
    started = time.perf_counter()
    check_buffers(buffers, align=align, period=period)
    if capacity is not None and capacity < 0:
        raise BadInput(f"capacity is {capacity}: give the bytes there are")
    if not 0 <= seed < 2**64:
        raise BadInput(f"seed is {seed}: give a whole number from 0 to 2**64 - 1")
    if math.isnan(seconds):
        raise BadInput("seconds is not a number: give the seconds it may take, or -1 for no limit")
    if period is not None:
        buffers = copies(buffers, period)
        check_buffers(buffers, align=align, period=period)

    # Lane 1 lies above lane 0: they share no bytes, so each is packed for itself.
    lanes = [[i for i, b in enumerate(buffers) if b.lane == lane] for lane in (0, 1)]
    lanes = [lane for lane in lanes if lane]
    loads = [load_bound([buffers[i] for i in lane], align, period) for lane in lanes]
    end = started + seconds if seconds >= 0 else None
    base = 0
    offsets = [0] * len(buffers)
    bounds, notes = [], []
    for number, lane in enumerate(lanes):
        left = -1.0 if end is None else max(0.0, end - time.perf_counter())
        room = None if capacity is None else max(0, capacity - base - sum(loads[number + 1 :]))
        own = [_above(buffers[i], base) for i in lane]
        task = _Task(own, align, period, room, left, seed, -1 if nodes is None else nodes, threads)
        places, bound, note = _METHODS[method](task)
        for i, place in zip(lane, places, strict=True):
            offsets[i] = base + place
        bounds.append(max(bound, loads[number]))
        base = rounded(max(offsets[i] + buffers[i].size for i in lane), align)
        notes.append(note)
    clash = find_clash(buffers, offsets, align=align, period=period)
    if clash is not None:
        raise AssertionError(f"{method} made a layout that is none: {clash}")
    fixed = [buffer.offset + buffer.size for buffer in buffers if buffer.offset is not None]
    # What lies between fixed buffers might hold the other lane: then bounds do not add up.
    bound = max([sum(loads), bounds[0], *fixed]) if fixed else sum(bounds)
    return Packing(
        buffers=tuple(replace(b, offset=at) for b, at in zip(buffers, offsets, strict=True)),
        height=max((b.size + at for b, at in zip(buffers, offsets, strict=True)), default=0),
        max_load=max_load(buffers, period=period),
        bound=bound,
        seconds=time.perf_counter() - started,
        method=method,
        note="; ".join(dict.fromkeys(filter(None, notes))),
    )


def _above(buffer: Buffer, base: int) -> Buffer:
    """The buffer as its lane sees it, which begins at `base`."""
    if buffer.offset is None or base == 0:
        return buffer
    if buffer.offset < base:
        raise BadInput(
            f"buffer {buffer.name}: fixed to {buffer.offset}, but lane 0 goes up to {base}: "
            "fix it higher or leave offset open"
        )
    return replace(buffer, offset=buffer.offset - base)


def load_bound(buffers: Sequence[Buffer], align: int, period: int | None) -> int:
    """No layout of one lane is lower: the bytes of a moment, rounded for all but the topmost."""
    load = max_load(buffers, period=period)
    if align == 1:
        return load
    full = [replace(buffer, size=rounded(buffer.size, align)) for buffer in buffers]
    spare = max((f.size - b.size for f, b in zip(full, buffers, strict=True)), default=0)
    return max(load, max_load(full, period=period) - spare)


@dataclass(frozen=True, slots=True)
class _Task:
    buffers: Sequence[Buffer]
    align: int
    period: int | None
    capacity: int | None
    seconds: float
    seed: int
    nodes: int
    threads: int


_Result = tuple[list[int], int, str]  # offsets, a lower bound of the height or 0, a note


def _search(task: _Task) -> _Result:
    return _found(task, None)


def _reference(task: _Task) -> _Result:
    from lowtide._layout.reference.search import search as reference_search

    return _found(task, reference_search)


def _found(task: _Task, engine: Callable[[Request], Answer] | None) -> _Result:
    found = search(
        task.buffers,
        align=task.align,
        period=task.period,
        goal=task.capacity or 0,
        seed=task.seed,
        nodes=task.nodes,
        seconds=task.seconds,
        threads=task.threads,
        engine=engine,
    )
    return found.offsets, found.bound, found.note


def _refuse_clash(task: _Task) -> None:
    clash = fixed_clash(task.buffers, task.period)
    if clash is not None:
        raise BadInput(f"no layout: {clash}")


def _smartpool(task: _Task, fit: Fit = Fit.BEST) -> _Result:
    from lowtide._layout.smartpool import smartpool

    _refuse_clash(task)
    return smartpool(task.buffers, fit, align=task.align, period=task.period), 0, ""


def _smartpool_first(task: _Task) -> _Result:
    return _smartpool(task, Fit.FIRST)


def _exact(task: _Task) -> _Result:
    _refuse_clash(task)
    seconds = task.seconds if task.seconds >= 0 else 1e6
    found = exact(
        task.buffers, align=task.align, period=task.period, seconds=seconds, seed=task.seed
    )
    if found.offsets is None:
        note = "the exact method found nothing in the time: this is smartpool's layout"
        return _smartpool(task, Fit.FIRST)[0], 0, note
    return found.offsets, found.bound, ""


_METHODS: dict[Method, Callable[[_Task], _Result]] = {
    Method.SEARCH: _search,
    Method.SMARTPOOL: _smartpool,
    Method.SMARTPOOL_FIRST: _smartpool_first,
    Method.EXACT: _exact,
    Method.REFERENCE: _reference,
}
