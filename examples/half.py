"""A GPT trained twice on this machine, plainly and in half the memory: side by side, bit for bit.

python examples/half.py [--report out/half.html]

Each run is a process of its own. What it holds is counted by PyTorch's allocator and told by
PyTorch's profiler; lowtide is not asked.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from train_gpt import GPT  # type: ignore[import-not-found]

BATCH, LENGTH, WIDTH, LAYERS, WORDS = 16, 128, 192, 6, 2000
SHARE = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="write a page about the plan here")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain or options.budget:
        print(json.dumps(train(options.steps, options.budget, options.report)))
        return
    what = f"a GPT of {LAYERS} layers, {options.steps} steps of {BATCH} x {LENGTH} tokens"
    print(f"{what}, plainly", flush=True)
    steps = ["--steps", str(options.steps)]
    plain = run("--plain", *steps)
    budget = int(SHARE * plain["peak_bytes"])
    print(f"... and within {budget / 2**20:.1f} MiB", flush=True)
    asked = ["--report", str(options.report)] if options.report else []
    ours = run("--budget", str(budget), *steps, *asked)
    print(f"\n{'':12}{'plain':>16}{'lowtide':>16}")
    for i, (one, other) in enumerate(zip(plain["losses"], ours["losses"], strict=True)):
        print(f"loss {i:<7}{one:>16.9f}{other:>16.9f}")
    for name, scale, unit in (("peak_bytes", 2**-20, "MiB"), ("seconds", 1e3, "ms")):
        values = [f"{run[name] * scale:.1f} {unit}" for run in (plain, ours)]
        print(f"{name.split('_')[0]:12}{values[0]:>16}{values[1]:>16}")
    same = plain["digest"] == ours["digest"]
    print(f"weights, optimizer state and losses: {'the same, bit for bit' if same else 'DIFFER'}")
    print(f"\n{ours['summary']}")
    if not same or ours["peak_bytes"] > 1.01 * budget:
        sys.exit("this is not as it should be: please report it")


def run(*how: str) -> dict[str, Any]:
    """One training in a process of its own."""
    command = [sys.executable, __file__, *how]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train(steps: int, budget: int | None, report: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    losses, seconds = [], []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = GPT(WORDS, LENGTH, WIDTH, LAYERS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        around: Any = nullcontext()
        if budget is not None:
            import lowtide

            around = lowtide.fit(model, optimizer, budget=budget, policy="tide")
        with around as tide:
            for _ in range(steps):
                began = time.perf_counter()
                tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                del loss
                seconds.append(time.perf_counter() - began)
    summary = "" if tide is None else tide.summary()
    if tide is not None and report is not None:
        tide.save_report(report)
    state = [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in state)
    return {
        "losses": losses,
        "seconds": median(seconds[steps // 2 :]),
        "peak_bytes": peak_bytes(profiler),
        "digest": hashlib.sha256(bits).hexdigest() + str(losses),
        "summary": summary,
    }


def peak_bytes(profiler: Any) -> int:
    """The most that PyTorch held for the CPU at once."""
    held = peak = 0
    events = profiler.profiler.kineto_results.events()
    moves = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    for _, count in sorted(moves):
        held += count
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    main()
