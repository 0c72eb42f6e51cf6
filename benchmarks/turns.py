"""Processes that measure on one machine take turns with its GPU, and plan or compile meanwhile.

One at a time has the turn alone: whoever computes something that is timed. Those who compute what
is not, or compile, share it; who only searches for a plan lets others go on for as long. Nobody
passes those who have asked before. A process that dies gives it back.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "LOWTIDE_TURN"  # the folder by which they know of each other
_FILES = ("turn", "queue")


@contextmanager
def table() -> Iterator[dict[str, str]]:
    """What processes that are to take turns find in their environment."""
    with tempfile.TemporaryDirectory(prefix="turn-") as folder:
        for name in _FILES:
            Path(folder, name).touch()
        yield {VARIABLE: folder}


def write_results(path: Path, results: object) -> None:
    """Whole or not at all: the machine may be taken away at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


class Turn:
    """Of one process; without others around it always has it."""

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        self._files = [os.open(Path(folder, name), os.O_RDWR) for name in _FILES] if folder else []
        self._alone: bool | None = None  # None: others have it

    @contextmanager
    def taken(self, *, alone: bool = True) -> Iterator[None]:
        """Nobody else has it meanwhile, or only others that do not mind."""
        before = self._alone
        self.have(alone)
        try:
            yield
        finally:
            self.have(before)

    def have(self, alone: bool | None) -> None:
        """From now on alone, or with others that do not mind; None: others may have it alone."""
        if alone is self._alone:
            return
        self._alone = alone
        if not self._files:
            return
        turn, queue = self._files
        fcntl.flock(turn, fcntl.LOCK_UN)  # who waits has nothing that others wait for
        if alone is not None:
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(queue, fcntl.LOCK_UN)

    def lend_during(self, of: Any, name: str, before: Callable[[], object]) -> None:
        """While that method runs others have it; `before` they do, nothing may be under way."""
        if not self._files:
            return
        work = getattr(of, name)

        def run(*args: Any) -> Any:
            before()
            had = self._alone
            self.have(None)
            try:
                return work(*args)
            finally:
                self.have(had)

        setattr(of, name, run)
