"""What a step saves, in numbers: whether steps are alike, and so small that nobody need look."""

from lowtide._runtime.delta.ledger import Ledger

_LOOSE = 0.9  # of the budget: a step that would hold less without lowtide is not watched
_NEARLY = 0.97  # ... where one that comes to hold more is noticed in time
_LOOSE_STEPS = 2  # in a row, until then


class Tally:
    """Of this step so far, and of the last one that was watched."""

    def __init__(self) -> None:
        self.saves = 0
        self._bytes = 0
        self._shape = self._known_shape = 0  # what it saved, in a number
        self._known_bytes = 0
        self.known_peak = 0  # what it held
        self._loose_steps = 0
        self.in_pieces = False
        self._rows: list[tuple[int, int]] = []  # bytes of a save, and of a storage new with it
        self.known_rows: list[tuple[int, int]] = []

    def save(self, count: int) -> int:
        """A tensor of so many bytes was saved, as the how-manieth."""
        self._shape = hash((self._shape, count))
        self._rows.append((count, 0))
        self.saves += 1
        return self.saves - 1

    def add_storage(self, count: int) -> None:
        """It lay in a storage of so many bytes that was not saved yet."""
        self._bytes += count
        self._rows[-1] = self._rows[-1][0], count

    def go_on(self, saves: int) -> None:
        """Up to so many in all were the same as in the step that is known."""
        for count, new in self.known_rows[self.saves : saves]:
            self.save(count)
            self.add_storage(new)

    def is_known(self, number: int) -> bool:
        """Whether that save of this step is as large as it was in the step that is known."""
        rows = self.known_rows
        return number < len(rows) and rows[number][0] == self._rows[number][0]

    def more(self) -> int:
        """Bytes that this step saved beyond what is known."""
        return self._bytes - self._known_bytes

    def step_in_pieces(self) -> None:
        """An optimizer did; as a whole it makes more on the way, and nobody knows how much."""
        self.in_pieces = True

    def begin(self) -> None:
        """A step begins."""
        self.saves = self._bytes = self._shape = 0
        self._rows = []
        self.in_pieces = False

    def is_another(self) -> bool:
        """Whether the step that ends was none like the one that is known."""
        return self._shape != self._known_shape

    def watched(self, ledger: Ledger, budget: int | None, *, guarded: bool = False) -> bool:
        """A step that was watched ends: whether those to come need not be.

        They have to be alike, unless they are `guarded`: then one that holds more is noticed.
        """
        share = _NEARLY if guarded else _LOOSE
        loose = budget is not None and ledger.plain_peak <= share * budget and not ledger.away
        loose = loose and not self.in_pieces  # as a whole it may need more
        loose = loose and (guarded or not self.is_another())
        self._known_shape, self._known_bytes = self._shape, self._bytes
        self.known_rows = self._rows
        self.known_peak = ledger.peak
        self._loose_steps = self._loose_steps + 1 if loose else 0
        return self._loose_steps >= _LOOSE_STEPS

    def watch_again(self) -> None:
        """Steps are, from the next one on."""
        self._loose_steps = 0
