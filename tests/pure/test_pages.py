"""Arenas in pages, over main memory: what is free can be used, wherever it lies."""

from collections import Counter
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import MIB, Bench, Host, bench, train

from lowtide._runtime.core import Mode

PAGE = 64 << 10


def paged(made: Bench, size: int) -> Host:
    made.host.use_pages(size)
    made.place.room = size
    return made.host


def fragmented(host: Host, count: int) -> list[int]:
    """Every other page free, of twice so many; those that are not."""
    blocks = [host.allocate(PAGE) for _ in range(2 * count)]
    for block in blocks[::2]:
        host.free(block)
    return blocks[1::2]


def test_a_block_is_made_of_pages_from_anywhere() -> None:
    """Its bytes are side by side, and nobody else's."""
    with bench() as made:
        host = paged(made, 16 * PAGE)
        fragmented(host, 8)
        assert host.bytes == 16 * PAGE
        block = host.allocate(8 * PAGE)  # all that is free
        assert host.bytes == 16 * PAGE and host.shown == 8
        assert host.library.lowtide_pool_allocate(host.handle, 1 << 40, 0, None) is None
        host.free(block)
        assert host.allocate(8 * PAGE) == block  # by the window that is there
        assert host.shown == 8


def test_it_grows_only_as_it_must_and_lies_in_one_piece_where_it_can() -> None:
    with bench() as made:
        host = paged(made, 64 * PAGE)
        first, second = host.allocate(3 * PAGE), host.allocate(5)
        assert host.bytes == 4 * PAGE
        assert second == first + 3 * PAGE
        host.free(first)
        third = host.allocate(2 * PAGE)
        assert third == first and host.bytes == 4 * PAGE
        host.allocate(3 * PAGE)  # one is free; two more, and all in one piece at the end
        assert host.shown in (0, 3) and host.bytes == 6 * PAGE


def test_small_blocks_share_pages_and_the_ends_of_others() -> None:
    with bench() as made:
        host = paged(made, 64 * PAGE)
        host.allocate(31 * PAGE + 512)
        for _ in range(10):
            host.allocate(512)
        assert host.bytes == 32 * PAGE
        for _ in range(10):  # in one piece each, wherever pages begin
            host.allocate(2 * PAGE + PAGE // 4)
        assert host.bytes <= 55 * PAGE


def test_beyond_its_size_blocks_lie_outside() -> None:
    with bench() as made:
        host = paged(made, 4 * PAGE)
        host.allocate(3 * PAGE)
        outside = host.allocate(2 * PAGE)
        assert not host.core.holds(outside) and not host.core.is_paged(outside)
        assert host.core.count(0).page_bytes == 3 * PAGE


def test_another_stream_gets_the_memory_of_free_pages() -> None:
    with bench(capacity=16 * PAGE) as made:
        host = paged(made, 16 * PAGE)
        stay = fragmented(host, 8)
        window = host.allocate(4 * PAGE)
        host.free(window)
        assert host.shown == 4
        other = host.allocate(6 * PAGE, stream=1)
        assert not host.core.holds(other)
        assert host.core.count(0).page_bytes == 10 * PAGE
        assert host.shown == 0  # a window that showed one of those pages would show nothing
        host.allocate(2 * PAGE)
        host.free(other)
        host.allocate(6 * PAGE)  # the memory comes back
        assert host.core.count(0).page_bytes == 16 * PAGE
        assert all(host.core.is_paged(block) for block in stay)


def test_pages_of_another_stream_wait_for_it_and_are_waited_for() -> None:
    with bench(capacity=8 * PAGE) as made:
        host = paged(made, 8 * PAGE)
        used = host.allocate(6 * PAGE)
        assert host.touch(used, 2)
        host.free(used)
        assert host.core.count(0).pending == 1
        host.allocate(2 * PAGE)
        assert host.core.count(0).pending == 1  # there was room beside it
        host.allocate(6 * PAGE)
        assert host.core.count(0).pending == 0


SIZES = [5 * PAGE, 3 * PAGE, 700, 7 * PAGE, 2 * PAGE, 4 * PAGE + 512]


def one_step(host: Host) -> None:
    """Of which not all fits in one piece in so few pages."""
    a, b, c, d = (host.allocate(size) for size in SIZES[:4])
    host.free(b)
    host.free(a)
    e = host.allocate(SIZES[4])
    host.free(d)
    f = host.allocate(SIZES[5])
    g = host.allocate(9 * PAGE)
    for block in (c, e, f, g):
        host.free(block)


def repeat(made: Bench, times: int) -> None:
    """Steps, one like the other."""
    for _ in range(times):
        one_step(made.host)
        made.pool.mark()


def test_a_step_that_repeats_gets_its_pages_and_no_new_windows() -> None:
    with bench() as made:
        host = paged(made, 21 * PAGE)
        repeat(made, 4)
        shown = host.shown
        repeat(made, 3)
        assert host.shown == shown
        summary = made.pool.summary()
        assert summary.planned == summary.allocations > 0
        assert summary.displaced == summary.unplanned == 0
        assert summary.replayed >= 3
        assert host.bytes <= 21 * PAGE


def test_what_a_step_leaves_behind_has_its_pages_again_too() -> None:
    with bench() as made:
        paged(made, 16 * MIB)
        left: list[int] = []
        for _ in range(9):
            left = train(made, left=left)
        summary = made.pool.summary()
        assert summary.planned == summary.allocations > 0
        for block in left:
            made.host.free(block)


def test_what_stays_is_in_nobodys_way() -> None:
    """It lies among the pages of the steps; plans go around it."""
    with bench() as made:
        host = paged(made, 40 * PAGE)
        fragmented(host, 10)
        host.allocate(700)
        repeat(made, 9)
        summary = made.pool.summary()
        assert summary.planned == summary.allocations > 0


def test_what_is_not_foreseen_keeps_out_of_the_way_of_plans() -> None:
    with bench() as made:
        host = paged(made, 40 * PAGE)
        repeat(made, 5)
        stranger = host.allocate(4 * PAGE)
        repeat(made, 3)
        assert made.pool.summary().displaced == 0
        host.free(stranger)


def test_until_steps_are_what_they_will_be_none_is_planned() -> None:
    with bench() as made:
        paged(made, 21 * PAGE)
        made.pool._ready = lambda: False
        repeat(made, 5)
        assert made.pool.summary().plans == 0
        made.pool._ready = lambda: True
        repeat(made, 3)
        assert made.pool.summary().plans == 1


def test_steps_that_are_others_are_planned_anew_in_the_same_pages() -> None:
    with bench() as made:
        host = paged(made, 21 * PAGE)
        repeat(made, 5)
        held = host.bytes
        made.pool.mark(anew=True)
        assert made.pool.summary().plans == 0 and host.bytes == held
        assert not made.place.cleared or made.place.cleared == [{}]
        for _ in range(4):
            host.free(host.allocate(6 * PAGE))
            one_step(host)
            made.pool.mark()
        assert made.pool.summary().plans == 1


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(4, 40))
def test_random_blocks_keep_their_bytes(seed: int, pages: int) -> None:
    """Plans that fit nothing in between; the host checks every byte of every block."""
    random = Random(seed)
    with bench(capacity=pages * PAGE) as made:
        host = paged(made, pages * PAGE)
        lane = host.core.mark()[0].lane if host.core.mark() else 0
        host.core.set_mode(Mode.REPLAY)
        for _ in range(60):
            if random.random() < 0.1 and host.live:
                some = random.sample(range(pages), random.randint(1, min(4, pages)))
                at = host.core.window(lane, some)
                size = len(some) * PAGE - random.choice([0, 512])
                host.core.add_plan(lane, [size], [[at]] if at >= 0 else [[-1]])
            if random.random() < 0.1:
                host.core.mark()
            if random.random() < 0.45 and host.live:
                block = random.choice(list(host.live))
                host.free(block)
                continue
            size = random.choice([random.randint(1, PAGE), random.randint(1, 5) * PAGE])
            block = host.library.lowtide_pool_allocate(host.handle, size, 0, None)
            if block:
                host._write(block, size)


