"""What a simulation says about one step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Span = tuple[float, float]  # start and end of a copy, seconds from the start of the step


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One step of a training loop that repeats the same swaps for ever.

    Times are in seconds from the start of the step, which is the end of the last op of the step
    before: a wait before op 0 is part of the step. The spans, one for each swap, are of the copies
    put into their lanes during this step. That of a swap across the boundary may end after the
    step, and its copy back may belong to the stay that began a step earlier.
    """

    seconds: float  # plain_seconds + stall_seconds
    plain_seconds: float  # the ops alone
    stall_seconds: float  # compute waiting for copies
    copy_seconds: float  # of all copies put in, both lanes added up
    hidden: float  # the share of copy_seconds that did not stall compute, 0 to 1
    peak_bytes: int
    peak_op: int  # the first op that holds so much
    out_spans: tuple[Span, ...]
    back_spans: tuple[Span, ...]
    starts: npt.NDArray[np.float64]  # of each op
