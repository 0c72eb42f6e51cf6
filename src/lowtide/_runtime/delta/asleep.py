"""Steps that nobody watches, and one that comes to hold more than it may.

To be told of a save takes microseconds, and in a step that nobody watches nothing is done about it.
So where memory goes in pages nobody is told, and the device's allocator guards the step: it
notices when the budget is near, or is going to be. From then on the hooks are there again, and
what the step has saved before is found in its graph.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cap import Cap
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.see import Seer
from lowtide._runtime.delta.tally import Tally
from lowtide._runtime.swap.late import Late
from lowtide._runtime.swap.quiet import is_capturing, is_free
from lowtide._runtime.swap.saved import Saved, unpack

_APPLY = Function.apply.__code__  # which calls what a program wrote, or a compiler


class Asleep:
    """Told of each step that begins. `watch` has ops seen from now on."""

    def __init__(
        self, cap: Cap, room: Room, seer: Seer, tally: Tally, watch: Callable[[], None]
    ) -> None:
        self._cap = cap
        self._room = room
        self._seer = seer
        self._tally = tally
        self._watch = watch
        self._saved: Saved | None = None
        self._guarded = False  # the steps are
        self._untold = False  # of the saves of this step, as long as the guard is not heard
        self._heard = False  # the guard
        self._woken = False  # in the midst of this step

    def start(self, saved: Saved) -> None:
        """Its saves."""
        self._saved = saved

    # Steps.

    def begin(self, budget: int | None) -> bool:
        """A step begins that nobody watches: whether nobody need be told of its saves, either.

        Not before the guard knows a whole step.
        """
        if budget is not None and self._untold and not self._heard and self._cap.paged:
            return True  # and it is still guarded
        self.end()
        saved = self._saved
        if saved is None or budget is None:
            return False
        self._guarded = True
        self._untold = self._cap.guard(budget, self._hear) and saved.rest()
        return self._untold

    def end(self, budget: int | None = None) -> None:
        """A step begins that is watched."""
        saved, untold = self._saved, self._untold
        self.stop()
        self._saved = saved
        if saved is not None and untold:
            saved.resume()
        if budget is not None:
            self._cap.count_steps(budget)

    def stop(self) -> None:
        """No step is any more."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.found = None
        if self._guarded:
            self._cap.dismiss_guard()
        self._guarded = self._untold = self._heard = False

    def undisturbed(self) -> bool:
        """Whether nobody was told of the step that ends, and that was right.

        It was, too, if what the guard had noticed was not saved.
        """
        return self._untold and not (self._heard and self._tally.saves)

    def had_woken(self) -> bool:
        """Whether somebody did in the step that ends."""
        woken, self._woken = self._woken, False
        if woken:
            self._seer.recorded = None
        return woken

    # Whoever notices.

    def saved_one(self, number: int, count: int) -> None:
        """The step saves so many bytes, as the `number`-th of which somebody is told."""
        if not self._heard and not self._tally.is_known(number):
            self._wake(count)

    def _hear(self) -> bool:
        """The guard, in the midst of an op and of PyTorch's allocator. False: not now."""
        saved = self._saved
        if saved is None or not self._untold:
            return False
        # In backward nothing of this step is saved, nor where there are no gradients; but a
        # function has none inside, and saves what it has made there as soon as it returns.
        if torch._C._current_graph_task_id() != -1:
            return False
        if not torch.is_grad_enabled() and not _saves_afterwards(sys._getframe()):
            return False
        if not self._heard and saved.resume():
            self._heard, saved.found = True, self._finder(saved, Late((saved.pack, unpack)))
        return self._heard

    def _finder(self, saved: Saved, late: Late) -> Callable[[Node | None], None]:
        """What the step has saved so far, before anybody was told, hangs on nodes."""

        def find(node: Node | None) -> None:
            saved.found = None  # what is found now is packed
            with self._room.lock:
                if node is not None:
                    late.hook(node)
                if not self._woken:
                    self._wake(0)
                else:
                    self._make_room(0)
            if self._heard:
                saved.found = find

        return find

    def _wake(self, count: int) -> None:
        """The step is another one than those before: who knows what it makes.

        Nobody sees the op that saves just now, but its insides. So the allocator is held to the
        budget from the next step on, and of this one nothing is written down: values are swapped.
        """
        if not is_free() or is_capturing():  # nothing may be given back then
            return
        self._room.adopt()  # what is kept natively is not found by looking at objects
        self._tally.watch_again()
        self._watch()
        self._woken, self._seer.recorded = True, frozenset()
        self._seer.ledger.begin_step()
        self._make_room(count)

    def _make_room(self, count: int) -> None:
        with suppress(OutOfBudget):
            self._room.make(count)


def _saves_afterwards(frame: FrameType | None) -> bool:
    """Whether a function is at work there that has something to save when it returns."""
    inner = frame
    while frame is not None:
        if frame.f_code is _APPLY and inner is not None:
            context = next(iter(inner.f_locals.values()), None)
            if not isinstance(context, FunctionCtx) or context.next_functions:  # type: ignore[attr-defined]
                return True
        inner, frame = frame, frame.f_back
    return False