def test_windows_of_ever_other_sizes_find_addresses() -> None:
    """Those of windows that are gone are one stretch again, around one that stays."""
    random = Random(0)
    with bench() as made:
        host = paged(made, 700 * PAGE)
        fragmented(host, 350)
        host.allocate(3 * PAGE)  # it stays
        for _ in range(1500):
            block = host.allocate(random.randint(2, 340) * PAGE)
            assert host.core.is_paged(block)
            host.free(block)


def test_beside_pages_other_streams_get_no_arenas() -> None:
    """They would take what pages need."""
    with bench() as made:
        host = paged(made, 21 * PAGE)
        for _ in range(6):
            one_step(host)
            host.free(host.allocate(2 * MIB, stream=1))
            made.pool.mark()
        assert made.place.arenas == []
        assert made.pool.summary().plans == 1


def test_pages_are_the_lanes_for_good() -> None:
    with bench() as made:
        host = paged(made, 16 * PAGE)
        block = host.allocate(PAGE)
        host.use_pages(32 * PAGE)  # it has some
        assert host.allocate(PAGE) == block + PAGE


def test_what_somebody_keeps_from_one_time_leaves_the_rest_to_the_next() -> None:
    with bench(capacity=16 * PAGE) as made:
        host = paged(made, 16 * PAGE)
        kept, other = host.allocate(8 * PAGE), host.allocate(8 * PAGE)
        made.pool.stop()
        host.free(other)  # its pages stay with the one that is kept, until somebody needs them
        host.use_pages(16 * PAGE)
        host.core.set_mode(Mode.RECORD)
        assert host.core.is_paged(host.allocate(8 * PAGE))
        host.free(kept)


def test_leaving_gives_everything_back() -> None:
    with bench() as made:
        host = paged(made, 16 * PAGE)
        stay = fragmented(host, 8)
        window = host.allocate(4 * PAGE)
        made.pool.stop()
        assert host.bytes == 12 * PAGE  # blocks are there, and nothing but their pages
        for block in [*stay, window]:
            host.free(block)
        assert host.bytes == 0


