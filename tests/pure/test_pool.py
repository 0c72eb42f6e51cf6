"""The pool over main memory: what it records, what it replays, and what it never does."""

import itertools
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import MIB, Bench, bench

from lowtide._runtime.core import Mode, StepRecord
from lowtide._runtime.planning import plan_step, widened
from lowtide._runtime.pool import Pool


def train(b: Bench, batch: int = 1, *, left: list[int] | None = None) -> list[int]:
    """One step: activations grow with the batch, gradients outlive it until the next begins.

    # forward   x h1 h2 h3        freed in backward, in reverse
    # backward         g3 g2 g1   freed by the next step's zero_grad
    """
    host = b.host
    x = host.allocate(batch * MIB)
    for block in left or []:  # zero_grad
        host.free(block)
    hidden = [host.allocate(batch * 2 * MIB + 512 * i) for i in range(3)]
    gradients = []
    for block in reversed(hidden):
        workspace = host.allocate(3 * MIB)
        gradients.append(host.allocate(MIB + 512))
        host.free(workspace)
        host.free(block)
    host.free(x)
    b.pool.mark()
    return gradients


def test_a_step_is_recorded_with_what_it_left_behind() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(2):
            left = train(b, left=left)
        step = b.host.core.step(0, 1)  # the first
        assert step is not None
        assert step.sizes[:2] == [MIB, 2 * MIB]
        assert step.sizes[4:6] == [3 * MIB, MIB + 512]
        assert len(step.sizes) == 10
        assert step.made[:4] == [0, 1, 2, 3]
        assert step.freed[0] == step.ticks - 1 == 16
        # A gradient is freed after the next step's first allocation.
        assert [end for end in step.freed if end >= step.ticks] == [18, 19, 20]
        assert all(0 <= start < end for start, end in zip(step.made_ns, step.freed_ns, strict=True))


def test_a_step_made_twice_is_planned_and_then_followed() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(20):
            left = train(b, left=left)
        summary = b.pool.summary()
        assert summary.plans == 1
        # Made twice without its beginning cut off: the second and the third.
        assert summary.replayed == 17
        assert summary.unplanned == summary.displaced == 0
        assert b.place.settled == [0]
        assert b.host.bytes == b.place.arenas[-1]  # nothing but the arena


def test_the_arena_is_as_small_as_the_load() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(8):
            left = train(b, left=left)
        summary = b.pool.summary()
        assert summary.load_bytes <= summary.arena_bytes < summary.load_bytes + 2 * MIB


def test_addresses_repeat_from_step_to_step() -> None:
    with bench() as b:
        seen = []
        left: list[int] = []
        for _ in range(12):
            left = train(b, left=left)
            seen.append(left)
        assert seen[6:] == [seen[6]] * 6


def test_an_unforeseen_allocation_goes_to_the_backend_and_costs_nothing_else() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(8):
            left = train(b, left=left)
        before = b.host.bytes
        odd = b.host.allocate(7 * MIB)  # in the middle of a step
        assert b.host.bytes == before + 7 * MIB
        left = train(b, left=left)
        b.host.free(odd)
        assert b.host.bytes == before
        after = b.pool.summary()
        assert after.unplanned == 1
        assert after.displaced == 0
        left = train(b, left=left)


@pytest.mark.parametrize("missing", [0, 2, 5])
def test_a_step_that_leaves_something_out_finds_back_into_its_plan(missing: int) -> None:
    with bench() as b:
        sizes = [MIB * (1 + i * 7 % 5) + 512 * i for i in range(30)]

        def step(left_out: int = -1) -> None:
            blocks = [b.host.allocate(size) for i, size in enumerate(sizes) if i != left_out]
            for block in blocks:
                b.host.free(block)
            b.pool.mark()

        for _ in range(5):
            step()
        before = b.pool.summary()
        step(missing)
        after = b.pool.summary()
        assert after.unplanned - before.unplanned <= 2  # then three in a row were known again
        assert after.planned - before.planned >= len(sizes) - 4


def test_shapes_that_alternate_each_keep_their_plan() -> None:
    with bench() as b:
        left: list[int] = []
        for i in range(24):
            left = train(b, 1 + i % 3, left=left)
        settled = b.host.bytes
        before = b.pool.summary()
        for i in range(300):
            left = train(b, 1 + i % 3, left=left)
        after = b.pool.summary()
        assert b.host.bytes == settled  # not a byte more
        assert after.plans == before.plans == 3
        assert after.replayed - before.replayed == 300
        assert after.unplanned == before.unplanned
        assert after.displaced == before.displaced


