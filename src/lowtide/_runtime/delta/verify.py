"""Whether two storages hold the same bytes, now or at different times."""

import torch

from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.tier import as_bytes

_PORTION = 1 << 10  # words at once: a digest is not to take memory itself


def same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Bit for bit, whatever they mean: a NaN equals itself."""
    if one.nbytes() != other.nbytes():
        return False
    with quiet(), torch.no_grad():
        return bool(torch.equal(_words(one), _words(other)))


def digest(storage: torch.UntypedStorage) -> int:
    """A number that other bytes, or the same in another order, would hardly have."""
    with quiet(), torch.no_grad():
        words = _words(storage)
        places = torch.arange(1, _PORTION + 1, device=storage.device) * 2 + 1
        total = torch.zeros((), dtype=torch.int64, device=storage.device)
        for portion in words.split(_PORTION):
            total = total * 1_000_003 + (portion * places[: portion.numel()]).sum()
        return int(total)


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    row = as_bytes(storage)
    return row.view(torch.int64) if row.numel() % 8 == 0 else row
