"""What a profiler saw a GPU do -> where the time of a step goes that it takes longer than another.

The stream that computes runs one kernel after the other; between two of them it waits, for the
host, which had not asked for the next one yet, or for a copy. So a step's time is that of its
kernels, and of both ways to wait. Kernels that another step has as well, in the same order, are
compared one by one, by what was copied meanwhile.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_COMPUTES = ("kernel", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_GAPS = (1e-3, 1e-4, 1e-5, 0.0)  # seconds
_MOST = 12  # of what differs most
_WAYS = {"DtoH": "out", "HtoD": "in"}

Calls = Mapping[str, tuple[int, float]]  # by name: how many, and their seconds


@dataclass(frozen=True)
class Ran:
    """Something that the device did, in seconds of its clock."""

    name: str
    begin: float
    end: float
    asked: float  # when the host had asked for it


@dataclass(frozen=True)
class Steps:
    """Some that were profiled: of the stream that computes, and the copies beside it."""

    count: int
    ran: Sequence[Ran]
    copies: Mapping[str, Sequence[Ran]]  # by way: "out", "in"
    calls: Calls  # of the host to the driver


def read_steps(events: Iterable[Mapping[str, Any]], count: int) -> Steps:
    """Of a Chrome trace as PyTorch's profiler writes it."""
    asked: dict[int, float] = {}
    streams: dict[Any, list[Ran]] = defaultdict(list)
    copies: dict[str, list[Ran]] = {"out": [], "in": []}
    calls: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    some = [event for event in events if event.get("ph") == "X"]
    for event in some:
        if event.get("cat") in _CALLS:
            asked[event["args"].get("correlation", -1)] = (event["ts"] + event["dur"]) / 1e6
            number, seconds = calls[event["name"]]
            calls[event["name"]] = number + 1, seconds + event["dur"] / 1e6
    for event in some:
        kind, args = event.get("cat"), event.get("args", {})
        if kind != "gpu_memcpy" and kind not in _COMPUTES:
            continue
        begin = event["ts"] / 1e6
        ran = Ran(
            event["name"],
            begin,
            begin + event["dur"] / 1e6,
            asked.get(args.get("correlation", -1), begin),
        )
        way = next((_WAYS[one] for one in _WAYS if one in event["name"]), None)
        if kind == "gpu_memcpy" and way is not None:
            copies[way].append(ran)
        else:
            streams[args.get("stream")].append(ran)
    busiest = max(streams.values(), key=lambda ran: sum(one.end - one.begin for one in ran))
    for row in (busiest, *copies.values()):
        row.sort(key=lambda one: one.begin)
    return Steps(count, busiest, copies, calls)


def by_call(plain: Steps, other: Steps) -> list[dict[str, Any]]:
    """What the host asks the driver for, a step: the calls whose time differs most."""
    return _most_different(plain.calls, other.calls, plain.count, other.count)


def by_gap(steps: Steps) -> list[dict[str, Any]]:
    """How often in a step, and for how long, the stream waits for what was asked for in time."""
    rows = [{"from_seconds": least, "times": 0.0, "seconds": 0.0} for least in _GAPS]
    for _, gap, behind in _gaps(steps):
        waits = gap - behind
        row = next((one for one in rows if waits >= one["from_seconds"]), rows[-1])
        row["times"] += 1 / steps.count
        row["seconds"] += waits / steps.count
    return rows


def longest_gaps(steps: Steps, most: int = 8) -> list[dict[str, Any]]:
    """The longest of them: when in the profile, and before which kernel."""
    began = steps.ran[0].begin if steps.ran else 0.0
    found = sorted(_gaps(steps), key=lambda one: -one[1])[:most]
    return [
        {"at": ran.begin - began, "seconds": gap, "host": behind, "before": ran.name}
        for ran, gap, behind in found
    ]


def _gaps(steps: Steps) -> Iterator[tuple[Ran, float, float]]:
    """Before each kernel: how long the stream had nothing to do, and of that until it was asked."""
    for before, after in pairwise(steps.ran):
        gap = max(0.0, after.begin - before.end)
        yield after, gap, min(gap, max(0.0, after.asked - before.end))


def spent(steps: Steps) -> dict[str, float]:
    """The seconds of a step by what they are for, and of what is copied beside it."""
    late = sum(behind for _, _, behind in _gaps(steps))
    waits = sum(gap - behind for _, gap, behind in _gaps(steps))
    busy = sum(one.end - one.begin for one in steps.ran)
    parts = {"kernels": busy, "host": late, "waits": waits}
    parts |= {way: sum(one.end - one.begin for one in steps.copies[way]) for way in ("out", "in")}
    return {name: seconds / steps.count for name, seconds in parts.items()}


def by_copies(plain: Steps, other: Steps) -> dict[str, dict[str, float]]:
    """Kernels that both have, as often: the seconds of a plain step, and how much slower they are.

    By what was copied during most of it: nothing, out, in, both ways.
    """
    shadows = {way: _Shadow(other.copies[way]) for way in ("out", "in")}
    first, second = _by_name(plain), _by_name(other)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in first.keys() & second.keys():
        each, odd = divmod(len(first[name]), plain.count)
        if odd or len(second[name]) != each * other.count:
            continue  # not the same ones in every step
        typical = [0.0] * each
        for at, one in enumerate(first[name]):
            typical[at % each] += (one.end - one.begin) / plain.count
        for at, one in enumerate(second[name]):
            ways = [way for way in shadows if shadows[way].covers(one)]
            entry = sums["+".join(ways) or "nothing"]
            entry[0] += typical[at % each] / other.count
            entry[1] += (one.end - one.begin) / other.count
    return {
        ways: {"plain_seconds": one, "slower": other / one - 1}
        for ways, (one, other) in sorted(sums.items())
    }


def by_name(plain: Steps, other: Steps) -> list[dict[str, Any]]:
    """The kernels whose time differs most."""
    first, second = (
        {name: (len(ran), sum(one.end - one.begin for one in ran)) for name, ran in found.items()}
        for found in (_by_name(plain), _by_name(other))
    )
    return _most_different(first, second, plain.count, other.count)


def _most_different(first: Calls, second: Calls, of: int, others: int) -> list[dict[str, Any]]:
    """Of so many steps each: a step's calls and seconds side by side."""
    rows: list[dict[str, Any]] = []
    for name in first.keys() | second.keys():
        (calls, seconds), (now, taken) = first.get(name, (0, 0.0)), second.get(name, (0, 0.0))
        rows.append(
            {
                "name": name,
                "plain_calls": calls / of,
                "calls": now / others,
                "plain_seconds": seconds / of,
                "seconds": taken / others,
            }
        )
    rows.sort(key=lambda row: -abs(row["seconds"] - row["plain_seconds"]))
    return rows[:_MOST]


def _by_name(steps: Steps) -> dict[str, list[Ran]]:
    found: dict[str, list[Ran]] = defaultdict(list)
    for one in steps.ran:
        found[one.name].append(one)
    return found


class _Shadow:
    """Of copies in one direction, which do not overlap."""

    def __init__(self, copies: Sequence[Ran]) -> None:
        self._copies = copies
        self._ends = [one.end for one in copies]

    def covers(self, ran: Ran) -> bool:
        """Whether most of it has one beside it."""
        beside = 0.0
        for at in range(bisect_left(self._ends, ran.begin), len(self._copies)):
            one = self._copies[at]
            if one.begin >= ran.end:
                break
            beside += min(one.end, ran.end) - max(one.begin, ran.begin)
        return beside > (ran.end - ran.begin) / 2
