"""Random layout problems, and the check of a layout by comparing every pair."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from lowtide import Buffer, Packing, pack


@dataclass(frozen=True)
class Problem:
    buffers: list[Buffer]
    align: int = 1
    period: int | None = None


@st.composite
def problems(
    draw: st.DrawFn,
    most: int = 12,
    lanes: bool = False,
    largest: int = 60,
    wraps: bool = True,
) -> Problem:
    """Buffers with lives in 0..12, some problems periodic, some aligned."""
    period = draw(st.sampled_from([None, None, 12])) if wraps else None
    align = draw(st.sampled_from([1, 1, 8]))
    buffers = []
    for i in range(draw(st.integers(1, most))):
        lower = draw(st.integers(0, 11))
        length = draw(st.integers(1, 12 if period else 12 - lower))
        size = draw(st.integers(1, largest))
        lane = draw(st.integers(0, 1)) if lanes else 0
        buffers.append(Buffer(f"b{i}", lower, lower + length, size, None, lane))
    return Problem(buffers, align, period)


@st.composite
def tight_problems(draw: st.DrawFn) -> Problem:
    """Every moment is full to the same load: the kind that may need more than its load."""

    def sizes(total: int) -> list[int]:
        parts = []
        while total:
            parts.append(draw(st.integers(1, min(total, 3))))
            total -= parts[-1]
        return parts

    alive = [(0, size) for size in sizes(draw(st.integers(5, 8)))]
    lives = []
    end = draw(st.integers(4, 8))
    for moment in range(1, end):
        for _ in range(draw(st.integers(1, 2))):
            born, size = alive.pop(draw(st.integers(0, len(alive) - 1)))
            if born < moment:
                lives.append((born, moment, size))
                alive += [(moment, part) for part in sizes(size)]
            else:
                alive.append((born, size))
    lives += [(born, end, size) for born, size in alive]
    return Problem([Buffer(f"b{i}", *life) for i, life in enumerate(lives)])


def moments(buffer: Buffer, period: int | None) -> set[int]:
    lived = range(buffer.lower, buffer.upper)
    return {t if period is None else t % period for t in lived}


def brute_clash(problem: Problem, buffers: Sequence[Buffer], offsets: Sequence[int]) -> bool:
    """Whether any two share a byte when they may not, or one is misplaced."""
    for i, buffer in enumerate(buffers):
        if offsets[i] < 0 or offsets[i] % problem.align:
            return True
        if buffer.offset not in (None, offsets[i]):
            return True
        for j in range(i):
            other = buffers[j]
            bytes_ = range(
                max(offsets[i], offsets[j]),
                min(offsets[i] + buffer.size, offsets[j] + other.size),
            )
            together = moments(buffer, problem.period) & moments(other, problem.period)
            if bytes_ and (together or buffer.lane != other.lane):
                return True
    return False


# Seven buffers with at most 6 bytes alive that need 7, whatever their order.
TANGLE = Problem(
    [
        Buffer("a", 1, 2, 3),
        Buffer("b", 1, 5, 3),
        Buffer("c", 3, 6, 2),
        Buffer("d", 4, 7, 1),
        Buffer("e", 5, 8, 2),
        Buffer("f", 6, 9, 3),
        Buffer("g", 8, 9, 3),
    ]
)


def run(problem: Problem, nodes: int = 3000, seed: int = 0, **options: object) -> Packing:
    """A packing that depends on nothing but its arguments."""
    arguments = {"align": problem.align, "period": problem.period, **options}
    return pack(problem.buffers, seconds=-1, nodes=nodes, seed=seed, **arguments)  # type: ignore[arg-type]
