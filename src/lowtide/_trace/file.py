"""Trace <-> a versioned, compressed JSON file.

Columns instead of records, and one table for all strings: a 30,000-op step is a few MB of JSON
and under one MB on disk. The bytes written depend on the trace alone, so equal traces make
equal files.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide._check import find_flaw
from lowtide._errors import BadInput
from lowtide._files import read_whole, write_whole
from lowtide._ir import Geometry, Kind, Op, Operand, Phase, Save, Trace, Value

FORMAT = "lowtide.trace"
VERSION = 1


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` to `path`, whole or not at all."""
    write_whole(Path(path), encode_trace(trace))


def load_trace(path: str | Path) -> Trace:
    """Read a trace, checking everything; a bad file is one clear line."""
    return decode_trace(read_whole(Path(path)), str(path))


def encode_trace(trace: Trace) -> bytes:
    """The file form of `trace`."""
    strings: dict[str, int] = {}

    def intern(text: str) -> int:
        return strings.setdefault(text, len(strings))

    ops = trace.ops
    values = trace.values
    document = {
        "format": FORMAT,
        "version": VERSION,
        "device": trace.device,
        "granularity_bytes": trace.granularity_bytes,
        "unseen_bytes": trace.unseen_bytes,
        "source": trace.source,
        "geometries": [[g.dtype, g.shape, g.strides, g.offset] for g in trace.geometries],
        "ops": {
            "name": [intern(op.name) for op in ops],
            "reads": [op.reads for op in ops],
            "updates": [op.updates for op in ops],
            "writes": [op.writes for op in ops],
            "operands": [_flatten_operands(op.operands) for op in ops],
            "results": [_flatten_operands(op.results) for op in ops],
            "args": [intern(op.args) for op in ops],
            "seconds": [op.seconds for op in ops],
            "workspace_bytes": [op.workspace_bytes for op in ops],
            "phase": [intern(op.phase) for op in ops],
            "module": [intern(op.module) for op in ops],
            "node": [intern(op.node) for op in ops],
            "random": [i for i, op in enumerate(ops) if op.random],
            "factory": [i for i, op in enumerate(ops) if op.factory],
            "view": [i for i, op in enumerate(ops) if op.view],
            "grad": [i for i, op in enumerate(ops) if op.grad],
        },
        "values": {
            "storage": [value.storage for value in values],
            "version": [value.version for value in values],
            "bytes": [value.bytes for value in values],
            "kind": [intern(value.kind) for value in values],
            "first": [value.first for value in values],
            "end": [value.end for value in values],
            "before": [i for i, value in enumerate(values) if value.before],
            "after": [i for i, value in enumerate(values) if value.after],
            "device": [intern(value.device) for value in values],
            "name": [intern(value.name) for value in values],
            "module": [intern(value.module) for value in values],
            "saves": [
                [[save.op, intern(save.node), save.packed, save.unpacked] for save in value.saves]
                for value in values
            ],
        },
        "strings": list(strings),  # last, for it is complete only now
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def decode_trace(content: bytes, where: str) -> Trace:
    """The trace in `content`; `where` names the file in errors."""
    if not content:
        raise BadInput(f"{where} is empty: record it again")
    try:
        document = json.loads(gzip.decompress(content))
    except EOFError as error:
        raise BadInput(f"{where} is cut off: copy or record it again") from error
    except gzip.BadGzipFile as error:
        raise BadInput(
            f"{where} is not a lowtide trace: record one with `lowtide trace`, or convert "
            f"another tool's file with `lowtide import`"
        ) from error
    except (zlib.error, ValueError, RecursionError) as error:
        raise BadInput(f"{where} is damaged: copy or record it again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadInput(f"{where} is not a lowtide trace: record one with `lowtide trace`")
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise BadInput(
            f"{where} has trace version {version}, this lowtide reads up to {VERSION}: "
            f"upgrade lowtide or record it again"
        )
    try:
        trace = _build(document)
        flaw = find_flaw(trace)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        flaw = f"{type(error).__name__} {error}"
        raise BadInput(f"{where} is damaged ({flaw}): copy or record it again") from error
    if flaw is not None:
        raise BadInput(f"{where} is damaged ({flaw}): copy or record it again")
    return trace


def _build(document: dict[str, Any]) -> Trace:
    strings = _Strings(_expect(text, str) for text in document["strings"])
    raw_ops = document["ops"]
    raw_values = document["values"]
    geometries = tuple(
        Geometry(_expect(dtype, str), _ints(shape), _ints(strides), _int(offset))
        for dtype, shape, strides, offset in document["geometries"]
    )
    flags = {
        flag: frozenset(_ints(raw_ops[flag])) for flag in ("random", "factory", "view", "grad")
    }
    phases = {text: Phase(text) for text in {strings[i] for i in raw_ops["phase"]}}
    ops = tuple(
        Op(
            name=strings[name],
            reads=_ints(reads),
            updates=_ints(updates),
            writes=_ints(writes),
            operands=_operands(operands),
            results=_operands(results),
            args=strings[args],
            seconds=_float(seconds),
            workspace_bytes=_int(workspace_bytes),
            phase=phases[strings[phase]],
            module=strings[module],
            node=strings[node],
            random=i in flags["random"],
            factory=i in flags["factory"],
            view=i in flags["view"],
            grad=i in flags["grad"],
        )
        for i, (
            name,
            reads,
            updates,
            writes,
            operands,
            results,
            args,
            seconds,
            workspace_bytes,
            phase,
            module,
            node,
        ) in enumerate(
            _rows(
                raw_ops,
                "name reads updates writes operands results args seconds workspace_bytes "
                "phase module node",
            )
        )
    )
    kinds = {text: Kind(text) for text in {strings[i] for i in raw_values["kind"]}}
    before = frozenset(_ints(raw_values["before"]))
    after = frozenset(_ints(raw_values["after"]))
    values = tuple(
        Value(
            storage=_int(storage),
            version=_int(version),
            bytes=_int(size),
            kind=kinds[strings[kind]],
            first=_int(first),
            end=_int(end),
            before=i in before,
            after=i in after,
            device=strings[device],
            name=strings[name],
            module=strings[module],
            saves=tuple(
                Save(None if op is None else _int(op), strings[node], _int(packed), _ints(unpacked))
                for op, node, packed, unpacked in saves
            ),
        )
        for i, (storage, version, size, kind, first, end, device, name, module, saves) in enumerate(
            _rows(raw_values, "storage version bytes kind first end device name module saves")
        )
    )
    return Trace(
        ops=ops,
        values=values,
        geometries=geometries,
        device=_expect(document["device"], str),
        granularity_bytes=_int(document["granularity_bytes"]),
        unseen_bytes=_int(document["unseen_bytes"]),
        source=_expect(document["source"], str),
    )


class _Strings(list[str]):
    """A table that is asked for by number only: no negative ones, no truth values."""

    def __getitem__(self, at: Any) -> Any:
        if type(at) is not int or at < 0:
            raise TypeError(f"{at!r:.40} is not the number of a string")
        return super().__getitem__(at)


def _rows(columns: dict[str, Sequence[Any]], names: str) -> Any:
    return zip(*(columns[name] for name in names.split()), strict=True)


def _flatten_operands(operands: tuple[Operand, ...]) -> list[int]:
    return [number for operand in operands for number in (operand.value, operand.geometry)]


def _operands(flat: object) -> tuple[Operand, ...]:
    numbers = iter(_ints(flat))
    return tuple(Operand(value, geometry) for value, geometry in zip(numbers, numbers, strict=True))


def _expect(thing: Any, kind: type) -> Any:
    if not isinstance(thing, kind):
        raise TypeError(f"expected {kind.__name__}, found {thing!r:.40}")
    return thing


def _int(thing: Any) -> Any:
    if type(thing) is not int:  # True is an int to isinstance
        raise TypeError(f"expected a whole number, found {thing!r:.40}")
    return thing


def _float(thing: Any) -> float:
    if type(thing) not in (int, float):
        raise TypeError(f"expected a number, found {thing!r:.40}")
    return float(thing)


def _ints(things: Any) -> tuple[Any, ...]:
    result = tuple(_expect(things, list))
    if any(type(thing) is not int for thing in result):
        raise TypeError("expected whole numbers")
    return result
