"""When a search has to end."""

import time


class Clock:
    """Counts down `seconds`; fewer than none is no limit."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds if seconds >= 0 else None

    def out(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() >= self._end
