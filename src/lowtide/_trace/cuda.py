"""What only the GPU can tell: device times, kernel workspace, memory that no tensor holds.

Times. A kernel timed between two events also shows the gap in which the GPU waited for the host.
So each op is preceded by a short spin on the GPU, during which the host queues event, kernels
and event; they then run back to back. What an empty pair of events shows is subtracted. An op for
which the allocator had to ask the driver for memory, or that the host had not queued in time, is
taken for as long as others of its kind.

Memory. The allocator's own history gives every allocation in order; its counters, read around
each op, tell which of them fell into the op. Peak statistics are not touched.
"""

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from lowtide._ir import CUDA_GRANULARITY_BYTES, Kind, Op, OpIndex, StorageId, Trace, Value
from lowtide._trace.book import Book, Entry

_SPIN_CYCLES = 200_000  # about 0.1 ms: longer than the host needs to queue most ops
_SPIN_CYCLES_RANGE = 80_000, 800_000
_LARGE = 64 << 20  # bytes: of an op that shows how fast memory is, and not a cache
_CYCLES_PER_SECOND = 2e9  # at most: GPUs run at 1 to 2 GHz


@dataclass(frozen=True, slots=True)
class _Event:
    """One entry of the allocator's history."""

    is_alloc: bool
    address: int
    bytes: int


