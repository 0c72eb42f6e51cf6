"""The pool over main memory: streams, arenas that come and go, and no memory left."""

from collections.abc import Mapping

import pytest
from pools import MIB, Host, Place, bench, plan_one, train

from lowtide._runtime.core import Mode
from lowtide._runtime.pool import Pool


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


def test_each_device_has_an_arena_of_its_own() -> None:
    with bench() as b:
        for _ in range(6):
            for device in (0, 1):
                block = b.host.allocate((4 + 2 * device) * MIB, device=device)
                b.host.free(block)
            b.pool.mark()
        assert b.place.arenas == [4 * MIB, 6 * MIB]
        assert b.place.settled == [0, 1]
        for device in (0, 1):
            counts = b.host.core.count(device)
            assert counts.arenas == 1
            assert counts.arena_bytes == (4 + 2 * device) * MIB
        assert b.pool.summary().replayed == 3
        assert b.pool.summary().displaced == 0


def test_while_paused_no_event_is_recorded_or_asked_for() -> None:
    with bench() as b:
        plan_one(b, 4 * MIB)
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


class _Parking(Place):
    """Makes room for an arena: what a step has left behind goes into it, where plans have it."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.core)
        self._host = host
        self.moved: dict[int, int] = {}

    def set_arena(
        self, lane: int, size: int, device: int, *, grows: bool, left: Mapping[int, int]
    ) -> bool:
        host = self._host
        parked = {}
        for block in list(host.live):
            if host.core.age(block) == 1:
                parked[block] = host.core.index(lane, block), host.live[block][0]
                assert host.core.index(lane + 1, block) == -1
                host.free(block)
        made = super().set_arena(lane, size, device, grows=grows, left=left)
        assert made
        for block, (index, length) in parked.items():
            self.moved[block] = host.place_in(lane, left[index], length)
        taken = next(iter(left.values()))
        assert host.library.lowtide_pool_place_in(host.handle, lane, taken, 512) is None
        assert host.library.lowtide_pool_place_in(host.handle, lane, size, 512) is None
        assert host.library.lowtide_pool_place_in(host.handle, lane + 1, 0, 512) is None
        return made

    def now(self, blocks: list[int]) -> list[int]:
        """Where they are by now; told once, since addresses are used again."""
        found = [self.moved.get(block, block) for block in blocks]
        self.moved.clear()
        return found


def test_what_the_last_step_left_behind_lies_where_plans_have_it() -> None:
    """So that the first step in a new arena follows its plan, in no more memory than that."""
    with bench() as b:
        place = _Parking(b.host)
        b.pool = Pool(b.host.core, place, b.told.append, lambda *_: False)
        left: list[int] = []
        moved = 0
        for i in range(9):
            left = train(b, left=left)
            moved += len(place.moved)
            left = place.now(left)
            if place.arenas:
                b.host.limit(place.arenas[0])  # nothing may lie beside it
            assert (b.pool.summary().plans == 1) == (i >= 2)
        summary = b.pool.summary()
        assert moved == 3
        assert summary.replayed == 6
        assert summary.unplanned == summary.displaced == 0


class _Clearing(_Parking):
    """Takes arenas away, with what lies in them put elsewhere."""

    def clear(self, lanes: Mapping[int, int]) -> None:
        host = self._host
        host.core.set_mode(Mode.PASS)
        sizes = {block: host.live[block][0] for block in list(host.live) if host.core.holds(block)}
        for block in sizes:
            host.free(block)
        super().clear(lanes)
        assert host.core.count(0).arenas == 0
        self.moved |= {block: host.allocate(size) for block, size in sizes.items()}


@pytest.mark.parametrize("why", ["other steps", "no room"])
def test_where_steps_have_become_others_the_arena_goes_and_comes_again(why: str) -> None:
    """Also if something lives in it that no step frees."""
    with bench() as b:
        place = _Clearing(b.host)
        b.pool = Pool(b.host.core, place, b.told.append, lambda *_: False)
        left: list[int] = []
        for _ in range(6):
            left = place.now(train(b, left=left))
        assert b.pool.summary().replayed > 0
        for block in left:
            b.host.free(block)
        left = []
        stays = b.host.place_in(0, 0, MIB)
        if why == "no room":
            b.host.limit(b.host.bytes)
            asked = b.host.library.lowtide_pool_allocate
            assert asked(b.host.handle, place.arenas[0], 0, None) is None
            b.pool.mark()
            b.host.limit(1 << 33)
        else:
            b.pool.mark(anew=True)
        assert place.cleared == [{0: 0}]
        assert b.pool.summary().plans == 0
        b.host.free(place.now([stays])[0])
        marks = 60 if why == "no room" else 6  # which is asked for again only after a while
        for _ in range(marks):
            left = place.now(train(b, 2, left=left))
        assert b.pool.summary().plans == 1
        assert len(place.arenas) == 2 and len(place.cleared) == 1
        assert place.settled == [0, 0]  # what stays is gathered again before


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


def test_without_room_steps_are_asked_to_need_less_before_anybody_is_told() -> None:
    asked: list[int] = []

    def shrink(less: int, _: float) -> bool:
        asked.append(less)
        return len(asked) < 3

    with bench(capacity=22 * MIB) as b:
        b.pool = Pool(b.host.core, b.place, b.told.append, shrink)
        held = b.host.allocate(8 * MIB)
        left: list[int] = []
        while len(asked) < 3:
            assert not b.told
            left = train(b, left=left)
        assert len(b.told) == 1
        assert len(b.place.arenas) == 3
        assert asked == [int(size // 10 + 0.005 * size) for size in b.place.arenas]
        b.host.free(held)


def test_out_of_memory_behind_takes_what_the_arena_has() -> None:
    with bench() as b:
        plan_one(b, 64 * MIB)
        b.host.limit(b.host.bytes)
        odd = b.host.allocate(8 * MIB)  # no plan foresaw it, and there is nothing behind
        assert b.host.bytes == 64 * MIB
        b.host.free(odd)


def test_out_of_memory_waits_for_what_other_streams_use() -> None:
    with bench() as b:
        plan_one(b, 64 * MIB)
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
        plan_one(b, 60 * MIB)
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
        plan_one(b, 64 * MIB)
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
        plan_one(b, 64 * MIB)
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
        assert b.host.core.holds(second)
        elsewhere = b.host.allocate(MIB)
        assert not b.host.core.holds(elsewhere)
        b.host.free(elsewhere)
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
