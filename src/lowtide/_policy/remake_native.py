"""The native pass over a step, called: see `native/remake/remake.h`."""

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtide._ir import Drop, Hold, OpIndex, Remake, Rerun, ValueId
from lowtide._native import REMAKE, NoNative, loaded
from lowtide._policy.ground import Ground
from lowtide._policy.taste import Stays, Stuck, Taste, Weights, quarters

ABI = 1
_PACKAGED = Path(__file__).with_name("remake.so")
_OK, _ENOUGH, _STUCK, _NO_MEMORY = range(4)
_HOLD, _RERUN = 1, 2
_ROOM = 1 << 12  # rows, at first

_Row = npt.NDArray[Any]
Run = Callable[
    [Ground, int, Taste, Weights | None, float, Stays, frozenset[int]],
    tuple[float, list[Remake]] | None,
]


class _Rows(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("what", ctypes.c_void_p)]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("ops", "values", "unseen")),
        *((name, ctypes.c_void_p) for name in ("workspace", "again", "starts", "chances")),
        *((name, _Rows) for name in ("wants", "writes", "sources", "made")),
        *((name, _Rows) for name in ("appearing", "overwritten", "ending")),
        *((name, ctypes.c_void_p) for name in ("size", "maker", "end", "until", "holdable")),
        *((name, ctypes.c_void_p) for name in ("can", "after")),
        *((name, _Rows) for name in ("uses", "near")),
    ]


class _Trial(ctypes.Structure):
    _fields_ = [
        ("limit", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("cost", "bytes", "distance", "around")),
        ("weights", ctypes.c_void_p),
        ("most_seconds", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("holds", "there", "below", "from_on")),
        *((name, ctypes.c_int64) for name in ("releases", "fetches")),
        *((name, ctypes.c_void_p) for name in ("release_at", "release", "fetch_at", "fetch")),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        ("seconds", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("count", "op", "needed")),
    ]


@functools.cache
def load() -> Run | None:
    """The pass; None where it cannot be built, which is looked into once."""
    try:
        return functools.partial(_run, _library())
    except NoNative:
        return None


def _library() -> ctypes.CDLL:
    library = loaded(REMAKE, _PACKAGED, ABI)
    library.lowtide_remake_ground.restype = ctypes.c_void_p
    library.lowtide_remake_forget.argtypes = [ctypes.c_void_p]
    library.lowtide_remake_forget.restype = None
    library.lowtide_remake_run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_void_p]
    return library


_grounds: "weakref.WeakKeyDictionary[Ground, int]" = weakref.WeakKeyDictionary()


def _handle(library: ctypes.CDLL, ground: Ground) -> int:
    found = _grounds.get(ground)
    if found is None:
        found = _grounds[ground] = _make(library, ground)
        weakref.finalize(ground, library.lowtide_remake_forget, found)
    return found


def _make(library: ctypes.CDLL, ground: Ground) -> int:
    trace = ground.trace
    kept: list[_Row] = []  # until it is copied

    def row(numbers: Iterable[float], dtype: Any = np.int64) -> int:
        kept.append(np.fromiter(numbers, dtype))
        return int(kept[-1].ctypes.data)

    def rows(given: Sequence[Sequence[int]]) -> _Rows:
        at = np.cumsum([0, *map(len, given)])
        return _Rows(row(at), row(one for some in given for one in some))

    step = _Step(
        ground.ops,
        len(ground.size),
        trace.unseen_bytes,
        row(op.workspace_bytes for op in trace.ops),
        row(ground.again, np.float64),
        row(ground.starts, np.float64),
        row(ground.chances),
        rows(ground.wants),
        rows([op.writes for op in trace.ops]),
        rows(ground.sources),
        rows(ground.made),
        rows(ground.appearing),
        rows(ground.overwritten),
        rows(ground.ending),
        row(ground.size),
        row(ground.maker),
        row(value.end for value in trace.values),
        row(ground.until(value) for value in range(len(ground.size))),
        row(ground.holdable.get(value, -1) for value in range(len(ground.size))),
        row(ground.can, np.uint8),
        row((value.after for value in trace.values), np.uint8),
        rows(ground.uses),
        rows(ground.near),
    )
    found = library.lowtide_remake_ground(ctypes.byref(step))
    if not found:
        raise MemoryError("there is not enough memory to plan this step")
    return int(found)


def _run(
    library: ctypes.CDLL,
    ground: Ground,
    limit: int,
    taste: Taste,
    weights: Weights | None,
    most_seconds: float,
    stays: Stays,
    holds: frozenset[int],
) -> tuple[float, list[Remake]] | None:
    handle = _handle(library, ground)
    held = np.zeros(len(ground.size), np.uint8)
    held[list(holds)] = 1
    rows: list[_Row] = [
        held,
        np.array(stays.there, np.uint8),
        np.array(stays.below, np.uint8),
        np.array(stays.from_on, np.int64),
    ]
    releases, fetches = _in_order(stays.releases), _in_order(stays.fetches)
    heavy = None if weights is None else np.ascontiguousarray(weights, np.float64)
    trial = _Trial(
        limit,
        *map(quarters, (taste.cost, taste.size, taste.distance)),
        taste.around,
        None if heavy is None else heavy.ctypes.data,
        most_seconds,
        *(one.ctypes.data for one in rows),
        len(releases[0]),
        len(fetches[0]),
        *(one.ctypes.data for one in (*releases, *fetches)),
    )
    result = _Result()
    room = _ROOM
    while True:
        done = np.empty((room, 3), np.int64)
        status = library.lowtide_remake_run(
            handle, ctypes.byref(trial), done.ctypes.data, room, ctypes.byref(result)
        )
        if status == _ENOUGH:
            return None
        if status == _STUCK:
            raise Stuck(result.op, result.needed)
        if status == _NO_MEMORY:
            raise MemoryError("there is not enough memory to plan this step")
        assert status == _OK, f"the native pass failed ({status})"
        if result.count <= room:
            break
        room = result.count
    return result.seconds, [_remake(*one) for one in done[: result.count].tolist()]


def _remake(kind: int, before: int, what: int) -> Remake:
    if kind == _RERUN:
        return Rerun(OpIndex(before), OpIndex(what))
    return (Hold if kind == _HOLD else Drop)(OpIndex(before), ValueId(what))


def _in_order(moves: Mapping[int, Sequence[int]]) -> tuple[_Row, _Row]:
    """Positions, ascending, and what moves at each."""
    pairs = [(at, value) for at in sorted(moves) for value in moves[at]]
    return np.array([at for at, _ in pairs], np.int64), np.array([v for _, v in pairs], np.int64)
