"""What benchmarks/delta.py measures: one task a process, told on standard input.

python benchmarks/delta_works.py batch

Says that its imports are done, waits for the line with the task, and prints a line of JSON for
each result. Peaks are those of all steps, the first included.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from delta import BATCH_BUDGET, CAP, POLICIES
from subjects import TIDY, Entry, Subject, _bert, _language, _vision
from swap import plain_times, timed
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide

LEARNING = 4  # steps before those that are timed
CAPPED, UNTIMED = 6, 2  # steps of a probe, and how many of them come before those that count
ROOM = 1.2  # times the plain peak is more than enough
STEPS, LESS = 6, 0.4  # whose losses are compared, and the memory that is saved meanwhile

WORKS: dict[str, Entry] = {
    **TIDY,
    "BERT-large 16x384": Entry(_language(_bert, 384, 30522, keeps=False), 16),
    "ResNet-50": TIDY["ResNet-50 256 tf32"],
    "ResNet-101": Entry(_vision("resnet101", keeps=False), 128),
    "GPT-2 medium 4x1024": Entry(TIDY["GPT-2 medium 16x1024"].make, 4),
    "ResNet-50 64": Entry(TIDY["ResNet-50 256 tf32"].make, 64),
}

BLOCKS = ("Bottleneck", "EncoderBlock")  # of torchvision's models: what is checkpointed
_ATEN = torch.ops.aten
EXPENSIVE = [  # what selective checkpointing saves
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]
SHORT = ("out of memory", "ALLOC_FAILED", "valid cuDNN algorithm")  # what torch says then


def main() -> None:
    """Load, wait, answer."""
    load(sys.argv[1])
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line.strip():
        return
    kind, *rest = json.loads(line)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    TASKS[kind](*rest)


def load(part: str) -> None:
    """The imports that a part needs; none of them uses the GPU."""
    from lowtide._runtime import fit  # noqa: F401

    if part != "warm":
        import torchvision  # noqa: F401
    if part not in ("warm", "batch"):
        from transformers import BertForMaskedLM, GPT2LMHeadModel  # noqa: F401


def say(row: dict[str, Any]) -> None:
    """One result."""
    print(json.dumps(row), flush=True)


def fitted(subject: Subject, method: str, budget: str) -> AbstractContextManager[Any]:
    """What a method puts around training."""
    if method not in POLICIES:
        return nullcontext()
    return lowtide.fit(subject.model, subject.optimizer, budget=budget, policy=method)


def described(tide: Any) -> dict[str, str]:
    """What lowtide says of it, where it runs."""
    return {} if tide is None else {"summary": tide.summary()}


def is_short(error: Exception) -> bool:
    """Whether it is memory that was missing."""
    known = isinstance(error, (torch.OutOfMemoryError, lowtide.LowtideError))
    return known or any(words in str(error) for words in SHORT)


def in_a_line(error: Exception) -> str:
    """The error for the results."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:400]


@contextmanager
def peaks() -> Iterator[Callable[[], dict[str, int]]]:
    """The most allocated and reserved since it began, also where somebody resets the counts."""
    most = {"peak_bytes": 0, "reserved_bytes": 0}
    reset = torch.cuda.reset_peak_memory_stats

    def look() -> dict[str, int]:
        most["peak_bytes"] = max(most["peak_bytes"], torch.cuda.max_memory_allocated())
        most["reserved_bytes"] = max(most["reserved_bytes"], torch.cuda.max_memory_reserved())
        return dict(most)

    def look_and_reset(device: Any = None) -> None:
        look()
        reset(device)

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    reset()
    with patch.object(torch.cuda, "reset_peak_memory_stats", look_and_reset):
        yield look


