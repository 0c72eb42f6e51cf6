"""Trace, op -> the floating-point operations of its matrix products.

Two for each multiply and add. Only matrix products, convolutions and attention are counted:
everything else runs at the speed of memory. Attention is counted whole, also where a causal mask
lets a kernel skip half of it.
"""

import json
import math

from lowtide._ir import Op, Operand, Trace

Shape = tuple[int, ...]

# The first of the two operands that are multiplied.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
_PRODUCTS |= {"_addmm_activation": 1}
_TRANSPOSED = {"convolution": 6, "convolution_backward": 7}  # which argument says so
_ATTENTION = "_scaled_dot_product_"


def flops(trace: Trace, op: Op) -> float:
    """How many; 0 for an op that multiplies no matrices or says nothing about its shapes."""
    name = base_name(op)
    inputs = _shapes(trace, op.operands)
    if name in _PRODUCTS:
        return _product(*inputs[_PRODUCTS[name] :][:2])
    if name == "linear":
        return _linear(*inputs[:2])
    if name in _TRANSPOSED:
        return _convolution(trace, op, inputs)
    if name.startswith(_ATTENTION):
        return _attention(inputs, backward=name.endswith("_backward"))
    return 0.0


def multiplied_dtype(trace: Trace, op: Op) -> str:
    """The dtype of what an op with flops multiplies."""
    at = min(_PRODUCTS.get(base_name(op), 0), len(op.operands) - 1)
    return trace.geometries[op.operands[at].geometry].dtype


def base_name(op: Op) -> str:
    """`aten.mm.default` -> `mm`."""
    return op.name.removeprefix("aten.").split(".")[0]


def _shapes(trace: Trace, operands: tuple[Operand, ...]) -> list[Shape]:
    return [trace.geometries[operand.geometry].shape for operand in operands]


def _product(left: Shape = (), right: Shape = ()) -> float:
    return 2.0 * math.prod(left) * right[-1] if len(left) > 1 and len(right) > 1 else 0.0


def _linear(rows: Shape = (), weight: Shape = ()) -> float:
    return 2.0 * math.prod(rows) * weight[0] if rows and len(weight) == 2 else 0.0


def _convolution(trace: Trace, op: Op, inputs: list[Shape]) -> float:
    """Every weight is used once for each place of the output, of the input if transposed.

    Backward does the same work again for each of the gradients of input and weight that is
    asked for; the one of the bias is a mere sum, and the only one with a single dimension.
    """
    results = _shapes(trace, op.results)
    backward = base_name(op).endswith("_backward")
    outer = [*inputs[:3]] if backward else [*results[:1], *inputs[:2]]
    if len(outer) < 3:
        return 0.0
    output, batch, weight = outer
    places = batch if _is_transposed(op) else output
    once = 2.0 * math.prod(weight) * places[0] * math.prod(places[2:])
    return once * sum(len(shape) > 1 for shape in results) if backward else once


def _is_transposed(op: Op) -> bool:
    try:
        return json.loads(op.args)[0][_TRANSPOSED[base_name(op)]] is True
    except (ValueError, LookupError, TypeError):
        return False


def _attention(inputs: list[Shape], *, backward: bool) -> float:
    """Queries by keys, then weights by values; backward multiplies five times."""
    given = inputs[1:4] if backward else inputs[:3]  # backward is given the gradient first
    if len(given) < 3 or any(len(shape) < 2 for shape in given):
        return 0.0
    query, key, value = given
    pairs = 2.0 * math.prod(query[:-1]) * key[-2]
    if backward:
        return pairs * (3 * query[-1] + 2 * value[-1])
    return pairs * (query[-1] + value[-1])
