"""What benchmarks/pareto.py measures: one task a process, told on standard input.

python benchmarks/pareto_works.py points

Says that its imports are done, waits for the line with the task, and prints a line of JSON for
each result. Peaks are those of all steps, the first included; only where a step is compiled first
do they begin after that. Where there are others on the machine the GPU is used in turns.
"""

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import delta_works
import torch
import torch._dynamo
import torch._functorch.config
from delta_works import in_a_line, peaks, say
from pareto_aims import COMPILED, FULL, SAME, TRACES
from subjects import TIDY, Entry, Subject, _bert, _language, _vision
from swap import context_of, plain_times, timed, trace_path, write_trace
from torch import nn
from turns import Turn

import lowtide
from lowtide._ir import Rerun

WARM = 3  # steps before those that are timed
PATIENCE = 48  # ... at most, where they wait for a plan and its layout
UNWATCHED = 8  # ... if nobody need watch: memory comes to lie otherwise when that begins
FOLLOWED = 2  # steps by both before those that are timed
STEPS = 5  # whose losses are compared: one unseen, one traced, the rest by a plan

WORKS: dict[str, Entry] = {
    "GPT-2 medium 16x1024": TIDY["GPT-2 medium 16x1024"],
    "Llama-1B-like 4x2048": TIDY["Llama-1B-like 4x2048"],
    "BERT-large 16x384": Entry(_language(_bert, 384, 30522, keeps=False), 16),
    "ViT-B/16 256 tf32": Entry(_vision("vit_b_16", keeps=False), 256),
    "ResNet-50 256 tf32": TIDY["ResNet-50 256 tf32"],
    "ResNet-50 256 bf16": Entry(_vision("resnet50", keeps=False, bf16=True), 256),
}

Step = Callable[[], None]
TURN = Turn()


def main() -> None:
    """Load, wait, answer."""
    load(sys.argv[1])
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line.strip():
        return
    kind, *rest = json.loads(line)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        TASKS[kind](*rest)
    except Exception as error:  # noqa: BLE001 - that, too, is a result
        say({"error": in_a_line(error)})


def load(part: str) -> None:
    """The imports that a part needs; none of them uses the GPU."""
    from lowtide._runtime import fit  # noqa: F401

    if part != "warm":
        import torchvision  # noqa: F401
        from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401


def build(name: str, method: str = "plain") -> Subject:
    """The work, with checkpoints where the method is one of those."""
    return delta_works.build(name, method, WORKS)


def step_of(name: str, subject: Subject) -> Step:
    """One step at the work's own batch."""
    return delta_works.step_of(name, subject, WORKS)


def summed_up(times: list[float]) -> dict[str, Any]:
    """The median, and what it is the median of."""
    return {"seconds": statistics.median(times), "step_seconds": times}


