"""What lies below the device: where bytes can be put and from where they come back."""

import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

GRAIN = max(4096, mmap.ALLOCATIONGRANULARITY)  # places begin at multiples of it: a view maps them


@dataclass(slots=True)
class Place:
    """Bytes [start, start + count) of a tier."""

    start: int
    count: int


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """What computes next comes after it. Raises OSError if it failed."""


class Tier(Protocol):
    """A store of bytes. Copies one way are made one after the other, in order."""

    def stream(self) -> int:
        """What computes now; copies wait for it and it for copies."""

    def prepare(self, count: int) -> None:
        """About `count` bytes are going to be needed at once; an empty slab may be replaced."""

    def trim(self, count: int) -> None:
        """What is beyond that and in nobody's use is not going to be needed."""

    def take(self, count: int, at: int | None = None) -> Place | None:
        """Room for `count` bytes, if it can be at `at`; None: there is none."""

    def give(self, place: Place) -> None:
        """The room is free again: every copy to or from it has been waited for."""

    def out(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """Start to copy the storage there, behind all that computes now."""

    def back(self, storage: torch.UntypedStorage, place: Place) -> Copy:
        """Start to copy it back into the storage, which has its bytes again."""

    def pause(self) -> None:
        """Nothing computes from now until `resume`, so what copies wait for is the same for all."""

    def resume(self) -> None:
        """Something may compute again."""

    def view(self, place: Place) -> torch.UntypedStorage:
        """The bytes there, for whoever computes on the device after the copy was waited for."""

    def held_bytes(self) -> int:
        """How much of the tier is locked for lowtide."""

    def close(self) -> None:
        """Give everything back."""


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as one row of bytes."""
    row = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return row.set_(storage)


def rounded_place(count: int) -> int:
    """What a place of `count` bytes takes."""
    return -(-count // GRAIN) * GRAIN
