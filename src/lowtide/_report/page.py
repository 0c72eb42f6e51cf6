"""A page's own part and its data -> one self-contained page. Opens offline."""

import json
from pathlib import Path
from typing import Any

_FRAME = Path(__file__).with_name("page.html")


def render_page(part: Path, data: dict[str, Any]) -> str:
    """The frame, which shows the data's `title` and `facts`, around `part`.

    Names in the data are data, never markup: "<" does not appear in what the script reads.
    """
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    frame = _FRAME.read_text(encoding="utf-8").replace("__PAGE__", part.read_text(encoding="utf-8"))
    return frame.replace("__DATA__", text)
