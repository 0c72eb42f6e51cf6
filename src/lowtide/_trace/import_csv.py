"""minimalloc's CSV -> Trace: buffers with a lifetime and a size, and nothing else.

Columns `id,lower,upper,size` in any order; a buffer lives for `lower <= t < upper`. The distinct
times become the ops, so the trace has the same load at every moment that matters.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide._errors import BadInput
from lowtide._files import read_whole
from lowtide._ir import Kind, Op, OpIndex, StorageId, Trace, Value, ValueId
from lowtide._trace.order import renumber

_COLUMNS = ("id", "lower", "upper", "size")


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    lower: int
    upper: int
    bytes: int


def import_csv(path: Path) -> Trace:
    """The buffers in `path` as a trace."""
    rows = list(_rows(path))
    times = sorted({time for row in rows for time in (row.lower, row.upper)})
    at = {time: i for i, time in enumerate(times)}
    values = tuple(
        Value(
            storage=StorageId(i),
            version=0,
            bytes=row.bytes,
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


def _rows(path: Path) -> Iterator[_Row]:
    try:
        text = read_whole(path).decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not text: give a CSV file") from error
    lines = _cells(path, csv.reader(io.StringIO(text)))
    _, head = next(lines, (1, []))
    missing = [name for name in _COLUMNS if name not in head]
    if missing:
        raise BadInput(
            f"{path} line 1: no column {missing[0]!r}; the columns are id,lower,upper,size"
        )
    seen: set[str] = set()
    for number, cells in lines:
        if cells:
            yield _row(f"{path} line {number}", head, cells, seen)
    if not seen:
        raise BadInput(f"{path} has no buffers: add a line for each under the header")


def _cells(path: Path, lines: Any) -> Iterator[tuple[int, list[str]]]:
    """Each line with its number, its cells stripped."""
    try:
        for cells in lines:
            yield lines.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise BadInput(f"{path} line {lines.line_num}: {error}") from error


def _row(where: str, head: list[str], cells: list[str], seen: set[str]) -> _Row:
    if len(cells) != len(head):
        raise BadInput(f"{where}: {len(cells)} cells under {len(head)} columns")
    given = dict(zip(head, cells, strict=True))
    numbers = {}
    for name in ("lower", "upper", "size"):
        try:
            numbers[name] = int(given[name])
        except ValueError as error:
            raise BadInput(f"{where}: {name} is {given[name]!r}, not a whole number") from error
    if numbers["upper"] <= numbers["lower"]:
        raise BadInput(f"{where}: upper {given['upper']} is not above lower {given['lower']}")
    if numbers["size"] <= 0:
        raise BadInput(f"{where}: size {given['size']} is not positive")
    if given["id"] in seen:
        raise BadInput(f"{where}: id {given['id']!r} was used before")
    seen.add(given["id"])
    return _Row(given["id"], numbers["lower"], numbers["upper"], numbers["size"])
