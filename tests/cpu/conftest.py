import gc
import os
from collections.abc import Iterator

import pytest
import torch
from moving import everything, same_machine
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lowtide._runtime import budget as budgeting


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is worth moving, and the machine is always the same."""
    monkeypatch.setattr(budgeting, "_SMALLEST", 256)
    monkeypatch.setattr(budgeting, "_PIECE", 4096)
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: same_machine())
    before = _open_files()
    yield
    gc.collect()
    assert _open_files() == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not _global_optimizer_post_hooks and not _global_optimizer_pre_hooks


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can move does."""
    monkeypatch.setattr(budgeting, "autoswap", everything)
