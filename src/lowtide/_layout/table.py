"""Buffers <-> a CSV file: `id,lower,upper,size`, and `offset` and `lane` if there are any."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lowtide._errors import BadInput
from lowtide._files import read_whole
from lowtide._layout.buffers import Buffer, find_flaw

_NEEDED = ("id", "lower", "upper", "size")
_NUMBERS = ("lower", "upper", "size", "offset", "lane")
_OPEN = ("offset", "lane")  # may be left out, or empty


def read_buffers(path: Path) -> list[Buffer]:
    """The buffers in `path`; whatever is wrong is named with its line."""
    try:
        text = read_whole(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not text: give a CSV file") from error
    lines = _cells(path, csv.reader(io.StringIO(text)))
    _, head = next(lines, (1, []))
    missing = [name for name in _NEEDED if name not in head]
    if missing:
        raise BadInput(
            f"{path} line 1: no column {missing[0]!r}; the columns are id,lower,upper,size"
        )
    twice = [name for name in head if head.count(name) > 1]
    if twice:
        raise BadInput(f"{path} line 1: column {twice[0]!r} is there twice")
    buffers = []
    seen: set[str] = set()
    for number, cells in lines:
        if not cells:
            continue
        where = f"{path} line {number}"
        buffer = _buffer(where, head, cells)
        if buffer.name in seen:
            raise BadInput(f"{where}: id {buffer.name!r} was used before")
        seen.add(buffer.name)
        buffers.append(buffer)
    if not buffers:
        raise BadInput(f"{path} has no buffers: add a line for each under the header")
    return buffers


def write_buffers(buffers: Sequence[Buffer]) -> bytes:
    """The CSV form of placed buffers."""
    lanes = any(buffer.lane for buffer in buffers)
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow([*_NEEDED, "offset", *(["lane"] if lanes else [])])
    for b in buffers:
        rows.writerow([b.name, b.lower, b.upper, b.size, b.offset, *([b.lane] if lanes else [])])
    return out.getvalue().encode()


def is_layout(path: Path) -> bool:
    """Whether a file is empty, or buffers that all have an offset: replacing it loses nothing."""
    try:
        return path.stat().st_size == 0 or all(b.offset is not None for b in read_buffers(path))
    except (OSError, BadInput):
        return False


def _cells(path: Path, lines: Any) -> Iterator[tuple[int, list[str]]]:
    """Each line with its number, its cells stripped."""
    try:
        for cells in lines:
            yield lines.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise BadInput(f"{path} line {lines.line_num}: {error}") from error


def _buffer(where: str, head: list[str], cells: list[str]) -> Buffer:
    if len(cells) != len(head):
        raise BadInput(f"{where}: {len(cells)} cells under {len(head)} columns")
    given = dict(zip(head, cells, strict=True))
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        text = given.get(name, "")
        if not text and name in _OPEN:
            continue
        try:
            if not text.isascii() or "_" in text:
                raise ValueError
            numbers[name] = int(text)
        except ValueError as error:
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            raise BadInput(f"{where}: {name} is {shown!r}, not a whole number") from error
    buffer = Buffer(
        name=given["id"],
        lower=numbers["lower"],
        upper=numbers["upper"],
        size=numbers["size"],
        offset=numbers.get("offset"),
        lane=numbers.get("lane", 0),
    )
    flaw = find_flaw(buffer)
    if flaw is not None:
        raise BadInput(f"{where}: {flaw}")
    return buffer
