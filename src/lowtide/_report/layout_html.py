"""A layout -> one self-contained page: time across, address up. Opens offline."""

from pathlib import Path

from lowtide._layout.buffers import pieces
from lowtide._layout.pack import Packing
from lowtide._report.page import render_page
from lowtide._units import format_bytes, format_seconds

_PART = Path(__file__).with_name("layout.html")


def render_layout(packing: Packing, title: str, *, period: int | None = None) -> str:
    """The page. Every buffer is drawn; the browser does not mind a hundred thousand."""
    rows = []
    load: dict[int, int] = {}
    for number, buffer in enumerate(packing.buffers):
        for lower, upper in pieces(buffer, period):
            rows.append([number, lower, upper])
            load[lower] = load.get(lower, 0) + buffer.size
            load[upper] = load.get(upper, 0) - buffer.size
    curve = []
    total = 0
    for moment in sorted(load):
        total += load[moment]
        curve.append([moment, total])
    data = {
        "title": title,
        "facts": [
            ["height", format_bytes(packing.height)],
            ["max load", format_bytes(packing.max_load)],
            ["height over max load", f"{packing.ratio:.4f}"],
            ["proved lowest", "yes" if packing.optimal else "no"],
            ["buffers", f"{len(packing.buffers):,}"],
            ["method", str(packing.method)],
            ["time", format_seconds(packing.seconds)],
        ],
        "height": packing.height,
        "max_load": packing.max_load,
        "names": [buffer.name for buffer in packing.buffers],
        "sizes": [buffer.size for buffer in packing.buffers],
        "offsets": [buffer.offset for buffer in packing.buffers],
        "rows": rows,
        "load": curve,
    }
    return render_page(_PART, data)
