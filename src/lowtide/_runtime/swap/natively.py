"""Events of a step that goes as expected, dealt with where Python does not see them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count

from lowtide._runtime.swap.cell import Cell
from lowtide._runtime.swap.native_saves import EVENTFUL, PLAIN, TAPED, NativeSaves
from lowtide._runtime.swap.saved import Saved
from lowtide._runtime.swap.script import Script, is_request


@dataclass(frozen=True, slots=True, eq=False)
class Taped:
    """What a tape does of a script: all but for what is swapped, and for state and guests."""

    saves: Collection[int]  # that are kept for it
    swapped: Collection[int]


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
        self._taped: Taped | None = None
        self._kinds: list[tuple[Script, frozenset[int], Taped | None, list[int]]] = []

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

    def is_at_work(self) -> bool:
        """Whether its hooks are those that PyTorch calls."""
        return self._native is not None

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

    def go(
        self,
        script: Script,
        moved: frozenset[int],
        saves: tuple[int, int],
        at: int,
        taped: Taped | None = None,
        *,
        tells: bool = False,
    ) -> None:
        """The script's next event is that; `saves`: in this step, and in all before.

        `taped`: what a tape does. `tells`: Python wants to know of every event.
        """
        native = self._native
        if native is None or not (script.plain or taped):
            return
        same = self.expected is script and self._moved is moved and self._taped is taped
        if not same:
            self.expected, self._moved, self._taped = script, moved, taped
            native.follow(script.codes, self._flags(script, moved, taped), asks_count=True)
        native.go(at, *saves, tells=tells)

    def _flags(self, script: Script, moved: frozenset[int], taped: Taped | None) -> Sequence[int]:
        """Of a step that a tape ends for, there are two kinds."""
        known = [row for row in self._kinds if row[0] is script and row[1] is moved]
        found = next((flags for _, _, tape, flags in known if tape is taped), None)
        if found is None:
            found = _flags(script, moved, taped)
            self._kinds = [*known[-1:], (script, moved, taped, found)]
        return found

    def go_by_sizes(self, rows: Sequence[tuple[int, int]], before: int) -> None:
        """A step begins of which only is known what it saves: the bytes, and something else."""
        native = self._native
        if native is None or not rows:
            return
        if self.expected is not rows:
            self.expected, self._moved, self._taped = rows, None, None
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


def _flags(script: Script, moved: frozenset[int], taped: Taped | None = None) -> list[int]:
    """What each event is."""
    numbers = count()
    flags = []
    for at, code in enumerate(script.codes):
        on_tape = False
        if code >= 0:
            number = next(numbers)
            can = number in script.plain and number not in moved
            on_tape = taped is not None and number in taped.saves
        else:
            can = is_request(code)
        if taped is None:
            eventful = bool(script.actions[at]) or at in script.reruns or at in script.lets_go
        else:
            eventful = any(one.who < 0 or one.who in taped.swapped for one in script.actions[at])
        flags.append(PLAIN * can | EVENTFUL * eventful | TAPED * on_tape)
    return flags
