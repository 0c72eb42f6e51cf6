"""Whether the steps to come have to be watched op by op, from what those so far have held."""

from collections import deque
from contextlib import suppress

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cap import Cap
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.planned import Planned
from lowtide._runtime.delta.room import Room
from lowtide._runtime.delta.tally import Tally
from lowtide._runtime.swap.quiet import is_calm

_MOST_STEPS = 1000
_NEARLY = 0.97  # of the budget: a step that is known, and is planned to hold no more


class Watching:
    """Told of the end of every step."""

    def __init__(
        self, room: Room, ledger: Ledger, cap: Cap, tally: Tally, planned: Planned | None
    ) -> None:
        self._room = room
        self._ledger = ledger
        self._cap = cap
        self._tally = tally
        self._planned = planned
        self._was_lax = False  # at some time in this step
        self._overran = False  # once, in a step that was not watched
        self.has_trained = False
        self.peaks: deque[int] = deque(maxlen=_MOST_STEPS)
        self.plain_peak = 0

    def goes_lax(self) -> None:
        """Nobody counts all of what this step holds."""
        self._was_lax = True

    def is_needless(self) -> bool:
        """After a step that was watched: whether those to come need not be."""
        ledger, budget, planned = self._ledger, self._room.budget, self._planned
        was_lax, self._was_lax = self._was_lax, False
        if was_lax:  # it was a step like those before
            self.peaks.append(self._tally.known_peak)
            return self._has_nothing_to_do()
        self.plain_peak = max(self.plain_peak, ledger.plain_peak)
        if budget is not None:  # a share is not known in the first step
            self.peaks.append(ledger.peak)
        if not self._tally.saves:
            return False  # an evaluation
        self.has_trained = True
        guarded = self.guards()
        loose = self._tally.watched(ledger, budget, guarded=guarded)
        if guarded and budget is not None:
            loose = loose and self._cap.reserved() <= budget
        if budget is not None and (planned is None or not planned.following.scripts):
            self._room.margin = self._cap.margin(budget)  # a plan was made for the one there was
        return (loose and is_calm()) or self._has_nothing_to_do()

    def _has_nothing_to_do(self) -> bool:
        """Whether steps go by a plan that moves nothing, with a little of the budget left over.

        That is for a step that turns out larger: what it saves beyond the known is made up for.
        """
        planned, budget = self._planned, self._room.budget
        if planned is None or budget is None or not planned.keeps_all():
            return False
        if self._ledger.away or self._tally.in_pieces or not is_calm():
            return False
        known = max(self._tally.known_peak, self.plain_peak)
        return self._cap.reserved() <= budget and known <= _NEARLY * budget

    def was_another(self, *, told: bool) -> bool:
        """After a step that was not watched: whether it was none like those before.

        `told`: somebody was, of what it saved.
        """
        self.peaks.append((0 if told else self._cap.guarded()) or self._tally.known_peak)
        if self._has_overrun():
            self._overran = True
            return True
        return told and self._tally.is_another()

    def _has_overrun(self) -> bool:
        budget = self._room.budget
        if budget is None or not self.guards():
            return False
        return max(self._cap.guarded(), self._cap.reserved()) > budget

    def guards(self) -> bool:
        """Whether the device's allocator notices in time where a step comes to hold more.

        Not what is made in backward, say: such a program has to be watched.
        """
        return self._cap.paged and not self._overran

    def guess(self) -> None:
        """Ops are not seen: a step that saves more than was known holds more, too."""
        more = self._tally.more()
        if more > 0 and self._room.budget is not None:
            self._ledger.held = self._tally.known_peak + more - self._ledger.away
            with suppress(OutOfBudget):  # it was only a guess
                self._room.make(0)
