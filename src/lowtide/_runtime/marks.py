"""Where steps end: after an optimizer's step, and around a forward that is no training."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_RECENT = 32  # steps in which one of several optimizers must have stepped to count as one of them


class Marks:
    """Calls `mark` at the end of each step; `undo` takes the hooks away again.

    A step ends where an optimizer has stepped: one of those named, or else, of all there are, the
    one that steps most rarely (of equals, the one that began last), so that a round of several
    is one step. Each evaluation of a named model is a step of its own: it is not part of the
    training step before or after it.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: Sequence[Optimizer],
        mark: Callable[[], None],
        undo: ExitStack,
    ) -> None:
        self._mark = mark
        self._named = {id(optimizer) for optimizer in optimizers}
        self._order: dict[tuple[int, ...], int] = {}  # optimizers by their first step
        self._recent: deque[tuple[int, ...]] = deque(maxlen=_RECENT)  # which of them stepped
        self._evaluated = False
        undo.callback(register_optimizer_step_post_hook(self._stepped).remove)
        if model is not None:
            undo.callback(model.register_forward_pre_hook(self._entered).remove)

    def _entered(self, model: nn.Module, _args: Any) -> None:
        if not model.training or self._evaluated:
            self._evaluated = not model.training
            self._mark()

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._named or (not self._named and self._closes(optimizer)):
            self._evaluated = False
            self._mark()

    def _closes(self, optimizer: Optimizer) -> bool:
        # By what it trains: some scripts make a new optimizer every step.
        number = tuple(id(p) for group in optimizer.param_groups for p in group["params"][:1])
        self._order.setdefault(number, len(self._order))
        self._recent.append(number)
        steps = Counter(self._recent)  # one that has had its day closes nothing
        return number == min(steps, key=lambda n: (steps[n], -self._order[n]))
