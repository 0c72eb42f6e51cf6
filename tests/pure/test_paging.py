"""Pages for a step: nobody shares one, and all of it fits into its load."""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide._runtime import paging
from lowtide._runtime.core import StepRecord
from lowtide._runtime.paging import PagePlan, is_odd, plan_pages

PAGE = 4096


@pytest.fixture(scope="module", autouse=True)
def _hurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "_SECONDS", 0.01)
        yield


def record(blocks: list[tuple[int, int, int]], ticks: int) -> StepRecord:
    """Of (size, made, freed)."""
    sizes, made, freed = (list(column) for column in zip(*blocks, strict=True))
    return StepRecord(sizes, made, freed, [-1] * len(sizes), [-1] * len(sizes), ticks)


def taken(plan: PagePlan, step: StepRecord, i: int) -> set[int]:
    """Grains of 512 bytes that an allocation has."""
    grains = -(-step.sizes[i] // 512)
    if i in plan.pages:
        assert plan.offsets[i] == -1
        assert len(plan.pages[i]) == -(-step.sizes[i] // PAGE)
        rows = [page * PAGE // 512 + k for page in plan.pages[i] for k in range(PAGE // 512)]
        return set(rows[:grains])
    return set(range(plan.offsets[i] // 512, plan.offsets[i] // 512 + grains))


def check(plan: PagePlan, step: StepRecord) -> int:
    """No grain is anybody else's at any tick of any step. How many have no place."""
    lives = list(zip(step.made, step.freed, strict=True))
    placed = [i for i in range(len(lives)) if plan.offsets[i] >= 0 or i in plan.pages]
    for tick in range(step.ticks):
        used: set[int] = set()
        for i in placed:
            low, high = lives[i]
            if low <= tick < high or low <= tick + step.ticks < high:
                mine = taken(plan, step, i)
                assert not used & mine
                assert max(mine) * 512 < plan.height
                used |= mine
    return len(lives) - len(placed)


@st.composite
def steps(draw: st.DrawFn) -> StepRecord:
    """Ticks are one each, as in a real step."""
    count = draw(st.integers(1, 24))
    order = draw(st.permutations([i % count for i in range(2 * count)]))
    first = {i: order.index(i) for i in range(count)}
    last = {i: len(order) - 1 - order[::-1].index(i) for i in range(count)}
    size = st.one_of(st.integers(1, PAGE - 1), st.integers(PAGE, 9 * PAGE))
    ticks = len(order)
    blocks = []
    for i in range(count):
        low, high = first[i], last[i]
        if draw(st.integers(0, 4)) == 0:  # it is left behind
            low, high = high, low + ticks
        if draw(st.integers(0, 9)) == 0:
            high = draw(st.sampled_from([-1, low + ticks + 1]))
        blocks.append((draw(size), low, high))
    return record(blocks, ticks)


@settings(deadline=None)
@given(steps(), st.integers(0, 60))
def test_no_two_blocks_share_a_byte_whatever_the_room(step: StepRecord, room: int) -> None:
    plan = plan_pages(step, PAGE, room * PAGE)
    large = [i for i, size in enumerate(step.sizes) if not is_odd(size, PAGE)]
    assert all(plan.offsets[i] % PAGE == 0 for i in large if plan.offsets[i] >= 0)
    check(plan, step)


@settings(deadline=None)
@given(steps())
def test_with_room_for_the_load_everything_has_a_place(step: StepRecord) -> None:
    """But for what outlives the next step; nothing is left behind here."""
    high = [end if 0 <= end <= step.ticks else step.ticks for end in step.freed]
    step = replace(step, freed=high)
    plan = plan_pages(step, PAGE, plan_pages(step, PAGE, 0).load)
    assert check(plan, step) == 0
    assert plan.height <= plan.load


def test_a_block_lies_in_one_piece_where_it_can_and_in_two_where_it_must() -> None:
    """The first three lie side by side; the second stays, and the last needs two pages."""
    blocks = [(PAGE, 0, 3), (PAGE, 1, 7), (PAGE, 2, 4), (2 * PAGE, 5, 6)]
    plan = plan_pages(record(blocks, 8), PAGE, 4 * PAGE)
    assert plan.offsets[3] == 2 * PAGE
    plan = plan_pages(record(blocks, 8), PAGE, 3 * PAGE)
    assert plan.pages == {3: (0, 2)}
    assert plan.height == plan.load == 3 * PAGE


def test_what_is_left_behind_has_its_pages_again() -> None:
    """b is alive when a step begins, and its page is another's in between."""
    blocks = [(PAGE, 5, 9), (PAGE, 2, 4), (PAGE, 3, 6)]
    plan = plan_pages(record(blocks, 8), PAGE, 2 * PAGE)
    assert check(plan, record(blocks, 8)) == 0
    assert plan.height == 2 * PAGE
    assert plan.offsets[1] == plan.offsets[0]


def test_pages_in_use_are_left_alone() -> None:
    blocks = [(PAGE, 0, 3), (512, 1, 2), (2 * PAGE, 2, 4)]
    plan = plan_pages(record(blocks, 5), PAGE, 7 * PAGE, lasting=[0, 3, 99])
    assert check(plan, record(blocks, 5)) == 0
    grains = set().union(*(taken(plan, record(blocks, 5), i) for i in range(3)))
    pages = {grain * 512 // PAGE for grain in grains}
    assert not pages & {0, 3}


def test_a_long_life_goes_before_one_that_fits_between_what_is_left_behind() -> None:
    # ticks    0 1 2 3 4 5 6 7 8 9
    # page 2 | a a . b b . . . a a   a is left behind; 1 is in use
    # page 0 | . . . . c c c c c .   in order, b would lie here, and c nowhere
    blocks = [(PAGE, 8, 12), (PAGE, 3, 5), (PAGE, 4, 9)]
    plan = plan_pages(record(blocks, 10), PAGE, 3 * PAGE, [1], {0: (2 * PAGE, (2,))})
    assert plan.offsets == [2 * PAGE, 2 * PAGE, 0]
    assert plan.missing == 0


@pytest.mark.parametrize("room", [0, PAGE])
def test_what_has_no_room_may_lie_anywhere(room: int) -> None:
    plan = plan_pages(record([(2 * PAGE, 0, 1)], 2), PAGE, room)
    assert plan.offsets == [-1] and not plan.pages and plan.height == 0


@settings(deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_is_here_stays_and_nobody_else_gets_its_bytes(seed: int) -> None:
    """Left behind anywhere, in pieces, on pages that others share, or for who knows how long."""
    random = Random(seed)
    step = random_step(random)
    high = random.choice([12, 30, 60])
    free = [page for page in range(high) if random.random() < 0.8]
    random.shuffle(free)
    lasting = [free.pop() for _ in range(min(len(free), random.randint(0, 3)))]
    here: dict[int, tuple[int, tuple[int, ...]]] = {}
    for i, (size, freed) in enumerate(zip(step.sizes, step.freed, strict=True)):
        count = -(-size // PAGE)
        if 0 <= freed < step.ticks or len(free) < count or random.random() < 0.2:
            continue
        pages = tuple(free.pop() for _ in range(count))
        here[i] = (pages[0] * PAGE if count == 1 else WINDOWS + i * 100 * PAGE, pages)
    room = random.choice([0, 5, 20, 80]) * PAGE
    plan = plan_pages(step, PAGE, room, lasting, here)
    where = {i: at for i in range(len(step.sizes)) if (at := pages_of(plan, step, here, i))}
    fixed = {*lasting, *(page for _, pages in here.values() for page in pages)}
    unknown = {page for i in here if life(step, i) > step.ticks for page in here[i][1]}
    for i, taken_pages in where.items():
        if i not in here:
            assert taken_pages.isdisjoint({*lasting, *unknown})
        assert max(taken_pages) < plan.height // PAGE
    for i, j in combinations(where, 2):
        odd = is_odd(step.sizes[i], PAGE) and is_odd(step.sizes[j], PAGE)  # they may share a page
        if where[i] & where[j] and not odd:
            assert not both_live(step, i, j), (i, j)
    others = set().union(*(where[i] for i in where if i not in here)) - fixed
    assert len(others) <= max(0, room // PAGE - len(fixed))
    if not plan.missing:
        known = [i for i in range(len(step.sizes)) if life(step, i) <= step.ticks]
        assert all(i in where for i in known)
    enough = plan_pages(step, PAGE, room + plan.missing, lasting, here)
    assert not enough.missing, "what is missing is enough"


WINDOWS = 1 << 40


def random_step(random: Random) -> StepRecord:
    count = random.randint(1, 14)
    order = [i % count for i in range(2 * count)]
    random.shuffle(order)
    sizes, made, freed = [], [], []
    for i in range(count):
        start, end = order.index(i), len(order) - 1 - order[::-1].index(i)
        if random.random() < 0.5:
            start, end = end, start + len(order)
        if random.random() < 0.1:
            end = random.choice([-1, start + len(order) + 1, start + len(order)])
        sizes.append(random.choice([random.randint(1, 9 * PAGE), PAGE * random.randint(1, 6), 512]))
        made.append(start)
        freed.append(end)
    blank = [-1] * count
    return StepRecord(sizes, made, freed, blank, blank, len(order))


def life(step: StepRecord, i: int) -> int:
    return step.freed[i] - step.made[i] if step.freed[i] >= 0 else step.ticks + 1


def both_live(step: StepRecord, i: int, j: int) -> bool:
    def lives(k: int, tick: int) -> bool:
        return any(step.made[k] <= at < step.freed[k] for at in (tick, tick + step.ticks))

    return any(lives(i, tick) and lives(j, tick) for tick in range(step.ticks))


def pages_of(
    plan: PagePlan, step: StepRecord, here: Mapping[int, tuple[int, tuple[int, ...]]], i: int
) -> set[int]:
    """Those an allocation lies in; none: it may lie anywhere."""
    if i in plan.pages:
        return set(plan.pages[i])
    offset = plan.offsets[i]
    if offset < 0:
        return set()
    if i in here and offset == here[i][0]:
        return set(here[i][1])
    assert offset < WINDOWS
    return set(range(offset // PAGE, -(-(offset + step.sizes[i]) // PAGE)))


def test_what_is_missing_is_what_more_room_would_mend() -> None:
    # pages 8..16 | a a a        b has no place for want of one page: that one is missing,
    # pages 0..8  | b b . .      and not all of b
    step = record([(8 * PAGE, 0, 3), (8 * PAGE, 1, 2), (2 * PAGE, 4, 5)], 6)
    short = plan_pages(step, PAGE, 15 * PAGE)
    assert short.missing == PAGE
    assert plan_pages(step, PAGE, 16 * PAGE).missing == 0


@given(steps(), st.integers(0, 40))
@settings(max_examples=60)
def test_with_what_is_missing_all_of_it_has_a_place(step: StepRecord, room: int) -> None:
    short = plan_pages(step, PAGE, room * PAGE)
    enough = plan_pages(step, PAGE, room * PAGE + short.missing)
    assert check(enough, step) == sum(
        not 0 <= end <= start + step.ticks for start, end in zip(step.made, step.freed, strict=True)
    )


def test_what_goes_before_anything_else_happens_lends_its_pages() -> None:
    """A gradient that is cleared first: it is here when the step is laid out, and soon gone."""
    # pages 0..4 | b b . a a     a was left behind by the last step, and lies there again
    step = record([(4 * PAGE, 1, 3), (4 * PAGE, 3, 5)], 5)
    plan = plan_pages(step, PAGE, 4 * PAGE, here={1: (0, (0, 1, 2, 3))})
    assert (plan.offsets, plan.missing, plan.height) == ([0, 0], 0, 4 * PAGE)


def test_what_is_missing_counts_pages_that_are_in_use_already() -> None:
    step = record([(PAGE, 0, 1)], 2)
    missing = [plan_pages(step, PAGE, k * PAGE, lasting=[0, 1, 2]).missing for k in range(5)]
    assert missing == [4 * PAGE, 3 * PAGE, 2 * PAGE, PAGE, 0]


def test_of_a_block_that_shares_its_last_page_others_have_the_rest() -> None:
    # page 3     | a a . . . s   something small lies there for good
    # pages 0..3 | a b b b . a
    size = 4 * PAGE - 100
    step = record([(3 * PAGE, 1, 4), (size, 5, 7)], 6)
    plan = plan_pages(step, PAGE, 4 * PAGE, lasting=[3], here={1: (0, (0, 1, 2, 3))})
    assert (plan.offsets, plan.missing) == ([0, 0], 0)


def test_who_is_gone_in_time_makes_way_for_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # page 1 | c . s s s . c c c c      c is left behind; s would lie below, and l, which is still
    # page 0 | . . . l l l l l l .      there when c comes again, nowhere
    monkeypatch.setattr(paging, "_MANY", 0)  # not by their length
    step = record([(PAGE, 2, 5), (PAGE, 3, 9), (PAGE, 6, 11)], 10)
    plan = plan_pages(step, PAGE, 2 * PAGE, here={2: (PAGE, (1,))})
    assert (plan.offsets, plan.missing) == ([PAGE, 0, PAGE], 0)
    assert check(plan, step) == 0


def pages_in(runs: list[list[int]]) -> list[int]:
    """Written as (first, how many)."""
    return [first + k for first, count in runs for k in range(count)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_real_step_lies_within_a_tenth_of_a_percent_of_its_load(name: str) -> None:
    """Recorded on a GPU, with what was left behind; in less room it says what is missing."""
    path = Path(__file__).parents[1] / "data" / f"pages-{name}.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    blank = [-1] * len(data["sizes"])
    step = StepRecord(data["sizes"], data["made"], data["freed"], blank, blank, data["ticks"])
    here = {int(i): (offset, tuple(pages_in(runs))) for i, (offset, runs) in data["here"].items()}
    page, lasting = data["page"], pages_in(data["lasting"])
    roomy = plan_pages(step, page, data["room"], lasting, here)
    assert roomy.missing == 0
    tight = plan_pages(step, page, int(1.001 * roomy.load), lasting, here)
    assert tight.missing == 0 and tight.height <= 1.001 * roomy.load + page
    short = plan_pages(step, page, roomy.load - 50 * page, lasting, here)
    assert 50 * page <= short.missing <= 50 * page + int(0.002 * roomy.load)
