"""Whether everything that lowtide may put somewhere is gone again."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import optimizer as optimizer_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide._runtime.fit import Tide


def installed() -> list[object]:
    """Hooks, modes, threads, open files, settings."""
    modules = nn.modules.module
    return [
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        _get_current_dispatch_mode_stack(),
        _get_current_function_mode_stack(),
        dict(modules._global_forward_hooks),
        dict(modules._global_forward_pre_hooks),
        dict(modules._global_forward_hooks_always_called),
        dict(modules._global_backward_hooks),
        dict(optimizer_module._global_optimizer_pre_hooks),
        dict(optimizer_module._global_optimizer_post_hooks),
        Tide._current,
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        (gc.isenabled(), gc.get_threshold(), len(gc.callbacks), torch.is_grad_enabled()),
    ]


@contextmanager
def untouched() -> Iterator[None]:
    """One thread, so that PyTorch itself is deterministic; and whatever was installed is gone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    before = installed()
    yield
    gc.collect()
    assert installed() == before
    torch.set_num_threads(threads)
