"""Budgets that cannot be met, seen before the first step."""

import torch

from lowtide._units import format_bytes


def why_not(budget: int, stays: int, largest: torch.Tensor | None) -> str | None:
    """In words, where it is too little for what `stays`, and for a step of the `largest` weight."""
    least = stays if largest is None else stays + largest.nbytes
    if least <= budget:
        return None
    why = f"{format_bytes(stays)} ({stays} bytes) are held before the first step and stay"
    if largest is not None:
        why += (
            f", and the optimizer's step needs {format_bytes(largest.nbytes)} at once for "
            f"a weight of {tuple(largest.shape)}: give at least {least} bytes"
        )
    return f"the budget is {format_bytes(budget)} ({budget} bytes), but {why}"
