"""How often Python looks for garbage."""

import gc

_RARER = 10  # times: about as often as without lowtide


class Garbage:
    """Python looks through all objects the more often the more are made, and here many are."""

    def __init__(self) -> None:
        self._thresholds: tuple[int, int, int] | None = None

    def collect_less(self) -> None:
        """From now on."""
        if self._thresholds is None:
            self._thresholds = gc.get_threshold()
            first, second, third = self._thresholds
            gc.set_threshold(_RARER * first, second, _RARER * third)

    def collect_as_before(self) -> None:
        """From now on."""
        thresholds, self._thresholds = self._thresholds, None
        if thresholds is not None:
            gc.set_threshold(*thresholds)
