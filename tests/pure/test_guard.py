"""The guard of a pool, over main memory: told where a step comes to hold more than before."""

import signal
import time
from functools import partial
from threading import Thread

import pytest
from pools import MIB, Bench, bench

MANY = 1 << 40


def step(made: Bench, *sizes: int, stream: int = 0) -> None:
    """Blocks of these sizes, one after the other, and all gone by the end."""
    blocks = [made.host.allocate(size, stream) for size in sizes]
    for block in blocks:
        made.host.free(block)
    made.pool.mark()


def guarded(made: Bench, *, most: int = MANY, answer: bool = False) -> list[int]:
    """Rings of the bell: the blocks that lived by then."""
    rings: list[int] = []

    def sound() -> bool:
        rings.append(len(made.host.live))
        return answer

    made.host.core.guard(0, 0, most, sound)
    return rings


def test_steps_that_repeat_ring_nothing() -> None:
    with bench() as made:
        rings = guarded(made)
        for _ in range(6):  # recorded, planned, followed
            step(made, 2 * MIB, 3 * MIB, 512)
        assert not rings


def test_it_rings_once_the_block_is_had_and_until_it_is_heard() -> None:
    # 2 3 | 2 4 5 3
    #         ^ ^
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 2 * MIB, 4 * MIB, 5 * MIB, 3 * MIB)
        assert rings == [1, 2]
        heard = guarded(made, answer=True)
        step(made, 2 * MIB)
        step(made, 2 * MIB, 5 * MIB, 5 * MIB, 3 * MIB, 6 * MIB, 7 * MIB)
        assert heard == [4]
        assert rings == [1, 2]


def test_small_blocks_come_and_go() -> None:
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 512, 2 * MIB, 1000, 512, 3 * MIB)
        assert not rings


def test_a_smaller_step_rings_nothing_and_is_forgotten() -> None:
    """The last batch of an epoch."""
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 1 * MIB, 2 * MIB)
        step(made, 2 * MIB)
        step(made, 2 * MIB, 3 * MIB)
        assert not rings


def known(made: Bench, most: int, *sizes: int) -> list[int]:
    """Rings, once a whole step of these sizes is known, in pages."""
    made.host.use_pages(1 << 30)
    made.place.room = 1 << 30
    guarded(made, most=most)
    for _ in range(3):
        step(made, *sizes)
    rings = guarded(made, most=most)
    step(made, *sizes)
    return rings


