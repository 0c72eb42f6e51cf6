"""What there is while calls run again: bytes at hand, and cells that are about to be read."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.recipe import Value

Told = Callable[[Value, torch.UntypedStorage], None]  # a value was made again, in these bytes
Rooms = Mapping[int, int]  # bytes that calls may make as one, by the number of the first
ROOMY: Rooms = MappingProxyType({})  # nothing is known to be short


@dataclass(slots=True)
class Going:
    """What there is while items run again."""

    there: dict[int, torch.UntypedStorage]  # by the value, what was there before and stays
    uses: Counter[int]  # how often each value is still read before it is made again
    pinned: dict[int, DeltaCell]  # by the value that is still going to be read
    made: Told
    rooms: Rooms
    mine: dict[int, torch.Tensor] = field(default_factory=dict)  # by the value, what was made


def pin(cell: DeltaCell, value: Value, pinned: dict[int, DeltaCell]) -> None:
    """It stays on the device until it was read."""
    if id(value) not in pinned:
        pinned[id(value)] = cell
        cell.pinned += 1
