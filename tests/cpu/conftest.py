import gc
import os
from collections.abc import Iterator

import pytest
import torch
from moving import everything, same_machine
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from untouched import untouched

from lowtide._runtime import budget as budgeting
from lowtide._runtime import plans
from lowtide._runtime.delta import replans
from lowtide._runtime.delta.cap import Cap
from lowtide._runtime.delta.feedback import Verdict
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.swap import lying


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
    monkeypatch.setattr(plans, "autoswap", everything)


@pytest.fixture
def plans_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is worth moving, plans are made at once, and all is as before in the end."""
    monkeypatch.setattr(budgeting, "_SMALLEST", 256)
    monkeypatch.setattr(budgeting, "_PIECE", 2 << 20)
    monkeypatch.setattr(plans, "_SECONDS", 0.1)
    monkeypatch.setattr(lying, "_SECONDS", 0.1)
    monkeypatch.setattr(replans, "judge", lambda _: Verdict.WAIT)  # the first plan stays
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: same_machine())
    with untouched():
        yield


@pytest.fixture
def pieces(plans_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only large state is worth moving, in four pieces."""
    monkeypatch.setattr(budgeting, "_SMALLEST", 1 << 16)


@pytest.fixture
def untaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan drops and makes again is dropped and made again by Python."""
    monkeypatch.setattr(budgeting, "load_tape", lambda: None)


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose allocator is held to the budget: nobody counts in planned steps."""
    monkeypatch.setattr(Cap, "holds", True)
    monkeypatch.setattr(Ledger, "count_unseen", lambda _: None)
