"""The two copy lanes: FIFO each, slowed down while both are busy.

Copies are put in with the moment from which they may start; how they went is worked out only when
somebody asks, so that a copy costs two events however many ops pass meanwhile. This is sound
because compute puts copies in in order of time, and whoever waits puts none in meanwhile: what is
put in later cannot start before the moment asked about.
"""

import math

from lowtide._ir import Machine

Pending = list[tuple[int, float]]  # swap and the work left, in the order of the lane


class Lane:
    """Copies in one direction; the k-th is the k-th put in. `done` counts those that ended."""

    __slots__ = ("done", "ends", "left", "ready", "swaps", "works")

    def __init__(self) -> None:
        self.swaps: list[int] = []
        self.ready: list[float] = []
        self.works: list[float] = []
        self.ends: list[float] = []
        self.done = 0
        self.left = 0.0  # work left of copy `done`; its whole work until it has started

    def put(self, swap: int, ready: float, work: float) -> None:
        """Append a copy."""
        if self.done == len(self.works):
            self.left = work
        self.swaps.append(swap)
        self.ready.append(ready)
        self.works.append(work)

    def span(self, copy: int) -> tuple[float, float]:
        """When a copy that has ended ran."""
        before = self.ends[copy - 1] if copy else 0.0
        return max(self.ready[copy], before), self.ends[copy]

    def pending(self, tolerance: float) -> Pending:
        """What is not done; a copy that lacks no more than `tolerance` is."""
        left = self.works[self.done :]
        if left:
            left[0] = self.left
        found = zip(self.swaps[self.done :], left, strict=True)
        return [(swap, work) for swap, work in found if work > tolerance]


class Lanes:
    """Both lanes at `now`, which only moves on when `advance` is called."""

    __slots__ = ("back", "now", "out", "together")

    def __init__(self, machine: Machine) -> None:
        self.out = Lane()
        self.back = Lane()
        self.together = machine.together
        self.now = 0.0

    def advance(self, out_count: int, back_count: int, limit: float = math.inf) -> None:
        """Go on until so many copies of each lane have ended, or until `limit`."""
        out, back, rate, now = self.out, self.back, self.together, self.now
        out_ready, out_works, out_ends = out.ready, out.works, out.ends
        back_ready, back_works, back_ends = back.ready, back.works, back.ends
        i, out_left, outs = out.done, out.left, len(out_works)
        j, back_left, backs = back.done, back.left, len(back_works)
        while (i < out_count or j < back_count) and now < limit:
            out_from = out_ready[i] if i < outs else math.inf
            back_from = back_ready[j] if j < backs else math.inf
            if out_from <= now:
                if back_from <= now:
                    pace, until = rate, limit
                    out_end, back_end = now + out_left / rate, now + back_left / rate
                else:
                    pace, until = 1.0, min(back_from, limit)
                    out_end, back_end = now + out_left, math.inf
            elif back_from <= now:
                pace, until = 1.0, min(out_from, limit)
                out_end, back_end = math.inf, now + back_left
            else:
                now = min(out_from, back_from, limit)
                continue
            then = min(out_end, back_end, until)
            passed = (then - now) * pace
            if out_end <= then:
                out_ends.append(out_end)
                i += 1
                out_left = out_works[i] if i < outs else 0.0
            elif out_from <= now:
                out_left -= passed
            if back_end <= then:
                back_ends.append(back_end)
                j += 1
                back_left = back_works[j] if j < backs else 0.0
            elif back_from <= now:
                back_left -= passed
            now = then
        out.done, out.left = i, out_left
        back.done, back.left = j, back_left
        self.now = now
