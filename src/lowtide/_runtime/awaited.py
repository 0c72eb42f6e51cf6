"""The device of a script that has not made its model yet: known when the model first runs."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lowtide._runtime.swap.quiet import is_free

_GPU = "cuda"


class Awaited:
    """Calls `begin` once with the device: of the first module on a GPU that runs, or if `is_on`.

    Not before: to ask CUDA would begin to use it, and a script may have to fork first. And not
    within a mode of the program's, or in inference: it would not last.
    """

    def __init__(self, begin: Callable[[torch.device], None], undo: ExitStack) -> None:
        self._begin: Callable[[torch.device], None] | None = begin
        self._hook = register_module_forward_pre_hook(self._runs)
        undo.callback(self._hook.remove)

    def _runs(self, module: nn.Module, _args: Any) -> None:
        first = next(module.parameters(), None)
        if first is not None and first.device.type == _GPU:
            self.is_on(first.device)

    def is_on(self, device: torch.device | None) -> None:
        """Something is trained there."""
        begin = self._begin
        if begin is not None and device is not None and is_free():
            self._begin = None
            self._hook.remove()
            begin(device)
