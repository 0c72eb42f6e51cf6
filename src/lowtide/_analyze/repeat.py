"""A sequence -> where it repeats itself: the iterations of a training loop.

The iteration is the longest adjacent repeat, a stretch followed at once by itself; where that
stretch is itself a repetition, the inner one. SmartPool's published search is cubic. This one is
Main and Lorentz's divide and conquer ("An O(n log n) algorithm for finding all repetitions in a
string", 1984): a repeat either lies in one half or crosses the middle, and the crossing ones
fall out of four Z-functions in linear time. Halves too short to beat the best so far are not
entered, so a recording that is mostly loop takes little more than linear time.

Known to be imperfect: iterations that differ in one element are not seen as equal.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeat:
    """Elements `start <= i < stop` repeat every `period`, at least twice over."""

    start: int
    stop: int
    period: int

    @property
    def times(self) -> int:
        """How many whole periods fit."""
        return (self.stop - self.start) // self.period


def find_repeat(items: Sequence[Hashable]) -> Repeat | None:
    """The longest adjacent repeat of `items`, reduced to its smallest period."""
    codes: dict[Hashable, int] = {}
    text = [codes.setdefault(item, len(codes)) for item in items]
    best = _longest_square(text)
    if best is None:
        return None
    start, length = best
    period = _primitive_period(text[start : start + length])
    stop = start + 2 * length
    while stop < len(text) and text[stop] == text[stop - period]:
        stop += 1
    while start > 0 and text[start - 1] == text[start - 1 + period]:
        start -= 1
    return Repeat(start, stop, period)


def _longest_square(text: list[int]) -> tuple[int, int] | None:
    """(start, length) with text[start:][:length] == text[start + length:][:length], longest."""
    best_start, best_length = 0, 0
    segments = deque([(0, len(text))])
    while segments:
        low, high = segments.popleft()
        if (high - low) // 2 <= best_length:
            continue
        middle = (low + high) // 2
        start, length = _square_across(text[low:middle], text[middle:high])
        if length > best_length:
            best_start, best_length = low + start, length
        segments += [(low, middle), (middle, high)]
    return (best_start, best_length) if best_length else None


def _square_across(left: list[int], right: list[int]) -> tuple[int, int]:
    """The longest square that crosses from `left` into `right`, as (start in left, length)."""
    start, length = _square_centred_left(left, right)
    # A square centred in `right` is one centred in the left part of the mirror image.
    mirror_start, mirror_length = _square_centred_left(right[::-1], left[::-1])
    if mirror_length > length:
        total = len(left) + len(right)
        return total - (mirror_start + 2 * mirror_length), mirror_length
    return start, length


def _square_centred_left(left: list[int], right: list[int]) -> tuple[int, int]:
    """The longest square whose second half starts in `left`, or at the border.

             left       | right
        . . [a b c] [a  | b c] . .        p = 3, back = 1, ahead = 2

    With period p, `back` is how far `left`, read backwards from the border, agrees with itself p
    earlier, and `ahead` how far `right` agrees with what starts p before the border. There is a
    square of that period if the two together cover p.
    """
    size = len(left)
    common = _z_function(left[::-1])
    onward = _z_function([*right, -1, *left, *right])
    base = len(right) + 1 + size
    for p in range(size, 0, -1):
        back = common[p] if p < size else 0
        ahead = min(onward[base - p], p)
        if back + ahead >= p and ahead > 0:
            # The border lies at `size`; the whole square may start as far back as `back` allows.
            return size - p - min(back, p - 1), p
    return 0, 0


def _z_function(text: list[int]) -> list[int]:
    """z[i]: how many elements from i on agree with the beginning."""
    z = [0] * len(text)
    left = right = 0
    for i in range(1, len(text)):
        reach = min(right - i, z[i - left]) if i < right else 0
        while i + reach < len(text) and text[reach] == text[i + reach]:
            reach += 1
        if i + reach > right:
            left, right = i, i + reach
        z[i] = reach
    if text:
        z[0] = len(text)
    return z


def _primitive_period(block: list[int]) -> int:
    z = _z_function(block)
    size = len(block)
    return next((p for p in range(1, size) if size % p == 0 and z[p] == size - p), size)
