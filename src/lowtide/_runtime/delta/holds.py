"""What a plan has stay beyond its end, for what was made from it to be made again."""

from collections.abc import Mapping, Sequence

from torch import UntypedStorage

from lowtide._runtime.delta.recipe import Call, Value
from lowtide._runtime.delta.rehearsal import Rehearsal

Place = tuple[int, int]  # an op's number, and which of its sources


class Holds:
    """`wanted` are the sources to hold of each op that is going to run, by its number."""

    def __init__(self) -> None:
        self.wanted: Mapping[int, Sequence[int]] = {}
        self._held: dict[Place, Value] = {}
        self.log: Rehearsal | None = None

    def begin(self, wanted: Mapping[int, Sequence[int]]) -> None:
        """From now on these; what is held for others is let go of."""
        self.wanted = wanted
        self.let_go([at for at in self._held if at[1] not in wanted.get(at[0], ())])

    def hold(self, call: Call) -> None:
        """It is about to run, so what it reads is still there."""
        for place in self.wanted[call.number]:
            if place >= len(call.sources):
                continue
            value = call.sources[place].value
            storage = value.storage()
            if storage is not None and value.held is None and value.saved() is None:
                self.let_go([(call.number, place)])  # of another call that had this number
                self.promise((call.number, place), value, storage)
                if self.log is not None and self.log.on:
                    self.log.held(call.number, place)

    def promise(self, place: Place, value: Value, storage: UntypedStorage) -> None:
        """It is held until that place is let go of."""
        value.held, value.promised = storage, True
        self._held[place] = value

    def let_go(self, places: Sequence[Place]) -> None:
        """Of what is needed no longer."""
        for place in places:
            value = self._held.pop(place, None)
            if value is not None:
                if self.log is not None and self.log.on:
                    self.log.let_go(*place)
                value.promised = False
                value.let_go()

    def let_all_go(self) -> None:
        """Of what was held in a step, unless something is still to be made from it."""
        self.let_go(list(self._held))
