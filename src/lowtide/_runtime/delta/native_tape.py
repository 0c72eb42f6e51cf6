"""The native side of a tape: see `native/gate/tape.h`."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lowtide._native import NoNative
from lowtide._runtime.delta.rehearsal import Tape
from lowtide._runtime.fused.source import EACH, THREADS
from lowtide._runtime.swap.cuda_driver import launch_address
from lowtide._runtime.torch_build import build_gate

_DROPPED, _SPOILT, _HELD, _SAVES = 1, 2, 4, 3  # of a value's state: bits, and a shift


class NativeTape:
    """One in a process, by which one step goes at a time."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._whom: tuple[Any, ...] = ()  # as long as the library may call them
        self._tape: Tape | None = None  # by which they go

    def put(
        self,
        tape: Tape,
        hand_over: Callable[[], None],
        bring: Callable[[int], None],
        fused: Callable[[int, Sequence[torch.UntypedStorage], Sequence[torch.Tensor]], None],
    ) -> bool:
        """Steps go by that from now on. False: they cannot."""
        if self._tape is tape and self._whom[0] == hand_over:
            return True
        words, functions = tape.words, [one.kernel.function for one in tape.kernels]
        if any(functions):
            self._library.lowtide_kernels_launch_by(launch_address(), THREADS, EACH)
        whom = hand_over, bring, fused
        done = self._library.lowtide_tape_put(
            *((ctypes.c_int64 * len(words))(*words), len(words)),
            *((ctypes.c_void_p * len(functions))(*functions), len(functions)),
            *map(id, whom),
        )
        if done:
            self._whom, self._tape = whom, tape
        return bool(done)

    def is_busy(self) -> bool:
        """Whether a step goes by it, or has not been handed over yet."""
        return bool(self._library.lowtide_tape_is_known())

    def leave(self, hand_over: Callable[[], None]) -> None:
        """Refer to nobody any more, if that is who it works for."""
        if self._whom and self._whom[0] == hand_over and not self.is_busy():
            self._whom, self._tape = (), None

    def begin(self) -> None:
        """A step begins that goes by it."""
        self._library.lowtide_tape_begin()

    def clear(self) -> None:
        """It has ended."""
        self._library.lowtide_tape_clear()

    def is_idle(self) -> bool:
        """Whether nothing is dropped, saved or held."""
        return bool(self._library.lowtide_tape_is_idle())

    def happen(self, event: int) -> None:
        """Do what is to be done then."""
        self._library.lowtide_tape_happen(event)

    def is_owed(self) -> bool:
        """Whether Python was to have all of it, and does not have it yet."""
        return bool(self._library.lowtide_tape_is_owed())

    def hand_over(self) -> None:
        """Python goes on."""
        self._library.lowtide_tape_hand_over()

    def reason(self) -> str:
        """Why it was handed over the last time."""
        found: bytes = self._library.lowtide_tape_reason()
        return found.decode(errors="replace").partition("\n")[0]

    def about_to_write(self, storage: torch.UntypedStorage) -> None:
        """Somebody is."""
        self._library.lowtide_tape_about_to_write(storage._cdata)

    def adopt_saves(self) -> None:
        """Those that lie on values of the tape are Python's."""
        self._library.lowtide_saves_adopt_taped()

    def storage(self, value: int) -> torch.UntypedStorage | None:
        """Where it lies, or lay."""
        found: torch.UntypedStorage | None = self._library.lowtide_tape_storage(value)
        return found

    def is_dropped(self, value: int) -> bool:
        """Whether its bytes are nowhere."""
        return bool(self._library.lowtide_tape_state(value) & _DROPPED)

    def is_spoilt(self, value: int) -> bool:
        """Whether it was written to."""
        return bool(self._library.lowtide_tape_state(value) & _SPOILT)

    def is_wanted(self, value: int) -> bool:
        """Whether it is saved, or dropped and something else is made from it."""
        state = self._library.lowtide_tape_state(value)
        return bool(state >> _SAVES or state & (_DROPPED | _HELD) == _DROPPED | _HELD)

    def is_saved(self, value: int) -> bool:
        """Whether a tensor that is kept natively lies on it."""
        return bool(self._library.lowtide_tape_state(value) >> _SAVES)

    def sources(self, value: int) -> list[int]:
        """What a dropped one is made from."""
        return self._until_none(functools.partial(self._library.lowtide_tape_source, value))

    def is_noted(self, op: int) -> bool:
        """Whether it has run, by its place in the tape."""
        return bool(self._library.lowtide_tape_noted(op))

    def random(self, op: int) -> torch.Tensor | None:
        """The state of the generator before it, if it draws."""
        found: torch.Tensor | None = self._library.lowtide_tape_random(op)
        return found

    def holds(self, op: int, place: int) -> bool:
        """Whether a plan still holds that: a place among the op's holds."""
        return bool(self._library.lowtide_tape_holds(op, place))

    def late(self) -> list[int]:
        """Saves that were to be dropped, and could not be yet."""
        return self._until_none(self._library.lowtide_tape_late)

    def take_counts(self) -> tuple[int, int, int, int]:
        """Values dropped, their bytes, those that could not be, ops run again: since last asked."""
        four = (ctypes.c_int64 * 4)()
        self._library.lowtide_tape_take_counts(four)
        return four[0], four[1], four[2], four[3]

    @staticmethod
    def _until_none(ask: Callable[[int], int]) -> list[int]:
        found: list[int] = []
        while (one := ask(len(found))) >= 0:
            found.append(one)
        return found


def load_tape() -> NativeTape | None:
    """The only one. None where it cannot be built, which whoever loads the gate is told."""
    try:
        return _load(build_gate())
    except (NoNative, OSError):
        return None


@functools.cache
def _load(path: Path) -> NativeTape:
    library = ctypes.PyDLL(str(path))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, tuple[list[Any], Any]] = {
        "put": (
            [pointer, number, pointer, number, *[pointer] * 3],
            ctypes.c_int,
        ),
        "begin": ([], None),
        "clear": ([], None),
        "happen": ([number], ctypes.c_int),
        "is_known": ([], ctypes.c_int),
        "is_owed": ([], ctypes.c_int),
        "hand_over": ([], ctypes.c_int),
        "reason": ([], ctypes.c_char_p),
        "about_to_write": ([pointer], ctypes.c_int),
        "storage": ([number], ctypes.py_object),
        "state": ([number], number),
        "source": ([number, number], number),
        "noted": ([number], ctypes.c_int),
        "random": ([number], ctypes.py_object),
        "holds": ([number, number], ctypes.c_int),
        "late": ([number], number),
        "take_counts": ([pointer], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, f"lowtide_tape_{name}")
        function.argtypes, function.restype = arguments, result
    library.lowtide_kernels_launch_by.argtypes = [pointer, number, number]
    library.lowtide_kernels_launch_by.restype = None
    return NativeTape(library)
