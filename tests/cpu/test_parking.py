"""What lies in the way of an arena waits in main memory, and comes back whatever happens.

The place's own code, over storages of main memory and a device that says what it is told to.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide._runtime import cuda
from lowtide._runtime.core import Mode
from lowtide._runtime.cuda import CudaPlace

SIZE = 1 << 20


class _Device:
    """A native library: arenas that it gives, and places in them that it says are in use."""

    def __init__(self, *, gives: bool, in_use: int = -1, short_of: int = -1) -> None:
        self.gives = gives
        self.in_use = in_use
        self.short_of = short_of  # bytes: it has none the first times that so many are asked for
        self._times = 2
        self.arenas: list[int] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.adopted: dict[int, int] = {}
        self.exchanged: list[int] = []

    def lowtide_torch_arena(self, _lane: int, size: int) -> int:
        self.arenas.append(size)
        return int(self.gives)

    def lowtide_torch_adopt(self, storage: int, _lane: int, where: int, length: int) -> int:
        found = self.storages[storage]
        if where == self.in_use:
            return 0
        assert found.nbytes() == 0
        found.resize_(length)
        self.adopted[where] = length
        return 1

    def lowtide_torch_refill(self, storage: int, length: int) -> int:
        if length == self.short_of and self._times:
            self._times -= 1
            return 0
        assert self.storages[storage].nbytes() == 0
        self.storages[storage].resize_(length)
        return 1

    def lowtide_torch_exchange(self, storage: int, other: int) -> int:
        self.exchanged.append(storage)
        return 1


class _Core:
    """Every storage is of the last step, and its number its place in it."""

    def __init__(self, storages: list[torch.UntypedStorage], ages: list[int]) -> None:
        self._at = {storage.data_ptr(): i for i, storage in enumerate(storages)}
        self._ages = ages
        self.modes: list[Mode] = []

    def age(self, block: int) -> int:
        return self._ages[self._at[block]]

    def index(self, lane: int, block: int) -> int:
        assert lane == 0
        return self._at[block]

    def set_mode(self, mode: Mode) -> None:
        self.modes.append(mode)


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.UntypedStorage, "cpu", torch.UntypedStorage.clone)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * SIZE)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5)
    properties = SimpleNamespace(total_memory=8 * SIZE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def park(
    device: _Device, left: Mapping[int, int], ages: list[int] | None = None
) -> tuple[Any, bool, list[torch.UntypedStorage], Any]:
    """Make an arena; the bytes of every storage must be what they were."""
    storages = [torch.full((64 + i,), i, dtype=torch.uint8).untyped_storage() for i in range(4)]
    before = [bytes(storage.tolist()) for storage in storages]
    device.storages = {storage._cdata: storage for storage in storages}
    place: Any = object.__new__(CudaPlace)
    place._library = device
    place.core = core = _Core(storages, ages or [1] * 4)
    place.missing = 0
    place._movable = lambda _: storages
    done = place._set_arena_parked(0, 2 * SIZE, 0, left)
    assert [bytes(storage.tolist()) for storage in storages] == before
    return place, done, storages, core


def test_what_was_left_behind_goes_where_it_is_planned_to() -> None:
    device = _Device(gives=True)
    _, done, _, core = park(device, {0: 0, 1: 512, 2: -1})
    assert done
    assert device.adopted == {0: 64, 512: 65}  # the others are not touched
    assert core.modes == [Mode.PASS]


def test_without_a_plan_it_goes_wherever_there_is_room() -> None:
    device = _Device(gives=True)
    _, done, _, core = park(device, {}, ages=[0, 1, 1, 2])
    assert done
    assert not device.adopted
    assert core.modes == [Mode.REPLAY]


def test_without_an_arena_all_is_as_before() -> None:
    device = _Device(gives=False)
    place, done, _, _ = park(device, {0: 0, 1: 512})
    assert not done
    assert not device.adopted
    assert place.missing == SIZE  # 3 reserved, 2 wanted, 4 allowed
    assert device.arenas == [2 * SIZE]  # the one there was stays


def test_a_place_that_is_in_use_costs_the_arena_and_nothing_else() -> None:
    device = _Device(gives=True, in_use=512)
    _, done, _, _ = park(device, {0: 0, 1: 512, 3: 1024})
    assert not done
    assert device.arenas == [2 * SIZE, 0]


def test_so_does_a_lack_of_memory() -> None:
    device = _Device(gives=True, short_of=66)
    _, done, _, _ = park(device, {})
    assert not done
    assert device.arenas == [2 * SIZE, 0]


@pytest.mark.parametrize("room", [4, 2, 0])
def test_what_moves_goes_one_after_the_other_and_all_at_once_where_there_is_no_room(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for which there is room beside the others first; then none is there any more."""
    storages = [torch.full((64 + i,), i, dtype=torch.uint8).untyped_storage() for i in range(4)]
    before = {storage._cdata: bytes(storage.tolist()) for storage in storages}
    device = _Device(gives=True)
    device.storages = {storage._cdata: storage for storage in storages}
    clone, left = torch.UntypedStorage.clone, [room]

    def short(storage: torch.UntypedStorage) -> Any:
        if not left[0]:
            raise torch.OutOfMemoryError
        left[0] -= 1
        return clone(storage)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(torch.UntypedStorage, "clone", short)
    place: Any = object.__new__(CudaPlace)
    place._library = device
    place.core = SimpleNamespace(base=lambda _: 0)
    place._movable = lambda _: storages
    place._fixed_addresses = lambda _: False
    place._relocate(0, lambda _: True)
    assert len(device.exchanged) == room
    assert {s._cdata: bytes(s.tolist()) for s in storages} == before


def test_what_was_emptied_is_given_back_before_others_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would lie in it, and keep it: two arenas, whose blocks lie here and there."""
    storages = [torch.full((64,), i, dtype=torch.uint8).untyped_storage() for i in range(4)]
    arena = {storage.data_ptr(): 1000 * (1 + i % 2) for i, storage in enumerate(storages)}
    happened: list[int] = []
    place: Any = object.__new__(CudaPlace)
    place.core = SimpleNamespace(base=arena.__getitem__)
    place._movable = lambda _: storages
    place._fixed_addresses = lambda _: False
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append(0))

    def exchange(storage: torch.UntypedStorage) -> bool:
        happened.append(arena[storage.data_ptr()])
        return True

    place._exchange = exchange
    place._relocate(0, lambda _: True)
    assert happened == [0, 2000, 2000, 0, 1000, 1000, 0]


def test_what_lies_in_pages_leaves_room_for_a_segment_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where PyTorch is not held to the budget by itself; where it is, all of that is theirs."""
    gib = 1 << 30
    place: Any = object.__new__(CudaPlace)
    place.core = SimpleNamespace(count=lambda _: SimpleNamespace(page_bytes=5 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 6 * gib)  # one of it outside
    monkeypatch.setattr(cuda, "_limit", lambda _: 100 * gib)
    place._most = lambda: 8 * gib
    assert place.page_room(0) == 7 * gib - cuda._SEGMENT
    place._most = lambda: None
    assert place.page_room(0) == 99 * gib
