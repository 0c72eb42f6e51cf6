"""For tests under a budget: twelve training jobs, and what PyTorch really allocates for them.

What stays of a job (weights, gradients, the optimizer's state) and what one op needs at once are
small beside its activations: each can be trained in a third of its plain peak.
"""

import ctypes
import gc
import os
import random
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import ne
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import lowtide


@dataclass(frozen=True)
class Job:
    """`step` trains one iteration on a batch of its own drawing, and gives the loss."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[], torch.Tensor]


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


Build = Callable[[], Job]


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


# The counter: an allocator of its own before PyTorch's. The profiler's events would nearly do, but
# it sees nothing of what other threads free, nor of what was allocated before it began.
_SOURCE = """
#include <c10/core/CPUAllocator.h>
#include <mutex>
#include <unordered_map>

static std::mutex& lock = *new std::mutex;  // these outlive the last tensor
static auto& blocks = *new std::unordered_map<void*, std::pair<long, long>>;
static long live, peak, starts;
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

struct Counting : c10::Allocator {
  c10::DataPtr allocate(size_t count) override {
    void* memory = inner->raw_allocate(count);
    if (!memory) return {nullptr, c10::Device(c10::kCPU)};
    std::lock_guard<std::mutex> locked(lock);
    blocks[memory] = {static_cast<long>(count), starts};
    live += static_cast<long>(count);
    if (live > peak) peak = live;
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
  c10::SetCPUAllocator(&counting);
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
  return was;
}
"""


@contextmanager
def counting() -> Iterator[ctypes.CDLL]:
    """Count what PyTorch allocates for the CPU from here on, in all threads, and nothing older.

    `held()` is what is live now of that, `mark()` the most that was since the last `mark()`.
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
        links = [f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(built)]
        subprocess.run([*compiler, *flags, str(source), *links], check=True)
        library = ctypes.CDLL(str(built))
    library.held.restype = library.mark.restype = ctypes.c_long
    return library


# The jobs.


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def job_of(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Job:
    """Trained by SGD with momentum; `loss_of` runs one forward pass on a batch of its drawing."""
    optimizer = _momentum(model)

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, [optimizer], step)


def mlp() -> Job:
    torch.manual_seed(0)
    layers = [part for _ in range(20) for part in (nn.Linear(96, 96), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(96, 8))
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, 1.5)  # type: ignore[arg-type]
    return job_of(model, lambda: model(torch.randn(1024, 96)).square().mean())


class _Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short = nn.Conv2d(into, out, 1) if into != out else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        out += self.short(x)
        found: torch.Tensor = self.relu(out)
        return found


def resnet() -> Job:
    torch.manual_seed(0)
    widths = [3, *[8] * 10, *[16] * 6]
    blocks: list[nn.Module] = [_Residual(into, out) for into, out in pairwise(widths)]
    blocks.insert(11, nn.MaxPool2d(2))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,)))

    return job_of(model, loss)