def test_planning_takes_a_bounded_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that vary without end are not all planned: training would wait for its layouts."""
    with bench() as b, monkeypatch.context() as patch:
        slow = itertools.count(time.monotonic(), 100.0)  # as if each layout took minutes
        left: list[int] = []
        for _ in range(6):
            left = train(b, left=left)
        assert b.pool.summary().plans == 1  # the first is made in any case
        assert 0 < b.pool._planning_seconds < 10
        patch.setattr(time, "monotonic", lambda: next(slow))
        for i in range(20):
            left = train(b, 2 + i % 4, left=left)
        assert b.pool.summary().plans == 2


def test_a_lost_step_uses_the_room_in_its_arena() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(6):
            left = train(b, 8, left=left)
        settled = b.host.bytes
        for i in range(40):  # shapes never seen twice, all smaller
            blocks = [b.host.allocate(MIB + 1024 * (i * 7 + j)) for j in range(6)]
            for block in blocks:
                b.host.free(block)
        assert b.host.bytes <= settled + 6 * MIB


def test_what_never_dies_stays_outside_the_arena() -> None:
    with bench() as b:
        kept = []
        for _ in range(10):
            kept.append(b.host.allocate(4096))
            train(b, left=[block for block in b.host.live if block not in kept])
        held = b.host.core.count(0).held
        assert held == 10


def test_a_result_kept_for_a_step_lies_in_two_places_in_turn() -> None:
    # step    |0     |1     |2
    # logits  |  aaaa|aab...|...     the old one dies when the new one is there
    with bench() as b:
        old = 0
        places = []
        for _ in range(10):
            hidden = b.host.allocate(8 * MIB)
            new = b.host.allocate(2 * MIB)
            if old:
                b.host.free(old)
            workspace = b.host.allocate(4 * MIB)
            b.host.free(workspace)
            b.host.free(hidden)
            old = new
            places.append(new)
            b.pool.mark()
        assert places[4:6] * 3 == places[4:10]
        assert len(set(places[4:])) == 2
        # Both live at once only while the hidden one does: 8 + 2 + 2, not 8 + 4 + 2 + 2.
        assert b.place.arenas == [12 * MIB + (2 * MIB if b.place.arenas[0] > 12 * MIB else 0)]


def test_bytes_another_stream_uses_are_not_handed_out() -> None:
    with bench() as b:
        host = b.host

        def step(touched: bool, finish: bool = True) -> None:
            first = host.allocate(4 * MIB)
            if touched:
                assert host.touch(first, 5)
                host.in_use[first] = 4 * MIB  # the checker watches them
            host.free(first)
            second = host.allocate(4 * MIB)  # planned to lie where the first did
            host.free(second)
            if touched:
                assert host.events == 1
                if finish:
                    host.finish(5)
                    host.in_use.clear()
            b.pool.mark()

        for _ in range(5):
            step(touched=False)
        assert b.pool.summary().planned > 0
        step(touched=True)
        assert b.pool.summary().displaced == 1
        step(touched=False)
        assert host.events == 0
        assert b.pool.summary().displaced == 1


def test_its_own_stream_is_no_other_stream() -> None:
    with bench() as b:
        for _ in range(5):
            block = b.host.allocate(4 * MIB, stream=3)
            b.host.touch(block, 3)
            b.host.free(block)
            b.pool.mark()
        assert b.host.events == 0
        assert b.pool.summary().displaced == 0


def test_each_stream_has_an_arena_of_its_own() -> None:
    with bench() as b:
        for _ in range(6):
            for stream in (1, 2):
                block = b.host.allocate(4 * MIB, stream=stream)
                b.host.free(block)
            b.pool.mark()
        assert b.place.arenas == [4 * MIB, 4 * MIB]
        assert b.pool.summary().displaced == 0


def test_while_paused_no_event_is_recorded_or_asked_for() -> None:
    with bench() as b:
        for _ in range(5):
            block = b.host.allocate(4 * MIB)
            b.host.free(block)
            b.pool.mark()
        block = b.host.allocate(4 * MIB)
        b.host.touch(block, 5)
        b.host.pause(True)
        b.host.free(block)
        assert b.host.events == 0
        b.host.in_use[block] = 4 * MIB
        other = b.host.allocate(4 * MIB)  # not there: nobody knows yet what stream 5 does
        b.host.pause(False)
        assert b.host.events == 1
        b.host.finish(5)
        b.host.in_use.clear()
        b.host.free(other)


def test_an_arena_goes_back_with_its_last_block_and_never_before() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(6):
            left = train(b, left=left)
        assert b.host.bytes > 0
        b.pool.stop()
        assert b.host.bytes == b.place.arenas[-1]  # the gradients live in it
        for block in left[:-1]:
            b.host.free(block)
        assert b.host.bytes == b.place.arenas[-1]
        b.host.free(left[-1])
        assert b.host.bytes == 0


def test_a_second_session_starts_from_nothing() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(6):
            left = train(b, left=left)
        b.pool.stop()
        for block in left:
            b.host.free(block)
        b.pool = Pool(b.host.core, b.place, b.told.append)
        left = []
        for i in range(8):
            left = train(b, 2, left=left)
            assert b.pool.summary().plans == (i >= 2)
        summary = b.pool.summary()
        assert summary.replayed == 5
        assert summary.unplanned == summary.displaced == 0


def test_without_room_for_an_arena_training_goes_on() -> None:
    with bench(capacity=22 * MIB) as b:
        held = b.host.allocate(8 * MIB)
        left: list[int] = []
        for _ in range(60):
            left = train(b, left=left)
        assert b.pool.summary().plans == 0
        assert len(b.told) == 1
        assert 1 < len(b.place.arenas) < 4  # asked for again after a while, not in every step
        assert "has no room for an arena of" in b.told[0]
        b.host.free(held)
        for _ in range(60):
            left = train(b, left=left)
        assert b.pool.summary().plans == 1


def test_out_of_memory_behind_takes_what_the_arena_has() -> None:
    with bench() as b:
        for _ in range(5):
            block = b.host.allocate(64 * MIB)
            b.host.free(block)
            b.pool.mark()
        b.host.limit(b.host.bytes)
        odd = b.host.allocate(8 * MIB)  # no plan foresaw it, and there is nothing behind
        assert b.host.bytes == 64 * MIB
        b.host.free(odd)


def test_out_of_memory_waits_for_what_other_streams_use() -> None:
    with bench() as b:
        for _ in range(5):
            block = b.host.allocate(64 * MIB)
            b.host.free(block)
            b.pool.mark()
        block = b.host.allocate(64 * MIB)
        b.host.touch(block, 5)
        b.host.free(block)  # another stream may still use it
        b.host.limit(b.host.bytes)
        odd = b.host.allocate(32 * MIB)
        assert b.host.bytes == 64 * MIB  # the host lets a stream finish when it is waited for
        b.host.free(odd)


def test_what_fits_without_an_arena_can_be_tried_again() -> None:
    """A larger shape that fits nowhere beside the arena is refused once, not for ever."""
    with bench() as b:
        for _ in range(5):
            block = b.host.allocate(60 * MIB)
            b.host.free(block)
            b.pool.mark()
        assert b.host.bytes == 60 * MIB
        held = b.host.allocate(21 * MIB)
        b.host.limit(100 * MIB)
        size = int(9.8 * MIB)
        blocks = []
        for _ in range(8):
            block = b.host.library.lowtide_pool_allocate(b.host.handle, size, 0, None)
            if block is None:
                break
            blocks.append(block)
        assert len(blocks) < 8  # 78 MiB: they would fit in what is free, but for the arena's rest
        for block in blocks:
            b.host.library.lowtide_pool_free(b.host.handle, block)
        for _ in range(3):  # and the arena does not come back at once, to be in the way again
            retried = [b.host.allocate(size) for _ in range(8)]
            for block in retried:
                b.host.free(block)
            b.pool.mark()
        assert b.place.arenas == [60 * MIB]
        b.host.free(held)


def test_a_refused_arena_leaves_the_old_one() -> None:
    with bench() as b:
        for _ in range(5):
            block = b.host.allocate(64 * MIB)
            b.host.free(block)
            b.pool.mark()
        b.host.limit(100 * MIB)
        assert not b.host.core.set_arena(0, 200 * MIB)
        assert b.host.bytes == 64 * MIB
        block = b.host.allocate(64 * MIB)
        assert b.host.core.mark()[0].planned == 1
        b.host.free(block)


def test_a_refused_plan_leaves_the_old_one() -> None:
    with bench() as b:

        def step(late: bool) -> None:
            first = b.host.allocate(40 * MIB)
            if not late:
                b.host.free(first)
            second = b.host.allocate(40 * MIB)
            if late:
                b.host.free(first)
            b.host.free(second)
            b.pool.mark()

        for _ in range(6):
            step(late=False)
        assert b.host.bytes == 40 * MIB
        b.host.limit(100 * MIB)  # enough for the late step, not for an arena of 80 beside 40
        held = b.host.allocate(MIB)
        for _ in range(6):
            step(late=True)
        before = b.pool.summary()
        assert before.plans == 1
        for _ in range(6):
            step(late=False)
        assert b.pool.summary().unplanned == before.unplanned
        b.host.free(held)


def test_a_step_that_never_goes_by_its_plan_alone_is_trimmed_too() -> None:
    with bench() as b:
        left: list[int] = []
        for i in range(40):
            odd = b.host.allocate(MIB + 4096 * i)  # another size each time
            left = train(b, left=left)
            b.host.free(odd)
        assert b.pool.summary().plans <= 1
        left = train(b, left=left)
        for _ in range(6):
            left = train(b, left=left)
        trims = b.place.trims
        assert trims
        for i in range(40):
            odd = b.host.allocate(MIB + 4096 * i)
            left = train(b, left=left)
            b.host.free(odd)
        assert 2 <= b.place.trims - trims <= 6


def test_a_mark_without_allocations_does_nothing() -> None:
    with bench() as b:
        left: list[int] = []
        for _ in range(3):
            left = train(b, left=left)  # planned: something is due to be trimmed
        trims, arenas = b.place.trims, len(b.place.arenas)
        for _ in range(20):
            b.pool.mark()
        assert (b.place.trims, len(b.place.arenas)) == (trims, arenas)


def test_out_of_memory_gives_an_empty_arena_back() -> None:
    with bench() as b:
        for _ in range(5):
            block = b.host.allocate(64 * MIB)
            b.host.free(block)
            b.pool.mark()
        b.host.limit(96 * MIB)
        large = b.host.allocate(80 * MIB)  # larger than the arena
        assert b.host.bytes == 80 * MIB
        b.host.free(large)
        b.host.limit(1 << 33)
        b.pool.mark()
        for _ in range(6):  # and the plan gets its arena again
            block = b.host.allocate(64 * MIB)
            b.host.free(block)
            b.pool.mark()
        assert b.host.bytes == 64 * MIB


def test_no_memory_at_all_is_said_and_leaves_the_pool_sound() -> None:
    with bench(capacity=16 * MIB) as b:
        block = b.host.allocate(12 * MIB)
        refused = b.host.library.lowtide_pool_allocate(b.host.handle, 8 * MIB, 0, None)
        assert refused is None
        b.host.free(block)
        b.host.free(b.host.allocate(8 * MIB))


def test_homes_hold_what_is_placed_and_go_with_it() -> None:
    with bench() as b:
        library, handle = b.host.library, b.host.handle
        home = library.lowtide_pool_home(handle, 2 * MIB, 0, None)
        first = library.lowtide_pool_place(handle, home, 0, 1000)
        assert first == home
        assert library.lowtide_pool_place(handle, home, 512, 512) is None  # shares bytes
        assert library.lowtide_pool_place(handle, home, 1000, 512) is None  # unaligned
        assert library.lowtide_pool_place(handle, home, 2 * MIB, 512) is None  # outside
        second = library.lowtide_pool_place(handle, home, 1024, 512)
        b.host.core.dismiss(home)
        assert library.lowtide_pool_free(handle, first) == 1
        assert library.lowtide_pool_free(handle, first) == 0  # twice
        assert b.host.bytes == 2 * MIB
        assert library.lowtide_pool_free(handle, second) == 1
        assert b.host.bytes == 0


def test_ages_tell_what_is_new() -> None:
    with bench() as b:
        old = b.host.allocate(MIB)
        b.pool.mark()
        b.pool.mark()
        new = b.host.allocate(MIB)
        assert b.host.core.age(old) == 2
        assert b.host.core.age(new) == 0
        assert b.host.core.age(12345) == -1


def test_a_plan_that_is_none_is_refused() -> None:
    with bench() as b:
        b.host.free(b.host.allocate(MIB))
        b.pool.mark()
        for offsets in ([100], [-2], [(1 << 62) + 512]):
            with pytest.raises(AssertionError):
                b.host.core.add_plan(0, [MIB], [offsets])
        with pytest.raises(AssertionError):
            b.host.core.add_plan(7, [MIB], [[0]])


def test_a_wrong_plan_costs_memory_and_nothing_else() -> None:
    # All at one place, though all live at once: only one at a time may have it.
    with bench() as b:
        b.host.free(b.host.allocate(MIB))
        b.pool.mark()
        b.host.core.set_arena(0, 4 * MIB)
        b.host.core.add_plan(0, [MIB, MIB, 2 * MIB], [[0, 0, 512]])
        b.host.core.set_mode(Mode.REPLAY)
        blocks = [b.host.allocate(size) for size in (MIB, MIB, 2 * MIB)]  # the host checks
        lane = b.host.core.mark()[0]
        assert (lane.planned, lane.displaced) == (1, 2)
        for block in blocks:
            b.host.free(block)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_the_program_does_blocks_in_use_share_no_byte(data: st.DataObject) -> None:
    """Steps of a few shapes, with strangers, late frees, streams and captures thrown in."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = random.Random(seed)
    with bench(capacity=rng.choice([1 << 33, 200 * MIB])) as b:
        host = b.host
        shapes = [
            [rng.choice([512, 4096, MIB, 3 * MIB, 5 * MIB + 1]) for _ in range(rng.randint(3, 25))]
            for _ in range(3)
        ]
        paused = False
        for _ in range(rng.randint(10, 40)):
            open_blocks = []
            for size in rng.choice(shapes):
                stream = rng.choice([0, 0, 0, 1])
                if rng.random() < 0.02:
                    open_blocks.append(host.allocate(rng.randint(1, 4 * MIB), stream))
                open_blocks.append(host.allocate(size, stream))
                if rng.random() < 0.05:
                    host.touch(rng.choice(open_blocks), rng.choice([0, 1, 4]))
                while open_blocks and rng.random() < 0.45:
                    host.free(open_blocks.pop(rng.randrange(len(open_blocks))))
                if rng.random() < 0.05:
                    host.finish(rng.choice([0, 1, 4]))
                if rng.random() < 0.01:
                    paused = not paused
                    host.pause(paused)
            b.pool.mark()
            for block in list(host.live):
                if rng.random() < 0.7:
                    host.free(block)
        host.pause(False)


