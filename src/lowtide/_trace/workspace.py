"""Ops on the CPU -> what their kernels allocate inside, by running each distinct one again.

PyTorch reports CPU allocations to its profiler alone, and a script may be using that. So after
the recording, each op whose name, arguments and shapes are new is called once more on scratch
tensors of the same geometry, under the profiler. Its results are thrown away and the random
state is put back. Ops that cannot be called again, ops of other libraries and ops for whose
scratch there is no room count as having no workspace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._C._autograd import (
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils._python_dispatch import _disable_current_modes

from lowtide._ir import UNREPLAYABLE, Geometry, Op, Trace
from lowtide._trace.args import decode_args

_Signature = tuple[str, str, tuple[Geometry, ...], bool]  # name, args, shapes, grad mode
_MARK = "lowtide op "


def with_cpu_workspace(trace: Trace, room: int | None = None) -> Trace:
    """`trace` with `workspace_bytes` filled in for its CPU ops, if no profiler is running.

    In `room` bytes: half for scratch and results, half for what is not known yet.
    """
    if trace.device != "cpu" or _profiler_enabled():
        return trace
    signatures = [
        _signature(trace, op) if room is None or 2 * _taken(trace, op) <= room else None
        for op in trace.ops
    ]
    measured = _measure([s for s in dict.fromkeys(signatures) if s is not None])
    return replace(
        trace,
        ops=tuple(
            replace(op, workspace_bytes=measured[signature]) if signature in measured else op
            for op, signature in zip(trace.ops, signatures, strict=True)
        ),
    )


def _signature(trace: Trace, op: Op) -> _Signature | None:
    if op.view or not op.name.startswith("aten.") or not op.args or UNREPLAYABLE in op.args:
        return None
    return op.name, op.args, tuple(trace.geometries[o.geometry] for o in op.operands), op.grad


def _taken(trace: Trace, op: Op) -> int:
    """Bytes of the scratch and the results of calling it again."""
    shapes = [trace.geometries[operand.geometry] for operand in op.operands]
    scratch = sum(_reach(shape) * int(getattr(torch, shape.dtype).itemsize) for shape in shapes)
    return scratch + sum(trace.values[value].bytes for value in op.writes)


def _measure(signatures: Sequence[_Signature]) -> dict[_Signature, int]:
    """The workspace of each signature that can be called."""
    # The plain profiler: unlike Kineto's it keeps allocations in order with the ops.
    config = ProfilerConfig(
        ProfilerState.CPU,
        False,
        True,
        False,
        False,
        False,
        _ExperimentalConfig(),
    )
    random_state = torch.random.get_rng_state()
    _enable_profiler_legacy(config)
    try:
        for number, signature in enumerate(signatures):
            _call_again(number, signature)
    finally:
        threads = _disable_profiler_legacy()
        torch.random.set_rng_state(random_state)
    measured: dict[_Signature, int] = {}
    for events in threads:
        for number, peak, kept in _spans(events):
            measured[signatures[number]] = peak - max(kept, 0)
    return measured


def _call_again(number: int, signature: _Signature) -> None:
    name, args, geometries, grad = signature
    namespace, packet, overload = name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    with torch.set_grad_enabled(grad), _disable_current_modes():
        try:
            tensors = [_scratch(geometry) for geometry in geometries]
            positional, keywords = decode_args(args, tensors)
            with torch.autograd.profiler.record_function(f"{_MARK}{number}"):
                result = func(*positional, **keywords)
            del result  # not before the mark ends: results are not workspace
        except Exception:  # noqa: BLE001 - any complaint about scratch content: not measured
            return


def _scratch(geometry: Geometry) -> torch.Tensor:
    """A tensor of zeros, which are valid indices, valid sizes and valid masks."""
    dtype = getattr(torch, geometry.dtype)
    flat = torch.zeros(_reach(geometry), dtype=dtype, device="cpu")
    return flat.as_strided(geometry.shape, geometry.strides)


def _reach(geometry: Geometry) -> int:
    """Elements from its first to its last, both counted."""
    reach = sum((n - 1) * s for n, s in zip(geometry.shape, geometry.strides, strict=True))
    return 0 if 0 in geometry.shape else reach + 1


def _spans(events: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """(number, highest load inside, load at its end) of every marked call."""
    depth = number = load = peak = 0
    for event in events:
        kind = event.kind()
        if kind == "push":
            if depth == 0 and event.name().startswith(_MARK):
                number, load, peak = int(event.name().removeprefix(_MARK)), 0, 0
                depth = 1
            elif depth:
                depth += 1
        elif kind == "memory_alloc" and depth:
            load += event.cpu_memory_usage()
            peak = max(peak, load)
        elif kind == "pop" and depth:
            depth -= 1
            if depth == 0:
                yield number, peak, load
