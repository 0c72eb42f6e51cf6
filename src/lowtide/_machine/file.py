"""Machine <-> a versioned JSON file that a person can write."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowtide._errors import BadInput
from lowtide._files import read_whole, write_whole
from lowtide._ir import Link, Machine

FORMAT = "lowtide machine"
VERSION = 1

_MOST_BYTES = 1 << 60  # sums of such numbers stay exact in 64 bits
_NEEDED = ("name", "device_bytes", "host_bytes", "out", "back")
_OPEN = ("together", "drag", "memory_bytes_per_second", "flops_per_second", "sources")
_LINK = ("bytes", "seconds")


def save_machine(machine: Machine, path: Path) -> None:
    """Write `machine` to `path`, whole or not at all."""
    flaw = find_flaw(machine)
    assert flaw is None, flaw
    text = json.dumps(machine_document(machine), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, f"{text}\n".encode())


def load_machine(path: Path) -> Machine:
    """Read a machine, checking everything; a bad file is one clear line."""
    return decode_machine(read_whole(path), str(path))


def machine_document(machine: Machine) -> dict[str, Any]:
    """The JSON form of `machine`."""
    links = {"out": machine.out, "back": machine.back}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": machine.name,
        "device_bytes": machine.device_bytes,
        "host_bytes": machine.host_bytes,
        **{
            name: {"bytes": list(link.bytes), "seconds": list(link.seconds)}
            for name, link in links.items()
        },
        "together": machine.together,
        "drag": machine.drag,
        "memory_bytes_per_second": machine.memory_bytes_per_second,
        "flops_per_second": dict(machine.flops_per_second),
        "sources": dict(machine.sources),
    }


def decode_machine(content: bytes, where: str) -> Machine:
    """The machine in `content`; `where` names the file in errors."""
    other = f"{where} is not a lowtide machine: `lowtide doctor` measures one and keeps it"
    try:
        document = json.loads(content, object_pairs_hook=_object)
    except _Twice as error:
        raise BadInput(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(other) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadInput(other)
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise BadInput(
            f"{where} has machine version {version!r:.40}, this lowtide reads up to {VERSION}: "
            f"upgrade lowtide or measure it again"
        )
    try:
        machine = _build(document)
        flaw = find_flaw(machine)
    except (_Bad, OverflowError) as error:
        raise BadInput(f"{where}: {error}") from error
    if flaw is not None:
        raise BadInput(f"{where}: {flaw}")
    return machine


def find_flaw(machine: Machine) -> str | None:
    """The first thing about `machine` that cannot be true, or None."""
    if not machine.name.strip():
        return "name is empty: name the machine"
    if not 1 <= machine.device_bytes <= _MOST_BYTES:
        return f"device_bytes is {machine.device_bytes}: give the bytes of the device's memory"
    if not 0 <= machine.host_bytes <= _MOST_BYTES:
        return f"host_bytes is {machine.host_bytes}: give the bytes of the tier below, 0 for none"
    for name, link in (("out", machine.out), ("back", machine.back)):
        flaw = _flaw_in_link(link)
        if flaw is not None:
            return f"{name}: {flaw}"
    if not 0 < machine.together <= 1:
        return f"together is {machine.together}: give a share above 0 and at most 1"
    if not 0 <= machine.drag < 1:
        return f"drag is {machine.drag}: give a share of at least 0 and below 1"
    if not 0 <= machine.memory_bytes_per_second < math.inf:
        return f"memory_bytes_per_second is {machine.memory_bytes_per_second}: give 0 if unknown"
    for dtype, rate in machine.flops_per_second:
        if not 0 < rate < math.inf:
            return f"flops_per_second of {dtype} is {rate}: leave it out if unknown"
    for field, _ in machine.sources:
        if field not in (*_NEEDED, *_OPEN):
            return f"sources has {field!r}, which is no field of a machine"
    return None


def _flaw_in_link(link: Link) -> str | None:
    if len(link.bytes) != len(link.seconds):
        return f"{len(link.bytes)} bytes but {len(link.seconds)} seconds: give as many of each"
    if len(link.bytes) < 2:
        return f"{len(link.bytes)} points: give at least two"
    if not 1 <= link.bytes[0] <= link.bytes[-1] <= _MOST_BYTES:
        return f"bytes from {link.bytes[0]} to {link.bytes[-1]}: give sizes of 1 or more"
    for small, large in pairwise(link.bytes):
        if small >= large:
            return f"bytes has {large} after {small}: give ascending sizes"
    for time in link.seconds:
        if not 0 < time < math.inf:
            return f"seconds has {time}: give finite times above 0"
    for short, long in pairwise(link.seconds):
        if short > long:
            return f"seconds has {long} after {short}: more bytes cannot take less time"
    return None


class _Bad(Exception):
    """A field that is missing, unknown or of the wrong kind; the message names it."""


class _Twice(Exception):
    """A field that is there twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _Twice(f"{name!r:.40} is there twice")
    return dict(pairs)


