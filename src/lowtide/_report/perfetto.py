"""The planned step -> a trace for ui.perfetto.dev, in Chrome's JSON form.

Compute and the two ways of copying are threads; memory, by kind, and what is away are counters.
A copy that goes on into the next step is shown as long as it takes.
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtide._analyze.load import find_peak, rounded_bytes
from lowtide._ir import Machine, Plan, Trace
from lowtide._report.planned import LAYERS, PlannedStep, away_bytes, labels, layers, plan_step

_PROCESS = 1
_COMPUTE, _OUT, _BACK = 1, 2, 3
_COLOURS = {  # of Chrome's own viewer; Perfetto's takes those of the names
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "optimizer": "thread_state_unknown",
    "run again": "bad",
    "waiting": "terrible",
    "copy out": "good",
    "copy back": "rail_load",
}

_Event = dict[str, Any]


def render_perfetto(trace: Trace, plan: Plan | None, machine: Machine | None) -> str:
    """The step by `plan`, or as it was traced."""
    if plan is None:
        peak, seconds = find_peak(trace).bytes, sum(op.seconds for op in trace.ops)
        plan = Plan((), peak, seconds, peak, seconds)
    planned = plan_step(trace, plan, machine)
    events = [
        _called("process_name", 0, trace.source or "one step"),
        _called("thread_name", _COMPUTE, "compute"),
        *_compute(planned),
    ]
    if plan.swaps:
        events += [
            _called("thread_name", _OUT, "copies out"),
            _called("thread_name", _BACK, "copies back"),
            *_copies(planned),
        ]
    held = layers(planned.step.trace, plan.swaps)
    times = planned.starts - planned.waits
    events += _counter("memory", times, held.sum(axis=0))
    for name, row in zip(LAYERS, held, strict=True):
        if row.any():
            events += _counter(f"memory: {name}", times, row)
    if plan.swaps:
        events += _counter("away", times, away_bytes(planned))
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _called(what: str, thread: int, name: str) -> _Event:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": {"name": name}}


def _slice(name: str, kind: str, thread: int, start: float, end: float, **args: object) -> _Event:
    first, last = _nanoseconds(start), _nanoseconds(end)
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "name": name,
        "cat": kind,
        "cname": _COLOURS[kind],
        "ts": first / 1000,
        "dur": (last - first) / 1000,
        "args": {key: value for key, value in args.items() if value != ""},
    }


def _compute(planned: PlannedStep) -> list[_Event]:
    found = []
    for i, op in enumerate(planned.step.trace.ops):
        start, wait = float(planned.starts[i]), float(planned.waits[i])
        if wait > 0:
            found.append(_slice("waiting", "waiting", _COMPUTE, start - wait, start))
        again = bool(planned.again[i])
        number = int(planned.before[i])
        found.append(
            _slice(
                f"again: {op.name}" if again else op.name,
                "run again" if again else str(op.phase),
                _COMPUTE,
                start,
                float(planned.ends[i]),
                module=op.module,
                **{"before op" if again else "op": number},
            )
        )
    return found


def _copies(planned: PlannedStep) -> list[_Event]:
    found = []
    outcome, trace = planned.outcome, planned.step.trace
    named = labels(trace)
    for number, swap in enumerate(planned.plan.swaps):
        value = trace.values[swap.value]
        name = named[swap.value] or f"storage {value.storage}"
        for kind, thread, (start, end) in (
            ("copy out", _OUT, outcome.out_spans[number]),
            ("copy back", _BACK, outcome.back_spans[number]),
        ):
            size = rounded_bytes(trace, value)
            found.append(_slice(name, kind, thread, start, end, bytes=size))
    return found


def _counter(name: str, times: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> Any:
    """One event for each change."""
    changes = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(counts)))]
    return [
        {
            "ph": "C",
            "pid": _PROCESS,
            "name": name,
            "ts": _nanoseconds(times[i]) / 1000,
            "args": {"bytes": int(counts[i])},
        }
        for i in changes
    ]


def _nanoseconds(seconds: float) -> int:
    """Whole ones: what follows each other must not overlap by a rounding."""
    return round(float(seconds) * 1e9)
