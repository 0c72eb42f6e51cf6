"""A traced step's op times -> those of a step that nobody traced.

An op does not start before Python has asked for it. Tracing slows Python down and so does not show
when that is; an ordinary step does, at its events. Where the device waits for Python, the time
between ops counts as part of them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowtide._ir import Trace


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