def _build(document: dict[str, Any]) -> Machine:
    fields = {name: document[name] for name in document if name not in ("format", "version")}
    _check_names(fields, _NEEDED, _OPEN, "the machine")
    rates = _mapping(fields.get("flops_per_second", {}), "flops_per_second")
    sources = _mapping(fields.get("sources", {}), "sources")
    return Machine(
        name=_text(fields["name"], "name"),
        device_bytes=_whole(fields["device_bytes"], "device_bytes"),
        host_bytes=_whole(fields["host_bytes"], "host_bytes"),
        out=_link(fields["out"], "out"),
        back=_link(fields["back"], "back"),
        together=_number(fields.get("together", 1.0), "together"),
        drag=_number(fields.get("drag", 0.0), "drag"),
        memory_bytes_per_second=_number(
            fields.get("memory_bytes_per_second", 0.0), "memory_bytes_per_second"
        ),
        flops_per_second=tuple(
            (dtype, _number(rate, f"flops_per_second of {dtype!r:.40}"))
            for dtype, rate in rates.items()
        ),
        sources=tuple(
            (field, _text(source, f"the source of {field!r:.40}"))
            for field, source in sources.items()
        ),
    )


def _link(thing: Any, what: str) -> Link:
    points = _mapping(thing, what)
    _check_names(points, _LINK, (), what)
    sizes, times = (_list(points[name], f"{what}.{name}") for name in _LINK)
    return Link(
        tuple(_whole(size, f"{what}.bytes") for size in sizes),
        tuple(_number(time, f"{what}.seconds") for time in times),
    )


def _check_names(
    fields: dict[str, Any], needed: tuple[str, ...], also: tuple[str, ...], what: str
) -> None:
    for name in needed:
        if name not in fields:
            raise _Bad(f"{what} has no {name!r}: add it")
    for name in fields:
        if name not in (*needed, *also):
            known = ", ".join((*needed, *also))
            raise _Bad(f"{what} has an unknown field {name!r:.40}; the fields are {known}")


def _mapping(thing: Any, what: str) -> dict[str, Any]:
    if not isinstance(thing, dict):
        raise _Bad(f"{what} is {thing!r:.40}, not an object")
    return thing


def _list(thing: Any, what: str) -> list[Any]:
    if not isinstance(thing, list):
        raise _Bad(f"{what} is {thing!r:.40}, not a list")
    return thing


def _text(thing: Any, what: str) -> str:
    if not isinstance(thing, str):
        raise _Bad(f"{what} is {thing!r:.40}, not text")
    return thing


def _whole(thing: Any, what: str) -> int:
    if type(thing) is not int:  # True is an int to isinstance
        raise _Bad(f"{what} has {thing!r:.40}, not a whole number")
    return thing


def _number(thing: Any, what: str) -> float:
    if type(thing) not in (int, float):
        raise _Bad(f"{what} has {thing!r:.40}, not a number")
    return float(thing)
