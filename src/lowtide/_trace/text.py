"""Trace <-> text that a person can type; tests and bug reports use the same form.

    # comments and blank lines are free
    mm    x:8 w:8 -> h:8
    relu_ h       -> h          | 2us
    mm    h v:8   -> y:8        | 5us forward @Net.head

A name stands for a storage. `name:bytes` introduces it: on the left of the arrow it was there
before the step, on the right this op makes it. A known name on the right is overwritten in place
and becomes its next version; `~name` on the left is read only for that. A storage made in the
step dies after its last use, one that was there before outlives the step; `free` and `keep` say
otherwise. Everything else has a line of its own or stands behind the bar:

    device cuda:0 · granularity 512 · unseen 0 · source "train.py"
    geometry float32 [2,3] [3,1] 0              numbered from 0
    have w:8     | parameter @Net.fc name=Net.fc.weight
    appear b:8   | input                        a storage seen first here, made by no op
    opaque h                                    h has new content that no op wrote
    is h         | activation @Net.fc device=cpu
    save h       | op=0 node=ReluBackward0 packed=1 unpacked=7,9
    free h · keep y
    op line      | 12us backward @module random factory view grad workspace=64 node=N {"args":…}
"""

import json
import re
import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from lowtide._check import find_flaw
from lowtide._errors import BadInput
from lowtide._ir import (
    Geometry,
    GeometryId,
    Kind,
    Op,
    Operand,
    OpIndex,
    Phase,
    Save,
    StorageId,
    Trace,
    Value,
    ValueId,
)

