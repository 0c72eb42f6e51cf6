"""When ordinary steps ask for their ops; a traced step's op times -> those of such a step.

An op does not start before Python has asked for it. Tracing slows Python down and so does not show
when that is; an ordinary step does, at its events. Where the device waits for Python, the time
between ops counts as part of them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from lowtide._ir import Trace

_ENOUGH, _MOST = 0.3, 32  # seconds of steps, or so many, show how fast the host is


class Pace:
    """Of steps that are alike: of some the faster ones, since the first ones of a loop are not.

    `hooked` tells how many seconds have gone into Python's hooks so far, which are no part of it.
    """

    def __init__(self, hooked: Callable[[], float]) -> None:
        self._hooked = hooked
        self._asked: list[float] = []  # when each event of this step came
        self._codes: tuple[int, ...] = ()  # of the last ones, which were alike
        self._rows: deque[tuple[float, ...]] = deque(maxlen=_MOST)  # ... and when they came
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
        if codes != self._codes or len(self._asked) != len(codes) + 1:
            self.forget_steps()
        self._codes = codes
        self._rows.append(tuple(self._asked))

    def forget(self) -> None:
        """What goes on is no ordinary step."""
        self._asked.clear()
        self.forget_steps()

    def forget_steps(self) -> None:
        """Those before were other ones."""
        self._codes = ()
        self._rows.clear()

    def wanted(self) -> int:
        """How many steps are to be looked at: of short ones more, as they differ more."""
        shortest = min((row[-1] for row in self._rows), default=_ENOUGH)
        return min(_MOST, ceil(_ENOUGH / max(shortest, 1e-9)))

    def of(self, codes: tuple[int, ...]) -> tuple[float, ...]:
        """When each event, and the end, came in such a step; nothing if that is not known."""
        if codes != self._codes or not self._rows:
            return ()
        rows = sorted(self._rows, key=lambda row: row[-1])
        row = rows[(len(rows) - 1) // 3]
        return row if len(row) == len(codes) + 1 else ()


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
