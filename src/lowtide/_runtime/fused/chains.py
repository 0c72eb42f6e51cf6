"""Element-wise ops of backward that run as one: what the native side has to ask.

`native/gate/chain.h` says when they do.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._analyze.fusable import ELEMENTWISE, GRADIENTS
from lowtide._native import NoNative
from lowtide._runtime.delta.recipe import GIVEN, NOBODY, Call, Look, Source, seen_on
from lowtide._runtime.fused.kernel import Kernel
from lowtide._runtime.fused.kernels import Kernels
from lowtide._runtime.fused.program import Input, Part, part_of, program_of
from lowtide._runtime.fused.source import EACH, THREADS
from lowtide._runtime.swap.cuda_driver import launch_address
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.torch_build import build_gate

_SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # PyTorch's numbers
_NO_LINK = (-1, 0, 0, 0, 0)
_MOST = 1024  # kernels
_SUM = torch.ops.aten.add.Tensor  # by which autograd adds gradients up
_COMPARED = 1 << 21  # bytes at once


class _Trust(IntEnum):
    """As in `native/gate/links.h`."""

    NONE = 0
    UNPROVED = 1
    PROVED = 2


@dataclass(frozen=True, slots=True)
class _Link:
    """An op on tensors that look like that."""

    part: Part
    looks: tuple[Look, ...]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A kernel for a chain of these words, and how it sees what it reads and makes."""

    words: tuple[int, ...]
    kernel: Kernel
    looks: tuple[Look, ...]
    dtypes: tuple[torch.dtype, ...]