_TIME = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)(s|ms|us|ns)$")
_FLAGS = ("random", "factory", "view", "grad")
_SCALE = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse(text: str) -> Trace:
    """The trace that `text` describes."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            reader.read(line)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"no storage is called {error}" if isinstance(error, KeyError) else str(error)
            raise BadInput(f"line {number} of the trace text: {reason}: {line.strip()}") from error
    return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[dict[str, Any]] = []
        self.current: dict[str, ValueId] = {}  # name -> its newest version
        self.touched: dict[StorageId, int] = {}
        self.freed: dict[StorageId, int] = {}
        self.kept: set[StorageId] = set()
        self.geometries: list[Geometry] = []
        self.header: dict[str, Any] = {}
        self.lines: dict[str, Callable[[str, str], None]] = {
            "device": lambda body, _: self.header.update(device=body),
            "granularity": lambda body, _: self.header.update(granularity_bytes=int(body)),
            "unseen": lambda body, _: self.header.update(unseen_bytes=int(body)),
            "source": lambda body, _: self.header.update(source=json.loads(body)),
            "geometry": self._geometry,
            "have": lambda body, rest: self._annotate(self._introduce(body, before=True), rest),
            "appear": lambda body, rest: self._annotate(self._introduce(body, before=False), rest),
            "opaque": lambda body, rest: self._annotate(self._next_version(body), rest),
            "is": lambda body, rest: self._annotate(self.current[body], rest),
            "save": self._save,
            "free": self._free,
            "keep": lambda body, _: self.kept.update(self._storage(name) for name in body.split()),
        }

    def read(self, line: str) -> None:
        line = line.strip()
        if not line or line.startswith("#"):
            return
        body, _, rest = (part.strip() for part in line.partition("|"))
        if re.search(r"(^|\s)->(\s|$)", body):
            self._op(body, rest)
            return
        word, _, body = body.partition(" ")
        if word not in self.lines:
            raise ValueError(f"{word!r} begins no line, and there is no ->")
        self.lines[word](body.strip(), rest)

    def _op(self, body: str, rest: str) -> None:
        left, _, right = body.partition("->")
        name, *sources = left.split()
        reads: list[ValueId] = []
        updates: list[ValueId] = []
        for source in sources:
            into = updates if source.startswith("~") else reads
            source = source.removeprefix("~")
            into.append(
                self._introduce(source, before=True) if ":" in source else self._touch(source)
            )
        facts, document = self._op_facts(rest)
        operands = self._operands(document.get("in", []))
        writes = [
            self._introduce(result, before=False) if ":" in result else self._next_version(result)
            for result in right.split()
        ]
        results = self._operands(document.get("out", []))
        self.ops.append(
            Op(
                name=name,
                reads=tuple(reads),
                updates=tuple(updates),
                writes=tuple(writes),
                operands=operands,
                results=results,
                **facts,
            )
        )

    def _op_facts(self, rest: str) -> tuple[dict[str, Any], dict[str, Any]]:
        words, brace, blob = rest.partition("{")
        document = json.loads(brace + blob) if brace else {}
        facts: dict[str, Any] = {"args": document.get("args", "")}
        for word in words.split():
            key, equals, given = word.partition("=")
            if time := _TIME.match(word):
                facts["seconds"] = float(time[1]) * _SCALE[time[2]]
            elif word in tuple(Phase):
                facts["phase"] = Phase(word)
            elif word.startswith("@"):
                facts["module"] = unquote(word[1:])
            elif word in _FLAGS:
                facts[word] = True
            elif equals and key == "workspace":
                facts["workspace_bytes"] = int(given)
            elif equals and key == "node":
                facts["node"] = unquote(given)
            else:
                raise ValueError(f"{word!r} says nothing about an op")
        return facts, document

    def _operands(self, pairs: list[list[Any]]) -> tuple[Operand, ...]:
        return tuple(Operand(self._touch(name), GeometryId(at)) for name, at in pairs)

    def _introduce(self, body: str, *, before: bool) -> ValueId:
        name, _, size = body.partition(":")
        if not name or not size.isdigit():
            raise ValueError(f"{body!r} is not name:bytes")
        if name in self.current:
            raise ValueError(f"{name!r} exists already")
        storage = StorageId(len(self.current))
        if before:
            self.kept.add(storage)
        return self._add(name, storage, 0, int(size), before)

    def _next_version(self, name: str) -> ValueId:
        old = self.values[self.current[name]]
        return self._add(name, old["storage"], old["version"] + 1, old["bytes"], False)

    def _add(self, name: str, storage: StorageId, version: int, size: int, before: bool) -> ValueId:
        self.values.append(
            {
                "storage": storage,
                "version": version,
                "bytes": size,
                "kind": Kind.INPUT if before else Kind.TEMPORARY,
                "first": OpIndex(0 if before else len(self.ops)),
                "before": before,
                "saves": (),
            }
        )
        self.current[name] = ValueId(len(self.values) - 1)
        return self._touch(name)

    def _touch(self, name: str) -> ValueId:
        self.touched[self._storage(name)] = len(self.ops) + 1
        return self.current[name]

    def _storage(self, name: str) -> StorageId:
        storage: StorageId = self.values[self.current[name]]["storage"]
        if storage in self.freed:
            raise ValueError(f"{name!r} was freed")
        return storage

    def _annotate(self, at: ValueId, rest: str) -> None:
        kinds = {kind.name.lower(): kind for kind in Kind}
        for word in rest.split():
            key, equals, given = word.partition("=")
            if word in kinds:
                self.values[at]["kind"] = kinds[word]
            elif word.startswith("@"):
                self.values[at]["module"] = unquote(word[1:])
            elif equals and key in ("name", "device"):
                self.values[at][key] = unquote(given)
            else:
                raise ValueError(f"{word!r} says nothing about a value")

    def _save(self, body: str, rest: str) -> None:
        facts = dict(word.split("=", 1) for word in rest.split())
        save = Save(
            op=OpIndex(int(facts["op"])) if "op" in facts else None,
            node=unquote(facts.get("node", "")),
            packed=OpIndex(int(facts.get("packed", len(self.ops)))),
            unpacked=tuple(OpIndex(int(at)) for at in facts.get("unpacked", "").split(",") if at),
        )
        self.values[self.current[body]]["saves"] += (save,)

    def _free(self, body: str, _: str) -> None:
        for name in body.split():
            self.freed[self._storage(name)] = len(self.ops)

    def _geometry(self, body: str, _: str) -> None:
        dtype, shape, strides, offset = body.split()
        sides = tuple(json.loads(shape)), tuple(json.loads(strides))
        self.geometries.append(Geometry(dtype, *sides, int(offset)))

    def finish(self) -> Trace:
        count = len(self.ops)
        device = self.header.get("device", "cpu")
        newest = {value["storage"]: i for i, value in enumerate(self.values)}
        ends: dict[StorageId, int] = {}
        values = []
        for i in reversed(range(len(self.values))):
            facts = self.values[i]
            storage = facts["storage"]
            after = False
            if newest[storage] == i:
                after = storage in self.kept and storage not in self.freed
                end = count if after else self.freed.get(storage, min(self.touched[storage], count))
            else:
                end = ends[storage]
            ends[storage] = facts["first"]
            values.append(Value(**{"device": device, **facts}, end=OpIndex(end), after=after))
        trace = Trace(
            ops=tuple(self.ops),
            values=tuple(reversed(values)),
            geometries=tuple(self.geometries),
            **self.header,
        )
        flaw = find_flaw(trace)
        if flaw is not None:
            raise BadInput(f"the trace text cannot be true: {flaw}")
        return trace


def format_trace(trace: Trace) -> str:
    """`trace` as text; `parse` gives back an equal trace if it is in the common order."""
    lines = [f"device {trace.device}", f"granularity {trace.granularity_bytes}"]
    lines += [f"unseen {trace.unseen_bytes}", f"source {json.dumps(trace.source)}"]
    lines += [
        f"geometry {g.dtype} {_compact(g.shape)} {_compact(g.strides)} {g.offset}"
        for g in trace.geometries
    ]
    written = {value for op in trace.ops for value in op.writes}
    arriving: dict[int, list[str]] = {}  # op index -> lines just before it
    leaving: dict[int, list[str]] = {}
    newest = {value.storage: i for i, value in enumerate(trace.values)}
    for i, value in enumerate(trace.values):
        if i not in written:
            word = "have" if value.before else "opaque" if value.version else "appear"
            name = _name(value) if word == "opaque" else f"{_name(value)}:{value.bytes}"
            arriving.setdefault(value.first, []).append(f"{word} {name} | {_facts(value)}")
            arriving[value.first] += _save_lines(value)
        if newest[value.storage] == i:
            word = "keep" if value.after else "free"
            leaving.setdefault(value.end, []).append(f"{word} {_name(value)}")
    for i, op in enumerate(trace.ops):
        lines += leaving.get(i, [])
        lines += arriving.get(i, [])
        lines += _op_lines(trace, op)
    lines += leaving.get(len(trace.ops), [])
    return "\n".join(lines) + "\n"


def _op_lines(trace: Trace, op: Op) -> list[str]:
    values = trace.values
    left = [_name(values[value]) for value in op.reads]
    left += [f"~{_name(values[value])}" for value in op.updates]
    right = [
        _name(values[value]) + ("" if values[value].version else f":{values[value].bytes}")
        for value in op.writes
    ]
    facts = [f"{op.seconds!r}s", op.phase]
    facts += _word("@", op.module) + _word("node=", op.node)
    facts += [f"workspace={op.workspace_bytes}"] * bool(op.workspace_bytes)
    facts += [flag for flag in _FLAGS if getattr(op, flag)]
    document: dict[str, object] = {"args": op.args} if op.args else {}
    for key, operands in (("in", op.operands), ("out", op.results)):
        if operands:
            document[key] = [[_name(values[o.value]), o.geometry] for o in operands]
    facts += [_compact(document)] * bool(document)
    lines = [f"{' '.join([op.name, *left])} -> {' '.join(right)} | {' '.join(facts)}"]
    for value in op.writes:
        lines.append(f"is {_name(values[value])} | {_facts(values[value])}")
        lines += _save_lines(values[value])
    return lines


def _name(value: Value) -> str:
    return f"s{value.storage}"


def _facts(value: Value) -> str:
    facts = [value.kind.name.lower(), f"device={value.device}"]
    facts += _word("@", value.module) + _word("name=", value.name)
    return " ".join(facts)


def _save_lines(value: Value) -> list[str]:
    lines = []
    for save in value.saves:
        facts = [f"op={save.op}"] * (save.op is not None) + _word("node=", save.node)
        facts.append(f"packed={save.packed}")
        facts += [f"unpacked={','.join(map(str, save.unpacked))}"] * bool(save.unpacked)
        lines.append(f"save {_name(value)} | {' '.join(facts)}")
    return lines


def _compact(thing: object) -> str:
    return json.dumps(thing, separators=(",", ":"))


def _word(prefix: str, text: str) -> list[str]:
    """A fact as one word, or none; names have no spaces or bars here, but `%20` and the like."""
    safe = "".join(c for c in string.punctuation if c not in "%|{")
    return [prefix + quote(text, safe=safe)] if text else []
