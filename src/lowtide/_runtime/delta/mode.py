"""The dispatch mode through which every op is seen."""

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lowtide._runtime.delta.record import Known, known
from lowtide._runtime.swap.quiet import is_calm

See = Callable[[OpOverload[..., Any], Known, Sequence[Any], dict[str, Any]], Any]


class SeeingMode(TorchDispatchMode):
    """Shows every op that makes or writes bytes, in backward too, where PyTorch carries modes."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would cost as much as seeing an op does

    def __init__(self, see: See) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see: See | None = see
        self.learn: Callable[[OpOverload[..., Any], Known], None] | None = None

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._see is None or not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        what = known(func)
        if self.learn is not None:
            self.learn(func, what)
        if what.view:
            return func._op(*args, **(kwargs or {}))
        return self._see(func, what, args, kwargs or {})

    def begin(self) -> None:
        """Onto the stack of modes. Only where it is calm."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def is_on_top(self) -> bool:
        """Whether it could leave the stack now."""
        return is_calm() and _get_current_dispatch_mode() is self

    def leave(self) -> None:
        """See nothing any more; off the stack, if this is the moment to leave it."""
        self._see = None
        if self.is_on_top():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
