"""The pool over main memory: what it records, what it replays, and what it never does."""

import itertools
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import MIB, bench, train


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
