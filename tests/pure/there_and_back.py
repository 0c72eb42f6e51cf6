"""Random steps in which much is made again: a forward, and a backward that reads all of it."""

from hypothesis import strategies as st

from lowtide._ir import Trace
from lowtide._trace.text import parse


@st.composite
def there_and_back(draw: st.DrawFn) -> Trace:
    """Values made from earlier ones, some in place, and read again later, as in backward."""
    lines = ["have x:10 | input"]
    names = ["x"]
    fixed = {"x"}  # came from outside
    reads: list[list[str]] = []
    makes: list[str] = []
    for i in range(draw(st.integers(3, 14))):
        sources = draw(st.lists(st.sampled_from(names[-4:]), unique=True, min_size=1, max_size=2))
        made = [f"v{i}_{k}" for k in range(draw(st.integers(1, 2)))]
        results = [f"{name}:{draw(st.integers(1, 60))}" for name in made]
        changed = draw(st.integers(0, 5)) == 0 and sources[0] not in fixed
        reads.append(sources)
        makes.append(" ".join([*results, *([sources[0]] if changed else [])]))
        names += made
    for _ in range(draw(st.integers(3, 14))):
        reads.append(draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=3)))
        makes.append(f"g{len(reads)}:{draw(st.integers(1, 20))}")
    last = {name: i for i, sources in enumerate(reads) for name in sources}
    for i, (sources, made_now) in enumerate(zip(reads, makes, strict=True)):
        lines.append(f"op{i} {' '.join(sources)} -> {made_now} | {draw(st.integers(1, 9))}us")
        unread = [n.split(":")[0] for n in made_now.split() if n.split(":")[0] not in last]
        lines += [f"free {name}" for name, at in last.items() if at == i and name != "x"]
        lines += [f"free {name}" for name in unread]
    return parse("\n".join(lines))
