"""Saved tensors that are kept without Python: see `native/gate/saves.cc`."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from lowtide._native import NoNative
from lowtide._runtime.swap.saved import Saved, show, unpack
from lowtide._runtime.swap.script import ASKED
from lowtide._runtime.torch_build import build_gate
from lowtide._trace.saves import Hooks, check_version

# Of an event: it may be dealt with natively; Python has something to do; a tape may deal with it.
PLAIN, EVENTFUL, TAPED = 1, 2, 4
_FIXED = (torch.Tensor, torch.nn.Parameter, check_version, unpack, show)


class _Python(ctypes.Structure):
    """Whom it works for: the fields of `Python` in the source."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("tensor_type", "parameter_type", "check", "unpack", "show"),
            *("pack", "adopt", "happened"),
        )
    ]


class NativeSaves:
    """One pair of hooks in a process, which work for one `Saved` at a time."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._whom: list[Any] = []  # that it works for, as long as it may call them
        self.hooks = cast("Hooks", library.lowtide_saves_hooks())

    def work_for(self, saved: Saved, happened: Callable[[int], None]) -> bool:
        """False: it works for another."""
        if self._whom:
            return False
        self._whom = [saved.pack, saved.adopt, happened]
        self._tell()
        return True

    def leave(self) -> None:
        """Work for nobody: what is still kept becomes Python's."""
        if self._whom:
            self.stop()
            try:
                self.adopt()
            finally:
                self._whom = []
                self._tell()

    def _tell(self) -> None:
        whom = _Python(*map(id, (*_FIXED, *self._whom)))
        self._library.lowtide_saves_work_for(ctypes.byref(whom))

    def follow(self, codes: Sequence[int], flags: Sequence[int], *, asks_count: bool) -> None:
        """A step as it is expected: its events' codes, and what each is.

        To be asked for a saved tensor is an event, or not.
        """
        count = len(codes)
        self._library.lowtide_saves_script(
            (ctypes.c_int64 * count)(*codes), bytes(flags), count, ASKED, asks_count
        )

    def go(self, event: int, saves: int, before: int, *, tells: bool = False) -> None:
        """It goes on as expected: from that event, with so many saves in it and before it.

        `tells`: Python wants to know of every event.
        """
        self._library.lowtide_saves_go(event, saves, before, tells)

    def stop(self) -> tuple[int, int] | None:
        """Python sees everything. The next event, and the saves so far; None: it did already."""
        event = self._library.lowtide_saves_stop()
        return None if event < 0 else (event, self._library.lowtide_saves_count())

    def adopt(self) -> None:
        """All that is kept becomes Python's."""
        self._library.lowtide_saves_adopt()

    def kept(self) -> int:
        """Saved tensors that are not Python's."""
        return int(self._library.lowtide_saves_kept())


def load_saves() -> NativeSaves | None:
    """The only ones. None where they cannot be built, which whoever loads the gate is told."""
    try:
        return _load(build_gate())
    except (NoNative, OSError):
        return None


@functools.cache
def _load(path: Path) -> NativeSaves:
    library = ctypes.PyDLL(str(path))
    library.lowtide_saves_hooks.restype = ctypes.py_object
    library.lowtide_saves_work_for.argtypes = [ctypes.POINTER(_Python)]
    library.lowtide_saves_script.argtypes = [
        *(ctypes.POINTER(ctypes.c_int64), ctypes.c_char_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    ]
    library.lowtide_saves_go.argtypes = [*[ctypes.c_int64] * 3, ctypes.c_int]
    for done in ("work_for", "script", "go"):
        getattr(library, f"lowtide_saves_{done}").restype = None
    for count in ("stop", "count", "kept"):
        getattr(library, f"lowtide_saves_{count}").restype = ctypes.c_int64
    return NativeSaves(library)