class CudaProbe:
    """Measures the ops it is told about, on the device that is current when it is made."""

    def __init__(self, book: Book) -> None:
        torch.cuda.init()
        self._device = torch.cuda.current_device()
        self._spans: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._cycles: dict[str, int] = {}  # how long to spin for ops of this name
        self._took: dict[str, float] = {}  # how long the host took for the last one
        self._began = 0.0
        self._moved = 0  # what the allocator had done to get memory, before the op
        self._late: dict[int, float] = {}  # by how much the host came too late, where it did more
        self._slow: set[int] = set()  # ops that it had not queued yet when the spin was over
        self._events: dict[int, _Event] = {}
        self._ranges: dict[int, tuple[int, int]] = {}  # op -> allocator events before and after
        self._own: list[tuple[int, int]] = []  # allocator events that are none of the program's
        self._own_from = self._own_depth = 0
        self._history_is_ours = not torch._C._cuda_isHistoryEnabled()
        if self._history_is_ours:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", clear_history=True
            )
        torch.cuda.synchronize()
        self._pause = self._measure_pause()
        held = sum(
            _rounded(entry.bytes)
            for entry in book.entries
            if entry.end is None and entry.device == f"cuda:{self._device}" and not entry.away
        )
        self._unseen_bytes = max(torch.cuda.memory_allocated(self._device) - held, 0)

    def begin(self, op: int, name: str) -> None:
        """`op` is about to run."""
        count, self._moved = self._counts()
        self._ranges[op] = count, count
        if torch.cuda.is_current_stream_capturing():
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._spans[op] = start, end
        for event in (start, end):
            event.record()  # creates it, which takes time that is better spent before the spin
        self._began = time.perf_counter()
        torch.cuda._sleep(self._cycles.get(name, _SPIN_CYCLES))
        start.record()

    def end(self, op: int, name: str) -> None:
        """`op` has been queued; how long that took tells how long to spin the next time."""
        if op in self._spans:
            self._spans[op][1].record()
            took = time.perf_counter() - self._began
            usual = min(took, self._took.get(name, took))  # one hiccup of the host is no rule
            self._took[name] = took
            spun = self._cycles.get(name, _SPIN_CYCLES) / _CYCLES_PER_SECOND
            low, high = _SPIN_CYCLES_RANGE
            self._cycles[name] = max(low, min(high, int(2.5 * usual * _CYCLES_PER_SECOND)))
        count, moved = self._counts()
        self._ranges[op] = self._ranges[op][0], count
        if op in self._spans and moved != self._moved:
            self._late[op] = max(0.0, took - spun)
        elif op in self._spans and took > spun:
            self._slow.add(op)

    def begin_own(self, *, anew: bool = False) -> None:
        """What is allocated from now on is none of the program's. `anew`: nobody else is at it."""
        while anew and self._own_depth:
            self.end_own()  # it was left by an error
        if not self._own_depth:
            self._own_from = self._event_count()
        self._own_depth += 1

    def end_own(self) -> None:
        """Now it is again."""
        if self._own_depth:
            self._own_depth -= 1
            if not self._own_depth:
                self._own.append((self._own_from, self._event_count()))

    def measured(self, trace: Trace, entries: Sequence[Entry]) -> Trace:
        """`trace` with device times, workspace and memory held by no tensor."""
        torch.cuda.synchronize()
        ops = list(trace.ops)
        for i, (start, end) in self._spans.items():
            seconds = max(start.elapsed_time(end) / 1e3 - self._pause, 0.0)
            ops[i] = replace(ops[i], seconds=seconds)
        self._correct(trace, ops)
        own = {at for start, stop in self._own for at in range(start, stop)}
        events = {
            at: event for at, event in self._events.items() if not (event.is_alloc and at in own)
        }
        for i, workspace in _workspaces(events, self._ranges).items():
            ops[i] = replace(ops[i], workspace_bytes=workspace)
        device = f"cuda:{self._device}"
        values = list(trace.values)
        values += _unseen_values(events, self._ranges, entries, values, device)
        return replace(
            trace,
            ops=tuple(ops),
            values=tuple(values),
            granularity_bytes=CUDA_GRANULARITY_BYTES if trace.device == device else 1,
            unseen_bytes=self._unseen_bytes if trace.device == device else 0,
        )

    def _measure_pause(self) -> float:
        """What a pair of events shows with nothing between them, in seconds."""
        pairs = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_SPIN_CYCLES)
            start.record()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return float(median(start.elapsed_time(end) for start, end in pairs)) / 1e3

    def _correct(self, trace: Trace, ops: list[Op]) -> None:
        """The times of ops in which the allocator was at work, or for which the host was slow.

        Those take as long as others of their kind. Where there is none, the host's part in what the
        allocator did is taken away. But no op is faster than the fastest of the others moves its
        bytes: nothing is free.
        """
        kinds: dict[tuple[str, ...], list[float]] = defaultdict(list)
        fastest = 0.0  # bytes a second
        for i in self._spans:
            if i not in self._late and i not in self._slow:
                kinds[_kind(trace, ops[i])].append(ops[i].seconds)
                moved = _moved(trace, ops[i])
                if moved >= _LARGE and ops[i].seconds:
                    fastest = max(fastest, moved / ops[i].seconds)
        for i, late in self._late.items():
            alike = kinds.get(_kind(trace, ops[i]))
            least = _moved(trace, ops[i]) / fastest if fastest else 0.0
            seconds = median(alike) if alike else max(least, ops[i].seconds - late)
            ops[i] = replace(ops[i], seconds=seconds)
        for i in self._slow:
            alike = kinds.get(_kind(trace, ops[i]))
            if alike:  # else nobody knows whether the device had waited for the host
                ops[i] = replace(ops[i], seconds=min(ops[i].seconds, median(alike)))

    def _counts(self) -> tuple[int, int]:
        """Allocations and frees so far, and a figure that changes when memory is got for them."""
        stats = torch._C._cuda_memoryStats(self._device)
        blocks, bytes_held = stats["allocation"]["all"], stats["reserved_bytes"]["all"]
        return (
            int(blocks["allocated"] + blocks["freed"]),
            int(bytes_held["allocated"] + bytes_held["freed"] + stats["num_device_alloc"]),
        )

    def _event_count(self) -> int:
        return self._counts()[0]

    def close(self) -> None:
        """Take what the history has and stop it, also when the recording ends by an error."""
        self._events = self._read_history()

    def _read_history(self) -> dict[int, _Event]:
        """The history by the running number of each event, which `_event_count` gives too."""
        last = self._event_count()
        history: list[dict[str, Any]] = torch.cuda.memory._snapshot(self._device)["device_traces"][
            self._device
        ]
        if self._history_is_ours:
            torch.cuda.memory._record_memory_history(None)
        events = [
            _Event(entry["action"] == "alloc", entry["addr"], _rounded(entry["size"]))
            for entry in history
            if entry["action"] in ("alloc", "free_requested")
        ]
        first = last - len(events)
        return {first + i: event for i, event in enumerate(events)}


