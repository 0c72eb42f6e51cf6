"""Step time against memory: lowtide's policy "tide" at many budgets, beside what else there is.

python benchmarks/pareto.py --out benchmarks/results/pareto.json [--only GPT-2] [--methods tide]

points  each work plain, with tide at shares of the plain peak and at the budgets that are aimed
        at, with checkpoints, with selective ones, with TRL's OffloadActivations, and compiled
same    whether tide's losses, dropout and all, are plain's bit for bit

A process for each work and method; what it runs is in pareto_works.py. Several works are measured
side by side, and use the GPU in turns (turns.py): while one waits for its plan, another computes.
Plain steps are timed in every run, and what is measured in it is compared with them. A file that is
there is added to, so that a run may be parted with --parts, --only, --methods and --budgets.
--dry-run walks through it all with made-up figures and says about how long each task takes; --plot
draws what the file has. Neither needs a GPU.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import delta
from delta import Row, Workers
from turns import table, write_results

GIB = 2**30
Ask = Callable[..., Iterable[Row]]  # a task -> its answers, at least one
Put = Callable[[dict[str, Any]], None]
FULL, ROOM = "100%", 1.05  # the budget that is not tight, over what plain training reserves
SHARES = (FULL, "80%", "66%", "50%", "40%", "33%", "25%")  # of the plain peak
METHODS = ("plain", "compile", "tide", "checkpoint", "selective", "offload_activations")
COMPILED = ("1.0", "0.5")  # torch._functorch.config.activation_memory_budget
PARTS = ("points", "same")

# The step time over plain's that is aimed at, by the budget.
AIMS: dict[str, dict[str, float]] = {
    "GPT-2 medium 16x1024": {FULL: 1.01, "30GiB": 1.03, "14.9GiB": 1.10},
    "Llama-1B-like 4x2048": {"18GiB": 1.06, "12GiB": 1.30},
    "BERT-large 16x384": {},
    "ViT-B/16 256 tf32": {},
    "ResNet-50 256 tf32": {FULL: 1.01, "13.8GiB": 1.04, "8.9GiB": 1.12},
    "ResNet-50 256 bf16": {FULL: 1.03},
}
WORKS = tuple(AIMS)
BUDGETS = tuple(dict.fromkeys([*SHARES, *(label for aims in AIMS.values() for label in aims)]))
SAME: dict[str, tuple[int, float]] = {  # the batch, and the budget over the plain peak
    "GPT-2 medium 16x1024": (4, 0.6),
    "Llama-1B-like 4x2048": (1, 0.7),
    "BERT-large 16x384": (8, 0.6),
    "ViT-B/16 256 tf32": (32, 0.6),
    "ResNet-50 256 tf32": (64, 0.6),
    "ResNet-50 256 bf16": (64, 0.6),
}
WAVES = (  # works that are on the GPU side by side, at most 110 GiB of it
    ("GPT-2 medium 16x1024", "Llama-1B-like 4x2048", "BERT-large 16x384"),
    ("ViT-B/16 256 tf32", "ResNet-50 256 tf32", "ResNet-50 256 bf16"),
)


def budgets_of(name: str, plain: Row, wanted: list[str]) -> list[tuple[str, int]]:
    """The budgets of a work and their bytes, the largest first: the tightest may fail."""
    rows = {}
    for label in dict.fromkeys([*SHARES, *AIMS[name]]):
        if label == FULL:
            rows[label] = int(ROOM * plain["reserved_bytes"])
        elif label.endswith("%"):
            rows[label] = int(float(label[:-1]) / 100 * plain["peak_bytes"])
        else:
            rows[label] = int(float(label.removesuffix("GiB")) * GIB)
    chosen = [(label, size) for label, size in rows.items() if label in wanted]
    return sorted(chosen, key=lambda row: -row[1])


def most_seconds(kind: str, *rest: Any) -> int:
    """What a task may take, with others around."""
    if kind == "tide":
        return 180 + 100 * len(rest[1])
    return {"warm": 400, "once": 400, "compile": 500, "same": 400}[kind]


@dataclass(frozen=True)
class Known:
    """About what is known of a work: enough to say how long its tasks take."""

    seconds: float  # of a plain step
    peak: float  # GiB
    reserved: float
    watching: float  # seconds of the first steps under a budget, which are seen op by op
    offload: float  # GiB that are pinned first
    compiling: float  # seconds, for each of the two


KNOWN: dict[str, Known] = {
    "GPT-2 medium 16x1024": Known(0.237, 47.8, 50.0, 8.0, 34, 70),
    "Llama-1B-like 4x2048": Known(0.172, 33.3, 34.3, 5.0, 14, 50),
    "BERT-large 16x384": Known(0.066, 13.3, 14.7, 6.0, 9, 60),
    "ViT-B/16 256 tf32": Known(0.250, 32.0, 33.5, 4.0, 29, 40),
    "ResNet-50 256 tf32": Known(0.118, 20.9, 25.2, 3.0, 17, 40),
    "ResNet-50 256 bf16": Known(0.055, 11.0, 12.4, 3.0, 9, 40),
}


class Imagined(delta.Imagined):
    """Answers as they might be: shows the plan of a run, and about how long it takes."""

    START = 6.0  # seconds of a process, of which several load at once
    SEARCH = 2.5  # seconds of planning
    ELSE: Mapping[str, tuple[float, float]] = {  # step time, memory over plain's
        "plain": (1.0, 1.0),
        "checkpoint": (1.26, 0.4),
        "selective": (1.2, 0.6),
        "offload_activations": (6.0, 0.4),
    }

    def _once(self, name: str, method: str) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        slower, less = self.ELSE[method]
        row = self._row(known.seconds * slower, less * known.peak, less * known.reserved)
        pinning = known.offload / 1.5 + 6 if method == "offload_activations" else 0
        return self.START + pinning + 10 * row["seconds"], [row]

    def _compile(self, name: str) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        rows = [
            self._row(faster * known.seconds, less * known.peak, less * known.reserved)
            for faster, less in ((0.75, 1.0), (0.9, 0.55))
        ]
        return self.START + 2 * known.compiling + 20 * known.seconds, rows

    def _tide(self, name: str, budgets: list[tuple[str, int]]) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        rows, seconds = [], self.START
        for label, budget in budgets:
            tight = max(0.0, 1 - budget / GIB / known.peak)
            held = min(budget / GIB, known.reserved)
            row = self._row(known.seconds * (1 + 0.7 * tight**2), 0.98 * held, held)
            plan = {"peak_bytes": int(0.97 * held * GIB), "seconds": 1.02 * row["seconds"]}
            plan |= {"swaps": int(40 * tight), "reruns": int(900 * tight)}
            row |= {"budget_bytes": budget, "plan": plan, "search_seconds": [self.SEARCH]}
            seconds += 2 + known.watching + self.SEARCH + 10 * row["seconds"]
            if label == FULL:
                seconds += 20 * known.seconds
                row["beside_seconds"] = known.seconds
            rows.append(row)
        return seconds, rows

    def _same(self, name: str) -> tuple[float, list[Row]]:
        known = KNOWN[name]
        row = self._row(known.seconds, 0.6 * known.peak, 0.6 * known.peak)
        row |= {"plain_repeats": True, "identical": True, "batch": SAME[name][0]}
        row |= {"budget_bytes": int(0.6 * known.peak * GIB), "steps": {"planned": 3}}
        return self.START + 6 + known.watching + self.SEARCH, [row]

    def _row(self, seconds: float, peak: float, reserved: float) -> Row:
        return {
            "seconds": seconds,
            "peak_bytes": int(peak * GIB),
            "reserved_bytes": int(reserved * GIB),
        }


@contextmanager
def answering(
    part: str, tasks: int, also: Mapping[str, str], *, dry: bool
) -> Iterator[Workers | Imagined]:
    """Who answers the tasks of a part, for one work; about how many they are."""
    answers: Workers | Imagined
    if dry:
        answers = Imagined()
    else:
        answers = Workers(
            part, tasks, quiet=True, script="pareto_works.py", limit=most_seconds, also=also
        )
    try:
        yield answers
    finally:
        answers.close()


class Results:
    """What is in the file: works are added to it by several threads."""

    def __init__(self, path: Path | None, *, dry: bool) -> None:
        self.found: dict[str, Any] = {}
        self._path = path
        self._dry = dry
        self._lock = threading.Lock()
        if path and path.exists():
            self.found = json.loads(path.read_text())

    def put(self, part: str, name: str, entry: Any) -> None:
        """As it is by now: whose it is may go on with it."""
        copy = json.loads(json.dumps(entry))
        with self._lock:
            self.found.setdefault(part, {})[name] = copy
            if self._path and not self._dry:
                write_results(self._path, self.found)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--only", default="", help="works whose names begin like one of these")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--budgets", default=",".join(BUDGETS), help="of tide")
    parser.add_argument("--dry-run", action="store_true", help="show the plan; needs no GPU")
    parser.add_argument("--plot", action="store_true", help="only draw what is in --out")
    options = parser.parse_args()
    methods, budgets = options.methods.split(","), options.budgets.split(",")
    parts = options.parts.split(",")
    for given, known in ((methods, METHODS), (budgets, BUDGETS), (parts, PARTS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")
    names = [name for name in WORKS if name.startswith(tuple(options.only.split(",")))]
    if not names:
        parser.error(f"no work begins like that: there are {', '.join(WORKS)}")
    if options.plot and not (options.out and options.out.exists()):
        parser.error("--plot draws what is in --out: give a file that is there")

    results = Results(options.out, dry=options.dry_run)
    if options.plot:
        plot(results.found, options.out.with_suffix(".png"))
        return
    if not options.dry_run:
        from machine import machine_facts

        results.found["machine"] = machine_facts()
    began = time.perf_counter()
    with table() as also:
        if "same" in parts or "tide" in methods:
            with answering("warm", 1, also, dry=options.dry_run) as answers:
                print("warm", answers.ask("warm")[-1], flush=True)
        imagined = 0.0
        for part in parts:
            since = time.perf_counter()
            tasks = len({"plain", *methods}) if part == "points" else 1
            measure = partial(
                measure_work, part, tasks, methods, budgets, results, also, dry=options.dry_run
            )
            for wave in WAVES:
                some = [name for name in wave if name in names]
                with ThreadPoolExecutor(1 if options.dry_run else len(wave)) as pool:
                    imagined += sum(pool.map(measure, some))
            print(f"{part}: {time.perf_counter() - since:.0f} s", flush=True)
    if options.dry_run:
        print(f"all of it would take about {imagined:.0f} s, one after the other")
    else:
        print(f"{time.perf_counter() - began:.0f} s")


def measure_work(
    part: str,
    tasks: int,
    methods: list[str],
    budgets: list[str],
    results: Results,
    also: Mapping[str, str],
    name: str,
    *,
    dry: bool,
) -> float:
    """One work's share of a part; in a dry run, about how many seconds it takes."""
    with answering(part, tasks, also, dry=dry) as answers:
        try:
            if part == "points":
                work = dict(results.found.get("works", {}).get(name, {}))
                put = partial(results.put, "works", name)
                points(name, methods, budgets, answers.rows, work, put)
            else:
                results.put("same", name, same(name, answers.rows))
        except Exception as error:  # noqa: BLE001 - the other works go on
            print(f"{name:20} {part} broke off: {error!r}", flush=True)
    return answers.seconds if isinstance(answers, Imagined) else 0.0


