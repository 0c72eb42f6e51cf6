"""lowtide's own tensor work is none of the program's: no mode of the program sees it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING: AbstractContextManager[Any] = nullcontext()
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def quiet(
    tensor: torch.Tensor | None = None, *, classes: bool = False
) -> AbstractContextManager[Any]:
    """Dispatch modes (a recorder, a counter of the program) off, where there are any.

    A `tensor` that is worked on and may be of a class with dispatching of its own keeps that;
    `classes`: others that are may be, too.
    """
    if not torch._C._len_torch_dispatch_stack():
        return _NOTHING
    if not classes and (tensor is None or type(tensor) in _PLAIN):
        return torch._C._DisableTorchDispatch()
    return _disable_current_modes()


def is_free() -> bool:
    """Calm, and no mode of the program's is active: one pushed now would be popped in its place."""
    return is_calm() and not torch._C._len_torch_dispatch_stack()


def is_calm() -> bool:
    """Neither in inference mode nor in a backward: both put the stack of modes back on leaving."""
    return not torch.is_inference_mode_enabled() and torch._C._current_graph_task_id() == -1


def is_capturing() -> bool:
    """Whether a CUDA graph is: nothing may be copied then that is not part of it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
