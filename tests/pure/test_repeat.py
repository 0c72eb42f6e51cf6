from hypothesis import given
from hypothesis import strategies as st

from lowtide._analyze.repeat import Repeat, find_repeat


def _longest_by_trying_everything(items: list[int]) -> int:
    return max(
        (
            p
            for p in range(1, len(items) // 2 + 1)
            for i in range(len(items) - 2 * p + 1)
            if items[i : i + p] == items[i + p : i + 2 * p]
        ),
        default=0,
    )


@given(st.lists(st.integers(0, 2), max_size=24))
def test_finds_the_longest_adjacent_repeat(items: list[int]) -> None:
    longest = _longest_by_trying_everything(items)
    found = find_repeat(items)
    if found is None:
        assert longest == 0
        return
    p = found.period
    assert longest % p == 0
    assert found.times >= 2
    assert found.stop - found.start >= 2 * longest
    assert all(items[i] == items[i + p] for i in range(found.start, found.stop - p))
    assert found.start == 0 or items[found.start - 1] != items[found.start - 1 + p]
    assert found.stop == len(items) or items[found.stop] != items[found.stop - p]


@given(st.lists(st.integers(), min_size=1, max_size=30, unique=True), st.integers(2, 5))
def test_a_loop_of_distinct_ops_has_its_length_as_period(body: list[int], times: int) -> None:
    found = find_repeat([*body, "set-up", *body * times, *body[:1]])
    assert found == Repeat(len(body) + 1, len(body) * (times + 1) + 2, len(body))


def test_the_inner_repeat_is_taken() -> None:
    # aab aab aab aab: the longest repeat is (aab aab), the iteration is aab
    assert find_repeat("aab" * 4) == Repeat(0, 12, 3)


def test_layers_that_repeat_do_not_hide_the_step() -> None:
    step = [*"in", *"layer" * 4, *"loss", *"reyal" * 4]
    found = find_repeat(["init", *step * 3])
    assert found is not None
    assert found.period == len(step)


def test_thirty_thousand_ops_three_times_over() -> None:
    step = list(range(30_000))
    assert find_repeat(step * 3) == Repeat(0, 90_000, 30_000)


def test_nothing_repeats() -> None:
    assert find_repeat([]) is None
    assert find_repeat(list(range(1000))) is None