def points(
    name: str,
    methods: list[str],
    budgets: list[str],
    ask: Ask,
    work: dict[str, Any],
    put: Put,
) -> None:
    """Each method's step time over plain's, and what it held at most."""
    plain = work["plain"] = last(ask("once", name, "plain"))
    beside_plain(plain, plain)
    show(name, "plain", "", plain)
    put(work)
    if "error" in plain:
        return
    for method in METHODS[1:]:
        if method not in methods:
            continue
        if method == "tide":
            under_budgets(name, budgets_of(name, plain, budgets), plain, ask, work, put)
        elif method == "compile":
            found = list(ask("compile", name))
            entry = work[method] = dict(zip(COMPILED, found, strict=False))
            for share, row in entry.items():
                beside_plain(row, plain)
                if {"seconds"} <= row.keys() & entry[COMPILED[0]].keys():
                    row["compiled_ratio"] = row["seconds"] / entry[COMPILED[0]]["seconds"]
                show(name, method, share, row)
        else:
            row = work[method] = last(ask("once", name, method))
            beside_plain(row, plain)
            show(name, method, "", row)
        put(work)


def under_budgets(
    name: str,
    budgets: list[tuple[str, int]],
    plain: Row,
    ask: Ask,
    work: dict[str, Any],
    put: Put,
) -> None:
    """Tide at each budget; the rest in a new process, should one of them fail."""
    entry = work.setdefault("tide", {})
    left = budgets
    while left:
        count = 0
        for row in ask("tide", name, left):  # as they come: whatever happens, these are kept
            if count == len(left):
                continue
            label, budget = left[count]
            count += 1
            row["budget_bytes"] = budget  # a task that broke off did not say
            beside_plain(row, plain)
            if label in AIMS[name]:
                row["aim"] = AIMS[name][label]
            entry[label] = row
            show(name, "tide", label, row)
            put(work)
        left = left[count:]


