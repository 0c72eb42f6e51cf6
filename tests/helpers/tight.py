"""For tests under a budget: a job is run, and what PyTorch really allocates for it counted."""

import ctypes
import gc
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from operator import ne
from pathlib import Path
from typing import Any

import torch
from jobs import Build, Job

import lowtide


@dataclass(frozen=True)
class Run:
    """What came out: the loss of each step and every tensor that stays; each step's peak, bytes."""

    result: list["Bits"]
    peaks: list[int]


@dataclass(frozen=True)
class Bits:
    """What a tensor held. Not a tensor: a budget counts those of the whole process."""

    dtype: torch.dtype
    shape: torch.Size
    content: bytes = field(repr=False)


def fitted(job: Job, budget: int | None, **how: Any) -> AbstractContextManager[object]:
    """`lowtide.fit` by policy "delta", unless `how` says else; nothing without a budget."""
    if budget is None:
        return nullcontext()
    return lowtide.fit(job.model, job.optimizers, budget=budget, **{"policy": "delta"} | how)


def run(build: Build, steps: int, budget: int | None = None, **how: Any) -> Run:
    """Train a fresh job, plainly if there is no budget."""
    with holding_nothing():
        return _run(build, steps, lambda job: fitted(job, budget, **how))


def run_away(build: Build, steps: int) -> Run:
    """Train with all that is saved for backward in no tensor: the least that hooks can hold."""
    with holding_nothing():
        return _run(build, steps, lambda job: _away({p.data_ptr() for p in job.model.parameters()}))


@contextmanager
def holding_nothing() -> Iterator[None]:
    """What an error's frames refer to is let go: it would count against the next budget."""
    try:
        yield
    except BaseException as error:
        chain: BaseException | None = error
        while chain is not None:
            traceback.clear_frames(chain.__traceback__)
            chain = chain.__context__
        raise


def _run(build: Build, steps: int, managed: Callable[[Job], AbstractContextManager[object]]) -> Run:
    losses: list[torch.Tensor] = []
    peaks: list[int] = []
    gc.collect()  # what an earlier test left in a circle would count, too
    with _without_collections(), counting() as counter:
        job = build()
        counter.mark()
        with managed(job):
            for _ in range(steps):
                losses.append(job.step())
                peaks.append(counter.mark())
    return Run(bits_of([*losses, *state_of(job), torch.get_rng_state()]), peaks)