class _UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = [*zip((3, *widths), widths, strict=False)]
        self.down = nn.ModuleList(self._twice(into, out) for into, out in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(low, high, 2, stride=2) for high, low in pairs[:0:-1]
        )
        self.join = nn.ModuleList(self._twice(2 * high, high) for high, _ in pairs[:0:-1])
        self.last = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _twice(into: int, out: int) -> nn.Module:
        parts: list[nn.Module] = []
        for count in (into, *[out] * 4):
            parts += [nn.Conv2d(count, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU()]
        return nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for i, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        found: torch.Tensor = self.last(x)
        return found


def unet() -> Job:
    torch.manual_seed(0)
    model = _UNet((8, 16, 32))

    def loss() -> torch.Tensor:
        x = torch.randn(4, 3, 32, 32)
        return 10 * F.binary_cross_entropy_with_logits(model(x), (x[:, :2] > 0).float())

    return job_of(model, loss)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return torch.as_tensor(self.out(found.transpose(1, 2).flatten(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attend(self.norms[0](x)))
        found: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))
        return found


class _GPT(nn.Module):
    def __init__(self, width: int, depth: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = F.linear(
            self.norm(self.blocks(F.dropout(x, 0.1, self.training))), self.words.weight
        )
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt() -> Job:
    torch.manual_seed(0)
    model = _GPT(32, 6, 64, 64)
    return job_of(model, lambda: model(torch.randint(0, 64, (16, 64))))


def accumulation() -> Job:
    """Also autocast, clipping, AdamW, and an evaluation between the parts of a step."""
    torch.manual_seed(0)
    model = _GPT(32, 6, 64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = model(torch.randint(0, 64, (16, 64)))
        return found / 3

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for i in range(3):
            part = loss()
            part.backward()
            total += part.detach()
            if i == 1:
                model.eval()
                with torch.no_grad():
                    total += loss()
                model.train()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total

    return Job(model, [optimizer], step)


def bert() -> Job:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=5,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    )

    def loss() -> torch.Tensor:
        tokens, labels = torch.randint(0, 100, (8, 64)), torch.randint(0, 2, (8,))
        found: torch.Tensor = model(input_ids=tokens, labels=labels).loss
        return found

    return job_of(model, loss)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(16, 64), nn.LSTMCell(64, 32)
        self.gru = nn.GRU(32, 16, num_layers=2, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = None, None
        seen: list[torch.Tensor] = []
        for now in x:
            one = self.first(now, one)
            two = self.second(one[0], two)
            seen.append(two[0])
        found: torch.Tensor = self.gru(torch.stack(seen))[0]
        return found


def rnn() -> Job:
    torch.manual_seed(0)
    model = _Recurrent()
    return job_of(model, lambda: model(torch.randn(24, 128, 16)).square().sum() / 500)


class _Tree(nn.Module):
    """A TreeLSTM whose tree is drawn anew every time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.random = width, random.Random(0)
        self.leaf, self.join = nn.Linear(width, 2 * width), nn.Linear(2 * width, 5 * width)

    def forward(self, rows: int, leaves: int) -> tuple[torch.Tensor, torch.Tensor]:
        if leaves == 1:
            h, c = self.leaf(torch.randn(rows, self.width)).tanh().chunk(2, 1)
            return h, c
        left = self.random.randint(1, leaves - 1)
        (h1, c1), (h2, c2) = self(rows, left), self(rows, leaves - left)
        parts = self.join(torch.cat([h1, h2], 1)).chunk(5, 1)
        keep, other, into, out = (part.sigmoid() for part in parts[:4])
        c = keep * c1 + other * c2 + into * parts[4].tanh()
        return out * c.tanh(), c


def tree() -> Job:
    torch.manual_seed(0)
    model = _Tree(48)

    def loss() -> torch.Tensor:
        h: torch.Tensor = model(128, model.random.randint(16, 24))[0]
        return h.square().sum() / 50

    return job_of(model, loss)


def gan() -> Job:
    """The generator learns through four steps that the critic would make."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.Tanh())
    critic = nn.Sequential(nn.Linear(48, 48), nn.Softplus(), nn.Linear(48, 48), nn.Tanh())
    critic.append(nn.Linear(48, 1))
    makers, critics = _momentum(maker), _momentum(critic)

    def loss_of(weights: dict[str, torch.Tensor], fake: torch.Tensor) -> torch.Tensor:
        real = torch.randn(512, 48).tanh_()
        right = F.softplus(-functional_call(critic, weights, (real,)))
        return (right + F.softplus(functional_call(critic, weights, (fake,)))).mean()

    def step() -> torch.Tensor:
        weights: dict[str, torch.Tensor] = dict(critic.named_parameters())
        fake = maker(torch.randn(512, 8))
        for _ in range(4):
            loss = loss_of(weights, fake)
            slopes = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - 0.1 * slope for (name, weight), slope in pairs}
        wrong = -loss_of(weights, fake)
        wrong.backward()
        makers.step()
        makers.zero_grad()
        critics.zero_grad()
        loss = loss_of(dict(critic.named_parameters()), maker(torch.randn(512, 8)).detach())
        loss.backward()
        critics.step()
        return torch.stack([wrong.detach(), loss.detach()])

    return Job(nn.ModuleList([maker, critic]), [makers, critics], step)


class _Swish(torch.autograd.Function):
    """Two outputs; saves an input, an output and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate = x.sigmoid()
        y = x * gate
        ctx.save_for_backward(x, gate, y)
        return y, gate

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, gate, y = ctx.saved_tensors
        return grads[0] * (gate + y * (1 - gate)) + grads[1] * gate * (1 - gate) + 0 * x


class _Odd(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.wide(x).chunk(4, 1)
        first = first.clone()
        first[:, ::2].mul_(0.5)
        first.t()[1:].add_(1)
        second, gate = _Swish.apply(second)  # type: ignore[no-untyped-call]
        most, _ = third.unflatten(1, (-1, 4)).max(2)
        top, where = fourth.topk(8, 1)
        picked = x.gather(1, where) * top.softmax(1)
        joined = torch.cat([most, picked], 1)
        joined = joined.repeat_interleave(x.shape[1] // joined.shape[1], 1)
        split = torch.stack([first * gate, joined.exp_().tanh(), second]).unbind()
        x = x + split[0].clamp(-1, 1).mul_(0.1)
        x += split[1] * split[2].expand_as(x)
        ordered, _ = x.view(-1, 2, x.shape[1] // 2).transpose(1, 2).sort(1)
        return F.layer_norm(x + ordered.transpose(1, 2).reshape(x.shape), x.shape[1:])


def odd() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Odd(32) for _ in range(6)))
    return job_of(model, lambda: model(torch.randn(1024, 32)).sigmoid().square().sum() / 500)


class _Trunk(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(16))
        self.heads = nn.ModuleList(nn.Linear(width, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What is in the middle, and the three heads' results."""
        seen = [x]
        for i, layer in enumerate(self.layers):
            x = x + F.dropout(F.silu(layer(x)), 0.2)
            if i == 7:
                seen = [x]
        return [*seen, *(head(x).square().mean() for head in self.heads)]


def partial() -> Job:
    """Gradients of some outputs first, the graph kept, then of all, twice."""
    torch.manual_seed(0)
    model = _Trunk(48)
    optimizer = _momentum(model)

    def step() -> torch.Tensor:
        middle, *losses = model(torch.randn(1024, 48))
        (slope,) = torch.autograd.grad(losses[0], middle, retain_graph=True)
        (losses[0] + losses[1] * slope.norm()).backward(retain_graph=True)
        losses[2].backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses])

    return Job(model, [optimizer], step)


class _Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.noise = nn.Linear(width, 4), nn.Linear(width, 2 * width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.noise(x).chunk(2, 1)
        x = x + mean + torch.randn_like(mean) * (0.5 * spread).exp()
        gates, chosen = self.router(x).softmax(1).topk(2, 1)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            if len(rows) > len(x) // 8:  # few rows are dropped
                found = found.index_add(0, rows, expert(x[rows]) * gates[rows, place, None])
        return F.layer_norm(x + found, x.shape[1:])


def mixture() -> Job:
    """A mixture of experts with noise as in a VAE: batches, routes and branches vary."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Mixture(32) for _ in range(6)))

    def loss() -> torch.Tensor:
        rows = int(torch.randint(700, 1000, ()))
        return torch.square(model(torch.randn(rows, 32)).sigmoid()).sum() / 500

    return job_of(model, loss)


JOBS: dict[str, Build] = {
    build.__name__: build
    for build in (
        *(mlp, resnet, unet, gpt, accumulation, bert),
        *(rnn, tree, gan, odd, partial, mixture),
    )
}