class Chains:
    """One in a process is open at a time. `wait`: ops may."""

    def __init__(self, kernels: Kernels, *, wait: bool = True) -> None:
        self._kernels = kernels
        self._wait = wait
        self._library: ctypes.PyDLL | None = None
        self._links: list[_Link] = []
        self._ready: list[_Ready] = []
        self._whom = self._make, self._run, self._prove  # as long as the library may call them
        self.is_open = False
        self.right = 0  # kernels that are relied on

    def _loaded(self) -> ctypes.PyDLL | None:
        if self._library is None and self._wait and self._kernels.works():
            self._library = _library()
        return self._library

    def works(self) -> bool:
        """Whether several ops can run as one here."""
        return self._kernels.works()

    def may_wait(self, func: OpOverload[..., Any], args: Sequence[Any]) -> bool:
        """Whether nobody but ops could tell of an op that is seen now, if it waited."""
        library = self._loaded()
        if library is None or torch._C._current_graph_task_id() == -1:
            return False
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        sizes = tuple(args[0].shape)
        row = (ctypes.c_int64 * len(sizes))(*sizes)
        return bool(library.lowtide_chain_may_wait(row, len(sizes), func is _SUM))

    def open(self) -> None:
        """Ops wait for each other from now on, where they may."""
        if self._loaded() is None or self._library is None:
            return
        if _Last.opened is not self:
            self._begin_anew(self._library)
        self.is_open = True
        self._library.lowtide_chain_begin(*map(id, self._whom))

    def _begin_anew(self, library: ctypes.PyDLL) -> None:
        """What others have made known is theirs."""
        library.lowtide_chain_forget()
        library.lowtide_chain_trust()
        self._links.clear()
        self._ready.clear()
        if self._kernels.device.type == "cuda":
            library.lowtide_kernels_launch_by(launch_address(), THREADS, EACH)
        for name in ELEMENTWISE | GRADIENTS:
            packet, _, overload = name.partition(".")
            own = "" if overload == "default" else overload
            is_sum = (packet, overload) == ("add", "Tensor")
            library.lowtide_chain_may_be(f"aten::{packet}".encode(), own.encode(), is_sum)
        _Last.opened = self

    def finish(self) -> None:
        """What waits in this thread runs now."""
        if self.is_open and self._library is not None:
            self._library.lowtide_chain_finish()

    def close(self) -> None:
        """Whatever waits runs, and no op waits any more."""
        if self.is_open and self._library is not None:
            self.is_open = False
            self._library.lowtide_chain_end()

    def leave(self) -> None:
        """Nobody refers to it any more."""
        self.close()
        if _Last.opened is self:
            _Last.opened = None

    def take_counts(self) -> tuple[int, int]:
        """Ops that have joined others, and kernels run, since last asked."""
        two = (ctypes.c_int64 * 2)()
        if self._library is not None:
            self._library.lowtide_chain_take_counts(two)
        return two[0], two[1]

    def answer(
        self, func: OpOverload[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """An op is seen now: if that is asked, whether it can be part of a chain."""
        if not self.is_open or self._library is None:
            return
        schema = func._schema
        name, overload = schema.name.encode(), schema.overload_name.encode()
        if not self._library.lowtide_chain_is_asked(name, overload):
            return
        with quiet(), torch.no_grad():
            link = self._link(func, args, kwargs)
        answer = _NO_LINK
        if link is not None:
            wholes = [not dims for dims in link.part.dims]
            bits = sum(1 << i for i, whole in enumerate(wholes) if whole)
            scalar_type = _SCALAR_TYPES[link.part.dtype]
            answer = (len(self._links), scalar_type, link.part.count, wholes.index(True), bits)
            self._links.append(link)
        self._library.lowtide_chain_answer(*answer)

    def _link(
        self, func: OpOverload[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> _Link | None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not tensors or any(one.is_neg() or one.is_conj() for one in tensors):
            return None
        given = [GIVEN if isinstance(arg, torch.Tensor) else arg for arg in args]
        sources = [
            Source(NOBODY, one.dtype, one.size(), one.stride(), int(one.storage_offset()))
            for one in tensors
        ]
        device = tensors[0].device
        makes = [(0, NOBODY.storage)]  # a result, whatever it is
        call = Call(func, given, kwargs, sources, 0, None, None, device, makes, [])  # type: ignore[arg-type]
        part = part_of(call)
        if part is None or not self._kernels.can(part.op, part.dtype):
            return None
        return _Link(part, tuple(source.look() for source in sources))

    def _make(self, words: tuple[int, ...]) -> None:
        """A chain was never seen before: its kernel is put, if there is one."""
        ready: _Ready | None = None
        try:
            with quiet(), torch.no_grad():
                ready = self._ready_for(words)
        except Exception as error:  # noqa: BLE001 - whatever it is, ops run one by one
            self._kernels.tell(f"ops of backward run one by one ({type(error).__name__}: {error})")
        if ready is None:
            self._put(words, _Trust.NONE)
            return
        self._ready.append(ready)
        self.right += not self._kernels.verify
        trust = _Trust.UNPROVED if self._kernels.verify else _Trust.PROVED
        self._put(words, trust, ready, len(self._ready) - 1)

    def _put(
        self,
        words: tuple[int, ...],
        trust: _Trust,
        ready: _Ready | None = None,
        number: int = 0,
    ) -> None:
        assert self._library is not None
        function = 0 if ready is None else ready.kernel.function
        row = (ctypes.c_int64 * len(words))(*words)
        self._library.lowtide_chain_put(row, len(words), trust, function, number)

    def _ready_for(self, words: tuple[int, ...]) -> _Ready | None:
        if len(self._ready) >= _MOST:
            return None
        links, places, outputs = self._read(words)
        looks: dict[int, tuple[Look, Input]] = {}  # of inputs, by who is the first to read each
        for link, sources in zip(links, places, strict=True):
            for look, dims, place in zip(link.looks, link.part.dims, sources, strict=True):
                if place < 0:
                    looks.setdefault(-1 - place, (look, Input(look[0], dims)))
        inputs = [looks[k] for k in range(len(looks))]
        parts = [link.part for link in links]
        program = program_of(parts, places, [given for _, given in inputs], outputs)
        kernel = self._kernels.of(program)
        if kernel is None:
            return None
        dtypes = tuple(parts[j].dtype for j in outputs)
        return _Ready(words, kernel, tuple(look for look, _ in inputs), dtypes)

    def _prove(
        self, number: int, rows: Sequence[torch.Tensor], made: Sequence[torch.UntypedStorage]
    ) -> None:
        """A kernel has made `rows`, and its ops have `made` the same, or others."""
        ready = self._ready[number]
        with quiet(), torch.no_grad():
            same = all(
                _are_same(row, seen_on((torch.uint8, row.size(), (1,), 0), one))
                for row, one in zip(rows, made, strict=True)
            )
        self.right += same
        self._kernels.wrong += not same
        self._put(ready.words, _Trust.PROVED if same else _Trust.NONE, ready, number)

    def _read(
        self, words: tuple[int, ...]
    ) -> tuple[list[_Link], list[tuple[int, ...]], tuple[int, ...]]:
        """Each step, where what it is given comes from, and which steps are wanted."""
        links, places, at = [], [], 1
        for _ in range(words[0]):
            link, count = words[at : at + 2]
            links.append(self._links[link])
            places.append(words[at + 2 : at + 2 + count])
            at += 2 + count
        return links, places, words[at:]

    def _run(
        self, number: int, read: Sequence[torch.UntypedStorage], made: Sequence[torch.Tensor]
    ) -> None:
        """By a kernel that is none of the driver's."""
        ready = self._ready[number]
        with quiet(), torch.no_grad():
            inputs = [seen_on(look, one) for look, one in zip(ready.looks, read, strict=True)]
            rows = [one.view(dtype) for one, dtype in zip(made, ready.dtypes, strict=True)]
            ready.kernel(inputs, rows, 0, rows[0].numel())


def _are_same(some: torch.Tensor, others: torch.Tensor) -> bool:
    """Byte by byte, which takes as many bytes again: a part at a time."""
    parts = zip(some.split(_COMPARED), others.split(_COMPARED), strict=True)
    return all(torch.equal(one, other) for one, other in parts)


class _Last:
    """Who was the last to open: what the library knows is theirs."""

    opened: Chains | None = None


def _library() -> ctypes.PyDLL | None:
    """None where it cannot be built, which whoever loads the gate is told."""
    try:
        return _load(build_gate())
    except (NoNative, OSError):
        return None


@functools.cache
def _load(path: Path) -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(path))
    number, pointer, text = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
    signatures: dict[str, tuple[list[Any], Any]] = {
        "begin": ([pointer, pointer, pointer], None),
        "end": ([], None),
        "finish": ([], ctypes.c_int),
        "may_wait": ([pointer, number, ctypes.c_int], ctypes.c_int),
        "take_counts": ([pointer], None),
        "may_be": ([text, text, ctypes.c_int], ctypes.c_int),
        "is_asked": ([text, text], ctypes.c_int),
        "answer": ([number, number, number, number, ctypes.c_uint64], None),
        "put": ([pointer, number, ctypes.c_int, pointer, number], None),
        "forget": ([], None),
        "trust": ([], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, f"lowtide_chain_{name}")
        function.argtypes, function.restype = arguments, result
    library.lowtide_kernels_launch_by.argtypes = [pointer, number, number]
    library.lowtide_kernels_launch_by.restype = None
    return library
