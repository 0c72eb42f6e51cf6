"""The nouns of a layout problem, and what makes one unusable.

A *buffer* needs `size` bytes for the moments `lower <= t < upper`. Two buffers alive at the same
moment may not share a byte. With a *period* the moments repeat: a buffer that ends after it lives
on into the next step, and one that lives longer than a period needs several *copies*, because
its lives in consecutive steps overlap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lowtide._errors import BadInput

_MOST_COPIES = 1000


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer; `offset` says where it has to be, None leaves it open.

    Buffers of lane 1, those that copies between devices touch, never share bytes with those of
    lane 0, whenever they live: so no copy waits for a kernel that only reused its memory.
    """

    name: str
    lower: int
    upper: int
    size: int
    offset: int | None = None
    lane: int = 0


class Fit(StrEnum):
    """Which of the gaps that hold a buffer it takes."""

    BEST = "best"
    FIRST = "first"


def check_buffers(buffers: Sequence[Buffer], *, align: int = 1, period: int | None = None) -> None:
    """Refuse what has no layout, or none that offsets can count."""
    if not 1 <= align < 2**62:
        raise BadInput(f"align is {align}: give 1 or more, below 2**62")
    if period is not None and not 1 <= period < 2**62:
        raise BadInput(f"period is {period}: give 1 or more, below 2**62")
    for buffer in buffers:
        flaw = find_flaw(buffer, align=align, period=period)
        if flaw is not None:
            raise BadInput(f"buffer {buffer.name}: {flaw}")
    seen: set[str] = set()
    for buffer in buffers:
        if buffer.name in seen:
            raise BadInput(f"buffer {buffer.name}: id {buffer.name!r} was used before")
        seen.add(buffer.name)
    total = sum(rounded(buffer.size, align) for buffer in buffers)
    if total + max((buffer.offset or 0 for buffer in buffers), default=0) >= 2**63:
        raise BadInput(
            f"the buffers add up to {total} bytes and offsets are counted up to 2**63: "
            "give fewer or smaller ones"
        )


def find_flaw(buffer: Buffer, *, align: int = 1, period: int | None = None) -> str | None:
    """What is wrong with one buffer, or None."""
    if buffer.upper <= buffer.lower:
        return f"upper {buffer.upper} is not above lower {buffer.lower}"
    if buffer.size <= 0:
        return f"size {buffer.size} is not positive"
    for name, most in (("lower", 62), ("upper", 62), ("size", 63), ("offset", 63)):
        number = getattr(buffer, name)
        if number is not None and abs(number) >= 2**most:
            return f"{name} {number} is beyond 2**{most}"
    if period is not None and not 0 <= buffer.lower < period:
        return f"lower {buffer.lower} is outside the period 0..{period}"
    if buffer.offset is not None and buffer.offset < 0:
        return f"offset {buffer.offset} is negative"
    if buffer.offset is not None and buffer.offset % align:
        return f"offset {buffer.offset} is not a multiple of {align}"
    if buffer.lane not in (0, 1):
        return f"lane {buffer.lane} is neither 0 nor 1"
    return None


def rounded(size: int, align: int) -> int:
    """`size` up to the next multiple of `align`."""
    return -(-size // align) * align


def copies(buffers: Iterable[Buffer], period: int) -> list[Buffer]:
    """The buffers with those that outlive a period as often as they are needed at once.

    A buffer alive for at most a period is placed once: when it is made again its last life is
    over. A longer one is needed `ceil(life / period)` times; steps take the copies in turn, and
    at every moment of the step some turn keeps each of them, so all live all along.
    """
    result = []
    for buffer in buffers:
        count = -(-(buffer.upper - buffer.lower) // period)
        if count == 1:
            result.append(buffer)
            continue
        if count > _MOST_COPIES:
            raise BadInput(
                f"buffer {buffer.name}: lives {count} periods of {period}: give the step's length"
            )
        if buffer.offset is not None:
            raise BadInput(
                f"buffer {buffer.name}: lives {buffer.upper - buffer.lower} moments of a period of "
                f"{period} and needs {count} places: it cannot be fixed to one, leave offset open"
            )
        result += [
            replace(buffer, name=f"{buffer.name}#{turn}", lower=0, upper=period)
            for turn in range(count)
        ]
    return result


def max_load(buffers: Iterable[Buffer], *, period: int | None = None) -> int:
    """The most bytes alive at one moment."""
    change: dict[int, int] = {}
    for buffer in buffers:
        for lower, upper in pieces(buffer, period):
            change[lower] = change.get(lower, 0) + buffer.size
            change[upper] = change.get(upper, 0) - buffer.size
    load = highest = 0
    for moment in sorted(change):
        load += change[moment]
        highest = max(highest, load)
    return highest


def pieces(buffer: Buffer, period: int | None) -> list[tuple[int, int]]:
    """The stretches of the step in which a buffer lives: two if it wraps round the end."""
    if period is None or buffer.upper <= period:
        return [(buffer.lower, buffer.upper)]
    if buffer.upper - buffer.lower >= period:
        return [(0, period)]
    return [(buffer.lower, period), (0, buffer.upper - period)]