@contextmanager
def _without_collections() -> Iterator[None]:
    """A cycle that holds memory is seen."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def state_of(job: Job) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and the optimizers' state."""
    of_optimizers = [
        value
        for optimizer in job.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [p.grad for p in job.model.parameters() if p.grad is not None]
    return [*job.model.parameters(), *job.model.buffers(), *gradients, *of_optimizers]


def bits_of(tensors: list[torch.Tensor]) -> list[Bits]:
    """Signs of zeros and what is no number, too."""
    found = []
    for tensor in tensors:
        content = tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
        found.append(Bits(tensor.dtype, tensor.shape, content))
    return found


def find_difference(some: list[Bits], others: list[Bits]) -> str | None:
    """The first, in words."""
    if len(some) != len(others):
        return f"{len(some)} tensors and {len(others)}"
    for i, (one, other) in enumerate(zip(some, others, strict=True)):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"tensor {i}: {one.dtype} {one.shape} and {other.dtype} {other.shape}"
        count = sum(map(ne, one.content, other.content))
        if count:
            return f"tensor {i} of {len(some)}: {one.shape} differs in {count} bytes"
    return None


@contextmanager
def _away(stays: set[int]) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in stays:
            return tensor
        layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
        if storage.nbytes() > tensor.nbytes:
            layout = (tensor.shape, torch.empty(tensor.shape, device="meta").stride(), 0)
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            storage = copy.untyped_storage()
        content = bytearray(storage.nbytes())
        if content:
            ctypes.memmove(_address(content), storage.data_ptr(), len(content))
        return tensor.dtype, layout, content

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        dtype, layout, content = kept
        storage = torch.UntypedStorage(len(content))
        if content:
            ctypes.memmove(storage.data_ptr(), _address(content), len(content))
        return torch.empty(0, dtype=dtype).set_(storage, layout[2], layout[0], layout[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _address(content: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(content))


_SOUND = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)

# The counter: an allocator of its own before PyTorch's. The profiler's events would nearly do, but
# it sees nothing of what other threads free, nor of what was allocated before it began.
_SOURCE = """
#include <c10/core/CPUAllocator.h>
#include <mutex>
#include <unordered_map>
#include "guard.h"

static std::mutex& lock = *new std::mutex;  // these outlive the last tensor
static auto& blocks = *new std::unordered_map<void*, std::pair<long, long>>;
static long live, peak, starts;
static auto& sizes = *new std::vector<int64_t>;  // of what was allocated since the last mark
static lowtide::Guard guard;
static c10::Allocator* const inner = c10::GetCPUAllocator();

static void drop(void* memory) {
  {
    std::lock_guard<std::mutex> locked(lock);
    auto found = blocks.find(memory);
    if (found != blocks.end()) {  // else null, or oneDNN's from before the first start
      if (found->second.second == starts) live -= found->second.first;
      blocks.erase(found);
    }
  }
  inner->raw_deallocate(memory);
}

extern "C" bool watch(long most, lowtide::Guard::Sound sound) {
  std::lock_guard<std::mutex> locked(lock);
  if (sound || most > 0) return guard.begin(0, most, sound, nullptr);
  guard.rest();
  return true;
}

struct Counting : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* memory = inner->raw_allocate(count);
    if (!memory) return {nullptr, c10::Device(c10::kCPU)};
    std::unique_lock<std::mutex> locked(lock);
    blocks[memory] = {static_cast<long>(count), starts};
    live += static_cast<long>(count);
    if (live > peak) peak = live;
    sizes.push_back(static_cast<int64_t>(count));
    const lowtide::Guard::Sound sound = guard.rings(0, sizes.back(), live) ? guard.sound : nullptr;
    locked.unlock();
    if (sound && sound(nullptr)) watch(0, nullptr);
    return {memory, memory, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t count) const override {
    inner->copy_data(to, from, count);
  }
};
static Counting& counting = *new Counting;

extern "C" void start() {
  std::lock_guard<std::mutex> locked(lock);
  live = peak = 0;
  starts++;
  guard = {};
  c10::SetCPUAllocator(&counting);
}
extern "C" long guarded() {
  std::lock_guard<std::mutex> locked(lock);
  return guard.held();
}
extern "C" void stop() { c10::SetCPUAllocator(inner); }
extern "C" long held() {
  std::lock_guard<std::mutex> locked(lock);
  return live;
}
extern "C" long mark() {
  std::lock_guard<std::mutex> locked(lock);
  const long was = peak;
  peak = live;
  guard.end_step(0, sizes);
  sizes.clear();
  return was;
}
"""


@contextmanager
def counting() -> Iterator[ctypes.CDLL]:
    """Count what PyTorch allocates for the CPU from here on, in all threads, and nothing older.

    `held()` is what is live now of that, `mark()` the most that was since the last `mark()`, which
    ends a step: `Guarded` is told where the next one is another.
    """
    library = _library()
    library.start()
    try:
        yield library
    finally:
        library.stop()


@cache
def _library() -> ctypes.CDLL:
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "counter.cc"), Path(folder, "counter.so")
        source.write_text(_SOURCE)
        compiler = os.environ.get("CXX", "c++").split()
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
        flags.append(f"-I{Path(__file__).parents[2] / 'native' / 'allocator'}")
        links = [f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(built)]
        subprocess.run([*compiler, *flags, str(source), *links], check=True)
        library = ctypes.CDLL(str(built))
    library.held.restype = library.mark.restype = library.guarded.restype = ctypes.c_long
    library.watch.argtypes, library.watch.restype = [ctypes.c_long, _SOUND], ctypes.c_bool
    return library


class Guarded:
    """Memory as in pages: the allocator that counts guards steps, as that of a GPU does."""

    def __init__(self) -> None:
        self.most = 0  # that a step may hold; 0: nobody is called
        self.heard = 0  # how often somebody was called, and listened
        self._called = _SOUND()

    def use_pages(self, device: int, most: Callable[[], int | None] | None = None) -> bool:
        return True

    def free_pages(self, device: int) -> int:
        return 1 << 30

    def pages_of(self, count: int) -> int:
        return 1

    def guard(self, device: int, most: int, sound: Callable[[], bool] | None) -> bool:
        def called(_: object) -> int:
            listened = sound is not None and sound()
            self.heard += listened
            return int(listened)

        self.most = most if sound is not None else 0
        self._called = _SOUND() if sound is None else _SOUND(called)
        return bool(_library().watch(most, self._called))

    def guarded(self) -> int:
        return int(_library().guarded())
