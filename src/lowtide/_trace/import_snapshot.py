"""A PyTorch CUDA memory snapshot -> Trace: the allocator's history as a trace of allocations.

`torch.cuda.memory._dump_snapshot` writes a pickle. It is read by an unpickler that knows no
class and no function, so nothing in the file can run. Every allocation becomes an op; blocks that
are freed without having been allocated, or never mentioned though the final state holds them,
were there before. Of a history that repeats itself the last whole iteration is taken.
"""

import io
import operator
import pickle
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from lowtide._analyze.repeat import find_repeat
from lowtide._errors import BadInput
from lowtide._files import read_whole
from lowtide._ir import CUDA_GRANULARITY_BYTES, Kind, Op, OpIndex, StorageId, Trace, Value, ValueId
from lowtide._trace.cut import cut
from lowtide._trace.order import renumber


def import_snapshot(path: Path, *, whole: bool) -> Trace:
    """The busiest device's history in the snapshot at `path`: one iteration, or the `whole`."""
    snapshot = _load(path)
    try:
        histories = snapshot["device_traces"]
        device = max(range(len(histories)), key=lambda i: len(histories[i]), default=0)
        events = [
            _Event(
                entry["action"] == "alloc",
                operator.index(entry["addr"]),
                operator.index(entry["size"]),
                _caller(entry),
            )
            for entry in (histories[device] if histories else [])
            if entry["action"] in ("alloc", "free_requested")
        ]
        blocks = [
            (block["address"], operator.index(block.get("requested_size", block["size"])))
            for segment in snapshot["segments"]
            if segment.get("device", 0) == device
            for block in _placed(segment)
            if block["state"] == "active_allocated"
        ]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadInput(f"{path} is a pickle, but not of a CUDA memory snapshot") from error
    if not any(event.is_alloc for event in events):
        raise BadInput(
            f"{path} has no allocation history: call torch.cuda.memory._record_memory_history() "
            f"before training and dump the snapshot after a few steps"
        )
    trace = _trace(events, blocks, f"cuda:{device}", path.name)
    return trace if whole else _one_iteration(trace, events)


class _PlainUnpickler(pickle.Unpickler):
    """Admits numbers, text, lists, tuples and dicts."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002 - the name is pickle's
        raise pickle.UnpicklingError("it asks for an object from elsewhere")


def _load(path: Path) -> Any:
    content = read_whole(path)
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        if "it asks for" in str(error):
            raise BadInput(f"{path} is not plain data and was not opened: {error}") from error
        raise BadInput(f"{path} is not a CUDA memory snapshot: {error}") from error
    except Exception as error:
        # A damaged pickle can fail in any way; none of it was code of the file's.
        raise BadInput(f"{path} is damaged or not a CUDA memory snapshot: dump it again") from error


@dataclass(frozen=True, slots=True)
class _Event:
    is_alloc: bool
    address: int
    bytes: int
    caller: str


def _caller(entry: dict[str, Any]) -> str:
    frames = entry.get("frames") or []
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    return str(python[0]["name"]) if python else ""


def _placed(segment: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks of a segment with their addresses, which old snapshots leave out."""
    address = segment["address"]
    placed = []
    for block in segment["blocks"]:
        placed.append({"address": address, **block})
        address += block["size"]
    return placed


def _trace(events: list[_Event], blocks: list[tuple[int, int]], device: str, source: str) -> Trace:
    """The k-th allocation is op k and makes value k; blocks from before follow."""
    ops: list[Op] = []
    sizes: list[int] = []
    ends: dict[int, int] = {}
    live: dict[int, int] = {}  # address -> the allocation that holds it
    before: list[tuple[int, int | None]] = []  # bytes, end
    for event in events:
        if event.is_alloc:
            live[event.address] = len(ops)
            sizes.append(event.bytes)
            ops.append(Op("allocate", writes=(ValueId(len(ops)),), module=event.caller))
        elif event.address in live:
            ends[live.pop(event.address)] = len(ops)
        else:
            before.append((event.bytes, len(ops)))
    before += [(size, None) for address, size in blocks if address not in live]
    count = len(ops)

    def value(size: int, first: int, end: int | None, was_before: bool, caller: str) -> Value:
        return Value(
            storage=StorageId(0),  # numbered below
            version=0,
            bytes=size,
            kind=Kind.INPUT if was_before else Kind.TEMPORARY,
            first=OpIndex(first),
            end=OpIndex(count if end is None else end),
            before=was_before,
            after=end is None,
            device=device,
            module=caller,
        )

    values = [value(n, i, ends.get(i), False, ops[i].module) for i, n in enumerate(sizes)]
    values += [value(n, 0, end, True, "") for n, end in before if end != 0]
    return renumber(
        Trace(
            ops=tuple(ops),
            values=tuple(replace(v, storage=StorageId(i)) for i, v in enumerate(values)),
            device=device,
            granularity_bytes=CUDA_GRANULARITY_BYTES,
            source=source,
        )
    )


def _one_iteration(trace: Trace, events: list[_Event]) -> Trace:
    """The last whole period of allocations and frees; all of it if nothing repeats.

    As in SmartPool an allocation is told by its size and a free by the distance to its
    allocation.
    """
    allocated: dict[int, int] = defaultdict(lambda: -1)
    tokens: list[tuple[bool, int]] = []
    ops_before: list[int] = []
    count = 0
    for i, event in enumerate(events):
        ops_before.append(count)
        if event.is_alloc:
            allocated[event.address] = i
            tokens.append((True, event.bytes))
            count += 1
        else:
            tokens.append((False, i - allocated[event.address]))
    repeat = find_repeat(tokens)
    if repeat is None:
        return trace
    start, stop = repeat.stop - repeat.period, repeat.stop
    return cut(trace, ops_before[start], ops_before[stop] if stop < len(events) else count)
