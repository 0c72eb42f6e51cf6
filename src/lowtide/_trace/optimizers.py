"""Where steps end, and which tensors are the optimizer's: global hooks, no change to scripts."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowtide._ir import Kind
from lowtide._trace.tensors import tensors_in

# tensor, kind, the parameter it belongs to, its name there
Claim = Callable[[torch.Tensor, Kind, torch.Tensor, str], None]


class OptimizerWatch:
    """Counts the steps of every optimizer and claims its tensors."""

    def __init__(self, claim: Claim, on_step: Callable[[int], None]) -> None:
        self._inside: list[int] = []  # an optimizer may call another's step
        self._claim = claim
        self._on_step = on_step
        self._numbers: dict[tuple[int, ...], int] = {}
        self._stepped: set[int] = set()  # parameters that have been stepped, by identity
        self._waiting: WeakSet[Optimizer] | None = None

    def install(self, undo: ExitStack) -> None:
        """Start watching; `undo` stops it."""
        undo.callback(register_optimizer_step_pre_hook(self.before).remove)
        undo.callback(register_optimizer_step_post_hook(self.after).remove)

    def exist(self) -> bool:
        """Whether there is any optimizer that might step later."""
        return any(issubclass(type(thing), Optimizer) for thing in gc.get_objects())

    def all_have_stepped(self) -> bool:
        """Whether no optimizer is left that trains something of its own and has not stepped.

        Found by one look through the heap: a GAN's second optimizer exists before it steps. One
        that only wraps another has the same parameters.
        """
        if self._waiting is None:
            self._waiting = WeakSet(
                thing
                for thing in gc.get_objects()
                if issubclass(type(thing), Optimizer) and hasattr(thing, "param_groups")
            )
        return all(
            id(parameter) in self._stepped
            for optimizer in self._waiting
            for parameter in _parameters(optimizer)
        )

    @property
    def running(self) -> bool:
        """Whether an optimizer is stepping."""
        return bool(self._inside)

    def before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """A step begins: what it is about to update is its own."""
        if id(optimizer) in self._inside:  # its last step raised and never came to its end
            del self._inside[self._inside.index(id(optimizer)) :]
        self._inside.append(id(optimizer))
        for parameter in _parameters(optimizer):
            self._claim(parameter, Kind.PARAMETER, parameter, "")
            if parameter.grad is not None:
                self._claim(parameter.grad, Kind.GRADIENT, parameter, "grad")

    def after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """A step has ended: what it keeps is its state."""
        if self._inside:
            self._inside.pop()
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, torch.Tensor) and isinstance(state, dict):
                for name, thing in state.items():
                    for tensor in tensors_in(thing):
                        self._claim(tensor, Kind.STATE, parameter, str(name))
        self._stepped.update(map(id, _parameters(optimizer)))
        if not self._inside:
            trained = tuple(map(id, _parameters(optimizer)))  # some make a new one every step
            self._on_step(self._numbers.setdefault(trained, len(self._numbers)))


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
