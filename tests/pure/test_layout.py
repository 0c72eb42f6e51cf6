"""Layouts: the laws every method obeys, and the cases that taught us something."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import TANGLE, Problem, brute_clash, moments, problems, run

from lowtide import BadInput, Buffer, pack
from lowtide._layout import native
from lowtide._layout.buffers import Fit, copies, max_load
from lowtide._layout.check import find_clash
from lowtide._layout.exact import exact
from lowtide._layout.native import Request
from lowtide._layout.pack import Method, Packing, load_bound
from lowtide._layout.reference.problem import compress, dominated
from lowtide._layout.reference.search import search as reference_search
from lowtide._layout.smartpool import smartpool
from lowtide._native import LAYOUT, NoNative, build

pytest.importorskip("ortools", reason="the exact method is an extra")


def offsets(packing: Packing) -> list[int]:
    return [buffer.offset for buffer in packing.buffers if buffer.offset is not None]


def fixing(problem: Problem, packing: Packing, which: list[bool]) -> Problem:
    """The problem with some buffers fixed to where they lie."""
    fixed = [
        replace(b, offset=at.offset if fix else None)
        for b, at, fix in zip(problem.buffers, packing.buffers, which, strict=False)
    ]
    return replace(problem, buffers=fixed + problem.buffers[len(fixed) :])


@settings(deadline=None, max_examples=150)
@given(problems(lanes=True), st.sampled_from([m for m in Method if m is not Method.EXACT]))
def test_every_method_makes_a_layout_and_knows_its_height(problem: Problem, method: Method) -> None:
    packing = run(problem, method=method)
    placed = offsets(packing)
    assert len(placed) == len(problem.buffers)
    assert not brute_clash(problem, problem.buffers, placed)
    assert packing.height == max(at + b.size for at, b in zip(placed, problem.buffers, strict=True))
    loads = [
        sum(b.size for b in problem.buffers if moment in moments(b, problem.period))
        for moment in range(12)
    ]
    assert packing.max_load == max(loads) <= packing.bound <= packing.height


@settings(deadline=None, max_examples=300)
@given(problems(most=5, lanes=True, largest=6), st.data())
def test_the_checker_agrees_with_comparing_every_pair(
    problem: Problem, data: st.DataObject
) -> None:
    count = len(problem.buffers)
    places = data.draw(st.lists(st.integers(-1, 12), min_size=count, max_size=count))
    found = find_clash(problem.buffers, places, align=problem.align, period=problem.period)
    assert (found is not None) == brute_clash(problem, problem.buffers, places)


@settings(deadline=None, max_examples=60)
@given(problems(most=7), st.lists(st.booleans(), max_size=7))
def test_bounds_and_proofs_agree_with_the_exact_method(problem: Problem, which: list[bool]) -> None:
    problem = fixing(problem, run(problem, method="smartpool-first"), which)
    found = run(problem)
    best = exact(problem.buffers, align=problem.align, period=problem.period, seconds=30)
    assert best.proved and best.offsets is not None
    assert not brute_clash(problem, problem.buffers, best.offsets)
    lowest = max(at + b.size for at, b in zip(best.offsets, problem.buffers, strict=True))
    assert best.bound == lowest
    assert load_bound(problem.buffers, problem.align, problem.period) <= lowest
    assert found.bound <= lowest <= found.height
    assert not found.optimal or found.height == lowest
    if problem.align == 1:  # problems this small are searched to the end
        assert found.height == lowest


@settings(deadline=None, max_examples=150)
@given(
    problems(most=24, largest=400),
    st.lists(st.booleans(), max_size=24),
    st.integers(0, 5),
    st.sampled_from([0, 50, 4000]),
    st.sampled_from([None, 100, 900]),
    st.integers(1, 3),
)
def test_native_and_reference_are_one_algorithm(
    problem: Problem,
    which: list[bool],
    seed: int,
    nodes: int,
    capacity: int | None,
    threads: int,
) -> None:
    problem = fixing(problem, run(problem, nodes=0), which)
    request = Request(
        lower=[b.lower for b in problem.buffers],
        upper=[b.upper for b in problem.buffers],
        size=[b.size for b in problem.buffers],
        fixed=[-1 if b.offset is None else b.offset for b in problem.buffers],
        period=problem.period or 0,
        align=problem.align,
        goal=capacity or 0,
        seed=seed,
        nodes=nodes,
        threads=threads,
    )
    assert native.search(request) == reference_search(request)


@pytest.mark.parametrize("seed", range(12))
def test_native_and_reference_agree_on_larger_problems(seed: int) -> None:
    """Large enough for parts, dominated buffers, groups and many rounds."""
    source = random.Random(seed)
    end = source.choice([40, 150])
    lower = [source.randrange(end) for _ in range(source.choice([60, 110]))]
    upper = [at + source.randint(1, source.choice([8, 30])) for at in lower]
    size = [source.randint(1, source.choice([9, 90])) for _ in lower]
    request = Request(lower, upper, size, [-1] * len(lower), nodes=6000, seed=seed, threads=2)
    answer = native.search(request)
    assert answer == reference_search(request)
    fixed = [at if source.random() < 0.1 else -1 for at in answer.offsets]
    request = replace(request, fixed=fixed, goal=answer.height + seed % 3, nodes=4000)
    assert native.search(request) == reference_search(request)


@settings(deadline=None, max_examples=100)
@given(problems(most=10), st.integers(1, 200))
def test_dominated_buffers_find_room_however_the_others_lie(
    problem: Problem, capacity: int
) -> None:
    # Each neighbour of size s rules out at most s + size - 1 offsets: some must be left.
    lives = [(b.lower, min(b.upper, 12), max(0, b.upper - 12)) for b in problem.buffers]
    reduced = compress(lives, [b.size for b in problem.buffers], [-1] * len(lives))
    order = dominated(reduced, capacity)
    rest = set(range(len(lives)))
    for i in order:
        size = reduced.size[i]
        near = [j for j in rest if j != i and reduced.meet(i, j)]
        assert sum(reduced.size[j] + size - 1 for j in near) < capacity - size + 1
        rest.remove(i)
    for i in rest:  # and none is missed, but where a neighbour is counted twice
        size = reduced.size[i]
        near = [j for j in rest if j != i and reduced.meet(i, j)]
        twice = sum(reduced.size[j] + size - 1 for j in near) * 2 + 2 * size
        assert twice > capacity - size


def staircase(count: int) -> Problem:
    """Sizes that leave holes for greedy passes: deep, and with room for backtracking."""
    return Problem(
        [
            Buffer(f"b{i}", (i * 7) % 19, (i * 7) % 19 + 2 + (i * 5) % 7, 3 + (i * 11) % 17)
            for i in range(count)
        ]
    )


def test_the_same_seed_and_nodes_give_the_same_layout_on_any_number_of_threads() -> None:
    problem = staircase(60)
    layouts = [
        offsets(run(problem, nodes=nodes, seed=seed, threads=threads))
        for nodes in (2000, 20000)
        for seed in (0, 1)
        for threads in (1, 2, 4, 1)
    ]
    for start in range(0, len(layouts), 4):
        assert all(layout == layouts[start] for layout in layouts[start : start + 4])


def test_smartpool_is_as_published() -> None:
    # Largest first; equal ones by when they are allocated; 'low' leaves a gap of 5 at the bottom
    # at the moment 'late' needs one: first fit takes it, best fit looks only between ranges.
    buffers = [
        Buffer("wide", 0, 2, 10),
        Buffer("low", 0, 6, 8),
        Buffer("late", 3, 6, 5),
        Buffer("later", 3, 6, 5),
    ]
    assert smartpool(buffers, Fit.FIRST) == [0, 10, 0, 5]
    assert smartpool(buffers, Fit.BEST) == [0, 10, 18, 23]
    # the smallest gap that holds it, not the lowest: 4 under 'b', 3 under 'd'
    buffers = [
        Buffer("a", 0, 9, 20),
        Buffer("x", 0, 4, 14),
        Buffer("b", 0, 9, 13),
        Buffer("y", 0, 4, 12),
        Buffer("d", 0, 9, 11),
        Buffer("small", 5, 9, 9),
    ]
    assert smartpool(buffers, Fit.BEST)[-1] == 47  # in the 12 of 'y'
    assert smartpool(buffers, Fit.FIRST)[-1] == 20  # in the 14 of 'x'


def test_a_buffer_that_wraps_is_placed_once_and_shared() -> None:
    grad = Buffer("grad", 8, 13, 10)  # into the next step until moment 3
    early, late = Buffer("early", 0, 3, 4), Buffer("late", 3, 8, 10)
    packing = run(Problem([grad, early, late], period=10))
    assert packing.height == 14 and packing.optimal
    clash = find_clash([grad, early], [0, 0], period=10)
    assert clash == "grad and early share byte 0 at moment 0"
    assert find_clash([grad, late], [0, 0], period=10) is None
    longer = find_clash([replace(grad, upper=19)], [0], period=10)
    assert longer == "grad outlives the period: its next life needs another place"


def test_a_buffer_whose_lives_overlap_is_doubled_and_no_other() -> None:
    buffers = [Buffer("once", 2, 12, 3), Buffer("twice", 2, 13, 5), Buffer("thrice", 0, 21, 7)]
    assert [b.name for b in copies(buffers, 10)] == [
        "once",
        *("twice#0", "twice#1"),
        *("thrice#0", "thrice#1", "thrice#2"),
    ]
    packing = run(Problem(buffers, period=10))
    assert packing.height == packing.max_load == 3 + 2 * 5 + 3 * 7
    with pytest.raises(BadInput, match="needs 2 places"):
        run(Problem([Buffer("twice", 0, 11, 5, offset=0)], period=10))


def test_lanes_never_share_bytes() -> None:
    buffers = [Buffer("a", 0, 1, 8), Buffer("b", 1, 2, 8, lane=1), Buffer("c", 2, 3, 8)]
    assert run(Problem(buffers)).height == 16
    assert run(Problem([replace(b, lane=0) for b in buffers])).height == 8
    assert find_clash(buffers, [0, 0, 0]) == "a and b share byte 0 across lanes"
    below = [Buffer("a", 0, 1, 8), Buffer("c", 2, 3, 1), Buffer("b", 1, 2, 8, lane=1)]
    assert find_clash(below, [0, 1, 5]) == "a and b share byte 5 across lanes"
    assert run(Problem(buffers), capacity=16).height == 16
    with pytest.raises(BadInput, match="lane 2 is neither 0 nor 1"):
        run(Problem([Buffer("a", 0, 1, 8, lane=2)]))
    with pytest.raises(BadInput, match="b: fixed to 4, but lane 0 goes up to 8: fix it higher"):
        run(Problem([buffers[0], replace(buffers[1], offset=4)]))
    # below the fixed one there is room for lane 1 that is not used: so no claim to be lowest
    pinned = run(Problem([Buffer("pin", 0, 1, 10, offset=100), Buffer("c", 0, 1, 50, lane=1)]))
    assert pinned.bound == 110 and not pinned.optimal
    # a goal for lane 0 leaves lane 1 what it needs
    tight = [*TANGLE.buffers, Buffer("copy", 0, 9, 5, lane=1)]
    assert run(Problem(tight), capacity=12).height == 12


def test_copies_do_not_take_a_name_that_is_in_use() -> None:
    with pytest.raises(BadInput, match="id 'a#0' was used before"):
        run(Problem([Buffer("a", 0, 11, 5), Buffer("a#0", 0, 1, 3)], period=10))
    with pytest.raises(BadInput, match="lives 1000000000 periods of 1: give the step's length"):
        run(Problem([Buffer("a", 0, 10**9, 1)], period=1))
    with pytest.raises(BadInput, match="add up to"):
        run(Problem([Buffer("a", 0, 16, 2**60)], period=1))


def test_fixed_buffers_stay_and_raise_the_bound() -> None:
    # 6 bytes free below 'pin': 'tall' cannot go there, so 20 is the least, not the load of 17
    buffers = [Buffer("pin", 0, 4, 7, offset=6), Buffer("tall", 1, 2, 7), Buffer("low", 0, 1, 3)]
    packing = run(Problem(buffers))
    assert (packing.max_load, packing.bound, packing.height) == (14, 20, 20)
    with pytest.raises(BadInput, match="pin and other share byte 8 at moment 3"):
        run(Problem([*buffers, Buffer("other", 3, 5, 2, offset=8)]))


@pytest.mark.parametrize(
    ("buffer", "complaint"),
    [
        (Buffer("a", 0, 1, 2**63), "buffer a: size 9223372036854775808 is beyond 2\\*\\*63"),
        (Buffer("a", 0, 1, 2**63 - 1, offset=1), "add up to 9223372036854775807 bytes and offsets"),
        (Buffer("a", 0, 2**64, 4), "buffer a: upper 18446744073709551616 is beyond"),
        (Buffer("a", 0, 1, 4, offset=-1), "buffer a: offset -1 is negative"),
        (Buffer("a", 3, 3, 4), "buffer a: upper 3 is not above lower 3"),
    ],
)
def test_what_cannot_be_packed_is_refused(buffer: Buffer, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        pack([buffer])


def test_sizes_up_to_the_limit_are_packed() -> None:
    large = 2**60
    packing = pack([Buffer("a", -5, 1, large), Buffer("b", 0, 2, large + 1)])
    assert packing.height == 2 * large + 1 and packing.optimal
    for method in (Method.SEARCH, Method.REFERENCE, Method.SMARTPOOL):
        packing = pack([Buffer("a", 0, 1, 2**63 - 1)], method=method)
        assert packing.height == 2**63 - 1 and packing.optimal
        halves = [Buffer("a", 0, 2, 2**62 - 2), Buffer("b", 1, 3, 2**62 - 2)]
        assert pack(halves, method=method).height == 2**63 - 4
    with pytest.raises(BadInput, match="more than 2\\*\\*62 units"):
        pack([Buffer("a", 0, 2, 2**62 - 2), Buffer("b", 1, 3, 2**62 - 1)])


def test_no_buffers_need_no_bytes() -> None:
    assert max_load([]) == 0
    assert find_clash([], []) is None


def test_without_a_compiler_the_reference_answers_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Request) -> native.Answer:
        raise NoNative("there is no C++ compiler: install one, or name it with CXX")

    monkeypatch.setattr(native, "search", refuse)
    packing = run(staircase(12))
    assert packing.note.startswith("the search ran in Python, slower than native: there is no C++")
    assert packing.optimal


def test_a_checkout_without_a_working_compiler_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("native") / "layout.so"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoNative, match="no-such-compiler could not be run"):
        build(LAYOUT, target)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NoNative, match="false could not build the native search: no message"):
        build(LAYOUT, target)
    assert not list(target.parent.iterdir())


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(BadInput, match="method 'magic' is not known: choose one of search,"):
        pack([Buffer("a", 0, 1, 1)], method="magic")