def last(rows: Iterable[Row]) -> Row:
    """Of at least one."""
    return [*rows][-1]


def beside_plain(row: Row, plain: Row) -> None:
    """Add how a row compares."""
    if "error" in row:
        return
    row["plain_seconds"] = row.get("beside_seconds", plain["seconds"])
    row["ratio"] = row["seconds"] / row["plain_seconds"]
    row["memory_ratio"] = row["reserved_bytes"] / plain["peak_bytes"]
    if "budget_bytes" in row:
        row["held"] = is_held(row)


def is_held(row: Row) -> bool:
    """Whether nothing more than the budget was ever taken from the device."""
    return bool(max(row["peak_bytes"], row["reserved_bytes"]) <= row["budget_bytes"])


def same(name: str, ask: Ask) -> Row:
    """Whether the losses are plain's."""
    row = last(ask("same", name))
    if "error" in row:
        print(f"{name:20} same failed: {row['error'][:160]}", flush=True)
        return row
    row["held"] = is_held(row)
    said = "identical" if row["identical"] else "DIFFERENT"
    if not row["plain_repeats"]:
        said += ", but plain differs from itself, too"
    print(
        f"{name:20} same {said}, {row['steps']}, batch {row['batch']},"
        f" {'held' if row['held'] else 'NOT HELD'} {row['budget_bytes'] / GIB:.2f} GiB",
        flush=True,
    )
    return row


