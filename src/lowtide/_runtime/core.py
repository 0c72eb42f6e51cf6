"""The native pool, called: `native/allocator/pool.h` explains every function and field."""

import _thread
import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from threading import Timer
from typing import Any

from lowtide._native import NoNative

ABI = 4
_MOST_LANES = 256
_MOMENT = 0.01  # seconds until whoever is called by the library has returned


class Mode(IntEnum):
    """What the pool does with an allocation."""

    PASS = 0
    RECORD = 1
    REPLAY = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """What became of one lane's last step."""

    lane: int
    device: int
    stream: int
    allocations: int
    signature: int
    plan: int
    planned: int
    displaced: int
    unplanned: int
    arena_bytes: int
    page: int
    overflow: int
    refused: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step's allocations in order: sizes, and the ticks at which each was made and freed.

    A tick is one allocation or free of the lane. `freed` is -1 for what still lives, and beyond
    `ticks` for what died in a later step. Times are in nanoseconds, or -1 where none were noted.
    """

    sizes: list[int]
    made: list[int]
    freed: list[int]
    made_ns: list[int]
    freed_ns: list[int]
    ticks: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What lies in a device's arenas."""

    arena_bytes: int
    arenas: int
    live_bytes: int
    live: int
    pending_bytes: int
    pending: int
    requested_bytes: int
    made: int
    made_bytes: int
    made_requested: int
    arenas_made: int
    arenas_made_bytes: int
    held: int
    page_bytes: int
    page_calls: int


class _Lane(ctypes.Structure):
    _fields_ = [
        ("lane", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("allocations", ctypes.c_int64),
        ("signature", ctypes.c_uint64),
        ("plan", ctypes.c_int64),
        ("planned", ctypes.c_int64),
        ("displaced", ctypes.c_int64),
        ("unplanned", ctypes.c_int64),
        ("arena_bytes", ctypes.c_int64),
        ("page", ctypes.c_int64),
        ("overflow", ctypes.c_int32),
        ("refused", ctypes.c_int32),
    ]


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in Counts.__slots__]


_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_ROW = ctypes.POINTER(ctypes.c_int64)
_SOUND = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "abi": (_I32, []),
    "close": (None, [_PTR]),
    "mode": (None, [_PTR, _I32]),
    "stop": (None, [_PTR]),
    "allocate": (_PTR, [_PTR, _I64, _I32, _PTR]),
    "free": (_I32, [_PTR, _PTR]),
    "touch": (_I32, [_PTR, _PTR, _I32, _PTR]),
    "pause": (None, [_PTR, _I32]),
    "guard": (_I32, [_PTR, _I32, _PTR, _I64, _SOUND, _PTR]),
    "guarded": (_I64, [_PTR]),
    "mark": (_I32, [_PTR, ctypes.POINTER(_Lane), _I32]),
    "step": (_I64, [_PTR, _I32, _I32, _I64, _ROW, _ROW, _ROW, _ROW, _ROW, _ROW]),
    "plan": (_I64, [_PTR, _I32, _I64, _ROW, _I32, _ROW]),
    "forget": (None, [_PTR, _I32, _I64]),
    "arena": (_I32, [_PTR, _I32, _I64]),
    "pages": (_I32, [_PTR, _I32, _PTR, _I64]),
    "fill": (_I32, [_PTR, _I32, _I64, _I64]),
    "lasting": (_I64, [_PTR, _I32, _ROW, _I64]),
    "left": (_I64, [_PTR, _I32, _ROW, _I64]),
    "free_pages": (_I64, [_PTR, _I32]),
    "window": (_I64, [_PTR, _I32, _ROW, _I64]),
    "home": (_PTR, [_PTR, _I64, _I32, _PTR]),
    "place": (_PTR, [_PTR, _PTR, _I64, _I64]),
    "dismiss": (None, [_PTR, _PTR]),
    "base": (_PTR, [_PTR, _PTR]),
    "paged": (_I64, [_PTR, _PTR]),
    "age": (_I64, [_PTR, _PTR]),
    "index": (_I64, [_PTR, _I32, _PTR]),
    "place_in": (_PTR, [_PTR, _I32, _I64, _I64]),
    "reclaim": (None, [_PTR]),
    "count": (None, [_PTR, _I32, ctypes.POINTER(_Counts)]),
}


