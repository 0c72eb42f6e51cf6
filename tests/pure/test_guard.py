"""The guard of a pool, over main memory: told where a step is none like the one before."""

import time

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
    # 2 3 | 2 4 . 3
    #         ^ ^
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 2 * MIB, 4 * MIB, 5 * MIB, 3 * MIB)
        assert rings == [1, 2]
        heard = guarded(made, answer=True)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 2 * MIB, 4 * MIB, 5 * MIB)
        assert heard == [1]
        assert rings == [1, 2]


def test_small_blocks_come_and_go() -> None:
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 512, 2 * MIB, 1000, 512, 3 * MIB)
        assert not rings


def test_a_step_that_ends_early_rings_nothing() -> None:
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 2 * MIB)
        step(made, 2 * MIB, 3 * MIB)
        assert not rings
        step(made, 3 * MIB)
        assert rings == [0]


def test_what_nobody_listens_to_is_no_part_of_the_steps() -> None:
    """An evaluation in between."""
    with bench() as made:
        rings = guarded(made)
        step(made, 2 * MIB, 3 * MIB)
        step(made, 7 * MIB, 2 * MIB, 3 * MIB)
        assert rings == [0]
        step(made, 2 * MIB, 3 * MIB)
        assert rings == [0]


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
        made.host.core.dismiss_guard()
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

    with bench() as made:
        made.host.core.guard(0, 0, MANY, sound)
        step(made, 2 * MIB)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - somewhere in here
            step(made, 7 * MIB)
            time.sleep(5)
