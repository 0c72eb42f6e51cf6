"""The native gate in front of the dispatch mode: see `native/gate/gate.cc`."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage
from torch._ops import OpOverload

from lowtide._native import NoNative
from lowtide._runtime.delta.record import Known
from lowtide._runtime.torch_build import build_gate

_WORD = 64
_VIEW, _PLAIN, _WRITER, _RANDOM, _STATISTICS = 1, 2, 3, 4, 5

# Told of an op: its form, its number, the storages it read, those it may have made, their places
# among the results, and the state of the generator before it if it draws.
Storages = tuple[UntypedStorage, ...]
Recorder = Callable[[int, int, Storages, Storages, tuple[int, ...], Tensor | None], None]


class Gate:
    """While it is open, only ops of interest reach the mode; which has to tell what ops are."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._told: set[int] = set()  # overloads live as long as the program
        self._written_down: frozenset[int] | None = None
        self._recorder: Recorder | None = None  # as long as the library may call it
        self._watched: tuple[dict[int, Any], dict[int, Any]] | None = None  # ... may read them
        self.is_open = False

    def open(self, mode: object, written_down: frozenset[int]) -> None:
        """For `mode`, which is on the stack: of plain ops it sees those with these numbers."""
        if written_down is not self._written_down:
            self._written_down = written_down
            words = [0] * (max(written_down, default=-1) // _WORD + 1)
            for number in written_down:
                words[number // _WORD] |= 1 << number % _WORD
            self._library.lowtide_gate_write_down(
                (ctypes.c_uint64 * len(words))(*words), len(words)
            )
        self.is_open = bool(self._library.lowtide_gate_open(id(mode)))

    def close(self) -> None:
        """The mode sees all of them."""
        self.is_open = False
        self._library.lowtide_gate_close()

    def leave(self) -> None:
        """Nothing stands before the mode any more, until it is opened again."""
        self.close()
        self._library.lowtide_gate_leave()

    def is_there(self) -> bool:
        """Whether it stands before modes, open or shut."""
        return bool(self._library.lowtide_gate_is_there())

    def learn(self, func: OpOverload[..., Any], what: Known) -> None:
        """What an op is that the mode sees."""
        if id(func) in self._told:
            return
        self._told.add(id(func))
        kind = _VIEW if what.view else _PLAIN if what.plain else _WRITER
        if what.draws:
            kind = _RANDOM
        elif what.only_moves_statistics:
            kind = _STATISTICS
        facts = what.facts
        names = facts.written | facts.statistics
        writes = sum(1 << i for i, name in enumerate(facts.arguments) if name in names)
        if writes >> _WORD or (kind == _WRITER and not what.only_writes):
            return
        name, overload = func._schema.name, func._schema.overload_name
        self._library.lowtide_gate_know(name.encode(), overload.encode(), kind, writes)

    def record_by(self, recorder: Recorder | None) -> None:
        """Who is told of ops that are written down, once their form is known."""
        before, self._recorder = self._recorder, recorder
        self._library.lowtide_gate_record_by(None if recorder is None else id(recorder))
        del before  # only now

    def keep(self, number: int) -> int:
        """The op that the mode has just seen, by that number, has a form: its id.

        Where that can be known again the recorder is told of it, and not the mode; otherwise 0.
        """
        return int(self._library.lowtide_gate_keep(number))

    def known(self, number: int) -> int:
        """The id of the form of the op that the mode sees, by that number; 0: it has none yet."""
        return int(self._library.lowtide_gate_known(number)) if self.is_open else 0

    def watch(self, tables: tuple[dict[int, Any], dict[int, Any]] | None) -> None:
        """Of ops that write, only those are seen that write to a storage in one of these.

        They are read as they are then. None: all of them are seen.
        """
        before, self._watched = self._watched, tables
        some, others = (None, None) if tables is None else map(id, tables)
        self._library.lowtide_gate_watch(some, others)
        del before  # only now

    def let_write(self, pass_: bool) -> None:
        """Whether ops that write pass as well, from now on."""
        self._library.lowtide_gate_let_write(pass_)

    def forget(self) -> None:
        """No form is known."""
        self._library.lowtide_gate_forget()

    def take_number(self) -> int:
        """Of the op that the mode sees."""
        return int(self._library.lowtide_gate_take_number())

    @property
    def number(self) -> int:
        """Of the next op."""
        return int(self._library.lowtide_gate_number())

    @number.setter
    def number(self, number: int) -> None:
        self._library.lowtide_gate_count_from(number)

    def passed(self) -> int:
        """Ops that the mode has not seen, so far."""
        return int(self._library.lowtide_gate_passed())


def load_gate(tell: Callable[[str], None]) -> Gate | None:
    """The only one. None, and told why, where it cannot be built: the mode sees all ops then."""
    try:
        return _load(build_gate())
    except (NoNative, OSError) as error:
        tell(f"steps by a plan take longer than they need: {error}")
        return None


@functools.cache
def _load(path: Path) -> Gate:
    library = ctypes.CDLL(str(path))
    library.lowtide_gate_open.argtypes = [ctypes.c_void_p]
    library.lowtide_gate_write_down.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_int64]
    library.lowtide_gate_record_by.argtypes = [ctypes.c_void_p]
    library.lowtide_gate_keep.argtypes = [ctypes.c_int64]
    library.lowtide_gate_keep.restype = ctypes.c_int64
    library.lowtide_gate_known.argtypes = [ctypes.c_int64]
    library.lowtide_gate_known.restype = ctypes.c_int64
    for done in ("watch", "write_down", "close", "leave", "record_by", "forget", "let_write"):
        getattr(library, f"lowtide_gate_{done}").restype = None
    library.lowtide_gate_know.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_uint64,
    ]
    library.lowtide_gate_watch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.lowtide_gate_count_from.argtypes = [ctypes.c_int64]
    library.lowtide_gate_count_from.restype = None
    for count in ("number", "take_number", "passed"):
        getattr(library, f"lowtide_gate_{count}").restype = ctypes.c_int64
    return Gate(library)