def open_library(path: Path) -> ctypes.CDLL:
    """A library with the pool in it, its functions typed."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNative(f"{path} cannot be loaded ({error})") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"lowtide_pool_{name}")
        function.restype, function.argtypes = result, arguments
    if library.lowtide_pool_abi() != ABI:
        raise NoNative(f"{path} is of another version of lowtide: install it again")
    return library


def _heard(sound: Callable[[], bool]) -> int:
    """Nothing is raised where nobody could catch it; an interrupt comes a moment later."""
    try:
        return int(sound())
    except KeyboardInterrupt:
        Timer(_MOMENT, _thread.interrupt_main).start()
    except Exception as error:  # noqa: BLE001 - the block that is asked for is there all the same
        sys.stderr.write(f"lowtide: {type(error).__name__}: {error}, please report it\n")
        return 1
    return 0


class Core:
    """A native pool; `handle` is the library's."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library = library
        self._handle = handle
        self._lanes = (_Lane * _MOST_LANES)()
        self._told: list[Any] = []  # the library may be about to call them

    def set_mode(self, mode: Mode) -> None:
        """From now on."""
        self._library.lowtide_pool_mode(self._handle, mode)

    def stop(self) -> None:
        """Back to PASS; plans are dropped and arenas go with their last blocks."""
        self._library.lowtide_pool_stop(self._handle)

    def guard(self, device: int, stream: int, most: int, sound: Callable[[], bool] | None) -> bool:
        """Have `sound` called, from the next mark on, where a step comes to hold more than before.

        That is: as this thread makes a block by which the device's arenas come near to holding
        `most`, or one that announces it; each time until it returns True. None: nobody is called;
        with something to hold, steps are counted all the same. False: no whole step is known by
        then, and it may be called too late.
        """
        called = _SOUND()
        if sound is not None:
            called = _SOUND(lambda _: _heard(sound))
            self._told = [*self._told[-1:], called]
        guard = self._library.lowtide_pool_guard
        return bool(guard(self._handle, device, stream or None, most, called, None))

    def guarded(self) -> int:
        """What the guarded device's arenas have held at most in the step so far."""
        return int(self._library.lowtide_pool_guarded(self._handle))

    def mark(self) -> list[Lane]:
        """End the step; what became of each lane's."""
        count = self._library.lowtide_pool_mark(self._handle, self._lanes, _MOST_LANES)
        return [
            Lane(**{name: getattr(entry, name) or 0 for name in Lane.__slots__})
            for entry in self._lanes[: min(count, _MOST_LANES)]
        ]

    def step(self, lane: int, back: int) -> StepRecord | None:
        """The step `back` marks before the last one that ended."""
        ticks = ctypes.c_int64()
        count = self._library.lowtide_pool_step(
            self._handle, lane, back, 0, *[None] * 5, ctypes.byref(ticks)
        )
        if count < 0:
            return None
        columns = [(ctypes.c_int64 * count)() for _ in range(5)]
        self._library.lowtide_pool_step(
            self._handle, lane, back, count, *columns, ctypes.byref(ticks)
        )
        sizes, made, freed, made_ns, freed_ns = map(list, columns)
        return StepRecord(sizes, made, freed, made_ns, freed_ns, ticks.value)

    def add_plan(self, lane: int, sizes: Sequence[int], phases: Sequence[Sequence[int]]) -> int:
        """A plan: the offsets of each phase, -1 for what lies outside. Its number."""
        count = len(sizes)
        flat = [offset for offsets in phases for offset in offsets]
        assert len(flat) == count * len(phases)
        number = self._library.lowtide_pool_plan(
            self._handle,
            lane,
            count,
            (ctypes.c_int64 * count)(*sizes),
            len(phases),
            (ctypes.c_int64 * len(flat))(*flat),
        )
        assert number >= 0
        return int(number)

    def forget(self, lane: int, plan: int) -> None:
        """Drop a plan."""
        self._library.lowtide_pool_forget(self._handle, lane, plan)

    def set_arena(self, lane: int, size: int) -> bool:
        """Give a lane an arena and retire the one it has; False: no memory, it keeps that one."""
        return bool(self._library.lowtide_pool_arena(self._handle, lane, size))

    def set_pages(self, device: int, stream: int, size: int) -> bool:
        """Give a stream's lane an arena in pages, of at most that size; False: there are none."""
        made = self._library.lowtide_pool_pages(self._handle, device, stream or None, size)
        return bool(made)

    def fill(self, lane: int, size: int, floor: int) -> bool:
        """Memory for the lowest pages of a lane's arena, for plans; False: there is too little.

        What is not planned lies above `floor` where it can.
        """
        return bool(self._library.lowtide_pool_fill(self._handle, lane, size, floor))

    def lasting(self, lane: int) -> list[int]:
        """Pages of a lane's arena with something that was made before its last step."""
        return self._row(self._library.lowtide_pool_lasting, lane)

    def left(self, lane: int) -> dict[int, tuple[int, tuple[int, ...]]]:
        """What its last step left behind in pages: by allocation, its offset and its pages."""
        numbers = iter(self._row(self._library.lowtide_pool_left, lane))
        return {index: (next(numbers), tuple(islice(numbers, next(numbers)))) for index in numbers}

    def _row(self, ask: Callable[..., int], lane: int) -> list[int]:
        """What it has to say; that may change while it is asked how long that is."""
        room, count = 0, 1
        while count > room:
            room = count
            row = (ctypes.c_int64 * room)()
            count = ask(self._handle, lane, row, room)
        return row[:count]

    def free_pages(self, device: int) -> int:
        """Bytes of whole pages that nobody uses."""
        return int(self._library.lowtide_pool_free_pages(self._handle, device))

    def window(self, lane: int, pages: Sequence[int]) -> int:
        """The offset at which these pages of a lane's arena are side by side, or -1."""
        row = (ctypes.c_int64 * len(pages))(*pages)
        return int(self._library.lowtide_pool_window(self._handle, lane, row, len(pages)))

    def dismiss(self, home: int) -> None:
        """Nothing more will be placed in this home."""
        self._library.lowtide_pool_dismiss(self._handle, home)

    def holds(self, block: int) -> bool:
        """Whether a block lies in an arena or a home."""
        return self.base(block) != 0

    def base(self, block: int) -> int:
        """Where the arena or home begins that a block lies in, or 0."""
        return int(self._library.lowtide_pool_base(self._handle, block) or 0)

    def is_paged(self, block: int) -> bool:
        """Whether a block lies in pages."""
        return bool(self._library.lowtide_pool_paged(self._handle, block))

    def age(self, block: int) -> int:
        """How many marks ago a block was allocated, or -1."""
        return int(self._library.lowtide_pool_age(self._handle, block))

    def index(self, lane: int, block: int) -> int:
        """Which allocation of the lane's step a block was, or -1."""
        return int(self._library.lowtide_pool_index(self._handle, lane, block))

    def reclaim(self) -> None:
        """Give back what only waited for an event."""
        self._library.lowtide_pool_reclaim(self._handle)

    def count(self, device: int) -> Counts:
        """What lies in the arenas of a device."""
        counts = _Counts()
        self._library.lowtide_pool_count(self._handle, device, ctypes.byref(counts))
        return Counts(*(getattr(counts, name) for name in Counts.__slots__))
