"""The step that is traced, so that those like it can be planned."""

from collections.abc import Sequence

import torch

from lowtide._runtime.fused.chains import Chains
from lowtide._runtime.swap.guests import GuestCell
from lowtide._runtime.swap.observe import Observer
from lowtide._runtime.swap.script import Observed
from lowtide._runtime.swap.states import StateCell

_PATIENCE = 2  # steps after a traced one before another may be; doubles each time
_NEVER = 1 << 62
_FIRST = 1  # steps before the first that is traced: it is slow, and optimizers have no state yet


class Tracing:
    """Of one fit. Its modes are pushed and popped where the mode that sees ops is off."""

    def __init__(self) -> None:
        self.chains: Chains | None = None  # where several ops run as one
        self.observer: Observer | None = None  # of the step at hand
        self._stray: Observer | None = None  # given up, and still on the stack of modes
        self._next = _FIRST
        self._patience = _PATIENCE
        self._fuses = False  # whether ops in steps like the traced one run as one

    def can_begin(self, steps: int) -> bool:
        """Whether the step that begins, after so many, may be traced."""
        return steps >= self._next and self._stray is None and Observer.can_begin()

    def begin(self, steps: int, cells: Sequence[StateCell | GuestCell]) -> Observer:
        """Trace it."""
        self._next = steps + self._patience
        self._patience *= 2
        self._fuses = self.chains is not None and self.chains.works()  # before that begins
        self.observer = Observer()
        self.observer.begin(cells)
        return self.observer

    def end(self) -> Observer | None:
        """It has ended: who has seen it, if that can be asked to `finish`."""
        observer, self.observer = self.observer, None
        assert observer is not None
        if observer.can_finish():
            return observer
        self._abandon(observer)
        return None

    def finish(
        self, observer: Observer, states: Sequence[torch.Tensor | None], room: int | None
    ) -> Observed:
        """What it has seen: see `Observer.finish`."""
        return observer.finish(states, room, fused=self._fuses)

    def finish_chain(self) -> None:
        """What is made or brought from now on comes after ops that wait for each other."""
        if self.chains is not None:
            self.chains.finish()

    def never(self) -> None:
        """None is traced any more."""
        self._next = _NEVER

    def give_up(self) -> None:
        """The step at hand is none."""
        observer, self.observer = self.observer, None
        if observer is not None:
            self._abandon(observer)

    def _abandon(self, observer: Observer) -> None:
        """Its mode cannot be popped here: it stays, silent, until it can."""
        observer.abandon()
        self._stray = observer

    def pop_stray(self) -> None:
        """If this is the moment."""
        if self._stray is not None and self._stray.can_finish():
            self._stray.pop()
            self._stray = None

    def stop(self) -> None:
        """Nothing is recorded any more."""
        observer, self.observer = self.observer or self._stray, None
        if observer is not None and observer.can_finish():
            if observer is self._stray:
                observer.pop()
            else:
                observer.stop()
        elif observer is not None:
            observer.abandon()
        self._stray = None