def warm() -> None:
    """Whatever is built or measured once on a machine, before anything is timed."""
    began = time.perf_counter()
    with torch.device("cuda"):
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Flatten()
        )
        images = torch.randn(8, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with lowtide.fit(model, optimizer, budget="2GiB", policy="delta") as tide:
        for _ in range(3):
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        say({"seconds": round(time.perf_counter() - began, 1), **described(tide)})


def probe(name: str, method: str, batch: int) -> None:
    """Whether this batch trains under the cap, and how fast."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP / total)
    free = torch.cuda.mem_get_info()[0]
    subject = WORKS[name].make()
    around = fitted(subject, method, BATCH_BUDGET)
    row: dict[str, Any] = {"batch": batch, "fits": False}
    try:
        with peaks() as look, around as tide:
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(CAPPED + 1)]
            ends[0].record()
            for end in ends[1:]:
                subject.step(batch)
                end.record()
            torch.cuda.synchronize()
            seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(ends)]
            row |= {
                "fits": True,
                "images_per_second": batch / statistics.median(seconds[UNTIMED:]),
                "step_seconds": seconds,
                **look(),
                "device_grew_bytes": free - torch.cuda.mem_get_info()[0],
                **described(tide),
            }
    except (RuntimeError, lowtide.LowtideError) as error:
        if not is_short(error):
            raise
        row["leaving" if row["fits"] else "why"] = in_a_line(error)
    say(row)


def build(name: str, method: str, works: Mapping[str, Entry] = WORKS) -> Subject:
    """The work, with checkpoints where the method is one of those."""
    gc.collect()  # of what was built before, nothing is left
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    subject = works[name].make()
    if method not in ("checkpoint", "selective"):
        return subject
    settings: dict[str, Any] = {"use_reentrant": False}
    if method == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, EXPENSIVE)
    model: Any = subject.model
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        return subject
    for block in [part for part in model.modules() if type(part).__name__ in BLOCKS]:
        block.forward = partial(checkpoint, block.forward, **settings)
    return subject


def step_of(name: str, subject: Subject, works: Mapping[str, Entry] = WORKS) -> Callable[[], None]:
    """One step at the work's own batch."""

    def step() -> None:
        subject.step(works[name].batch)

    return step


def points(name: str, method: str, budgets: list[int]) -> None:
    """Step time and peaks at each budget; after one that fails, a new process does the rest."""
    for budget in budgets or [0]:
        subject = build(name, method)
        step = step_of(name, subject)
        around = fitted(subject, method, f"{budget}B")
        row: dict[str, Any] = {"budget_bytes": budget} if budget else {}
        try:
            with peaks() as look, around as tide:
                step()
                first = look()
                for _ in range(LEARNING - 1):
                    step()
                times = timed(step)
                row |= {
                    "seconds": statistics.median(times),
                    **look(),
                    **{f"first_{key}": value for key, value in first.items()},
                    **described(tide),
                }
        except (RuntimeError, lowtide.LowtideError) as error:
            row["leaving" if "seconds" in row else "error"] = in_a_line(error)
            say(row)
            return
        say(row)
        del subject, step, around, tide


def overhead(name: str) -> None:
    """Plain steps, steps with a budget above their peak, plain steps; and again by reserved."""
    subject = build(name, "plain")
    step = step_of(name, subject)
    with peaks() as look:
        before = plain_times(step)
        plain = look()
    for of, most in (("peak", plain["peak_bytes"]), ("reserved", plain["reserved_bytes"])):
        budget = int(ROOM * most)
        around = fitted(subject, "delta", f"{budget}B")
        row: dict[str, Any] = {"of": of, "budget_bytes": budget, "plain": plain}
        try:
            with peaks() as look, around as tide:
                for _ in range(LEARNING):
                    step()
                times = timed(step)
                row |= {**look(), **described(tide)}
            after = plain_times(step)
        except (RuntimeError, lowtide.LowtideError) as error:
            row["error"] = in_a_line(error)
            say(row)
            return
        row["seconds"] = statistics.median(times)
        row["plain_seconds"] = statistics.median([*before, *after])
        row["ratio"] = row["seconds"] / row["plain_seconds"]
        say(row)
        before = after


def same(name: str) -> None:
    """Losses of plain training, of plain training again, and under a tight budget."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as deterministic algorithms want it
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # their backward differs from run to run
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)

    def losses(method: str, budget: int = 0) -> tuple[list[float], dict[str, Any]]:
        subject = build(name, method)
        with peaks() as look, fitted(subject, method, f"{budget}B") as tide:
            found = [subject.step(WORKS[name].batch) for _ in range(STEPS)]
            return [loss.item() for loss in found], {**look(), **described(tide)}

    plain, memory = losses("plain")
    again, _ = losses("plain")
    budget = int((1 - LESS) * memory["peak_bytes"])
    ours, held = losses("delta", budget)
    say(
        {
            "steps": STEPS,
            "plain_repeats": plain == again,
            "identical": plain == ours,
            "plain_peak_bytes": memory["peak_bytes"],
            "budget_bytes": budget,
            "held": max(held["peak_bytes"], held["reserved_bytes"]) <= budget,
            "losses": {"plain": plain, "delta": ours},
            **held,
        }
    )


TASKS: dict[str, Callable[..., None]] = {
    "warm": warm,
    "batch": probe,
    "points": points,
    "overhead": overhead,
    "same": same,
}

if __name__ == "__main__":
    main()
