"""A saved storage takes over what was held of it for values made from it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.ledger import Ledger


@pytest.mark.parametrize("promised", [False, True])
def test_what_was_held_for_others_can_leave_once_it_is_saved(promised: bool) -> None:
    """One more reference, and nobody could tell that it is alone. What a plan holds, it holds."""
    tensor = torch.ones(64)
    storage = tensor.untyped_storage()
    ledger = Ledger(torch.device("cpu"))
    value = ledger.value_of(storage)
    value.held, value.promised = storage, promised
    keeper: Any = SimpleNamespace(ledger=ledger, digests=False)
    tier: Any = SimpleNamespace(stream=lambda: 0)
    cell = DeltaCell(storage, tier, keeper)
    cell.handles = 1
    del storage
    assert (value.held is not None) == promised
    assert cell.alone() != promised
