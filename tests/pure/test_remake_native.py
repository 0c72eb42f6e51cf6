"""The native pass over a step does what the readable one does, to the last bit."""

from collections import Counter
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from strategies import traces
from swaps import busy_traces
from there_and_back import there_and_back

from lowtide._analyze.load import find_peak
from lowtide._ir import Link, Machine, OpIndex, Remake, Swap, Trace, ValueId
from lowtide._policy import remake_native
from lowtide._policy.ground import Ground, Runtime
from lowtide._policy.joint import Task
from lowtide._policy.remake import remake, stays_of
from lowtide._policy.remake_pass import run_pass
from lowtide._policy.schedule import schedule
from lowtide._policy.taste import Stuck, Taste
from lowtide._trace.text import parse

POWERS = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
LINK = Link((0, 9), (0.25, 2.0))
MACHINE = Machine("test", 1 << 40, 1 << 40, LINK, LINK)
TASTES = st.builds(Taste, *[st.sampled_from(POWERS)] * 3, st.booleans())

Found = tuple[float, list[Remake]] | tuple[int, int] | None


def swaps_of(ground: Ground, limit: int, draw: Random) -> tuple[Swap, ...]:
    """Some of what could be swapped."""
    problem = Task(ground, MACHINE, limit, None, 1, None).problem()
    some = [one for one in problem.found if draw.random() < 0.4]
    return tuple(schedule(problem.stage, MACHINE, some, draw.choice((None, 0, limit))))


def there_and_all_the_way_back(draw: Random, layers: int) -> Trace:
    """Each made from one or two of the last, and all read again in reverse, as in backward."""
    lines = ["have x:10 | input"]
    names = ["x"]
    reads: list[list[str]] = []
    for i in range(layers):
        reads.append(draw.sample(names[-3:], min(len(names), draw.choice((1, 1, 2)))))
        names.append(f"h{i}")
    kept = [name for name in names[1:] if draw.random() < 0.8]
    last = {name: i for i, sources in enumerate(reads) for name in sources}
    for i, sources in enumerate(reads):
        time, size = draw.choice((1, 1, 2, 9)), draw.randint(1, 60)
        lines.append(f"f{i % 5} {' '.join(sources)} -> h{i}:{size} | {time}us")
        over = [name for name, at in last.items() if at == i and name not in {"x", *kept}]
        lines += [f"free {name}" for name in over]
    gradient = ""
    for name in reversed(kept):
        lines.append(f"b {name} {gradient} -> g{name}:{draw.randint(1, 9)} | 2us")
        lines += [f"free {one}" for one in (name, gradient) if one]
        gradient = f"g{name}"
    return parse("\n".join(lines))


def live(trace: Trace, draw: Random) -> Runtime:
    """As in a live step: something can be done only now and then, and some of it later."""
    held = {
        ValueId(i): OpIndex(min(len(trace.ops) - 1, value.first + draw.choice((1, 1, 2, 4))))
        for i, value in enumerate(trace.values)
    }
    positions = [at for at in range(len(trace.ops)) if draw.random() < 0.7]
    every = range(max(len(trace.ops), len(trace.values)))
    return Runtime(every, held, held, held, tuple(positions))


class _Both:
    """A step, and one trial on it by both passes."""

    def __init__(self, trace: Trace, draw: Random) -> None:
        self.ground = Ground(trace, live(trace, draw) if draw.random() < 0.5 else None)
        self.peak = find_peak(trace).bytes
        self._draw = draw

    def compare(self, share: float, taste: Taste, most: float) -> str:
        """How it ends."""
        ground, draw, limit = self.ground, self._draw, int(share * self.peak)
        weights = None
        if draw.random() < 0.5:
            weights = np.array([draw.choice((0.05, 0.3, 1.0, 7.0)) for _ in ground.size])
        holds = frozenset(value for value in ground.holdable if draw.random() < 0.5)
        swaps = swaps_of(ground, limit, draw) if draw.random() < 0.5 else ()
        native = remake_native.load()
        assert native is not None

        def outcome(run: remake_native.Run) -> Found:
            try:
                return run(ground, limit, taste, weights, most, stays_of(ground, swaps), holds)
            except Stuck as stuck:
                return stuck.op, stuck.needed_bytes

        ours, theirs = outcome(run_pass), outcome(native)
        assert ours == theirs
        if ours is None:
            return "without end"
        return "stuck" if isinstance(ours[1], int) else "found"


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=300)
@given(
    trace=st.one_of(there_and_back(), there_and_back(), traces(max_ops=16), busy_traces()),
    share=st.floats(0.6, 1),
    taste=TASTES,
    seed=st.integers(0, 1 << 20),
    most=st.sampled_from([float("inf"), 1e-4, 1e-5]),
)
def test_both_do_the_same(trace: Trace, share: float, taste: Taste, seed: int, most: float) -> None:
    event(_Both(trace, Random(seed)).compare(share, taste, most))


def test_both_do_the_same_where_much_is_made_again() -> None:
    ends: Counter[str] = Counter()
    for seed in range(120):
        draw = Random(seed)
        both = _Both(there_and_all_the_way_back(draw, draw.randint(20, 60)), draw)
        for _ in range(3):
            cost, size, distance = (draw.choice(POWERS) for _ in range(3))
            taste = Taste(cost, size, distance, draw.random() < 0.7)
            ends[both.compare(draw.uniform(0.2, 0.9), taste, draw.choice((1.0, 2e-5)))] += 1
    assert ends["found"] > 100
    assert ends["stuck"] > 5
    assert ends["without end"] > 5


def test_a_long_step_has_room_for_all_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["have x:10 | input"]
    lines += [f"f {'x' if not i else f'h{i - 1}'} -> h{i}:100 | 1us" for i in range(60)]
    lines += [
        f"b h{i}{'' if i == 59 else f' g{i + 1}'} -> g{i}:1 | 1us" for i in reversed(range(60))
    ]
    ground = Ground(parse("\n".join(lines)))
    run = partial(remake, ground, 1500, Taste())
    expected = run()
    monkeypatch.setattr(remake_native, "_ROOM", 2)
    assert run() == expected
    assert expected is not None
    assert len(expected[1]) > 100


def test_without_a_compiler_the_readable_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(
        parse("have x:10 | input\nf x -> a:9 | 1us\nf a -> b:9 | 1us\ng b a -> c:9 | 1us")
    )
    expected = remake(ground, 40, Taste())
    monkeypatch.setattr(remake_native, "load", lambda: None)
    assert remake(ground, 40, Taste()) == expected


def test_the_native_one_is_here() -> None:
    assert remake_native.load() is not None
