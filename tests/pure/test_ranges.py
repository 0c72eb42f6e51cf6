"""Byte ranges against a plain set of bytes."""

from hypothesis import given
from hypothesis import strategies as st

from lowtide._runtime.swap.ranges import Ranges

_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["take", "at", "give", "grow", "shrink"]),
        st.integers(0, 40),
        st.integers(1, 12),
    ),
    max_size=60,
)


@given(st.integers(0, 40), _CALLS)
def test_ranges_agree_with_a_set_of_bytes(size: int, calls: list[tuple[str, int, int]]) -> None:
    ranges = Ranges(size)
    free = set(range(size))
    held: list[tuple[int, int]] = []
    for call, where, count in calls:
        if call == "take":
            fits = [s for s in range(size) if free.issuperset(range(s, s + count))]
            assert ranges.take(count) == (fits[0] if fits else None)
            if fits:
                held.append((fits[0], count))
                free -= set(range(fits[0], fits[0] + count))
        elif call == "at":
            fits_there = free.issuperset(range(where, where + count))
            assert ranges.take_at(where, count) == fits_there
            if fits_there:
                held.append((where, count))
                free -= set(range(where, where + count))
        elif call == "give" and held:
            start, length = held.pop(where % len(held))
            ranges.give(start, length)
            free |= set(range(start, start + length))
        elif call == "grow":
            ranges.grow(size + count)
            free |= set(range(size, size + count))
            size += count
        elif call == "shrink":
            beyond = set(range(where, size))
            assert ranges.shrink(where) == (free >= beyond)
            if free >= beyond:
                free -= beyond
                size = min(size, where)
        assert ranges.taken == size - len(free)
