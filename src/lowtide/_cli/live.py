"""A line at the bottom of the terminal that is written over."""

import sys
import time

_EVERY = 0.2  # seconds


class LiveLine:
    """On the standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._last = 0.0
        self._shown = False

    @staticmethod
    def can_be_seen() -> bool:
        """Whether somebody watches."""
        return sys.stderr.isatty()

    def show(self, text: str) -> None:
        """In place of what was there, but not too often."""
        now = time.monotonic()
        if now - self._last >= _EVERY:
            self._last, self._shown = now, True
            sys.stderr.write(f"\r\x1b[Klowtide: {text}")
            sys.stderr.flush()

    def clear(self) -> None:
        """What comes next begins a line of its own."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
