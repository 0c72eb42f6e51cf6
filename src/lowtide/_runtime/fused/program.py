"""Calls -> the program that computes the same, element by element."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from lowtide._analyze.fusable import DTYPES, ELEMENTWISE
from lowtide._analyze.fusable import GRADIENTS as BACKWARD
from lowtide._runtime.delta.recipe import Call, Given, Source, filled
from lowtide._runtime.swap.quiet import quiet

Dims = tuple[tuple[int, int], ...]  # extents and strides, the innermost first; (): as it lies

FLOATS = frozenset(getattr(torch, name) for name in DTYPES)
_SCALED = ("add", "sub", "rsub")  # a factor may come with the second operand
_TWO = ("add", "div", "mul", "sub")
_POWERS = (1, 2, 3)
_OPERANDS = {"threshold_backward": 3}  # of what only backward has: the last is a number; else two
GRADIENTS = {name: _OPERANDS.get(name, 2) for name in (one.partition(".")[0] for one in BACKWARD)}
_MOST_DIMS = 5


@dataclass(frozen=True, slots=True)
class Input:
    """What is read from memory."""

    dtype: torch.dtype
    dims: Dims


@dataclass(frozen=True, slots=True)
class Read:
    """The k-th input as an operand."""

    place: int


@dataclass(frozen=True, slots=True)
class Made:
    """What the k-th step has made as an operand."""

    place: int


Operand = Read | Made | float


@dataclass(frozen=True, slots=True)
class Step:
    """One op; `dtype` is that of what it makes, to which it rounds."""

    op: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Program:
    """All that a kernel is made of: those that are equal share one."""

    count: int  # elements, if any are found by strides; else 0: it is the same for any number
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]  # the steps whose results are wanted


@dataclass(frozen=True, slots=True)
class Part:
    """A call that can be a step: what it computes of its sources, and numbers, by their places."""

    op: str
    operands: tuple[int | float, ...]  # ints are places of sources
    dtype: torch.dtype
    count: int
    dims: tuple[Dims, ...]  # of each source


def part_of(call: Call) -> Part | None:
    """None: it is nothing that a kernel here could compute."""
    schema = call.func._schema
    name, _, _ = schema.name.partition("::")[2].partition(".")
    overload = schema.overload_name or "default"
    is_one = f"{name}.{overload}" in ELEMENTWISE or name in GRADIENTS
    if not is_one or call.writes or len(call.makes) != 1:
        return None
    if any(source.ignored or source.dtype not in FLOATS for source in call.sources):
        return None
    places = iter(range(len(call.sources)))
    given = [next(places) if type(arg) is Given else arg for arg in call.args]
    dtype = _dtype(call, name)
    lying = _lying(call.sources)
    if dtype is None or lying is None:
        return None
    operands = _operands(name, given, [type(arg) is Given for arg in call.args])
    if operands is None or not _makes_alike(call, dtype):
        return None
    count, dims = lying
    return Part(name, operands, dtype, count, dims)


def program_of(
    parts: Sequence[Part],
    places: Sequence[Sequence[int]],
    inputs: Sequence[Input],
    outputs: Sequence[int],
) -> Program:
    """Of parts in a row. `places`: of the sources of each, the part that makes it, or from -1
    downwards an input.
    """
    steps = []
    for part, sources in zip(parts, places, strict=True):
        operands: list[Operand] = []
        for one in part.operands:
            if isinstance(one, float):
                operands.append(one)
            else:
                place = sources[one]
                operands.append(Made(place) if place >= 0 else Read(-1 - place))
        steps.append(Step(part.op, tuple(operands), part.dtype))
    count = parts[0].count if any(given.dims for given in inputs) else 0
    return Program(count, tuple(inputs), tuple(steps), tuple(outputs))


def _makes_alike(call: Call, dtype: torch.dtype) -> bool:
    """Whether what it makes is of that type and lies as what it reads as a whole: PyTorch says.

    Where operands lie in different ways, the first of them may decide.
    """
    whole = max(call.sources, key=lambda source: prod(source.size))
    with quiet(), torch.no_grad():
        given = iter(
            [
                torch.empty_strided(one.size, one.stride, dtype=one.dtype, device="meta")
                for one in call.sources
            ]
        )
        named = {key: value for key, value in call.kwargs.items() if key != "device"}
        made = call.func(*filled(call.args, given), **named)
    return bool(
        made.dtype is dtype
        and made.size() == whole.size
        and made.stride() == whole.stride
        and made.storage_offset() == 0
    )


def _dtype(call: Call, name: str) -> torch.dtype | None:
    """Of its result, if its keywords say nothing that is not understood."""
    found = call.sources[0].dtype if call.sources else None
    for source in call.sources[1:]:
        assert found is not None
        found = torch.promote_types(found, source.dtype)
    for key, value in call.kwargs.items():
        if key == "dtype" and name == "_to_copy":
            found = found if value is None else value
        elif key == "alpha" and name in _SCALED:
            if type(value) is Given or value != 1:
                return None
        elif key == "device":
            if value is not None and torch.device(value).type != call.device.type:
                return None
        elif value is not None and value is not False and value is not torch.strided:
            return None
    return found if found in FLOATS else None


def _operands(
    name: str, given: Sequence[object], tensors: Sequence[bool]
) -> tuple[int | float, ...] | None:
    """Places of sources as ints, numbers as floats."""
    found: list[int | float] = []
    for thing, is_tensor in zip(given, tensors, strict=True):
        if is_tensor:
            assert isinstance(thing, int)
            found.append(thing)
        elif type(thing) in (int, float):
            found.append(float(thing))  # type: ignore[arg-type]
        else:
            return None
    if name == "rsub" and len(found) == 3 and found.pop() != 1:
        return None
    if name == "pow" and found[1:] not in [[float(power)] for power in _POWERS]:
        return None
    if len(found) != GRADIENTS.get(name, 2 if name in (*_TWO, "rsub", "pow") else 1):
        return None
    if not all(tensors[: 2 if name in GRADIENTS else 1]):
        return None
    return tuple(found)


def _lying(sources: Sequence[Source]) -> tuple[int, tuple[Dims, ...]] | None:
    """How many elements there are, and how to find each source's; None: they do not lie alike."""
    if not sources:
        return None
    whole = max(sources, key=lambda source: prod(source.size))
    count = prod(whole.size)
    order = _dense(whole.size, whole.stride)
    if order is None or not count:
        return None
    shape = tuple(whole.size)
    dims: list[Dims] = []
    for source in sources:
        if not source.size:
            return None  # a number on the device: other rules of types
        if tuple(source.size) == shape:
            if source.stride != whole.stride:
                return None
            dims.append(())
            continue
        strides = _expanded(source, shape)
        if strides is None:
            return None
        found = _collapsed([(shape[d], strides[d]) for d in order])
        if not found or len(found) > _MOST_DIMS:
            return None
        dims.append(found)
    return count, tuple(dims)


def _dense(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Dimensions in the order in which elements lie, the innermost first; None: with holes."""
    order = sorted(
        (d for d, extent in enumerate(size) if extent > 1), key=lambda d: (stride[d], -d)
    )
    step = 1
    for d in order:
        if stride[d] != step:
            return None
        step *= size[d]
    return order


def _expanded(source: Source, shape: tuple[int, ...]) -> list[int] | None:
    """Strides over a larger shape."""
    missing = len(shape) - len(source.size)
    if missing < 0:
        return None
    strides = [0] * missing
    for extent, wanted, stride in zip(source.size, shape[missing:], source.stride, strict=True):
        if extent == wanted:
            strides.append(stride)
        elif extent == 1:
            strides.append(0)
        else:
            return None
    return strides


def _collapsed(dims: Sequence[tuple[int, int]]) -> Dims:
    """Neighbours that can be counted through as one, as one; without those that change nothing."""
    found: list[tuple[int, int]] = []
    for extent, stride in dims:
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0] * extent, found[-1][1]
        else:
            found.append((extent, stride))
    while len(found) > 1 and not found[-1][1]:
        found.pop()
    return tuple(found)
