"""What ops cost: their time and the bytes they make, remembered by what they are and are given."""

import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._runtime.swap.quiet import quiet
from lowtide._trace.tensors import tensors_in

# What CPU kernels take inside, at most: so many times their arguments, so many times their results
# (measured on the models of the tests; PyTorch tells nobody). On a GPU the allocator tells.
_SCRATCH = {
    "convolution": (2.4, 2.4),
    "convolution_backward": (1.5, 0.0),
    "native_batch_norm_backward": (0.5, 0.0),
    "_safe_softmax": (0.3, 0.0),
    "binary_cross_entropy_with_logits": (1.0, 0.0),
    "_scaled_dot_product_flash_attention_for_cpu": (0.2, 0.0),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0.3, 0.0),
}
_SCRATCH_OF_HALVES = {  # which they convert
    "mm": (1.0, 0.0),
    "addmm": (1.0, 0.5),
    "bmm": (1.0, 0.0),
    "baddbmm": (1.0, 0.0),
    "add": (0.0, 1.0),
}
_MOST_INSIDE = 2  # times arguments and results: what a convolution may take in its first run
_SAMPLES = 4  # runs of an op of one shape that are timed
_LOOKS = 2  # runs of which the allocator of a GPU is asked what they took
_MOST = 20_000  # shapes remembered
_UNKNOWN = 20e-6  # seconds, of an op that was never timed


