"""The arguments of an op <-> canonical JSON, so that a recorded op can be called again.

Tensors are given as `{"tensor": k}`, the k-th tensor in order of appearance; what JSON has no
word for is a one-key object, such as `{"dtype": "float32"}`. What cannot be written down at all
becomes `{"unreplayable": type}`.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_JSON = json.JSONEncoder(separators=(",", ":"))


def encode_args(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The call as text, tensors numbered in the order in which they come."""
    numbers = itertools.count()
    call = [_encode(args, numbers), {key: _encode(kwargs[key], numbers) for key in kwargs}]
    return _JSON.encode(call)


def decode_args(text: str, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of the call, with `tensors` in their places."""
    args, kwargs = json.loads(text)
    return _decode(args, tensors), {key: _decode(kwargs[key], tensors) for key in kwargs}


def _encode(thing: Any, numbers: Iterator[int]) -> Any:
    kind = type(thing)
    if thing is None or kind is bool or kind is int or kind is str:
        return thing
    if isinstance(thing, torch.Tensor):
        return {"tensor": next(numbers)}
    if kind is float:
        return thing if math.isfinite(thing) else {"float": repr(thing)}
    if kind is list or kind is tuple or isinstance(thing, torch.Size):
        return [_encode(item, numbers) for item in thing]
    if kind is complex:
        return {"complex": [repr(thing.real), repr(thing.imag)]}
    for name in ("dtype", "device", "layout", "memory_format"):
        if kind is getattr(torch, name):
            return {name: str(thing).removeprefix("torch.")}
    if isinstance(thing, torch.Generator):
        return {"generator": str(thing.device)}
    return {"unreplayable": kind.__name__}


def _decode(thing: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if type(thing) is list:
        return [_decode(item, tensors) for item in thing]
    if type(thing) is not dict:
        return thing
    ((key, given),) = thing.items()
    match key:
        case "tensor":
            return tensors[given]
        case "float":
            return float(given)
        case "complex":
            return complex(*map(float, given))
        case "device":
            return torch.device(given)
        case "dtype" | "layout" | "memory_format":
            return getattr(torch, given)
        case "generator":
            return None  # the device's default one; the caller sets its state
        case _:
            raise ValueError(f"a {given} cannot be replayed")
