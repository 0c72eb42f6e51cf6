"""The pool in front of PyTorch's CUDA allocator: built, installed, given what it needs."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowtide._errors import OutOfBudget
from lowtide._ir import CUDA_GRANULARITY_BYTES
from lowtide._layout.buffers import rounded
from lowtide._machine.host import available_bytes
from lowtide._native import NoNative
from lowtide._report.pool_text import MemorySummary
from lowtide._runtime.core import Core, Mode
from lowtide._runtime.cuda_library import cuda_library
from lowtide._runtime.planning import ARENA_GRAIN
from lowtide._runtime.storages import graphs_exist, movable_storages
from lowtide._runtime.workspaces import make_workspaces

_PAGE = 2 << 20
_HOME_BYTES = 512 << 20  # what stays is moved in portions: one must fit beside the rest
_MOST_TIDIED = 3  # times in a fit, a device
_SEGMENT = 20 << 20  # bytes that PyTorch takes at once for what lies outside
_PARKED = 0.5  # of the main memory that is free, at most, for what waits there
_WORTH = 0.002  # of what is reserved: less waste than this is left alone


@dataclass(frozen=True, slots=True)
class _Parked:
    """A storage whose bytes wait in main memory."""

    storage: torch.UntypedStorage
    bytes: int
    content: torch.UntypedStorage
    where: int  # in the arena to come; -1: anywhere


class CudaPlace:
    """PyTorch's memory, once CUDA is in use. Raises NoNative if the pool cannot stand in it."""

    def __init__(self) -> None:
        self._library = cuda_library()
        for device in range(torch.cuda.device_count()):
            torch.cuda.memory_stats(device)  # starts PyTorch's allocator
        why = self._library.lowtide_torch_install()
        if why:
            raise NoNative(why.decode())
        self.core = Core(self._library, self._library.lowtide_torch_pool())
        self._reserved_before = 0
        self._without_pages = False  # they cannot be had
        self._most: Callable[[], int | None] = lambda: None  # bytes of steps in pages, if fewer
        self.missing = 0  # of the last arena that could not be had
        self._tidied: Counter[int] = Counter()  # by device

    def leave(self) -> None:
        """Out of the way as soon as nothing depends on it."""
        for device in range(torch.cuda.device_count()):
            self._evacuate(device)
        self._library.lowtide_torch_withdraw()
        if not graphs_exist():
            torch._C._cuda_clearCublasWorkspaces()  # they would keep it for ever
        torch.cuda.empty_cache()

    def memory(self) -> MemorySummary:
        """PyTorch's own figures, over all devices."""
        devices = range(torch.cuda.device_count())
        return MemorySummary(
            reserved_before=self._reserved_before,
            reserved=sum(torch.cuda.memory_reserved(device) for device in devices),
            peak_allocated=sum(torch.cuda.max_memory_allocated(device) for device in devices),
        )

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured here."""
        return torch.cuda.is_current_stream_capturing()

    def set_arena(
        self, lane: int, size: int, device: int, *, grows: bool, left: Mapping[int, int]
    ) -> bool:
        """In a segment of its own.

        What the last step left behind (gradients) lies beside the new arena until it is freed, and
        keeps a smaller one that is replaced. Where there is no room for both, or more would be
        reserved than ever before because the old arena stays, it waits in main memory while the
        arena is made, and then goes into it.
        """
        most = torch.cuda.max_memory_reserved(device)
        if torch.cuda.memory_reserved(device) + size > most:
            torch.cuda.empty_cache()
        more = torch.cuda.memory_reserved(device) + size > most
        if not (grows and more) and self._library.lowtide_torch_arena(lane, size):
            return True
        if not self._fixed_addresses(device):
            return self._set_arena_parked(lane, size, device, left)
        done = bool(self._library.lowtide_torch_arena(lane, size))
        if not done:
            self.missing = self._missing(size, device)
        return done

    def use_pages(self, device: int, most: Callable[[], int | None] | None = None) -> bool:
        """Whether what the current stream allocates lies in pages from now on.

        So does what is there already: in segments, nobody could use what it leaves behind when it
        is swapped. Not where other devices are in use: they may read it without asking again. Steps
        are laid out in what PyTorch may reserve, or in as many bytes as `most` says then.
        """
        others = set(range(torch.cuda.device_count())) - {device}
        if self._without_pages or any(torch.cuda.max_memory_reserved(one) for one in others):
            return False
        stream = torch.cuda.current_stream(device).cuda_stream
        made = bool(self._library.lowtide_torch_pages(device, stream or None, _limit(device)))
        self._without_pages = not made
        if made:
            self._most = most or self._most
            self._reserved_before += torch.cuda.memory_reserved(device)
            self.core.set_mode(Mode.RECORD)  # before that, nothing goes where it is sent
            if not self._fixed_addresses(device):
                torch._C._cuda_clearCublasWorkspaces()  # in the midst of segments, they stay for it
                self._relocate(device, lambda block: not self.core.is_paged(block))
                make_workspaces(device)
        return made

    def page_room(self, device: int) -> int:
        """What PyTorch may reserve, but for what lies outside.

        Where it is not held to it by itself, it may take another segment there at any time.
        """
        most, limit = self._most(), _limit(device)
        limit = limit if most is None else min(limit, most - _SEGMENT)
        return max(0, limit - self._outside(device))

    def _outside(self, device: int) -> int:
        return torch.cuda.memory_reserved(device) - self.core.count(device).page_bytes

    def free_pages(self, device: int) -> int:
        """Those that are free, and those that there may still be."""
        more = self.page_room(device) - self.core.count(device).page_bytes
        return (self.core.free_pages(device) + max(0, more)) // _PAGE

    def guard(self, device: int, most: int, sound: Callable[[], bool] | None) -> bool:
        """See `cap.Giver`."""
        stream = torch.cuda.current_stream(device).cuda_stream
        if sound is not None:  # in every watched step there is none
            most -= self._outside(device)
        return self.core.guard(device, stream, max(0, most), sound)

    def guarded(self) -> int:
        """Likewise."""
        return self.core.guarded()

    def pages_of(self, count: int) -> int:
        """That a block of so many bytes may need: some lie across a page's end."""
        return -(-count // _PAGE) + 1

    def _set_arena_parked(self, lane: int, size: int, device: int, left: Mapping[int, int]) -> bool:
        """With what lies in the way in main memory meanwhile.

        Where plans say where it lies in the arena it goes there, and what they leave outside is not
        touched. Otherwise it goes wherever there is room in it.
        """
        torch.cuda.synchronize(device)
        parked = [
            _Parked(storage, storage.nbytes(), storage.cpu(), where)
            for storage, where in self._left_behind(lane, device, left)
        ]
        done = False
        try:
            for one in parked:
                one.storage.resize_(0)
            if not (done := bool(self._library.lowtide_torch_arena(lane, size))):
                self.missing = self._missing(size, device)
        finally:
            with torch.cuda.device(device):
                self.core.set_mode(Mode.PASS if left else Mode.REPLAY)
                if not all(self._restore(one, lane, placed=done) for one in parked):
                    done = False
                    self._restore_without(parked, [lane])  # what was there comes first
                    self.missing = self._missing(size, device)
        return done

    def _left_behind(
        self, lane: int, device: int, left: Mapping[int, int]
    ) -> Iterator[tuple[torch.UntypedStorage, int]]:
        """What the last step has left behind, and where in the arena it is to lie, or -1."""
        for storage in self._movable(device):
            age = self.core.age(storage.data_ptr())
            if not storage.resizable() or age not in (0, 1):
                continue
            where = left.get(self.core.index(lane, storage.data_ptr()), -1) if age == 1 else -1
            if where >= 0 or not left:
                yield storage, where

    def _restore(self, parked: _Parked, lane: int, *, placed: bool) -> bool:
        storage, length = parked.storage, parked.bytes
        if placed and parked.where >= 0:
            adopt = self._library.lowtide_torch_adopt
            if not adopt(storage._cdata, lane, parked.where, length):
                return False
        else:
            if not self._refill(storage, length):
                return False
        storage.copy_(parked.content)
        return True

    def _refill(self, storage: torch.UntypedStorage, count: int) -> bool:
        """Not by `resize_`: that asks the allocator of the time when the storage was made."""
        refill = functools.partial(self._library.lowtide_torch_refill, storage._cdata, count)
        if refill():
            return True
        torch.cuda.empty_cache()
        return bool(refill())

    def clear(self, lanes: Mapping[int, int]) -> None:
        """Take these lanes' arenas away; their devices are given.

        What lies in them, and in homes, waits in main memory until they are gone. Where it cannot,
        they go with the last of it.
        """
        for device in set(lanes.values()):
            own = [lane for lane in lanes if lanes[lane] == device]
            torch.cuda.synchronize(device)
            self.core.set_mode(Mode.PASS)  # what follows is no part of a step
            held = [] if self._fixed_addresses(device) else self._held(device)
            if sum(storage.nbytes() for storage in held) > _PARKED * available_bytes():
                held = []
            with torch.cuda.device(device):
                parked = [_Parked(one, one.nbytes(), one.cpu(), -1) for one in held]
                self._restore_without(parked, own)

    def _held(self, device: int) -> list[torch.UntypedStorage]:
        """What lies in arenas and homes and can be moved, the largest first."""
        found = [one for one in self._movable(device) if one.resizable()]
        found = [one for one in found if self.core.holds(one.data_ptr())]
        return sorted(found, key=lambda storage: -storage.nbytes())

    def _restore_without(self, parked: Sequence[_Parked], lanes: Sequence[int]) -> None:
        """As it was before these lanes had arenas."""
        for one in parked:
            one.storage.resize_(0)
        for lane in lanes:
            self._library.lowtide_torch_arena(lane, 0)
        torch.cuda.empty_cache()
        lost: list[Exception] = []
        for one in parked:
            try:
                if not self._refill(one.storage, one.bytes):
                    one.storage.resize_(one.bytes)  # which says why not
                one.storage.copy_(one.content)
            except Exception as error:  # noqa: BLE001 - the others come back all the same
                lost.append(error)
        if lost:
            raise OutOfBudget("tensors of the last step had to wait, and there is no room for them")

    def _missing(self, size: int, device: int) -> int:
        """By how much PyTorch would reserve more than it may."""
        torch.cuda.empty_cache()
        return max(0, torch.cuda.memory_reserved(device) + size - _limit(device))

    def trim(self) -> None:
        """Give back what is cached; where much stays in pieces, gather what holds them.

        What a step leaves behind lies in its arena now, so the caching allocator has little but
        what stays. That includes workspaces of cuBLAS, made again wherever there is room for them.
        """
        for device in range(torch.cuda.device_count()):
            if not self._wasteful(device):
                continue
            torch.cuda.empty_cache()
            if not self._wasteful(device) or self._tidied[device] >= _MOST_TIDIED:
                continue
            self._tidied[device] += 1
            if self._fixed_addresses(device):
                continue
            torch.cuda.synchronize(device)
            self.core.set_mode(Mode.PASS)  # what follows is no part of a step
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            if self._wasteful(device):
                self._gather(device)
                torch.cuda.empty_cache()
            make_workspaces(device)

    def _wasteful(self, device: int) -> bool:
        """Whether enough is cached and not in use to do something about it."""
        cached = self._library.lowtide_torch_cached(device)
        return bool(cached > _WORTH * torch.cuda.memory_reserved(device))

    def settle(self, device: int) -> None:
        """Move what stays (weights, optimizer state) out of half-empty segments.

        Only storages that Python can reach and whose bytes are the caching allocator's own. Their
        address changes; the storage and every tensor on it stay the same objects. Where a CUDA
        graph has been captured nothing is moved: it knows addresses, not storages.
        """
        self._reserved_before += torch.cuda.memory_reserved(device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if self._wasteful(device) and not self._fixed_addresses(device):
            self._gather(device)

    def _gather(self, device: int) -> None:
        """Move what stays, and does not lie in a home yet, into homes."""
        storages = [
            storage
            for storage in self._movable(device)
            if not self.core.holds(storage.data_ptr())
            and self.core.age(storage.data_ptr()) not in (0, 1)
        ]
        storages.sort(key=lambda storage: storage.nbytes(), reverse=True)
        with torch.cuda.device(device):
            portion: list[torch.UntypedStorage] = []
            for storage in storages:
                portion.append(storage)
                if _room(portion) >= _HOME_BYTES:
                    self._move(portion, device)
                    portion = []
            self._move(portion, device)

    def _move(self, portion: list[torch.UntypedStorage], device: int) -> None:
        if not portion:
            return
        stream = torch.cuda.current_stream(device).cuda_stream
        size = rounded(_room(portion), ARENA_GRAIN)
        home = self._library.lowtide_torch_home(size, device, stream)
        if not home:
            return  # they stay where they are
        offset = 0
        for storage in portion:
            if self._library.lowtide_torch_settle(storage._cdata, home, offset):
                offset += rounded(storage.nbytes(), CUDA_GRANULARITY_BYTES)
        self.core.dismiss(home)

    def _evacuate(self, device: int) -> None:
        """Move what lives on (state, gradients) out of arenas and homes: they would stay for it.

        The pool has stopped, so it goes to the caching allocator.
        """
        self._relocate(device, self.core.holds)

    def _relocate(self, device: int, wanted: Callable[[int], bool]) -> None:
        """Allocate anew what lies at such addresses, as far as there is memory.

        One arena or home after the other, each given back when it is empty: else what is moved next
        would lie in it, and keep it. What lies in segments comes last. Where there is no room
        beside the others, they all wait in main memory, and go first.
        """
        if self._fixed_addresses(device):
            return
        torch.cuda.synchronize(device)
        found = [one for one in self._movable(device) if wanted(one.data_ptr()) and one.resizable()]
        found.sort(key=lambda storage: (self.core.base(storage.data_ptr()), storage.data_ptr()))
        emptied = -1  # the last
        while found:
            before, emptied = emptied, self.core.base(found[-1].data_ptr())
            if before != emptied:
                torch.cuda.empty_cache()
            if not self._exchange(found[-1]):
                break
            found.pop()
        if sum(one.nbytes() for one in found) <= _PARKED * available_bytes():
            self._restore_without([_Parked(one, one.nbytes(), one.cpu(), -1) for one in found], [])

    def _exchange(self, storage: torch.UntypedStorage) -> bool:
        """New bytes for it, if there are any; the old ones, and what they lay in, go at once."""
        try:
            content = storage.clone()
        except torch.OutOfMemoryError:
            return False
        return bool(self._library.lowtide_torch_exchange(storage._cdata, content._cdata))

    def _movable(self, device: int) -> list[torch.UntypedStorage]:
        """Storages whose bytes may be moved: those of the current stream, in no private pool."""
        return movable_storages(device, self.core.is_paged)

    def _fixed_addresses(self, device: int) -> bool:
        """Whether there may be a CUDA graph: it knows addresses, not storages.

        A graph that is gone leaves a workspace of cuBLAS in its private pool; other private memory
        may belong to a graph that Python cannot see.
        """
        if graphs_exist():
            return True
        if self._library.lowtide_torch_private(device):
            torch.cuda.synchronize(device)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return bool(self._library.lowtide_torch_private(device))


def _limit(device: int) -> int:
    """What PyTorch may reserve."""
    total = torch.cuda.get_device_properties(device).total_memory
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)


def _room(storages: list[torch.UntypedStorage]) -> int:
    return sum(rounded(storage.nbytes(), CUDA_GRANULARITY_BYTES) for storage in storages)
