"""A DTR log -> Trace: the operator trace of a training step, in JSON lines, gzipped or not.

Every name is a reference to a storage; a storage dies when its last reference is released. A
result whose ALIAS is not -1 shares the storage of that argument of its call (given by position).
MUTATE makes new versions. What runs before `ANNOTATE START` is set-up: what it leaves alive was
there before the step. Ops that allocate nothing are views.

Known to be imperfect: a log does not tell weights from inputs, so both are inputs here, and it
has no gradients or optimizer state to speak of.
"""

import gzip
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide._errors import BadInput
from lowtide._files import read_whole
from lowtide._ir import Kind, Op, OpIndex, Phase, StorageId, Trace, Value, ValueId
from lowtide._trace.cut import cut


def import_dtr(path: Path) -> Trace:
    """The step in the DTR log at `path`."""
    log = _Log()
    for number, text in enumerate(_lines(path), start=1):
        try:
            if text.strip():
                log.read(json.loads(text))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            reason = f"{error} is unknown here" if isinstance(error, KeyError) else str(error)
            raise BadInput(f"{path} line {number} is not a line of a DTR log: {reason}") from error
    if len(log.ops) == log.start:
        raise BadInput(f"{path} has no ops: give the log of a training step")
    return cut(log.trace(path.name), log.start, len(log.ops))


def _lines(path: Path) -> list[str]:
    content = read_whole(path)
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return content.decode().splitlines()
    except EOFError as error:
        raise BadInput(f"{path} is cut off: copy it again") from error
    except (gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is damaged or not a DTR log: copy it again") from error


@dataclass(slots=True)
class _Entry:
    """One value."""

    storage: int
    version: int
    first: int
    before: bool
    end: int | None = None


@dataclass(slots=True)
class _Storage:
    value: int  # its newest version
    bytes: int = 0
    references: int = 1


@dataclass(slots=True)
class _Call:
    """One op; `pending` are its results that have no storage yet."""

    name: str
    args: list[str]
    reads: list[int]
    seconds: float
    phase: Phase
    writes: list[int] = field(default_factory=list)
    pending: dict[str, int] = field(default_factory=dict)  # name -> bytes


class _Log:
    def __init__(self) -> None:
        self.ops: list[_Call] = []
        self.entries: list[_Entry] = []
        self.storages: list[_Storage] = []
        self.names: dict[str, int] = {}  # reference -> storage
        self.start = 0
        self.phase = Phase.FORWARD

    def read(self, line: dict[str, Any]) -> None:
        """Follow one instruction."""
        instruction = line["INSTRUCTION"]
        if instruction not in ("MEMORY", "ALIAS"):
            self._settle_results()
        match instruction:
            case "CONSTANT":
                first = len(self.ops)
                self._add_storage(line["NAME"], first, before=first == self.start)
            case "MEMORY":
                self._set_bytes(line["NAME"], int(line["MEMORY"]))
            case "CALL":
                self._add_op(line)
                self.ops[-1].pending = dict.fromkeys(line["RESULT"], 0)
            case "MUTATE":
                self._add_op(line)
                self._mutate({self.names[line["ARGS"][at]]: None for at in line["MUTATE"]})
            case "ALIAS":
                self._alias(line["NAME"], line["ALIAS"])
            case "COPY":
                self._refer(line["DST"], self.names[line["SRC"]])
            case "RELEASE":
                self._release(line["NAME"])
            case "ANNOTATE":
                if line["ANNOTATION"] == "START":
                    self.start = len(self.ops)
                elif line["ANNOTATION"] == "BACKWARD":
                    self.phase = Phase.BACKWARD
            case _:
                raise ValueError(f"there is no instruction {instruction!r}")

    def _add_op(self, line: dict[str, Any]) -> None:
        args = list(line["ARGS"])
        reads = list(dict.fromkeys(self.storages[self.names[name]].value for name in args))
        seconds = int(line["TIME"]) / 1e9
        self.ops.append(_Call(str(line["NAME"]), args, reads, seconds, self.phase))

    def _add_storage(self, name: str, first: int, *, before: bool) -> int:
        self.entries.append(_Entry(len(self.storages), 0, first, before))
        self.storages.append(_Storage(len(self.entries) - 1))
        self.names[name] = len(self.storages) - 1
        return len(self.entries) - 1

    def _set_bytes(self, name: str, size: int) -> None:
        if self.ops and name in self.ops[-1].pending:
            self.ops[-1].pending[name] = size
        else:
            self.storages[self.names[name]].bytes = size

    def _alias(self, name: str, alias: str | int) -> None:
        call = self.ops[-1]
        size = call.pending.pop(name)
        if str(alias) in ("-1", name):
            self._make(name, size)
        else:
            self._refer(name, self.names[call.args[int(alias)]])

    def _settle_results(self) -> None:
        if self.ops:
            for name, size in self.ops[-1].pending.items():
                self._make(name, size)
            self.ops[-1].pending = {}

    def _make(self, name: str, size: int) -> None:
        value = self._add_storage(name, len(self.ops) - 1, before=False)
        self.storages[-1].bytes = size
        self.ops[-1].writes.append(value)

    def _mutate(self, storages: dict[int, None]) -> None:
        index = len(self.ops) - 1
        for number in storages:
            storage = self.storages[number]
            old = self.entries[storage.value]
            old.end = index
            self.entries.append(_Entry(number, old.version + 1, index, before=False))
            storage.value = len(self.entries) - 1
            self.ops[-1].writes.append(storage.value)

    def _refer(self, name: str, storage: int) -> None:
        self.storages[storage].references += 1
        self.names[name] = storage

    def _release(self, name: str) -> None:
        storage = self.storages[self.names.pop(name)]
        storage.references -= 1
        if storage.references == 0:
            self.entries[storage.value].end = len(self.ops)

    def trace(self, source: str) -> Trace:
        """Everything read, set-up included."""
        self._settle_results()
        made_forward = {v for op in self.ops if op.phase is Phase.FORWARD for v in op.writes}
        read_backward = {v for op in self.ops if op.phase is Phase.BACKWARD for v in op.reads}
        made = {value for op in self.ops for value in op.writes}
        count = len(self.ops)
        values = []
        for i, entry in enumerate(self.entries):
            kept = i in made_forward and i in read_backward
            values.append(
                Value(
                    storage=StorageId(entry.storage),
                    version=entry.version,
                    bytes=self.storages[entry.storage].bytes,
                    kind=Kind.ACTIVATION if kept else Kind.TEMPORARY if i in made else Kind.INPUT,
                    first=OpIndex(entry.first),
                    end=OpIndex(count if entry.end is None else entry.end),
                    before=entry.before,
                    after=entry.end is None,
                    device="cuda",
                )
            )
        ops = tuple(
            Op(
                name=op.name,
                reads=tuple(ValueId(value) for value in op.reads) if op.writes else (),
                writes=tuple(ValueId(value) for value in op.writes),
                seconds=op.seconds,
                phase=op.phase,
                view=not op.writes,
            )
            for op in self.ops
        )
        return Trace(ops=ops, values=tuple(values), device="cuda", source=source)