def show(name: str, method: str, label: str, row: Row) -> None:
    """A line for one result."""
    line = f"{name:20} {method:19} {label:7}"
    if "error" in row:
        print(f"{line} failed: {row['error'][:160]}", flush=True)
        return
    line += (
        f" {row['seconds'] * 1e3:7.1f} ms x{row['ratio']:.3f}"
        f" {row['reserved_bytes'] / GIB:6.2f} GiB ({row['memory_ratio']:.0%})"
    )
    if "compiled_ratio" in row:
        line += f" x{row['compiled_ratio']:.3f} of compiled"
    if "held" in row:
        line += f" {'held' if row['held'] else 'NOT HELD'} {row['budget_bytes'] / GIB:.2f}"
    if "plan" in row:
        plan = row["plan"]
        line += (
            f" planned {plan['seconds'] * 1e3:.1f} ms {plan['peak_bytes'] / GIB:.2f} GiB"
            f" {plan['swaps']} swaps {plan['reruns']} reruns"
            f" in {sum(row['search_seconds']):.1f} s"
        )
    elif "budget_bytes" in row:
        line += " no plan"
    if "aim" in row:
        line += f" aim x{row['aim']:.2f} {'met' if is_met(row) else 'MISSED'}"
    print(line, flush=True)


def is_met(row: Row) -> bool:
    """Whether it is as fast as is aimed at, within the budget."""
    return bool(row.get("held") and row["ratio"] <= row["aim"])


HIGHEST = 2.0  # of the plot: what takes longer is marked at its upper edge
BLUE, GREEN, GREY = "#33658a", "#2a9d4a", "#888888"
STYLES = {  # of what else there is: colour, marker, name
    "checkpoint": ("#d1495b", "s", "checkpoint per block"),
    "selective": ("#edae49", "D", "selective checkpoint"),
    "offload_activations": ("#8a6fa8", "^", "TRL OffloadActivations"),
    "compile 1.0": ("#9aada4", "v", "torch.compile"),
    "compile 0.5": ("#4f772d", "v", "torch.compile, memory budget 0.5"),
}


