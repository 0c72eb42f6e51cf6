"""Does the trace tell the truth, and what does it cost?

For every model: the trace's peak against what PyTorch's allocator says of an untraced step, the
extra time of tracing, the time of the analyses, and whether anything is left behind (step time,
memory, results). Prints a table and writes JSON.

    python benchmarks/tracing.py --out benchmarks/results/trace-gpu.json
"""

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from independent import cpu_peak_bytes
from machine import machine_facts
from models import Job, bert, bert_large, chain, custom, gpt2, gpt2_medium, resnet50, small_resnet

import lowtide
from lowtide._analyze.gaps import idle_gaps
from lowtide._analyze.load import find_peak
from lowtide._analyze.recompute import obstacles
from lowtide._trace.digest import digest

TINY = "30,000 tiny ops"
GPU: dict[str, Callable[[], Job]] = {
    "ResNet-50 256 tf32": lambda: resnet50("cuda"),
    "GPT-2 medium 16x1024 bf16": lambda: gpt2_medium("cuda"),
    "BERT-large 16x384": lambda: bert_large("cuda"),
    "custom autograd.Function": lambda: custom("cuda", 8192, 4096),
    TINY: lambda: chain("cuda", 4200),
}
CPU: dict[str, Callable[[], Job]] = {
    "ResNet": lambda: small_resnet("cpu"),
    "GPT-2": lambda: gpt2("cpu", 4, 64, n_layer=12, n_embd=96, n_head=4, vocab_size=1000),
    "BERT": lambda: bert(
        "cpu",
        4,
        64,
        num_hidden_layers=6,
        hidden_size=96,
        num_attention_heads=4,
        intermediate_size=384,
        vocab_size=1000,
    ),
    "custom autograd.Function": lambda: custom("cpu", 512, 256),
    TINY: lambda: chain("cpu", 4200),
}


def seconds_per_step(step: Callable[[], object], device: str, steps: int = 5) -> float:
    """The median of a few steps."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def true_peak(build: Callable[[], Job], device: str) -> int:
    """The most that was allocated in an untraced steady step."""
    if device == "cpu":
        return cpu_peak_bytes(lambda: build().step, 4)
    job = build()
    for _ in range(3):
        job.step()
    torch.cuda.reset_peak_memory_stats()
    job.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that repeat themselves: without them PyTorch does not equal itself."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results_after(build: Callable[[], Job], traced: bool) -> dict[str, torch.Tensor]:
    """The weights after six steps, two of them traced or not."""
    torch.manual_seed(0)
    job = build()
    job.step()
    if traced:
        lowtide.trace(job.step, warmup=1)
    else:
        for _ in range(3):
            job.step()
    for _ in range(2):
        job.step()
    return copy.deepcopy(job.model.state_dict())


def measure(build: Callable[[], Job], device: str, *, repeat: bool) -> dict[str, Any]:
    """Everything about one model; without `repeat`, what takes a single trace."""
    torch.manual_seed(0)
    truth = true_peak(build, device)
    release()
    torch.manual_seed(0)
    job = build()
    for _ in range(3):
        job.step()
    plain = seconds_per_step(job.step, device)
    gc.collect()
    held = held_bytes(device)
    lowtide.trace(lambda: torch.ones(1), warmup=0)  # imports are not the cost of a step
    began = time.perf_counter()
    trace = lowtide.trace(job.step, warmup=0)
    extra = time.perf_counter() - began - 2 * plain
    left = held_bytes(device) - held
    after = seconds_per_step(job.step, device)
    began = time.perf_counter()
    peak = find_peak(trace)
    obstacles(trace)
    idle_gaps(trace)
    analysis = time.perf_counter() - began
    again = digest(lowtide.trace(job.step, warmup=0)) == digest(trace) if repeat else None
    figures = {
        "ops": len(trace.ops),
        "true_peak_bytes": truth,
        "trace_peak_bytes": peak.bytes,
        "peak_error": peak.bytes / truth - 1,
        "plain_step_seconds": plain,
        "op_seconds_over_step_seconds": sum(op.seconds for op in trace.ops) / plain,
        "extra_seconds": extra,
        "extra_seconds_per_3300_ops": extra / len(trace.ops) * 3300,
        "analysis_seconds": analysis,
        "step_time_after_over_before": after / plain,
        "bytes_left_behind": left,
        "same_digest_twice": again,
    }
    del job, trace
    release()
    if not repeat:
        return figures
    with deterministic():
        plain_twice = [results_after(build, traced=False) for _ in range(2)]
        traced_once = results_after(build, traced=True)
    figures["plain_equals_itself"] = equal(*plain_twice)
    figures["same_results"] = equal(plain_twice[0], traced_once)
    return figures


def held_bytes(device: str) -> int:
    """What tensors have asked for; what the allocator gave varies with the holes it finds."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"] if device == "cuda" else 0


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors agree bit for bit."""
    return all(torch.equal(a[name], b[name]) for name in a)


def release() -> None:
    """Give back what the last model held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def verdict(figures: dict[str, Any], what: str) -> str:
    """In one word, whether two things were the same."""
    if figures.get(what) is None:
        return "-"
    if figures[what]:
        return "same"
    return "DIFFER" if figures.get("plain_equals_itself", True) else "random"


def main() -> None:
    """Measure every model and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS repeats itself only with this
    results: dict[str, Any] = {"machine": machine_facts(), "device": options.device, "models": {}}
    for name, build in (GPU if options.device == "cuda" else CPU).items():
        if options.only and options.only not in name:
            continue
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        results["models"][name] = measure(build, options.device, repeat=name != TINY)
        release()
    print(
        f"{'model':28}{'ops':>7}{'true peak MiB':>15}{'error':>10}{'op/step time':>14}"
        f"{'extra s':>9}{'analysis s':>12}{'after':>7}{'left':>6}{'digest':>8}{'results':>9}"
    )
    for name, m in results["models"].items():
        print(
            f"{name:28}{m['ops']:>7}{m['true_peak_bytes'] / 2**20:>15.1f}{m['peak_error']:>+10.3%}"
            f"{m['op_seconds_over_step_seconds']:>14.3f}"
            f"{m['extra_seconds']:>9.2f}{m['analysis_seconds']:>12.3f}"
            f"{m['step_time_after_over_before']:>7.2f}{m['bytes_left_behind']:>6}"
            f"{verdict(m, 'same_digest_twice'):>8}{verdict(m, 'same_results'):>9}"
        )
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
