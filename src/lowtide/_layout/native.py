"""The native search, called."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide._native import LAYOUT, loaded

ABI = 1
_PACKAGED = Path(__file__).with_name("layout.so")
_REFUSALS = {1: "the problem breaks a rule", 2: "two fixed buffers share bytes"}
_NO_MEMORY = 3


@dataclass(frozen=True, slots=True)
class Request:
    """A problem in the terms of `native/layout/layout.h`, which explains every field."""

    lower: Sequence[int]
    upper: Sequence[int]
    size: Sequence[int]
    fixed: Sequence[int]  # -1: open
    period: int = 0
    align: int = 1
    goal: int = 0
    seed: int = 0
    nodes: int = -1
    seconds: float = -1.0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search came back with."""

    offsets: list[int]
    height: int  # to the aligned end of the highest buffer
    bound: int  # no layout is lower
    nodes: int


class _Problem(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("lower", ctypes.POINTER(ctypes.c_int64)),
        ("upper", ctypes.POINTER(ctypes.c_int64)),
        ("size", ctypes.POINTER(ctypes.c_int64)),
        ("fixed", ctypes.POINTER(ctypes.c_int64)),
        ("period", ctypes.c_int64),
        ("align", ctypes.c_int64),
        ("goal", ctypes.c_int64),
    ]


class _Budget(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("nodes", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("threads", ctypes.c_int32),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        ("height", ctypes.c_int64),
        ("bound", ctypes.c_int64),
        ("nodes", ctypes.c_int64),
    ]


def search(request: Request) -> Answer:
    """Run the native search. Raises NoNative where there is none."""
    library = _library()
    count = len(request.size)
    row = ctypes.c_int64 * count
    problem = _Problem(
        count,
        row(*request.lower),
        row(*request.upper),
        row(*request.size),
        row(*request.fixed),
        request.period,
        request.align,
        request.goal,
    )
    budget = _Budget(request.seed, request.nodes, request.seconds, request.threads)
    offsets = row()
    result = _Result()
    status = library.lowtide_layout_pack(
        ctypes.byref(problem), ctypes.byref(budget), offsets, ctypes.byref(result)
    )
    if status == _NO_MEMORY:
        raise MemoryError("there is not enough memory for the layout search")
    if status in _REFUSALS:
        raise ValueError(_REFUSALS[status])
    if status:
        raise AssertionError(f"the native layout search failed ({status})")
    return Answer(list(offsets), result.height, result.bound, result.nodes)


@functools.cache
def _library() -> ctypes.CDLL:
    return loaded(LAYOUT, _PACKAGED, ABI)