def test_threads_allocate_at_the_same_time() -> None:
    with bench() as b:
        library, handle = b.host.library, b.host.handle
        left: list[int] = []
        for _ in range(6):
            left = train(b, left=left)
        errors: list[str] = []
        lock = threading.Lock()
        taken: dict[int, int] = {}

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(400):
                size = rng.choice([MIB, 2 * MIB, 3 * MIB])
                block = library.lowtide_pool_allocate(handle, size, 0, None)
                with lock:
                    for other, length in taken.items():
                        if block < other + length and other < block + size:
                            errors.append("two threads got the same bytes")
                    taken[block] = size
                with lock:
                    del taken[block]
                library.lowtide_pool_free(handle, block)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            b.host.core.mark()
        for thread in threads:
            thread.join()
        assert not errors


def record(sizes: list[int], made: list[int], freed: list[int], ticks: int) -> StepRecord:
    return StepRecord(sizes, made, freed, [], [], ticks)


def test_a_plan_needs_no_more_than_the_load() -> None:
    # bytes 1..2 | . b b .
    # bytes 0..1 | a a c c
    plan = plan_step(record([512, 512, 512], [0, 1, 3], [2, 5, 6], 6))
    assert plan.phases == [[0, 512, 0]]
    assert plan.height == plan.max_load == 1024


def test_what_outlives_two_steps_is_left_outside() -> None:
    plan = plan_step(record([512, 512], [0, 1], [2, -1], 4))
    assert plan.phases == [[0, -1]]
    plan = plan_step(record([512, 512], [0, 1], [2, 99], 4))
    assert [phase[1] for phase in plan.phases] == [-1, -1]


def test_lower_plans_leave_their_gradients_where_the_highest_does() -> None:
    high = plan_step(record([4096, 1024], [0, 1], [2, 5], 4))
    low = plan_step(record([2048, 1024], [0, 1], [2, 5], 4), beside=high, room=high.height)
    assert low.phases[0][1] == high.phases[0][1]
    assert low.height == high.height
    cramped = plan_step(record([2048, 1024], [0, 1], [2, 5], 4), beside=high, room=3072)
    assert cramped.height == 3072  # no room to follow suit: as low as can be


def test_widened_lives_are_the_longest_seen() -> None:
    first = record([512, 512, 512], [0, 1, 2], [3, 4, -1], 6)
    second = record([512, 512, 512], [0, 1, 2], [4, 3, 5], 6)
    assert widened(first, second).freed == [4, 4, -1]
