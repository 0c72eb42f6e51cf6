"""A name -> the machine: a file, or a profile that lowtide ships.

`rtx3090@pcie3` is the card in another slot: its link is replaced by that of the slot, whatever
the card itself could do.
"""

import dataclasses
import re
from pathlib import Path

from lowtide._errors import BadInput
from lowtide._ir import Link, Machine
from lowtide._machine.file import load_machine
from lowtide._machine.link import line

_PROFILES = Path(__file__).with_name("profiles")

# Seconds for 1 byte, 1, 4 and 16 MiB, and 1 GiB.
_PCIE5 = Link(
    (1, 1 << 20, 1 << 22, 1 << 24, 1 << 30),
    (3.4e-6, (1 << 20) / 47e9, (1 << 22) / 53e9, (1 << 24) / 55e9, (1 << 30) / 55e9),
)

# What pinned copies reach over 16 lanes: a link each way, the share kept together, the source.
_SLOTS = {
    "pcie3": (
        line(5e-6, 12.5e9),
        0.9,
        "PCIe 3.0 x16: 12-13 GB/s with pinned memory (AutoSwap paper, 2019); "
        "latency and the share kept together are estimates",
    ),
    "pcie4": (
        line(5e-6, 25e9),
        0.9,
        "estimate: 80 % of the 31.5 GB/s of PCIe 4.0 x16, 5 us latency, 90 % of it kept together",
    ),
    "pcie5": (
        _PCIE5,
        round(50.7 / 55, 4),
        "measured on an H200 with PCIe 5.0 x16 and pinned memory: 47 GB/s at 1 MiB, 53 at 4 MiB, "
        "55 from 16 MiB, 50.7 each way together; below 1 MiB extrapolated",
    ),
}


def find_machine(name: str) -> Machine:
    """The machine in the file `name`, or the profile of that name; `@SLOT` replaces its link."""
    if _is_file(name):
        return load_machine(Path(name))
    card, at, slot = name.rpartition("@")
    if not at:
        return _profile(name)
    machine = load_machine(Path(card)) if _is_file(card) else _profile(card)
    if slot.lower() not in _SLOTS:
        raise BadInput(f"no slot {slot!r:.40} in {name!r:.80}: use one of {', '.join(_SLOTS)}")
    return in_slot(machine, slot.lower())


def profile_names() -> list[str]:
    """The profiles that lowtide ships."""
    return sorted(path.stem for path in _PROFILES.glob("*.json"))


def slot_names() -> list[str]:
    """What may follow the `@`."""
    return list(_SLOTS)


def in_slot(machine: Machine, slot: str) -> Machine:
    """`machine` with the link of one of `slot_names()`."""
    link, together, source = _SLOTS[slot]
    sources = dict(machine.sources) | dict.fromkeys(("out", "back", "together"), source)
    return dataclasses.replace(
        machine,
        name=f"{machine.name}@{slot}",
        out=link,
        back=link,
        together=together,
        sources=tuple(sources.items()),
    )


def _profile(name: str) -> Machine:
    for known in profile_names():
        if _plain(known) == _plain(name):
            return load_machine(_PROFILES / f"{known}.json")
    raise BadInput(
        f"no machine {name!r:.80}: name a file that exists, or one of {', '.join(profile_names())}"
    )


def _plain(name: str) -> str:
    """Small letters, and none of the signs people leave out: "RTX 4090" is rtx4090."""
    return re.sub(r"[\s_-]", "", name.lower())


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False
