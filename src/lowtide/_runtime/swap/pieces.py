"""An optimizer's step, done for some parameters after the other.

So that not all of its state need be on the device at once. What these optimizers do to a parameter
depends on no other one, so the result is the same bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.optimizer import _global_optimizer_pre_hooks

_ONE_BY_ONE = (
    ASGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SGD,
)
MOST_PIECES = 16

Piece = list[list[torch.Tensor]]  # for each parameter group some of its parameters


def can_be_parted(optimizer: Optimizer, args: Sequence[object]) -> bool:
    """Whether a step may be done in pieces: a known optimizer, no closure, nobody else's hooks."""
    return (
        type(optimizer) in _ONE_BY_ONE
        and all(arg is None for arg in args)
        and not optimizer._optimizer_step_pre_hooks
        and len(_global_optimizer_pre_hooks) == 1  # lowtide's own
        and getattr(type(optimizer).step, "hooked", False)  # by PyTorch, around the step itself
    )


def pieces_of(optimizer: Optimizer, piece_bytes: int) -> list[Piece]:
    """Its parameters in portions of about `piece_bytes` of state, in order.

    Of one that has none yet it is taken to be as much as Adam's.
    """
    sizes = [
        [_state_bytes(optimizer, parameter) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    total = sum(map(sum, sizes))
    portion = max(piece_bytes, -(-total // MOST_PIECES))
    groups = len(sizes)
    pieces: list[Piece] = [[[] for _ in range(groups)]]
    held = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter, size in zip(group["params"], sizes[number], strict=True):
            if held and held + size > portion:
                pieces.append([[] for _ in range(groups)])
                held = 0
            pieces[-1][number].append(parameter)
            held += size
    return pieces


def joined(pieces: Sequence[Piece]) -> Piece:
    """As one."""
    return [
        [parameter for some in group for parameter in some] for group in zip(*pieces, strict=True)
    ]


def covers(pieces: Sequence[Piece], optimizer: Optimizer) -> bool:
    """Whether the pieces are made of just the parameters that it has now."""
    groups = optimizer.param_groups
    if any(len(piece) != len(groups) for piece in pieces):
        return False
    return all(
        [id(parameter) for piece in pieces for parameter in piece[number]]
        == [id(parameter) for parameter in group["params"]]
        for number, group in enumerate(groups)
    )


@contextmanager
def only(optimizer: Optimizer, piece: Piece) -> Iterator[None]:
    """As if it had no other parameters."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, some in zip(optimizer.param_groups, piece, strict=True):
            group["params"] = some
        yield
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = params


class _Once(list[torch.Tensor]):
    """Some of a group's parameters, for whoever goes through them first; then the group has all."""

    def __init__(self, some: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        super().__init__(some)
        self._group = group
        self.whole = group["params"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._group["params"] is self:
            self._group["params"] = self.whole
        return super().__iter__()


def narrow_once(optimizer: Optimizer, piece: Piece) -> None:
    """Let the step that is about to begin see only these: it looks through each group once."""
    for group, some in zip(optimizer.param_groups, piece, strict=True):
        group["params"] = _Once(some, group)


def widen(optimizer: Optimizer) -> None:
    """A step that failed may not have looked: all parameters again."""
    for group in optimizer.param_groups:
        if isinstance(group["params"], _Once):
            group["params"] = group["params"].whole


def step_once(optimizer: Optimizer) -> None:
    """The step itself, without the hooks around it."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def state_bytes(optimizer: Optimizer, piece: Piece) -> int:
    """Of all of its parameters, whether it can move or not."""
    return sum(_state_bytes(optimizer, parameter) for group in piece for parameter in group)


def _state_bytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    state = optimizer.state.get(parameter)
    if not state:
        return 2 * parameter.nbytes
    return sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))
