"""Events of a step that goes as expected, dealt with where Python does not see them."""

from collections.abc import Callable, Collection, Sequence
from itertools import count

from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.native_saves import EVENTFUL, PLAIN, NativeSaves
from lowtide._runtime.swap.saved import Saved
from lowtide._runtime.swap.script import Script, is_request


class Natively:
    """Between `go` and `halt` what happens may be dealt with natively.

    So whoever wants to know what has happened in a step halts first, and is told: the event that is
    next, and how many tensors were saved. `happened` is called for events at which there is
    something to do.
    """

    def __init__(
        self,
        load: Callable[[], NativeSaves | None],
        went_on: Callable[[int, int], None],
        happened: Callable[[int], None],
    ) -> None:
        self._load = load
        self._went_on = went_on
        self._happened = happened
        self._saved: Saved | None = None
        self._native: NativeSaves | None = None
        self.expected: object = None  # what a step is compared with
        self._moved: frozenset[int] | None = None

    def start(self, saved: Saved) -> None:
        """Its saves."""
        self._saved = saved

    def prepare(self) -> None:
        """A step begins that may be dealt with natively: the hooks are, from now on."""
        if self._native is not None or self._saved is None:
            return
        native = self._load()
        if native is None:
            self._load = lambda: None  # nor will it be had later
        elif native.work_for(self._saved, self._happened):
            if self._saved.exchange(native.hooks):
                self._native = native
            else:
                native.leave()

    def stop(self) -> None:
        """For good."""
        self.halt()
        native, self._native = self._native, None
        if native is not None:
            native.leave()
        self._saved = None

    def halt(self) -> None:
        """Python knows what has happened so far, and sees what happens next."""
        found = None if self._native is None else self._native.stop()
        if found is not None:
            self._went_on(*found)

    def adopt(self) -> None:
        """Every saved tensor is in Python's hands."""
        self.halt()
        if self._native is not None:
            self._native.adopt()

    def go(self, script: Script, moved: frozenset[int], saves: tuple[int, int], at: int) -> None:
        """The script's next event is that; `saves`: in this step, and in all before."""
        native = self._native
        if native is None or not script.plain:
            return
        if self.expected is not script or self._moved is not moved:
            self.expected, self._moved = script, moved
            native.follow(script.codes, _flags(script, moved), asks_count=True)
        native.go(at, *saves)

    def go_by_sizes(self, rows: Sequence[tuple[int, int]], before: int) -> None:
        """A step begins of which only is known what it saves: the bytes, and something else."""
        native = self._native
        if native is None or not rows:
            return
        if self.expected is not rows:
            self.expected, self._moved = rows, None
            native.follow([size for size, _ in rows], [PLAIN] * len(rows), asks_count=False)
        native.go(0, 0, before)


def plain_saves(
    cells: Sequence[Cell | None], moved: frozenset[int], tied: Collection[int] = ()
) -> frozenset[int]:
    """Of the saves of a step, which lay on these cells: those that do not move.

    Nor are they `tied`, by the ids of cells of which somebody else has to know.
    """
    known = {id(cells[number]) for number in moved if number < len(cells)}.union(tied)
    return frozenset(
        number for number, cell in enumerate(cells) if cell is None or id(cell) not in known
    )


def _flags(script: Script, moved: frozenset[int]) -> list[int]:
    """What each event is."""
    numbers = count()
    flags = []
    for at, code in enumerate(script.codes):
        if code >= 0:
            number = next(numbers)
            can = number in script.plain and number not in moved
        else:
            can = is_request(code)
        eventful = bool(script.actions[at]) or at in script.reruns or at in script.lets_go
        flags.append(PLAIN * can | EVENTFUL * eventful)
    return flags