class Costs:
    """Times are those of the kernels: on a GPU between two events, of which few are made."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._on_cuda = device.type == "cuda"
        self._index = device.index or 0
        if self._on_cuda and device.index is None:
            self._index = torch.cuda.current_device()
        self._looks: dict[Hashable, int] = {}
        self._made: dict[Hashable, int] = {}
        self._scratch: dict[Hashable, int] = {}
        self._runs: Counter[tuple[int, Hashable]] = Counter()  # by thread, up to _LOOKS
        self._seconds: dict[Hashable, list[float]] = {}
        self._timed: set[Hashable] = set()  # in this step
        self._pending: list[tuple[Hashable, torch.cuda.Event, torch.cuda.Event]] = []

    def expected_bytes(
        self,
        key: Hashable | None,
        func: OpOverload[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> int:
        """What the op is going to make: as much as last time, or as its meta kernel says.

        A key that is None stands for an op that makes nothing.
        """
        if key is None:
            return 0
        known = self._made.get(key)
        if known is None:
            here = self._is_here(args, kwargs)
            known = self._made[key] = _meta_bytes(func, args, kwargs) if here else 0
            if not self._on_cuda:
                self._scratch[key] = _scratch_bytes(func, args, known)
        return known if self._on_cuda else known + self._scratch.get(key, 0)

    def _is_here(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether results are on the device, as far as arguments say."""
        device = kwargs.get("device")
        if device is not None:
            return bool(torch.device(device).type == self._kind)
        tensors = [thing for thing in tensors_in((args, kwargs)) if thing.dim()]
        return not tensors or any(tensor.device.type == self._kind for tensor in tensors)

    def inside(self, key: Hashable | None, name: str = "", args: Sequence[Any] = ()) -> int:
        """Bytes that an op on a GPU may want besides, while it runs: at most what it took last.

        cuDNN makes do with less, but then it computes in another way, and maybe other bits: so
        before its first run there is room for much.
        """
        if not self._on_cuda or key is None:
            return 0
        known = self._scratch.get(key)
        if known is None and "convolution" in name:
            return _MOST_INSIDE * (_all_bytes(args) + self._made.get(key, 0))
        return known or 0

    def known_bytes(self, key: Hashable) -> int:
        """What an op that has run before made."""
        made = self._made.get(key, 0)
        return made if self._on_cuda else made + self._scratch.get(key, 0)

    def looks(self, key: Hashable | None) -> bool:
        """Whether the allocator should be asked before and after it."""
        return self._on_cuda and key is not None and self._looks.get(key, 0) < _LOOKS

    def chooses(self, key: Hashable | None) -> bool:
        """Whether a library may choose now how this thread computes it, from now on.

        PyTorch keeps what cuDNN chose for each thread: what ran in forward is chosen once more
        where backward makes it again.
        """
        if key is None:
            return False
        here = threading.get_ident(), key
        runs = self._runs[here]
        if runs < _LOOKS:
            self._runs[here] = runs + 1
        return runs < _LOOKS

    def taken(self) -> int:
        """Bytes that were ever taken of the GPU."""
        return int(torch._C._cuda_memoryStats(self._index)["allocated_bytes"]["all"]["allocated"])

    def saw_bytes(self, key: Hashable, count: int, taken: int | None) -> None:
        """What it has made, and taken in all: the least it did, if libraries tried several ways."""
        if len(self._made) > _MOST:
            self._made.clear()
            self._scratch.clear()
            self._looks.clear()
            self._runs.clear()
        self._made[key] = count
        if taken is not None:
            inside = max(0, taken - count)
            if self._looks.get(key):
                inside = min(inside, self._scratch[key])
            self._scratch[key] = inside
            self._looks[key] = self._looks.get(key, 0) + 1

    def wants(self, key: Hashable) -> bool:
        """Whether a run of it should be timed: once a step, as a step may be slow all over."""
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = []
        if len(known) >= _SAMPLES or key in self._timed:
            return False
        self._timed.add(key)
        return True

    def start(self) -> Any:
        """Before the op."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, key: Hashable, began: Any) -> None:
        """After it."""
        if not self._on_cuda:
            self._seconds[key].append(time.perf_counter() - began)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((key, began, event))

    def collect(self) -> None:
        """The step is over: read what the GPU is done with."""
        self._timed.clear()
        while self._pending and self._pending[0][2].query():
            key, began, ended = self._pending.pop(0)
            self._seconds.setdefault(key, []).append(began.elapsed_time(ended) / 1e3)
        if len(self._seconds) > _MOST:
            self._seconds.clear()

    def seconds(self, key: Hashable) -> float:
        """The least that was measured: the others waited for something."""
        return min(self._seconds.get(key) or (_UNKNOWN,))


def _meta_bytes(func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    seen: set[int] = set()

    def meta(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            like = torch.empty_strided(
                thing.size(), thing.stride(), dtype=thing.dtype, device="meta"
            )
            seen.add(like.untyped_storage()._cdata)
            return like
        if isinstance(thing, list | tuple):
            return [meta(item) for item in thing]
        return torch.device("meta") if isinstance(thing, torch.device) else thing

    with quiet():
        given = [meta(arg) for arg in args]
        named = {name: meta(thing) for name, thing in kwargs.items()}
        try:
            result = func(*given, **named)
        except Exception:  # noqa: BLE001 - it has none, or needs to see numbers
            return _most_bytes((*args, *kwargs.values()))
    total = 0
    for tensor in result if isinstance(result, list | tuple) else [result]:
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            return _most_bytes((*args, *kwargs.values()))
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


def _scratch_bytes(func: OpOverload[..., Any], args: Sequence[Any], made: int) -> int:
    name = func._schema.name.split("::")[1]
    shares = _SCRATCH.get(name)
    if shares is None and name in _SCRATCH_OF_HALVES:
        kinds = {thing.dtype for thing in args if isinstance(thing, torch.Tensor)}
        shares = _SCRATCH_OF_HALVES[name] if kinds & {torch.bfloat16, torch.float16} else None
    return int(shares[0] * _all_bytes(args) + shares[1] * made) if shares else 0


def _all_bytes(things: Sequence[Any]) -> int:
    return sum(thing.nbytes for thing in things if isinstance(thing, torch.Tensor))


def _most_bytes(things: Sequence[Any]) -> int:
    sizes = [thing.nbytes for thing in things if isinstance(thing, torch.Tensor)]
    return max(sizes, default=0)