@pytest.mark.parametrize("pages", [[], [-1], [0, 0], [99], [12]])
def test_a_window_of_what_is_not_there_is_none(pages: list[int]) -> None:
    with bench() as made:
        host = paged(made, 16 * PAGE)
        host.allocate(4 * PAGE)
        assert host.core.fill(0, 10 * PAGE, 0)
        assert host.bytes == 10 * PAGE
        assert host.core.window(0, pages) == -1
        assert host.core.window(0, [9, 3]) > 0
        assert not host.core.fill(0, 21 * PAGE, 0)


class _Tight:
    """Steps that leave behind what the next one is rid of while it goes, with hardly room to spare.

    As under a budget: activations, and optimizer state that comes back while they are freed.
    """

    def __init__(self, seed: int, count: int = 120, states: int = 30) -> None:
        random = Random(seed)
        self._acts = [random.randint(1, 8) for _ in range(count)]
        self._states = [random.randint(2, 8) for _ in range(states)]
        self._leave = Counter(random.choices(range(count // 2, count), k=states))
        self._come = Counter(random.choices(range(count // 2, count), k=states))
        self.most = 0

    def step(self, host: Host, left: list[int]) -> list[int]:
        states, came = iter(self._states), []
        old, live = iter(left), []
        for at, act in enumerate(self._acts):
            inside = host.allocate(max(1, act // 2) * PAGE)
            live.append(host.allocate(act * PAGE))
            self.most = max(self.most, sum(size for size, _ in host.live.values()))
            host.free(inside)
            for _ in range(self._leave[at] if left else 0):
                host.free(next(old))
        for at, act in enumerate(reversed(self._acts)):
            gradient = host.allocate(act * PAGE)
            self.most = max(self.most, sum(size for size, _ in host.live.values()))
            host.free(live.pop())
            host.free(gradient)
            came += [host.allocate(next(states) * PAGE) for _ in range(self._come[at])]
        return came


@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_behind_is_in_nobodys_way_although_there_is_hardly_room(seed: int) -> None:
    steps = _Tight(seed)
    with bench() as made:
        left: list[int] = []
        for _ in range(2):
            left = steps.step(made.host, left)
    with bench() as made:
        host = paged(made, int(1.02 * steps.most) // PAGE * PAGE)
        left = []
        for _ in range(4):
            left = steps.step(host, left)
            made.pool.mark()
        calls = host.core.count(0).page_calls
        for _ in range(4):
            left = steps.step(host, left)
            made.pool.mark()
        summary = made.pool.summary()
        assert summary.planned == summary.allocations > 0
        assert host.core.count(0).page_calls == calls
        for block in left:
            host.free(block)


def test_where_not_all_has_a_place_steps_are_asked_to_need_less() -> None:
    asked: list[int] = []
    steps = _Tight(0)
    with bench() as made:
        left = steps.step(made.host, [])
        most = steps.most
        for block in left:
            made.host.free(block)
    with bench() as made:
        paged(made, int(0.9 * most) // PAGE * PAGE)
        made.pool._shrink = lambda count, _: not asked.append(count)  # type: ignore[func-returns-value]
        left = []
        for _ in range(9):
            left = steps.step(made.host, left)
            made.pool.mark()
        assert asked[0] >= PAGE
        assert asked[:3] == [asked[0], 2 * asked[0], 4 * asked[0]]  # the same is missing each time
        assert made.pool.summary().plans == 0
        asked.clear()
        made.pool._lacked.clear()

        def dear(count: int, slower: float) -> bool:
            """More than what is missing costs too much time."""
            asked.append(count)
            return slower == inf

        made.pool._shrink = dear
        for _ in range(6):
            left = steps.step(made.host, left)
            made.pool.mark()
        assert asked[:3] == [asked[0], 2 * asked[0], asked[0]]
        asked.clear()

        def cannot(count: int, _: float) -> bool:
            asked.append(count)
            return False

        made.pool._shrink = cannot  # it goes on as well as it can
        for _ in range(4):
            left = steps.step(made.host, left)
            made.pool.mark()
        assert made.pool.summary().plans == 1
        assert asked[0] > asked[1], "more than what is missing, and then that"
        for block in left:
            made.host.free(block)


def test_a_window_of_two_plans_stays_as_long_as_one_has_it() -> None:
    random = Random(0)
    with bench() as made:
        host = paged(made, 16 * PAGE)
        host.allocate(512)
        assert host.core.fill(0, 16 * PAGE, 0)
        window = host.core.window(0, [1, 3])
        first = host.core.add_plan(0, [2 * PAGE], [[window]])
        second = host.core.add_plan(0, [2 * PAGE, PAGE], [[window, -1]])
        host.core.forget(0, first)
        others = []
        while (other := host.core.window(0, random.sample(range(4, 16), 2))) >= 0:
            others.append(other)  # until there are no addresses left
        assert others and window not in others
        plan = host.core.add_plan(0, [2 * PAGE] * len(others), [others])
        host.core.forget(0, plan)
        host.core.forget(0, second)
        again = [host.core.window(0, random.sample(range(4, 16), 2)) for _ in range(1000)]
        assert window in again  # nobody has it any more
