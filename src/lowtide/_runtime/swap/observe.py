"""One live step -> its trace, and how the trace's values are known to the runtime."""

import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowtide._analyze.chained import with_chains
from lowtide._analyze.fusable import with_fused_reruns
from lowtide._ir import OpIndex, Trace, ValueId
from lowtide._policy.candidates import GUEST_KINDS
from lowtide._policy.ground import Runtime
from lowtide._runtime.swap.cell import Cell, State
from lowtide._runtime.swap.guests import GuestCell
from lowtide._runtime.swap.quiet import is_calm, is_free
from lowtide._runtime.swap.saved import Handle
from lowtide._runtime.swap.script import Observed
from lowtide._runtime.swap.states import StateCell
from lowtide._trace.cut import cut
from lowtide._trace.record import Recorder
from lowtide._trace.workspace import with_cpu_workspace


class Observer:
    """Records from one end of a step to the next, while the driver tells it of every event."""

    def __init__(self) -> None:
        self._recorder = Recorder(hooked=True)
        self._waiting: set[int] = set()  # the recorder's ops that may wait for others
        self._thread = 0
        self._codes: list[int] = []
        self._positions: list[int] = []
        self._saves: dict[int, int] = {}  # the recorder's value -> the first save
        self._cells: dict[int, Cell] = {}  # those that somebody else refers to, too
        self._droppable: set[int] = set()
        self._numbers: dict[int, int] = {}  # the recorder's op -> the number the driver knows it by
        self._guests: dict[int, int] = {}  # the recorder's storage -> the number of a guest
        self._alone: dict[int, int] = {}  # the recorder's value -> from where on it is alone

    @staticmethod
    def can_begin() -> bool:
        """Whether a mode pushed now stays until it is popped, and is the only one."""
        return is_free()

    def begin(self, cells: Iterable[StateCell] = ()) -> None:
        """The step begins. `cells` have state that may be elsewhere than where it belongs."""
        self._thread = threading.get_ident()
        self._recorder.__enter__()
        for cell in cells:
            tensor = cell.tensor()
            if tensor is not None:
                self._recorder.book.belongs(
                    tensor,
                    cell.bytes,
                    cell.home(),
                    shown=cell.state in (State.AWAY, State.COMING),
                    away=cell.state is State.AWAY,
                )
        if torch.cuda.is_initialized():
            self._recorder.probe_cuda()  # before anything moves

    def can_finish(self) -> bool:
        """Whether the mode that was pushed is the one that would be popped."""
        return (
            is_calm()
            and threading.get_ident() == self._thread
            and _get_current_dispatch_mode() is self._recorder
        )

    def abandon(self) -> None:
        """Record no more, although this is no moment to pop the mode: see `can_finish`."""
        self._recorder.abandon()

    def pop(self) -> None:
        """Once it was abandoned, and can be finished."""
        self._recorder.pop()

    def begin_own(self, *, anew: bool = False) -> None:
        """What is allocated from now on is lowtide's doing. `anew`: nobody else is at it."""
        if self._recorder.cuda is not None:
            self._recorder.cuda.begin_own(anew=anew)

    def end_own(self) -> None:
        """Now it is the program's again."""
        if self._recorder.cuda is not None:
            self._recorder.cuda.end_own()

    def event(self, code: int) -> None:
        """Something happens."""
        self._codes.append(code)
        self._positions.append(self._recorder.book.started)
        gone = []
        for value, cell in self._cells.items():
            if cell.alone():
                self._alone[value] = self._recorder.book.started
            elif cell.handles:
                continue
            gone.append(value)
        for value in gone:
            del self._cells[value]

    def see(self, run: Callable[[], Any], number: Callable[[], int], *, waits: bool) -> Any:
        """Run an op; if the driver could run it again, that knows it by a number.

        `waits`: in steps like this one it may.
        """
        before = self._recorder.book.started
        result = run()
        if self._recorder.book.started > before:  # the last of them, if it was tried again
            self._numbers[self._recorder.book.started - 1] = number()
            if waits:
                self._waiting.add(self._recorder.book.started - 1)
        return result

    def packed(self, handle: Handle, number: int) -> None:
        """A tensor was saved."""
        handle.entry = self._recorder.saves.note_pack(handle.tensor)
        if handle.cell is not None:
            value = self._recorder.book.current(handle.tensor)
            if value not in self._saves:
                self._saves[value] = number
                self._cells[value] = handle.cell

    def can_drop(self, number: int) -> None:
        """What was saved as the `number`-th can be made again."""
        self._droppable.add(number)

    def unpacked(self, handle: Handle, tensor: torch.Tensor) -> None:
        """Backward gets it, over other bytes perhaps."""
        self._recorder.book.alias(handle.tensor, tensor)
        self._recorder.saves.note_unpack(handle.entry, tensor)

    def moved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """What an optimizer's tensor shows lies in `storage` now."""
        self._recorder.book.move(tensor, storage)

    def stepping(self, optimizer: Optimizer, guests: Sequence[GuestCell] = ()) -> None:
        """An optimizer is about to step: by now all gradients are there."""
        self._recorder.optimizers.before(optimizer, (), {})
        for number, guest in enumerate(guests):
            tensor = guest.subject()
            if tensor is not None:
                self._guests[self._recorder.book.storage_of(tensor)] = number

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        self._recorder.optimizers.after(optimizer, (), {})

    def finish(
        self,
        states: Sequence[torch.Tensor | None],
        room: int | None = None,
        *,
        fused: bool = False,
    ) -> Observed:
        """The step has ended; `states` are the optimizers' tensors that could move.

        What is looked at more closely now may take `room` bytes; None: as much as it does. `fused`:
        element-wise ops that run again do so as one, and so do those of backward that may wait.
        """
        book = self._recorder.book
        numbers = {book.shown(t): i for i, t in enumerate(states) if t is not None}
        self.stop()
        trace, new = _cleaned(self._recorder.recording())
        plain_seconds = sum(op.seconds for op in trace.ops)
        numbered = tuple(self._numbers.get(op, -1) for op in range(len(trace.ops)))
        if fused:
            again = {op for op, number in enumerate(numbered) if number >= 0}
            trace = with_chains(with_fused_reruns(trace, again), self._waiting)
        guests = {
            new[old]: self._guests[entry.storage]
            for old, entry in enumerate(book.entries)
            if entry.storage in self._guests and old in new
        }
        return Observed(
            trace=with_cpu_workspace(trace, room),
            codes=tuple(self._codes),
            positions=tuple(OpIndex(at) for at in self._positions),
            saves={new[old]: number for old, number in self._saves.items() if old in new},
            states={new[old]: i for old, i in numbers.items() if old in new},
            held={new[old]: OpIndex(at) for old, at in self._alone.items() if old in new},
            numbers=numbered,
            plain_seconds=plain_seconds,
            guests={v: i for v, i in guests.items() if trace.values[v].kind in GUEST_KINDS},
            droppable=frozenset(
                new[old] for old, at in self._saves.items() if old in new and at in self._droppable
            ),
        )

    def stop(self) -> None:
        """Record no more."""
        self._recorder.stop()
        self._recorder.__exit__(None, None, None)


def runtime_of(observed: Observed, *, guests: bool = False) -> Runtime:
    """What can be done in steps like it; with `guests`, to weights and gradients, too."""
    return Runtime(
        repeatable={op for op, number in enumerate(observed.numbers) if number >= 0},
        droppable=observed.droppable,
        movable=movable_in(observed, guests=guests),
        held=observed.held,
        positions=tuple(sorted(set(observed.positions))),
    )


def movable_in(observed: Observed, *, guests: bool) -> Container[ValueId]:
    """What can be swapped in steps like it."""
    movable = observed.saves.keys() | observed.states.keys()
    return movable | observed.guests.keys() if guests else movable


def _cleaned(trace: Trace) -> tuple[Trace, dict[int, ValueId]]:
    """The recording in the common order, and the new number of each value."""
    named = replace(
        trace,
        values=tuple(replace(v, name=f"{v.name}\\0{i}") for i, v in enumerate(trace.values)),
    )
    ordered = cut(named, 0, len(trace.ops))
    new = {}
    values = []
    for i, value in enumerate(ordered.values):
        name, _, old = value.name.rpartition("\\0")
        new[int(old)] = ValueId(i)
        values.append(replace(value, name=name))
    return replace(ordered, values=tuple(values)), new
