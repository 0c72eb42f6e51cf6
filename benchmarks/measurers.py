"""Processes that measure: what they find is there as soon as they say it, a line of JSON each."""

import json
import subprocess
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any


class Measurer:
    """One process. What it complains about goes to a file: nobody has to read that meanwhile."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=dict(environment),
        )

    def wait_until_ready(self) -> None:
        """It says so in its first line."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def rows(self, told: str = "", limit: float | None = None) -> Generator[dict[str, Any]]:
        """What it says until it ends, or has taken `limit` seconds; then an "error", if it failed.

        Its process is gone with the last of them.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        clock = threading.Timer(limit or 0, stop)
        if limit is not None:
            clock.start()
        count = 0
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(told)
                process.stdin.close()
            for line in process.stdout:
                row = _row(line)
                if row is not None:
                    count += 1
                    yield row
            process.wait()
        finally:
            clock.cancel()
            complaint = self.end()
        if late.is_set():
            complaint = f"took longer than {limit:.0f} s"
        if complaint is not None or not count:
            yield {"error": complaint or "no answer"}

    def end(self) -> str | None:
        """Now. What it complained about last, if it had failed before."""
        failed = self._process.poll() or 0
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        with self._errors as errors:
            errors.seek(0)
            said = errors.read().strip().splitlines()
        return (said or ["no message"])[-1] if failed else None


def _row(line: str) -> dict[str, Any] | None:
    """None: something else was said."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
