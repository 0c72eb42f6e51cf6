"""Trace and summary -> one self-contained page: memory over the step. Opens offline."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import numpy as np

from lowtide._analyze.load import load_by_kind, load_curve
from lowtide._analyze.summary import Summary
from lowtide._ir import Kind, Trace
from lowtide._report.page import render_page
from lowtide._units import format_bytes, format_seconds

_PART = Path(__file__).with_name("timeline.html")
_BUCKETS = 1200  # more columns than a chart has pixels show nothing more


class _Layer(TypedDict):
    kind: str
    bytes: list[int]


def render_timeline(trace: Trace, summary: Summary) -> str:
    """The page. Of the ops that share a column the one with the highest load is shown."""
    load = load_curve(trace)
    kinds = load_by_kind(trace)
    shown = _columns(load)
    ends = np.cumsum([op.seconds for op in trace.ops])
    data = {
        "title": summary.source or "one step",
        "facts": [
            ["peak", format_bytes(summary.peak.bytes)],
            ["device", summary.device],
            ["ops", f"{summary.ops:,}"],
            ["device time", format_seconds(summary.seconds)],
            ["saved for backward at the peak", format_bytes(summary.saved_bytes)],
            ["recomputable at the peak", format_bytes(summary.recomputable_bytes)],
        ],
        "peak": {
            "column": int(np.searchsorted(shown, summary.peak.op)),
            "bytes": summary.peak.bytes,
            "text": f"{format_bytes(summary.peak.bytes)} at op {summary.peak.op}",
        },
        "ops": [int(i) for i in shown],
        "seconds": [float(ends[i]) for i in shown],
        "names": [trace.ops[i].name for i in shown],
        "modules": [trace.ops[i].module for i in shown],
        "phases": [trace.ops[i].phase for i in shown],
        "layers": [layer for layer in _layers(trace, shown, kinds) if any(layer["bytes"])],
        "owners": [
            {
                "module": owner.module or "(outside modules)",
                "modules": owner.modules,
                "bytes": owner.by_kind,
            }
            for owner in summary.owners[:60]
        ],
        "largest": [
            [
                format_bytes(holding.bytes),
                holding.kind,
                holding.name or holding.module or "(outside modules)",
                holding.made_by.removeprefix("aten."),
                holding.idle_ops,
                holding.obstacle or "can be recomputed",
            ]
            for holding in summary.largest
        ],
    }
    return render_page(_PART, data)


def _columns(load: "np.typing.NDArray[np.int64]") -> Sequence[int]:
    """The op to show in each column."""
    edges = np.unique(np.linspace(0, len(load), min(_BUCKETS, len(load)) + 1).astype(int))
    return [int(a + load[a:b].argmax()) for a, b in pairwise(edges)]


def _layers(
    trace: Trace, shown: Sequence[int], kinds: "np.typing.NDArray[np.int64]"
) -> list[_Layer]:
    """What stays lies at the bottom of the stack, what comes and goes at the top."""
    order = [Kind.PARAMETER, Kind.STATE, Kind.BUFFER, Kind.INPUT]
    order += [Kind.GRADIENT, Kind.ACTIVATION, Kind.TEMPORARY]
    row = {kind: number for number, kind in enumerate(Kind)}
    layers: list[_Layer] = [
        {"kind": kind, "bytes": [int(kinds[row[kind], i]) for i in shown]} for kind in order
    ]
    return [
        {"kind": "held by no tensor", "bytes": [trace.unseen_bytes] * len(shown)},
        *layers,
        {"kind": "workspace", "bytes": [trace.ops[i].workspace_bytes for i in shown]},
    ]
