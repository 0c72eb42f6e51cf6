"""minimalloc's CSV -> Trace: buffers with a lifetime and a size, and nothing else.

Columns `id,lower,upper,size` in any order; a buffer lives for `lower <= t < upper`. The distinct
times become the ops, so the trace has the same load at every moment that matters.
"""

from pathlib import Path

from lowtide._ir import Kind, Op, OpIndex, StorageId, Trace, Value, ValueId
from lowtide._layout.table import read_buffers
from lowtide._trace.order import renumber


def import_csv(path: Path) -> Trace:
    """The buffers in `path` as a trace."""
    rows = read_buffers(path)
    times = sorted({time for row in rows for time in (row.lower, row.upper)})
    at = {time: i for i, time in enumerate(times)}
    values = tuple(
        Value(
            storage=StorageId(i),
            version=0,
            bytes=row.size,
            kind=Kind.TEMPORARY,
            first=OpIndex(at[row.lower]),
            end=OpIndex(at[row.upper]),
            name=row.name,
        )
        for i, row in enumerate(rows)
    )
    made: dict[int, list[ValueId]] = {}
    for i, value in enumerate(values):
        made.setdefault(value.first, []).append(ValueId(i))
    # The last time only ends lives: nothing runs at it.
    ops = tuple(
        Op(name="allocate", writes=tuple(made.get(i, ())), args=f"[[{time}],{{}}]")
        for i, time in enumerate(times[:-1])
    )
    return renumber(Trace(ops=ops, values=values, source=path.name))
