"""A small layout -> characters: time across, address up, a letter for each buffer."""

import string
from collections.abc import Sequence

from lowtide._layout.buffers import Buffer, pieces
from lowtide._units import format_bytes

MOST_BUFFERS = 52  # a letter each
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


def draw_layout(
    buffers: Sequence[Buffer], *, width: int, rows: int = 16, period: int | None = None
) -> list[str]:
    """The picture, highest address first; no more than MOST_BUFFERS fit.

    A cell shows the buffer that holds most of its moments and bytes, a dot where most is free.
    """
    height = max((b.offset or 0) + b.size for b in buffers)
    lives = [pieces(b, period) for b in buffers]
    times = sorted({moment for life in lives for stretch in life for moment in stretch})
    label = len(format_bytes(height))
    columns = max(8, min(width - label - 2, 8 * (len(times) - 1)))
    first, span = times[0], times[-1] - times[0]
    lines = []
    for row in reversed(range(rows)):
        low, high = row * height / rows, (row + 1) * height / rows
        cells = []
        for column in range(columns):
            left = first + column * span / columns
            right = first + (column + 1) * span / columns
            shares = [
                _shared(low, high, b.offset or 0, (b.offset or 0) + b.size)
                * sum(_shared(left, right, *stretch) for stretch in life)
                for b, life in zip(buffers, lives, strict=True)
            ]
            most = max(range(len(shares)), key=shares.__getitem__)
            free = (high - low) * (right - left) - sum(shares)
            cells.append(_LETTERS[most] if shares[most] > 0 and shares[most] >= free else ".")
        mark = format_bytes(height) if row == rows - 1 else "0 B" if row == 0 else ""
        lines.append(f"{mark:>{label}} │{''.join(cells).rstrip('.') or ' '}".rstrip())
    lines.append(f"{'':>{label}} └{'─' * columns}")
    lines.append(f"{'':>{label}}  {first}{times[-1]:>{max(1, columns - len(str(first)))}}")
    names = [f"{letter} {b.name}" for letter, b in zip(_LETTERS, buffers, strict=False)]
    line = ""
    for name in names:
        if line and len(line) + len(name) + 3 > width:
            lines.append(line)
            line = ""
        line += f"{'   ' if line else ''}{name}"
    return [*lines, line]


def _shared(a: float, b: float, c: float, d: float) -> float:
    return max(0.0, min(b, d) - max(a, c))
