"""When ordinary steps ask for their ops; a traced step's op times -> those of such a step.

An op does not start before Python has asked for it. Tracing slows Python down and so does not show
when that is; an ordinary step does, at its events. Where the device waits for Python, the time
between ops counts as part of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lowtide._ir import Trace


class Pace:
    """Of steps that are alike: the host is as fast as it ever was.

    `hooked` tells how many seconds have gone into Python's hooks so far, which are no part of it.
    """

    def __init__(self, hooked: Callable[[], float]) -> None:
        self._hooked = hooked
        self._asked: list[float] = []  # when each event of this step came
        self._known: tuple[tuple[int, ...], tuple[float, ...]] = (), ()
        self.begin()

    def begin(self) -> None:
        """A step does."""
        self._asked.clear()
        self._before = self._hooked()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Since the step began, with hooks."""
        return time.perf_counter() - self._began

    def note(self) -> None:
        """An event has come."""
        self._asked.append(self.seconds() - (self._hooked() - self._before))

    def end(self, codes: tuple[int, ...]) -> None:
        """An ordinary step has ended, of these events."""
        self.note()
        known, times = self._known
        asked = tuple(self._asked)
        if known == codes and len(times) == len(asked):
            asked = tuple(map(min, times, asked))
        self._known = codes, asked

    def forget(self) -> None:
        """What goes on is no ordinary step."""
        self._asked.clear()
        self._known = (), ()

    def of(self, codes: tuple[int, ...]) -> tuple[float, ...]:
        """When each event, and the end, came in such steps; nothing if that is not known."""
        known, times = self._known
        return times if known == codes and len(times) == len(codes) + 1 else ()


def paced(trace: Trace, positions: Sequence[int], asked: Sequence[float]) -> Trace:
    """`trace` as it runs when event i, at `positions[i]`, comes `asked[i]` seconds after the first.

    One more time may follow the events' own: that of the step's end.
    """
    count = len(trace.ops)
    # Of events at one position the last counts; ops between two positions are asked for evenly.
    latest = dict(zip([*positions, count], asked, strict=False))
    times = np.interp(np.arange(count + 1), [*latest], [*latest.values()])
    starts = np.empty(count + 1)
    now = 0.0
    for i, op in enumerate(trace.ops):
        now = max(now, float(times[i]))
        starts[i] = now
        now += op.seconds
    starts[count] = max(now, float(times[count]))
    lengths = np.diff(starts)
    return replace(
        trace,
        ops=tuple(
            replace(op, seconds=float(length))
            for op, length in zip(trace.ops, lengths, strict=True)
        ),
    )