def _kind(trace: Trace, op: Op) -> tuple[str, ...]:
    """Alike for ops that take as long."""
    return (op.name, *(str(trace.values[one.value].bytes) for one in op.operands))


def _moved(trace: Trace, op: Op) -> int:
    """Bytes that it reads and writes."""
    return sum(trace.values[value].bytes for value in (*op.reads, *op.updates, *op.writes))


def _rounded(size: int) -> int:
    return -(-size // CUDA_GRANULARITY_BYTES) * CUDA_GRANULARITY_BYTES


def _workspaces(events: dict[int, _Event], ranges: dict[int, tuple[int, int]]) -> dict[int, int]:
    """For every op the height of its load above both its beginning and its end."""
    found = {}
    for op, (start, stop) in ranges.items():
        load = peak = 0
        for number in range(start, stop):
            event = events.get(number)
            if event is not None:
                load += event.bytes if event.is_alloc else -event.bytes
                peak = max(peak, load)
        if peak > max(load, 0):
            found[op] = peak - max(load, 0)
    return found


def _unseen_values(
    events: dict[int, _Event],
    ranges: dict[int, tuple[int, int]],
    entries: Sequence[Entry],
    values: list[Value],
    device: str,
) -> list[Value]:
    """Blocks that outlive the op they were allocated in and belong to no tensor: workspaces that
    libraries keep, buffers of raw kernels.

    A tensor that was first seen some ops after its allocation gets its true birth instead, in
    `values`.
    """
    births: dict[int, list[tuple[int, int]]] = defaultdict(list)  # address -> (first, value)
    for i, entry in enumerate(entries):
        if entry.version == 0 and entry.device == device:
            births[entry.pointer].append((entry.first, i))
    found: list[Value] = []
    for block in _blocks(events, ranges):
        owner = next(
            (i for first, i in births[block.address] if block.first <= first < block.end), None
        )
        if owner is not None:
            values[owner] = replace(values[owner], first=OpIndex(block.first))
        else:
            found.append(
                Value(
                    storage=StorageId(len(entries) + len(found)),
                    version=0,
                    bytes=block.bytes,
                    kind=Kind.BUFFER if block.after else Kind.TEMPORARY,
                    first=OpIndex(block.first),
                    end=OpIndex(block.end),
                    after=block.after,
                    device=device,
                    name="workspace",
                )
            )
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    address: int
    bytes: int
    first: int
    end: int
    after: bool = False


def _blocks(events: dict[int, _Event], ranges: dict[int, tuple[int, int]]) -> Iterator[_Block]:
    """The allocations of the history that outlive the op they fall into, in op indices."""
    ops = sorted(ranges)
    starts = [ranges[op][0] for op in ops]
    count = ops[-1] + 1

    def begun(number: int, *, inside_counts: bool) -> int:
        """How many ops had begun at an event, the one it falls into counted or not."""
        at = bisect_right(starts, number) - 1
        inside = number < ranges[ops[at]][1]
        return ops[at] + (1 if inside_counts or not inside else 0)

    open_blocks: dict[int, tuple[int, int]] = {}  # address -> bytes, first
    for number, event in events.items():
        if number < starts[0]:
            continue
        if event.is_alloc:
            open_blocks[event.address] = event.bytes, begun(number, inside_counts=False)
        elif event.address in open_blocks:
            size, first = open_blocks.pop(event.address)
            end = begun(number, inside_counts=True)
            inside_one_op = end == first + 1 and begun(number, inside_counts=False) == first
            if end > first and not inside_one_op:
                yield _Block(event.address, size, first, end)
    for address, (size, first) in open_blocks.items():
        if first < count:
            yield _Block(address, size, first, count, after=True)
