"""Every recorded op against the op itself: what it read and wrote, and that it can be replayed.

A recorder that copies each op's storages before and after it runs; afterwards each op is called
again from nothing but its record and the bytes it saw.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from zoo import ZOO, Loop

from lowtide._ir import UNREPLAYABLE, Geometry, Op, Operand, Trace
from lowtide._trace.args import decode_args
from lowtide._trace.record import Recorder
from lowtide._trace.schema import OpFacts
from lowtide._trace.tensors import parts, tensors_in


@dataclass
class Witness:
    """What one op saw and did."""

    before: dict[int, torch.UntypedStorage]  # storage number -> bytes
    after: dict[int, torch.UntypedStorage]
    results: list[torch.Tensor]
    random_state: torch.Tensor


class WitnessingRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.witnesses: dict[int, Witness] = {}

    def _run(
        self,
        func: OpOverload[..., Any],
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        seen = [*args, *kwargs.values()]
        tensors = [part for tensor in tensors_in(seen) for part in parts(tensor)]
        index = self.book.started
        storages = {self.book.storage_of(t): t.untyped_storage() for t in tensors}
        random_state = torch.random.get_rng_state()
        before = {number: storage.clone() for number, storage in storages.items()}
        result = super()._run(func, facts, args, kwargs)
        self.witnesses[index] = Witness(
            before=before,
            after={number: storage.clone() for number, storage in storages.items()},
            results=[part.clone() for t in tensors_in(result) for part in parts(t)],
            random_state=random_state,
        )
        return result


@pytest.fixture(params=list(ZOO.values()), ids=list(ZOO), scope="module")
def recorded(request: pytest.FixtureRequest) -> tuple[Trace, dict[int, Witness]]:
    torch.manual_seed(0)
    build: Callable[[], Loop] = request.param
    loop = build()
    for _ in range(2):
        loop.step()
    with WitnessingRecorder() as recorder:
        loop.step()
    return recorder.recording(), recorder.witnesses


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def test_an_op_changes_exactly_what_its_record_says(
    recorded: tuple[Trace, dict[int, Witness]],
) -> None:
    trace, witnesses = recorded
    for i, op in enumerate(trace.ops):
        written = {trace.values[value].storage for value in op.writes}
        for storage, before in witnesses[i].before.items():
            if storage not in written:
                same = torch.equal(_bytes(before), _bytes(witnesses[i].after[storage]))
                assert same, f"op {i} {op.name} changes storage {storage} unseen"


def test_an_op_can_be_called_again_from_its_record(
    recorded: tuple[Trace, dict[int, Witness]],
) -> None:
    trace, witnesses = recorded
    state = torch.random.get_rng_state()
    replayed = 0
    for i, op in enumerate(trace.ops):
        if UNREPLAYABLE in op.args or not op.name.startswith("aten."):
            continue
        witness = witnesses[i]
        if not op.random:
            torch.manual_seed(i)  # an op that does not draw cannot care
        else:
            torch.random.set_rng_state(witness.random_state)
        copies = {number: storage.clone() for number, storage in witness.before.items()}
        _spoil_what_is_not_read(trace, op, copies)
        results = _call(trace, op, copies)
        replayed += 1
        for result, expected in zip(results, witness.results, strict=True):
            scratch = "rnn" in op.name and result.dtype is torch.uint8  # has gaps nobody writes
            if not scratch and op.name.split(".")[1] not in _UNINITIALISED:
                assert _same(result, expected), f"op {i} {op.name} gives another result"
    sparse = sum(UNREPLAYABLE in op.args for op in trace.ops)
    assert replayed == len(trace.ops) - sparse
    torch.random.set_rng_state(state)


_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def _spoil_what_is_not_read(trace: Trace, op: Op, copies: dict[int, torch.UntypedStorage]) -> None:
    """Bytes that the record does not count as read must not matter: replace them."""
    if op.view:
        return
    used = {trace.values[value].storage for value in (*op.reads, *op.updates)}
    for number, storage in copies.items():
        if number not in used:
            _bytes(storage).fill_(1)


def _call(trace: Trace, op: Op, copies: dict[int, torch.UntypedStorage]) -> list[torch.Tensor]:
    def tensor(operand: Operand) -> torch.Tensor:
        geometry: Geometry = trace.geometries[operand.geometry]
        flat = torch.empty(0, dtype=getattr(torch, geometry.dtype))
        storage = copies[trace.values[operand.value].storage]
        return flat.set_(storage, geometry.offset, geometry.shape, geometry.strides)

    args, kwargs = decode_args(op.args, [tensor(operand) for operand in op.operands])
    namespace, packet, overload = op.name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    with torch.set_grad_enabled(op.grad):
        return [part for t in tensors_in(func(*args, **kwargs)) for part in parts(t)]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        if a.is_floating_point()
        else (torch.equal(a, b))
    )
