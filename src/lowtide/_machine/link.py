"""Link, bytes -> seconds."""

import math
from bisect import bisect_left

from lowtide._errors import BadInput
from lowtide._ir import Link

_FAR = 1 << 30


def seconds(link: Link, count: int) -> float:
    """How long one copy of `count` bytes takes."""
    sizes, times = link.bytes, link.seconds
    if count <= sizes[0]:
        return times[0]
    right = min(bisect_left(sizes, count), len(sizes) - 1)  # beyond the last: the last two points
    left = right - 1
    slope = (times[right] - times[left]) / (sizes[right] - sizes[left])
    return times[left] + slope * (count - sizes[left])


def line(latency_seconds: float, bytes_per_second: float) -> Link:
    """The link on which every copy takes the latency, and then its bytes at one speed."""
    if not (0 <= latency_seconds < math.inf and 0 < bytes_per_second < math.inf):
        raise BadInput(
            f"a link cannot have a latency of {latency_seconds} s and {bytes_per_second} bytes "
            f"a second: give a latency of 0 or more and a speed above 0"
        )
    sizes = (1, _FAR)
    return Link(sizes, tuple(latency_seconds + size / bytes_per_second for size in sizes))


def slower(link: Link, times: float) -> Link:
    """One on which every copy takes so many times as long."""
    return Link(link.bytes, tuple(times * one for one in link.seconds))


def share_together(one: float, other: float, both: float) -> float:
    """The share of its speed that each way keeps while both are busy.

    `one` and `other` are the seconds the two ways take for some work alone, `both` those from
    the start of both to the end of the later. While both are busy each runs at the share s; when
    the shorter has ended, after short / s, the longer goes on alone:
    both = short / s + long - short.
    """
    short, long = sorted((one, other))
    busy = both - long + short
    return min(1.0, short / busy) if busy > 0 else 1.0
