"""A pool over main memory, and a checker of its own that knows nothing of plans or arenas."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lowtide._native import HOST_POOL, built
from lowtide._runtime.core import Core, open_library
from lowtide._runtime.pool import Pool

MIB = 1 << 20


def _library() -> Any:
    library = open_library(built(HOST_POOL))
    for name, result, arguments in (
        ("open", ctypes.c_void_p, [ctypes.c_int64]),
        ("close", None, [ctypes.c_void_p]),
        ("pool", ctypes.c_void_p, [ctypes.c_void_p]),
        ("finish", None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]),
        ("bytes", ctypes.c_int64, [ctypes.c_void_p]),
        ("events", ctypes.c_int64, [ctypes.c_void_p]),
        ("shown", ctypes.c_int64, [ctypes.c_void_p]),
        ("limit", None, [ctypes.c_void_p, ctypes.c_int64]),
    ):
        function = getattr(library, f"lowtide_host_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class Host:
    """Allocates, writes into every block, and checks on each event that none was disturbed."""

    def __init__(self, capacity: int) -> None:
        self.library = _library()
        self.host = self.library.lowtide_host_open(capacity)
        self.handle = self.library.lowtide_host_pool(self.host)
        self.core = Core(self.library, self.handle)
        self.live: dict[int, tuple[int, int]] = {}  # address -> bytes, what was written
        self.in_use: dict[int, int] = {}  # freed, but another stream uses it: address -> bytes
        self._written = 0

    def allocate(self, size: int, stream: int = 0, device: int = 0) -> int:
        """A block that shares no byte with another one in use."""
        block = self.library.lowtide_pool_allocate(self.handle, size, device, stream or None)
        assert block, "no memory"
        self._write(block, size)
        return int(block)

    def _write(self, block: int, size: int) -> None:
        assert block % 512 == 0
        for other, (length, _) in self.live.items():
            assert block + size <= other or other + length <= block, "two blocks share bytes"
        for other, length in self.in_use.items():
            assert block + size <= other or other + length <= block, "bytes of another stream"
        self._written = self._written % 255 + 1
        ctypes.memset(block, self._written, size)
        self.live[block] = (size, self._written)

    def place_in(self, lane: int, offset: int, size: int) -> int:
        """A block at a place of the lane's arena."""
        block = self.library.lowtide_pool_place_in(self.handle, lane, offset, size)
        assert block, "in use"
        self._write(block, size)
        return int(block)

    def free(self, block: int) -> None:
        """Its content must be what was written."""
        size, written = self.live.pop(block)
        content = ctypes.string_at(block, size)
        assert content == bytes([written]) * size, "a block was written over"
        assert self.library.lowtide_pool_free(self.handle, block) == 1

    def touch(self, block: int, stream: int) -> bool:
        """Another stream uses the block from now on."""
        return bool(self.library.lowtide_pool_touch(self.handle, block, 0, stream or None))

    def finish(self, stream: int) -> None:
        """All that the stream was given is done."""
        self.library.lowtide_host_finish(self.host, 0, stream or None)

    def pause(self, paused: bool) -> None:
        self.library.lowtide_pool_pause(self.handle, paused)

    def limit(self, capacity: int) -> None:
        self.library.lowtide_host_limit(self.host, capacity)

    def use_pages(self, size: int, stream: int = 0) -> None:
        """What the stream allocates lies in pages from now on."""
        assert self.core.set_pages(0, stream, size)

    @property
    def shown(self) -> int:
        """Pages in windows."""
        return int(self.library.lowtide_host_shown(self.host))

    @property
    def bytes(self) -> int:
        """Allocated in the backend."""
        return int(self.library.lowtide_host_bytes(self.host))

    @property
    def events(self) -> int:
        """Recorded and not dropped."""
        return int(self.library.lowtide_host_events(self.host))


class Place:
    """The host as a place for `Pool`; remembers what was asked of it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.settled: list[int] = []
        self.arenas: list[int] = []
        self.cleared: list[dict[int, int]] = []
        self.trims = 0
        self.missing = 0
        self.room = 0  # for pages

    def settle(self, device: int) -> None:
        self.settled.append(device)

    def set_arena(
        self, lane: int, size: int, device: int, *, grows: bool, left: Mapping[int, int]
    ) -> bool:
        self.arenas.append(size)
        self.missing = size // 10
        return self._core.set_arena(lane, size)

    def page_room(self, device: int) -> int:
        return self.room

    def trim(self) -> None:
        self.trims += 1

    def clear(self, lanes: Mapping[int, int]) -> None:
        self.cleared.append(dict(lanes))
        for lane in lanes:
            self._core.set_arena(lane, 0)


class Bench:
    """A host, a pool that plans on it, and what it told."""

    def __init__(self, capacity: int) -> None:
        self.host = Host(capacity)
        self.place = Place(self.host.core)
        self.told: list[str] = []
        self.pool = Pool(self.host.core, self.place, self.told.append)


@contextmanager
def bench(capacity: int = 1 << 33) -> Iterator[Bench]:
    """Afterwards everything has gone back."""
    made = Bench(capacity)
    yield made
    host = made.host
    for block in list(host.live):
        host.free(block)
    made.pool.stop()
    for stream in range(8):
        host.finish(stream)
    host.core.reclaim()
    assert host.core.count(0).live == host.core.count(0).pending == 0
    assert host.core.count(0).arenas == host.core.count(0).held == 0
    assert host.bytes == 0, "something was not given back"
    assert host.events == 0
    host.library.lowtide_pool_close(host.handle)
    host.library.lowtide_host_close(host.host)


def train(b: Bench, batch: int = 1, *, left: list[int] | None = None) -> list[int]:
    """One step: activations grow with the batch, gradients outlive it until the next begins.

    # forward   x h1 h2 h3        freed in backward, in reverse
    # backward         g3 g2 g1   freed by the next step's zero_grad
    """
    host = b.host
    x = host.allocate(batch * MIB)
    for block in left or []:  # zero_grad
        host.free(block)
    hidden = [host.allocate(batch * 2 * MIB + 512 * i) for i in range(3)]
    gradients = []
    for block in reversed(hidden):
        workspace = host.allocate(3 * MIB)
        gradients.append(host.allocate(MIB + 512))
        host.free(workspace)
        host.free(block)
    host.free(x)
    b.pool.mark()
    return gradients


def plan_one(b: Bench, size: int) -> None:
    """Five steps of a single block: afterwards it has its arena and its plan."""
    for _ in range(5):
        b.host.free(b.host.allocate(size))
        b.pool.mark()