def plot(results: dict[str, Any], path: Path) -> None:
    """Step time over plain's against memory, a panel for each work."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    works = {
        name: results["works"][name]
        for name in WORKS
        if "seconds" in results.get("works", {}).get(name, {}).get("plain", {})
    }
    if not works:
        raise SystemExit("nothing is measured yet: there is nothing to draw")
    across = min(3, len(works))
    down = -(-len(works) // across)
    figure, grid = pyplot.subplots(
        down, across, figsize=(4.1 * across, 3.4 * down + 0.5), layout="constrained", squeeze=False
    )
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)
    for panel in grid.flat[len(works) :]:
        panel.set_visible(False)
    named: dict[str, Any] = {}
    for panel, (name, work) in zip(grid.flat, works.items(), strict=False):
        draw(panel, name, work)
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    for panel in grid[:, 0]:
        panel.set_ylabel("step time over plain")
    for panel in grid[-1]:
        panel.set_xlabel("memory reserved at most, GiB")
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=across + 1, frameon=False,
        fontsize=9,
    )  # fmt: skip
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw(panel: Any, name: str, work: dict[str, Any]) -> None:
    """One work."""
    plain = work["plain"]
    panel.set_title(name, loc="left", fontsize=10, pad=11)
    panel.set_title(
        f"plain {plain['seconds'] * 1e3:.0f} ms", loc="right", fontsize=9, color=GREY, pad=11
    )
    panel.axhline(1, color=GREY, linewidth=0.8, zorder=1)
    rows = sorted(work.get("tide", {}).values(), key=lambda row: row["budget_bytes"])
    done = [row for row in rows if "ratio" in row]
    panel.plot(
        [row["reserved_bytes"] / GIB for row in done], [row["ratio"] for row in done], "o-",
        color=BLUE, linewidth=1.6, markersize=5, zorder=5, label="lowtide, tide",
    )  # fmt: skip
    for row in done:
        if not row["held"]:
            mark(panel, row, BLUE, "o", "tide, over its budget", filled=False)
        elif row["ratio"] > HIGHEST:
            mark(panel, row, BLUE, "o", "")
    for row in rows:
        if "ratio" not in row:
            failed = {"color": BLUE, "marker": "x", "linestyle": "", "clip_on": False}
            panel.plot(row["budget_bytes"] / GIB, HIGHEST, label="tide failed", **failed)
    mark(panel, plain, "k", "o", "plain")
    others = {**work, **{f"compile {share}": row for share, row in work.get("compile", {}).items()}}
    for key, (colour, marker, label) in STYLES.items():
        if "ratio" in others.get(key, {}):
            mark(panel, others[key], colour, marker, label)
    for label, aim in AIMS[name].items():
        memory = ROOM * plain["reserved_bytes"] / GIB
        if label.endswith("GiB"):
            memory = float(label.removesuffix("GiB"))
        panel.plot(
            memory, aim, marker=[(-1, 0), (0, 0), (0, -1), (0, 0)], fillstyle="none", linestyle="",
            color=GREEN, markersize=18, markeredgewidth=1.6, zorder=6, clip_on=False,
            label="aim: left of it and below",
        )  # fmt: skip
    shown = [row for row in others.values() if "ratio" in row] + done
    panel.set_ylim(min(0.95, *(row["ratio"] for row in shown)) - 0.05, HIGHEST)
    panel.set_xlim(0, 1.08 * ROOM * plain["reserved_bytes"] / GIB)
    panel.locator_params(axis="x", integer=True)
    panel.grid(visible=True, alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)


def mark(
    panel: Any, row: Row, colour: str, marker: str, label: str, *, filled: bool = True
) -> None:
    """A point; at the upper edge with its figure, if it is beyond."""
    at = row["reserved_bytes"] / GIB
    panel.plot(
        at, min(row["ratio"], HIGHEST), marker=marker, color=colour, linestyle="",
        label=label or None, markerfacecolor=colour if filled else "white", markersize=6,
        zorder=6 if not filled else 4, clip_on=False,
    )  # fmt: skip
    if row["ratio"] > HIGHEST:
        panel.annotate(
            f"×{row['ratio']:.1f}", (at, HIGHEST), textcoords="offset points",
            xytext=(-6 if colour == BLUE else 6, -2), ha="right" if colour == BLUE else "left",
            fontsize=8, color=colour, va="top",
        )  # fmt: skip


if __name__ == "__main__":
    main()
