"""Text -> bytes: how a person writes a budget."""

import math
import re

from lowtide._errors import BadInput

_AMOUNT = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-z%]*)")
_UNITS: dict[str, int] = {"b": 1} | {
    prefix + suffix: int(base**power)
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_bytes(text: str, whole: int) -> int:
    """`"8GiB"` and `"8000000000"` are bytes; `"50%"` and `"0.5"` are shares of `whole`.

    A bare number up to 1 is a share, a bare whole number above it bytes.
    """
    found = _AMOUNT.fullmatch(text.strip().lower())
    if found is None:
        raise _bad(text)
    amount, unit = float(found[1]), found[2]
    if unit == "%":
        count = amount / 100 * whole
    elif unit in _UNITS:
        count = amount * _UNITS[unit]
    elif unit == "" and amount <= 1:
        count = amount * whole
    elif unit == "" and found[1].isdigit():
        count = int(found[1])
    else:
        raise _bad(text)
    if not math.isfinite(count) or count < 1:
        raise _bad(text)
    return math.floor(count)


def is_share(text: str) -> bool:
    """Whether it depends on the whole how much it is."""
    text = text.strip()
    if text.endswith("%"):
        return True
    try:
        return float(text) <= 1
    except ValueError:
        return False


def parse_rate(text: str) -> float:
    """`"25GB/s"` -> bytes a second."""
    amount, _, per = text.strip().lower().rpartition("/")
    found = _AMOUNT.fullmatch(amount.strip())
    if found is None or per.strip() != "s" or found[2] not in _UNITS or float(found[1]) == 0:
        raise BadInput(f"{text!r} is no speed of a link: write it as 25GB/s")
    return float(found[1]) * _UNITS[found[2]]


def _bad(text: str) -> BadInput:
    return BadInput(
        f"{text!r} is no budget: write bytes (8GiB, 500MB) or a share of the plain peak (0.5, 50%)"
    )
