"""Values that are gone, in groups: those that would be made again together.

A group is what hangs together by being made from each other. It is approximate: what came back
leaves its time behind, but not the tree.
"""

from collections.abc import Iterable, Sequence


class Gone:
    """A tree over the values of each group; the group's seconds stand at its root."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._each = seconds
        self._above = list(range(len(seconds)))
        self._seconds = [0.0] * len(seconds)
        self.is_gone = [False] * len(seconds)

    def add(self, value: int) -> None:
        """It is gone, as a group of its own."""
        self.is_gone[value] = True
        self._above[value] = value
        self._seconds[value] = self._each[value]

    def join(self, one: int, other: int) -> None:
        """They would be made again together."""
        one, other = self._root(one), self._root(other)
        if one != other:
            self._above[other] = one
            self._seconds[one] += self._seconds[other]

    def remove(self, value: int) -> None:
        """It is back."""
        self.is_gone[value] = False
        self._seconds[self._root(value)] -= self._each[value]

    def seconds_of(self, values: Iterable[int]) -> float:
        """What all groups take in which one of the values is."""
        roots = {self._root(value) for value in values if self.is_gone[value]}
        found = 0.0
        for root in sorted(roots):  # in this order, and not by `sum`: as it is done natively
            found += self._seconds[root]
        return max(0.0, found)

    def _root(self, value: int) -> int:
        above = self._above
        while above[value] != value:
            above[value] = above[above[value]]
            value = above[value]
        return value