def test_a_larger_block_rings_if_the_peak_would_be_above_with_it() -> None:
    # 11 MiB in all: 4 MiB that are 4.5 make them 12.375
    for most, rung in ((12.3, [0]), (12.4, [])):
        with bench() as made:
            rings = known(made, int(most * MIB), 4 * MIB, 7 * MIB)
            step(made, 4 * MIB + MIB // 2, 4 * MIB)
            assert rings == rung


def test_a_larger_block_is_compared_with_the_largest_step() -> None:
    with bench() as made:
        rings = known(made, int(12.3 * MIB), 4 * MIB, 7 * MIB)
        step(made, 2 * MIB, 1 * MIB)
        step(made, 4 * MIB, 7 * MIB)
        assert not rings
        step(made, 2 * MIB)
        step(made, 4 * MIB + MIB // 2, 4 * MIB)
        assert rings == [0]


def test_what_stays_is_not_made_larger() -> None:
    # 20 MiB, and 11 that would be 12.375
    for most, rung in ((32.3, [1]), (32.4, [])):
        with bench() as made:
            made.host.use_pages(1 << 30)
            made.place.room = 1 << 30
            made.host.allocate(20 * MIB)
            rings = known(made, int(most * MIB), 4 * MIB, 7 * MIB)
            step(made, 4 * MIB + MIB // 2, 4 * MIB)
            assert rings == rung


def test_blocks_of_the_step_before_are_others() -> None:
    # 2 9 3 9 | 2 3 9 | 2 9     that was watched, and lowtide made blocks as well
    #                     ^
    with bench() as made:
        made.host.use_pages(1 << 30)
        made.place.room = 1 << 30
        rings = guarded(made, most=40 * MIB)
        step(made, 2 * MIB, 9 * MIB, 3 * MIB, 9 * MIB)
        step(made, 2 * MIB, 3 * MIB, 9 * MIB)
        assert not rings
        step(made, 2 * MIB, 9 * MIB)
        assert rings == [1]


def test_it_rings_where_two_more_blocks_would_not_fit() -> None:
    with bench() as made:
        rings = known(made, 40 * MIB, 4 * MIB, 3 * MIB)  # 32 may be had
        step(made, 4 * MIB, 4 * MIB, *[4 * MIB] * 6)
        assert rings == [2, 3, 4, 5, 6, 7]  # there was none at their place
        rings = guarded(made, most=40 * MIB)
        step(made, *[4 * MIB] * 8)
        step(made, *[4 * MIB] * 8)
        assert not rings  # by now there was
        step(made, *[4 * MIB] * 9)  # 36 may be had by now, and are
        assert rings == [8]
        step(made, *[4 * MIB] * 9)
        assert rings == [8]
        step(made, *[4 * MIB] * 10)
        assert rings == [8, 9]
        step(made, *[4 * MIB] * 10)
        assert rings == [8, 9, 9]
        rings = guarded(made, most=40 * MIB)
        step(made, *[4 * MIB] * 10)
        step(made, *[4 * MIB] * 10)
        assert rings == [9]  # what came near is not known


def test_steps_that_were_counted_are_enough_to_ring_in_time() -> None:
    # 65 in all, 20 of them last: 82 may be had. 28 that are 3 each are 84
    sizes = [*[MIB + MIB // 2] * 30, 20 * MIB]
    with bench() as made:
        made.host.use_pages(1 << 30)
        made.place.room = 1 << 30
        count = partial(made.host.core.guard, 0, 0, 100 * MIB)
        assert not count(None)
        step(made, *[9 * MIB] * 10)  # as a watched one that swaps, say
        assert count(None)
        step(made, *[9 * MIB] * 11)
        rings = guarded(made, most=100 * MIB)
        step(made, *sizes)
        assert not rings
        step(made, *[2 * one for one in sizes])
        assert rings[0] <= 27


@pytest.mark.parametrize("paged", [False, True])
def test_it_rings_where_more_is_held_than_may_be(paged: bool) -> None:
    """By blocks in arenas: what a program keeps from step to step has the sizes it always had."""
    with bench() as made:
        if paged:
            made.host.use_pages(1 << 30)
            made.place.room = 1 << 30
        for _ in range(5):
            step(made, 2 * MIB, 3 * MIB)
        rings = guarded(made, most=9 * MIB)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 2 * MIB, 3 * MIB)  # which holds 5 MiB: 7 are half-way
        kept = made.host.allocate(2 * MIB)
        made.host.allocate(3 * MIB)
        made.pool.mark()
        assert not rings
        made.host.free(made.host.allocate(2 * MIB))
        made.host.free(made.host.allocate(3 * MIB))
        assert rings
        rings.clear()
        made.pool.mark()
        made.host.free(kept)
        made.host.free(made.host.allocate(2 * MIB))
        made.host.free(made.host.allocate(3 * MIB))
        assert not rings


def test_nor_are_blocks_of_another_thread_told_of() -> None:
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB)
        thread = Thread(target=lambda: made.host.free(made.host.allocate(7 * MIB)))
        thread.start()
        thread.join()
        assert not rings
        made.host.free(made.host.allocate(7 * MIB))
        assert rings == [0]


def test_what_a_step_has_held_is_told() -> None:
    with bench() as made:
        for _ in range(4):
            step(made, 2 * MIB, 3 * MIB)
        guarded(made)
        assert not made.host.core.guarded()
        step(made, 2 * MIB, 3 * MIB)
        kept = made.host.allocate(2 * MIB)
        made.host.free(made.host.allocate(3 * MIB))
        assert made.host.core.guarded() == 5 * MIB
        made.host.free(kept)
        made.pool.mark()
        assert not made.host.core.guarded()


def test_the_step_at_hand_and_other_streams_are_not_looked_at() -> None:
    with bench() as made:
        step(made, 2 * MIB)
        rings = guarded(made)
        step(made, 7 * MIB)
        step(made, 7 * MIB)
        made.host.allocate(9 * MIB, stream=3)
        assert not rings


def test_nobody_is_told_after_it_is_dismissed_or_the_pool_has_stopped() -> None:
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB)
        made.host.core.guard(0, 0, 0, None)
        step(made, 7 * MIB)
        guarded(made)
        step(made, 2 * MIB)
        made.pool.stop()
        made.host.allocate(7 * MIB)
        assert not rings


def test_what_the_listener_raises_stops_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    def sound() -> bool:
        raise ValueError("not now")

    with bench() as made:
        made.host.core.guard(0, 0, MANY, sound)
        step(made, 2 * MIB)
        step(made, 7 * MIB, 8 * MIB)
    assert capfd.readouterr().err == "lowtide: ValueError: not now, please report it\n"


def test_an_interrupt_while_it_listens_comes_a_moment_later() -> None:
    def sound() -> bool:
        raise KeyboardInterrupt

    # Who was started in the background of a shell is not interrupted.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with bench() as made:
            made.host.core.guard(0, 0, MANY, sound)
            step(made, 2 * MIB)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - somewhere in here
                step(made, 7 * MIB)
                for _ in range(500):
                    time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
