"""What was claimed and what happened -> the kind of every value and the phase of every op."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide._ir import Kind, Op, OpIndex, Phase, Value, ValueId


@dataclass(frozen=True, slots=True)
class Claim:
    """What is known of a storage from modules, optimizers and autograd."""

    kind: Kind
    name: str
    module: str


def settle_phases(
    ops: Sequence[Op], storages: Sequence[int], claims: Mapping[int, Claim]
) -> list[Op]:
    """Ops outside of backward and of modules that handle gradients, or parameters without grad
    mode, or what came of either, are the optimizer's.

    Clipping, unscaling, zeroing and averaging of weights run outside of `Optimizer.step`. The
    gradient of the loss itself is made just before backward and belongs to it.
    """
    kind_of = [claims[storage].kind if storage in claims else None for storage in storages]
    derived: set[ValueId] = set()

    def is_update(op: Op) -> bool:
        for value in (*op.reads, *op.writes):
            kind = kind_of[value]
            if value in derived or kind is Kind.GRADIENT:
                return True
            if kind is Kind.PARAMETER and not op.grad:
                return True
        return False

    settled = list(ops)
    for i, op in enumerate(ops):
        if op.phase is not Phase.FORWARD:
            continue
        if not op.module and is_update(op):
            settled[i] = replace(op, phase=Phase.OPTIMIZER)
            derived.update(value for value in op.writes if kind_of[value] is None)
        elif (
            op.name.startswith("aten.ones_like")
            and i + 1 < len(ops)
            and ops[i + 1].phase is Phase.BACKWARD
        ):
            settled[i] = replace(op, phase=Phase.BACKWARD)
    return settled


def settle_kinds(
    values: Sequence[Value],
    ops: Sequence[Op],
    claims: Mapping[int, Claim],
    made_by_autograd: Sequence[bool],
) -> list[Value]:
    """`values` with kind, name and module filled in."""
    maker: dict[ValueId, OpIndex] = {}
    read_in_backward: set[ValueId] = set()
    first_user: dict[ValueId, str] = {}
    for i, op in enumerate(ops):
        for value in op.writes:
            maker[value] = OpIndex(i)
        for value in (*op.reads, *op.updates):
            first_user.setdefault(value, op.module)
            if op.phase is Phase.BACKWARD:
                read_in_backward.add(value)
    outsiders = {
        value.storage
        for i, value in enumerate(values)
        if value.version == 0 and i not in maker and not made_by_autograd[i]
    }
    settled = []
    for i, found in enumerate(values):
        at = maker.get(ValueId(i))
        module = ops[at].module if at is not None else first_user.get(ValueId(i), "")
        made_forward = ops[at].phase is Phase.FORWARD if at is not None else made_by_autograd[i]
        if claim := claims.get(found.storage):
            settled.append(replace(found, kind=claim.kind, name=claim.name, module=claim.module))
            continue
        if found.storage in outsiders:
            kind = Kind.INPUT
        elif found.saves or (made_forward and i in read_in_backward):
            kind = Kind.ACTIVATION
        else:
            kind = Kind.TEMPORARY
        settled.append(replace(found, kind=kind, module=module))
    return settled


def main_device(values: Sequence[Value]) -> str:
    """The device that holds most of the parameters, or of anything if there are none."""
    held: dict[str, int] = {}
    for value in values:
        weight = value.bytes << (64 * (value.kind is Kind.PARAMETER))
        held[value.device] = held.get(value.device, 0) + weight
    return max(held, key=lambda device: held[device], default="cpu")