def warm() -> None:
    """Whatever is built or measured once on a machine, before anything is timed."""
    began = time.perf_counter()
    TURN.have(alone=True)  # the link, too, is measured now
    with torch.device("cuda"):
        layers = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.GELU())]
        model = nn.Sequential(*layers)
        rows = torch.randn(1 << 15, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with lowtide.fit(model, optimizer, budget=0.7, policy="tide") as tide:
        for _ in range(4):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds = round(time.perf_counter() - began, 1)
        say({"seconds": seconds, "summary": tide.summary()})


def once(name: str, method: str) -> None:
    """A method that knows no budget."""
    TURN.have(alone=False)
    subject = build(name, method)
    around = context_of(method)

    def step() -> None:
        with around():
            subject.step(WORKS[name].batch)

    with peaks() as look:
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        TURN.have(alone=True)
        say({**summed_up(timed(step)), **look()})


def compiled(name: str) -> None:
    """As torch.compile has it, with all activations it wants to keep and with a share of them."""
    for share in COMPILED:
        with TURN.taken(alone=False):
            torch._dynamo.reset()
            torch._functorch.config.activation_memory_budget = float(share)
            subject = build(name)
            subject.model.compile()
            step = step_of(name, subject)
            began = time.perf_counter()
            for _ in range(WARM):
                step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        with TURN.taken(), peaks() as look:
            say({**summed_up(timed(step)), **look(), "compiling_seconds": round(seconds, 1)})
        del subject, step


def tide(name: str, budgets: list[tuple[str, int]]) -> None:
    """Lowtide at each budget; after one that fails, a new process does the rest.

    Where memory is not tight the difference is small: there, plain steps are timed before and
    after, in this process.
    """
    for label, budget in budgets:
        TURN.have(alone=False)
        subject = build(name)
        step = step_of(name, subject)
        row: dict[str, Any] = {"budget_bytes": budget}
        before = beside(step) if label == FULL else []
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", lowtide.LowtideWarning)
                under(budget, subject, step, row, trace_path(os.environ.get(TRACES, ""), name))
            if before:
                row["beside_seconds"] = statistics.median([*before, *beside(step)])
        except (RuntimeError, lowtide.LowtideError) as error:
            row["leaving" if "seconds" in row else "error"] = in_a_line(error)
        torch.cuda.synchronize()
        TURN.have(None)
        if told:
            row["told"] = [str(one.message) for one in told]
        say(row)
        if "error" in row or "leaving" in row:
            return
        del subject, step


def beside(step: Step) -> list[float]:
    """Seconds of plain steps."""
    torch.cuda.synchronize()
    with TURN.taken():
        return plain_times(step)


def under(
    budget: int, subject: Subject, step: Step, row: dict[str, Any], path: Path | None
) -> None:
    """Fill the row of one budget; the first traced step goes to `path`."""
    around = lowtide.fit(subject.model, subject.optimizer, budget=f"{budget}B", policy="tide")
    with peaks() as look, around as fitted:
        budgeted: Any = fitted._budgeted
        planned = budgeted._dynamic.planned
        searching = stopwatch(planned, "_plan")
        again = stopwatch(planned.replans, "_plan")
        for who in (planned, planned.replans):
            TURN.lend_during(who, "_plan", torch.cuda.synchronize)

        def step_in_turn() -> None:
            alone = counts(planned)
            TURN.have(alone)
            step()
            if not alone:
                torch.cuda.synchronize()
                TURN.have(None)

        step_in_turn()
        first = look()
        settle(fitted, step_in_turn)
        TURN.have(alone=True)
        before = budgeted.dynamic_summary()
        torch.cuda.reset_peak_memory_stats()  # `look` knows of those before
        times = timed(step)
        after = budgeted.dynamic_summary()
        row |= {
            "settled_peak_bytes": torch.cuda.max_memory_allocated(),
            **look(),
            **{f"first_{key}": value for key, value in first.items()},
            **planned_of(planned),
            **summed_up(times),
            "steady": planned.is_steady(),
            "search_seconds": [*searching, *again],
            "a_step": {
                key: (getattr(after, key) - getattr(before, key)) / (len(times) + 2)
                for key in ("replayed_ops", "dropped", "swapped", "swapped_bytes")
            },
            "steps_before": len(planned.modes),
            "taped_steps": planned.tapes.steps,
            "last_ended": planned.tapes.why,
            "summary": fitted.summary(),
        }
        script = planned.main_script()
        if script is not None and path is not None and not path.with_suffix(".trace").exists():
            write_trace(script.observed, budgeted._machine, path)


def counts(planned: Any) -> bool:
    """Whether something is made of how long the next step takes: it may be traced, or judged.

    Not the first, nor those by a plan that has yet to settle.
    """
    script = planned.following.script
    if script is None:
        return bool(planned.modes)
    return bool(script.settled or script.judged)


def settle(fitted: Any, step: Step) -> None:
    """Until steps go by their last plan, and lie where they are planned to."""
    planned = fitted._budgeted._dynamic.planned
    script, replayed = None, 0  # the last plan, and what had been laid out before it
    loose = 0  # steps in a row that nobody watched
    for _ in range(PATIENCE - 1):
        pool = fitted._pool
        now = 0 if pool is None else pool.summary().replayed
        if planned.following.script is not script:
            script, replayed = planned.following.script, now
        if planned.is_steady() and now - replayed >= FOLLOWED:
            break
        loose = loose + 1 if planned.modes and planned.modes[-1] == "loose" else 0
        if loose >= UNWATCHED:
            break
        step()


def stopwatch(of: Any, name: str) -> list[float]:
    """The seconds of each call of a method from now on."""
    work = getattr(of, name)
    seconds: list[float] = []

    def timed_work(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*args)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(of, name, timed_work)
    return seconds


def planned_of(planned: Any) -> dict[str, Any]:
    """How steps went, and what the plan expects of them."""
    found: dict[str, Any] = {
        "modes": [str(mode) for mode in planned.modes],
        "steps": {str(mode): count for mode, count in planned.steps.items()},
    }
    script = planned.main_script()
    if script is not None:
        plan = script.plan
        found["plan"] = {
            "peak_bytes": plan.peak_bytes,
            "seconds": plan.seconds,
            "plain_peak_bytes": plan.plain_peak_bytes,
            "plain_seconds": plan.plain_seconds,
            "swaps": len(plan.swaps),
            "swapped_bytes": script.swapped_bytes,
            "reruns": sum(isinstance(one, Rerun) for one in plan.remakes),
        }
    return found


def same(name: str) -> None:
    """Losses of plain training, of plain training again, and under a tight budget."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as deterministic algorithms want it
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # their backward differs from run to run
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    batch, share = SAME[name]

    def losses(subject: Subject) -> list[float]:
        return [loss.item() for loss in [subject.step(batch) for _ in range(STEPS)]]

    TURN.have(alone=False)
    with peaks() as look:
        plain = losses(build(name))
        most = look()["peak_bytes"]
    again = losses(build(name))
    budget = int(share * most)
    subject = build(name)
    around = lowtide.fit(subject.model, subject.optimizer, budget=f"{budget}B", policy="tide")
    with peaks() as look, around as fitted:
        budgeted: Any = fitted._budgeted
        TURN.lend_during(budgeted._dynamic.planned, "_plan", torch.cuda.synchronize)
        ours = losses(subject)
        say(
            {
                "batch": batch,
                "plain_repeats": plain == again,
                "identical": plain == ours,
                "plain_peak_bytes": most,
                "budget_bytes": budget,
                "losses": {"plain": plain, "tide": ours},
                **look(),
                **planned_of(budgeted._dynamic.planned),
                "summary": fitted.summary(),
            }
        )


TASKS: dict[str, Callable[..., None]] = {
    "warm": warm,
    "once": once,
    "compile": compiled,
    "tide": tide,
    "same": same,
}

if __name__ == "__main__":
    main()
