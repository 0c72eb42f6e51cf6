"""Trace -> what its ops take where those of backward that are element-wise run as one.

`native/gate/chain.h` has the rules: such ops wait, and run when one comes that is none of them.
Each takes the part of its time that is for bytes from elsewhere, or for others than them. Their
bytes stay what they are: until a kernel is relied on, ops run one by one.
"""

from collections.abc import Container, Iterable
from dataclasses import replace
from math import prod

from lowtide._analyze.fusable import (
    ELEMENTWISE,
    GRADIENTS,
    LEAST_SECONDS,
    lies_alike,
)
from lowtide._ir import Op, Trace, ValueId

_ABLE = ELEMENTWISE | GRADIENTS
_MOST_OPS, _MOST_INPUTS = 32, 12


def with_chains(trace: Trace, waiting: Container[int]) -> Trace:
    """`waiting`: the ops that nobody but ops could tell of."""
    ops = list(trace.ops)
    last_use = [-1] * len(trace.values)
    for i, op in enumerate(ops):
        for value in (*op.reads, *op.updates):
            last_use[value] = i
    for chain in _chains(trace, waiting):
        made = {value for i in chain for value in ops[i].writes}
        wanted = {v for v in made if last_use[v] > chain[-1] or trace.values[v].after}
        seen: set[ValueId] = set()
        for i in chain:
            read = {value for value in ops[i].reads if value not in made}
            left = (read - seen) | (wanted & {*ops[i].writes})
            share = _bytes(trace, left) / max(1, _bytes(trace, {*ops[i].reads, *ops[i].writes}))
            seconds = min(ops[i].seconds, share * ops[i].seconds + LEAST_SECONDS)
            ops[i] = replace(ops[i], seconds=seconds)
            seen |= read
    return replace(trace, ops=tuple(ops))


def _bytes(trace: Trace, values: Iterable[ValueId]) -> int:
    return sum(trace.values[value].bytes for value in values)


def _chains(trace: Trace, waiting: Container[int]) -> list[list[int]]:
    found: list[list[int]] = []
    chain: list[int] = []
    made: set[ValueId] = set()
    inputs: set[ValueId] = set()
    for i, op in enumerate(trace.ops):
        if op.view or not (op.reads or op.writes):
            continue
        if i not in waiting or len(op.writes) != 1 or not _is_link(trace, op):
            chain = []
            continue
        more = inputs | {value for value in op.reads if value not in made}
        fits = chain and _count(trace, trace.ops[chain[0]]) == _count(trace, op)
        if not fits or len(chain) == _MOST_OPS or len(more) > _MOST_INPUTS:
            chain, made, more = [], set(), set(op.reads)
            found.append(chain)
        inputs = more
        made |= set(op.writes)
        chain.append(i)
    return [chain for chain in found if len(chain) > 1]


def _is_link(trace: Trace, op: Op) -> bool:
    return op.name.removeprefix("aten.") in _ABLE and lies_alike(trace, op)


def _count(trace: Trace, op: Op) -> int:
    return prod(trace.geometries[op.results[0].geometry].shape)
