"""Random machines, and random lawful swaps of random steps."""

from dataclasses import replace

from hypothesis import strategies as st
from strategies import traces

from lowtide._ir import Kind, Link, Machine, Op, OpIndex, StorageId, Swap, Trace, Value, ValueId
from lowtide._simulate.check import find_bad_swap


def swap(value: int, after: int, release: int, fetch: int, until: int) -> Swap:
    return Swap(ValueId(value), OpIndex(after), OpIndex(release), OpIndex(fetch), OpIndex(until))


@st.composite
def busy_traces(draw: st.DrawFn) -> Trace:
    """Many storages used seldom: much to swap. Some persist, some live within the step."""
    count = draw(st.integers(1, 14))
    reads: list[list[ValueId]] = [[] for _ in range(count)]
    writes: list[list[ValueId]] = [[] for _ in range(count)]
    values = []
    for k in range(draw(st.integers(1, 6))):
        uses = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3)))
        persists = draw(st.booleans())
        if not persists:
            writes[uses[0]].append(ValueId(k))
        for i in uses if persists else uses[1:]:
            reads[i].append(ValueId(k))
        first, end = (0, count) if persists else (uses[0], uses[-1] + 1)
        size = draw(st.integers(0, 9))
        values.append(
            Value(
                StorageId(k),
                0,
                size,
                Kind.STATE if persists else Kind.ACTIVATION,
                OpIndex(first),
                OpIndex(end),
                before=persists,
                after=persists,
            )
        )
    ops = tuple(
        Op("op", tuple(read), (), tuple(write), workspace_bytes=draw(st.integers(0, 3)))
        for read, write in zip(reads, writes, strict=True)
    )
    return Trace(ops, tuple(values), granularity_bytes=draw(st.sampled_from([1, 4])))


@st.composite
def links(draw: st.DrawFn) -> Link:
    sizes = sorted(draw(st.sets(st.integers(0, 2000), min_size=2, max_size=3)))
    times = sorted(draw(st.lists(st.integers(0, 24), min_size=len(sizes), max_size=len(sizes))))
    return Link(tuple(sizes), tuple(time / 4 for time in times))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    small = st.builds(lambda a, b: Link((0, 9), (a / 4, (a + b) / 4)), *[st.integers(0, 20)] * 2)
    link = st.one_of(links(), small)
    together = draw(st.sampled_from([1.0, 0.5, 0.7, 0.3]))
    return Machine("random", 0, 0, draw(link), draw(link), together)


@st.composite
def swapped_steps(draw: st.DrawFn) -> tuple[Trace, tuple[Swap, ...]]:
    """A step whose ops take some seconds, and swaps in any order that `find_bad_swap` lets pass."""
    trace = draw(st.one_of(busy_traces(), busy_traces(), traces()))
    ops = tuple(replace(op, seconds=draw(st.integers(0, 9)) / 2) for op in trace.ops)
    trace = replace(trace, ops=ops)
    count = len(ops)
    swaps: list[Swap] = []
    for k in range(len(trace.values)):
        uses = sorted(
            {i for i, op in enumerate(ops) if k in (*op.reads, *op.updates, *op.writes)} or {0}
        )
        for after, until in zip(uses, [*uses[1:], uses[0] + count], strict=True):
            if draw(st.integers(0, 4)):
                positions = st.integers(after + 1, until)
                release, fetch = sorted((draw(positions), draw(positions)))
                new = swap(k, after, release, fetch, until)
                if find_bad_swap(trace, [*swaps, new]) is None:
                    swaps.append(new)
    return trace, tuple(draw(st.permutations(swaps)))
