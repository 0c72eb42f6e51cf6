"""Byte ranges of a span that can grow: who has which."""

from bisect import bisect_left, insort


class Ranges:
    """The free stretches of [0, size), as sorted (start, stop), never touching each other."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    @property
    def taken(self) -> int:
        """Bytes in use."""
        return self.size - sum(stop - start for start, stop in self._free)

    def take(self, count: int) -> int | None:
        """The lowest free stretch of `count` bytes, or None."""
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                self._cut(i, start, start + count)
                return start
        return None

    def take_at(self, start: int, count: int) -> bool:
        """Exactly these bytes, if they are free."""
        i = bisect_left(self._free, (start + 1,)) - 1
        if i < 0 or self._free[i][1] < start + count:
            return False
        self._cut(i, start, start + count)
        return True

    def give(self, start: int, count: int) -> None:
        """They are free again."""
        stop = start + count
        i = bisect_left(self._free, (start,))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
        insort(self._free, (start, stop))

    def grow(self, size: int) -> None:
        """The span ends at `size` from now on, further than before."""
        old, self.size = self.size, size
        self.give(old, size - old)

    def shrink(self, size: int) -> bool:
        """The span ends at `size` from now on, if nobody has anything beyond."""
        if size < self.size and not self.take_at(size, self.size - size):
            return False
        self.size = min(size, self.size)
        return True

    def _cut(self, i: int, start: int, stop: int) -> None:
        low, high = self._free.pop(i)
        self._free[i:i] = [part for part in ((low, start), (stop, high)) if part[0] < part[1]]
