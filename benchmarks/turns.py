"""Processes that measure on one machine take turns with its GPU, and plan or compile meanwhile.

One at a time has the turn: whoever computes something that counts. Who only searches for a plan
lets others go on for as long; who compiles shares the turn with others that do. A process that
dies gives it back.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "LOWTIDE_TURN"  # the file by which they know of each other


@contextmanager
def table() -> Iterator[dict[str, str]]:
    """What processes that are to take turns find in their environment."""
    with tempfile.NamedTemporaryFile(prefix="turn-") as file:
        yield {VARIABLE: file.name}


def write_results(path: Path, results: object) -> None:
    """Whole or not at all: the machine may be taken away at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


class Turn:
    """Of one process; without others around it always has it."""

    def __init__(self) -> None:
        name = os.environ.get(VARIABLE)
        self._file = os.open(name, os.O_RDWR) if name else None

    @contextmanager
    def taken(self, *, alone: bool = True) -> Iterator[None]:
        """Nobody else has it meanwhile, or only others that do not mind."""
        self._take(fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            self._take(fcntl.LOCK_UN)

    def lend_during(self, of: Any, name: str, before: Callable[[], object]) -> None:
        """While that method runs others have it; `before` they do, nothing may be under way."""
        if self._file is None:
            return
        work = getattr(of, name)

        def run(*args: Any) -> Any:
            before()
            self._take(fcntl.LOCK_UN)
            try:
                return work(*args)
            finally:
                self._take(fcntl.LOCK_EX)

        setattr(of, name, run)

    def _take(self, how: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, how)
