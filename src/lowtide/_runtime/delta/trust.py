"""Which recipes can be relied on: those whose bytes were once compared with the original's."""

from collections.abc import Sequence
from typing import Any

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.recipe import Call, Recipe, Value, find_recipe
from lowtide._runtime.delta.replay import Replayer
from lowtide._runtime.delta.room import PUBLISHED, Room
from lowtide._runtime.delta.verify import same_bytes

VERIFY = ("first", "always", "never")
_MOST_KINDS = 50_000


class Trust:
    """Compares when a value is saved: then all that its recipe needs is still there."""

    def __init__(self, verify: str, room: Room, costs: Costs, replayer: Replayer) -> None:
        self._verify = verify
        self._room = room
        self._costs = costs
        self._replayer = replayer
        self._right: set[Any] = set()
        self.wrong: set[Any] = set()
        self._known: set[Any] = set()  # places in a step where nothing new is to be found

    def reliable(self, value: Value, *, check: bool = False) -> Recipe | None:
        """How to make it again, if that can be relied on; `check`: compared now, if need be."""
        room = self._room
        if value.spoilt or value.call is None or room.budget is None or room.blind:
            return None
        recipe = find_recipe(value)
        if recipe is None or self._verify == "never" or recipe.key in self._right:
            return recipe
        return recipe if check and self._check(value, recipe, insist=not room.lax) else None

    def consider(self, value: Value, number: int) -> None:
        """The first time something of this kind is saved: does its recipe make just that?"""
        room = self._room
        if self._verify == "never" or room.budget is None or room.policy == PUBLISHED:
            return
        if room.blind:  # its sources may not be what they were
            return
        assert value.call is not None
        kind = (number, value.call.key)  # steps mostly save the same in the same order
        if kind in self._known:
            return
        recipe = find_recipe(value)
        if recipe is None:
            value.spoilt = True
            return
        if self._check(value, recipe):
            if len(self._known) > _MOST_KINDS:
                self._known.clear()
            self._known.add(kind)

    def surely(self, value: Value) -> Recipe | None:
        """`reliable`, with a comparison now if there was none: its sources may be others by now."""
        return self.reliable(value, check=True)

    def _check(self, value: Value, recipe: Recipe, *, insist: bool = False) -> bool:
        """Whether it makes just that; False also if there is no room to find out.

        `insist`: then others go. A plan relies on it, and there may be as little room every time.
        """
        room = self._room
        if recipe.key in self.wrong:
            value.spoilt = True
            return False
        if recipe.key in self._right:
            return True
        need = _most_at_once(recipe.calls, self._costs)
        if not insist and not room.has(need):
            return False
        room.counts["checked"] += 1
        try:
            right = self._is_right(value, recipe)
        except OutOfBudget:
            return False  # another time
        if not right:
            value.spoilt = True
            self.wrong.add(recipe.key)
            return False
        self._right.add(recipe.key)
        return True

    def _is_right(self, value: Value, recipe: Recipe) -> bool:
        storage = value.storage()
        if storage is None:
            return False
        try:
            with self._room.lock:
                found = self._replayer.replay(recipe.calls, value, lambda *_: None)
        except OutOfBudget:
            raise
        except RuntimeError:  # an op that cannot be called like that
            return False
        count = value.bytes // 8  # a comparison of words makes a byte of each
        return bool(self._room.run(lambda: same_bytes(found, storage), count, "comparing"))


def _most_at_once(calls: Sequence[Call], costs: Costs) -> int:
    """Bytes of results while they run one after the other: each is gone when it was read last."""
    makers = {id(call): call for call in calls}
    last: dict[int, int] = {}  # the call -> where what it has made is read last
    for at, call in enumerate(calls):
        for source in call.sources:
            if source.value.call is not None:
                last[id(source.value.call)] = at
    gone: dict[int, list[Call]] = {}
    for maker, at in last.items():
        if maker in makers:
            gone.setdefault(at, []).append(makers[maker])
    held = most = 0
    for at, call in enumerate(calls):
        held += costs.known_bytes(call.cost)
        most = max(most, held)
        held -= sum(costs.known_bytes(maker.cost) for maker in gone.get(at, ()))
    return most
