"""The driver that needs no plan: largest batch under a hard cap, step time at less memory.

python benchmarks/delta.py --out benchmarks/results/delta.json [--parts batch,points] [--only GPT-2]

batch     the largest batch of ResNet-50 and ResNet-101 at a hard cap of 16 GiB, and images/s
points    step time and peaks at 40 % and 70 % less than the plain peak, beside checkpointing
overhead  what it costs where memory is not tight: a budget above the plain peak
same      whether the losses, dropout and all, are the same bit for bit

A process for each probe of a batch, and one for each work and method of the rest; what it runs is
in delta_works.py. A file that is there is added to, so that a run may be parted with --parts,
--only and --methods. --dry-run walks through it all with made-up figures, without a GPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measurers import Measurer

HERE = Path(__file__).parent
CAP = 16 * 2**30  # bytes that a process may reserve in `batch`
BATCH_BUDGET = "15.5GiB"  # what lowtide is given of them
UNIT, FACTOR, PROBES = 16, 1.25, 6  # images, growth, and probes of a search

POLICIES = ("delta", "dtr", "delta-as-published")
METHODS = ("plain", *POLICIES, "checkpoint", "selective")
REDUCTIONS = ("0.4", "0.7")  # of the plain peak
GUESSES = {"ResNet-50": 192, "ResNet-101": 128}  # plain's largest batch
POINTS = ("ResNet-50 256 tf32", "GPT-2 medium 16x1024", "BERT-large 16x384")
OVERHEAD = ("GPT-2 medium 16x1024", "ResNet-50 256 tf32")
SAME = ("GPT-2 medium 4x1024", "ResNet-50 64")
WORKS = {"batch": tuple(GUESSES), "points": POINTS, "overhead": OVERHEAD, "same": SAME}
SECONDS = {"warm": 400, "batch": 90, "points": 180, "overhead": 180, "same": 180}  # at most, a task

Row = dict[str, Any]
Ask = Callable[..., list[Row]]  # a task -> its answers, at least one
Save = Callable[[], None]


class Broken(Exception):
    """A method fails for another reason than memory."""


def largest_fitting(
    fits: Callable[[int], bool],
    guess: int,
    known: Mapping[int, bool],
    *,
    unit: int = UNIT,
    factor: float = FACTOR,
    probes: int = PROBES,
) -> tuple[int, int | None]:
    """The largest batch that fits (0: none did) and the smallest above it that does not.

    From the guess up or down by `factor` until one fits and one does not, then halves, in multiples
    of `unit`. `known` has what was probed before; `fits` is asked at most `probes` times, never
    twice for a batch.
    """
    low = max((batch for batch, fit in known.items() if fit), default=0)
    high = min((batch for batch, fit in known.items() if not fit and batch > low), default=None)
    for _ in range(probes):
        if high is None:
            grown = guess if guess > low else low * factor
            at = max(low + unit, _multiple(grown, unit))
        elif high - low <= unit:
            break
        elif low == 0:
            at = min(high - unit, max(unit, _multiple(high / factor, unit)))
        else:
            at = min(high - unit, max(low + unit, _multiple((low + high) / 2, unit)))
        if fits(at):
            low = at
        else:
            high = at
    return low, high


def _multiple(number: float, unit: int) -> int:
    return round(number / unit) * unit


def most_seconds(kind: str, *_rest: Any) -> int:
    """What a task may take."""
    return SECONDS[kind]


class Workers:
    """Processes that have loaded their imports and wait for a task, which ends them.

    Quiet ones are loaded several at a time, before the first of them gets the GPU: nothing else
    runs on the machine while something is measured. Where memory is searched they load meanwhile.
    They run `script`, and end what takes longer than `limit` says of a task.
    """

    def __init__(
        self,
        part: str,
        count: int,
        *,
        quiet: bool,
        script: str = "delta_works.py",
        limit: Callable[..., int] = most_seconds,
        also: Mapping[str, str] | None = None,  # in their environment
    ) -> None:
        self._part = part
        self._count = count
        self._quiet = quiet
        self._script = script
        self._limit = limit
        self._also = dict(also or {})
        self._waiting: list[Measurer] = []

    def ask(self, *task: Any) -> list[Row]:
        """The rows that a task prints; a last one with an "error" if it fails."""
        return list(self.rows(*task))

    def rows(self, *task: Any) -> Iterator[Row]:
        """The same, each as soon as it is there."""
        yield from self._next().rows(json.dumps(task) + "\n", self._limit(*task))

    def close(self) -> None:
        """End those that still wait."""
        for process in self._waiting:
            process.end()
        self._waiting = []

    def _next(self) -> Measurer:
        if not self._waiting or not self._quiet:
            started = [self._start() for _ in range(self._count - len(self._waiting))]
            self._waiting += started
            for process in started if self._quiet else []:
                process.wait_until_ready()
            if self._quiet:
                self._count = 1  # whatever is asked beyond
        return self._waiting.pop(0)

    def _start(self) -> Measurer:
        settings = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
        return Measurer(
            [sys.executable, "-W", "ignore", str(HERE / self._script), self._part],
            {k: v for k, v in os.environ.items() if k not in settings} | self._also,
        )


class Imagined:
    """Answers as they might be: shows the plan of a run, and about how long it takes."""

    FITTING: Mapping[str, float] = {"plain": 0.92, "delta": 4.1, "dtr": 2.6}  # times the guess
    STEP: Mapping[str, float] = {"plain": 1.0, "dtr": 1.7, "delta-as-published": 1.6}

    def __init__(self) -> None:
        self.seconds = 0.0

    def ask(self, *task: Any) -> list[Row]:
        """Says what it is asked."""
        kind, *rest = task
        seconds, rows = getattr(self, f"_{kind}")(*rest)
        self.seconds += seconds
        print("  would ask", json.dumps(task), f"about {seconds:.0f} s")
        answers: list[Row] = rows
        return answers

    rows = ask

    def close(self) -> None:
        """There is nothing to end."""

    def _warm(self) -> tuple[float, list[Row]]:
        return 20, [{"seconds": 20.0}]

    def _batch(self, name: str, method: str, batch: int) -> tuple[float, list[Row]]:
        fits = batch <= self.FITTING.get(method, 2.4) * GUESSES[name]
        speed = (2200 if name == "ResNet-50" else 1300) / self.STEP.get(method, 1.4)
        row: Row = {"batch": batch, "fits": fits, "why": "out of memory (made up)"}
        if fits:
            row = {"batch": batch, "fits": True, "images_per_second": speed}
            row |= {"reserved_bytes": CAP - 2**20, "peak_bytes": CAP - 2**28}
        return 3 + 6 * batch / speed * (1 if fits else 0.3), [row]

    def _points(self, name: str, method: str, budgets: list[int]) -> tuple[float, list[Row]]:
        plain = {POINTS[0]: (0.116, 20.9), POINTS[1]: (0.219, 45.5), POINTS[2]: (0.09, 14.0)}
        seconds, gib = plain[name]
        seconds *= self.STEP.get(method, 1.3)
        rows: list[Row] = [{"budget_bytes": budget} for budget in budgets] or [{}]
        for row in rows:
            most = row.get("budget_bytes", int(gib * 2**30))
            row |= {"seconds": seconds, "peak_bytes": most, "reserved_bytes": most}
        return 4 + len(rows) * 12 * seconds, rows

    def _overhead(self, name: str) -> tuple[float, list[Row]]:
        known = {"seconds": 0.222, "plain_seconds": 0.219, "ratio": 1.014, "peak_bytes": 2**34}
        rows = [{"of": of, "budget_bytes": 2**35, **known} for of in ("peak", "reserved")]
        return 18 if name.startswith("GPT-2") else 11, rows

    def _same(self, name: str) -> tuple[float, list[Row]]:
        row: Row = {"steps": 6, "plain_repeats": True, "identical": True, "held": True}
        return 9 if name.startswith("GPT-2") else 6, [row]


@contextmanager
def answering(part: str, tasks: int, *, dry: bool) -> Iterator[Workers | Imagined]:
    """Who answers the tasks of a part; about how many they are."""
    if dry:
        answers: Workers | Imagined = Imagined()
    elif part == "batch":
        answers = Workers(part, 3, quiet=False)
    else:
        answers = Workers(part, min(9, tasks), quiet=True)
    began = time.perf_counter()
    try:
        yield answers
    finally:
        answers.close()
        if isinstance(answers, Imagined):
            print(f"{part}: would take about {answers.seconds:.0f} s", flush=True)
        else:
            print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default=",".join(WORKS))
    parser.add_argument("--only", default="", help="works whose names begin like one of these")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--probes", type=int, default=PROBES, help="of a search, at most")
    parser.add_argument("--dry-run", action="store_true", help="show the plan; needs no GPU")
    options = parser.parse_args()
    methods = options.methods.split(",")
    parts = options.parts.split(",")
    for given, known in ((methods, METHODS), (parts, tuple(WORKS))):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")

    results: dict[str, Any] = {}
    if options.out and options.out.exists():
        results = json.loads(options.out.read_text())
    if not options.dry_run:
        from machine import machine_facts

        results["machine"] = machine_facts()

    def save() -> None:
        if options.out and not options.dry_run:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")

    began = time.perf_counter()
    if set(methods) & set(POLICIES):
        with answering("warm", 1, dry=options.dry_run) as answers:
            print("warm", answers.ask("warm")[-1], flush=True)
    for part in parts:
        names = [name for name in WORKS[part] if name.startswith(tuple(options.only.split(",")))]
        if not names or (part in ("overhead", "same") and "delta" not in methods):
            continue
        works = results.setdefault(part, {})
        tasks = len(names) * (len(methods) if part == "points" else 1)
        with answering(part, tasks, dry=options.dry_run) as answers:
            for name in names:
                if part == "batch":
                    work = works.setdefault(name, {})
                    batches(name, methods, answers.ask, work, save, options.probes)
                elif part == "points":
                    points(name, methods, answers.ask, works.setdefault(name, {}), save)
                elif part == "overhead":
                    overhead(name, answers.ask, works)
                else:
                    same(name, answers.ask, works)
                save()
    print(f"{time.perf_counter() - began:.0f} s")


def batches(
    name: str, methods: list[str], ask: Ask, work: dict[str, Any], save: Save, probes: int
) -> None:
    """The largest batch of each method, and its images/s there and at plain's, twice, thrice."""
    chosen = [method for method in ("plain", *POLICIES) if method in methods]
    if chosen and "plain" not in chosen and not work.get("plain", {}).get("largest_batch"):
        chosen.insert(0, "plain")
    for method in chosen:
        plain = 0 if method == "plain" else work["plain"].get("largest_batch", 0)
        entry = work[method] = {"probes": {}}
        # Plain's is what the others are compared with, and its probes are short.
        search(name, method, plain, ask, entry, save, probes if plain else probes + 3)
        show_batch(name, method, entry)
        save()


def search(
    name: str, method: str, plain: int, ask: Ask, entry: Row, save: Save, probes: int
) -> None:
    """Fill the entry of one method; `plain` is plain's largest batch, 0 if it is not known."""
    rows: dict[int, Row] = {}

    def fits(batch: int) -> bool:
        row = rows[batch] = ask("batch", name, method, batch)[0]
        entry["probes"][str(batch)] = row
        show_probe(name, method, batch, row)
        save()
        if "error" in row and not any(row.get("fits") for row in rows.values()):
            raise Broken(row["error"])
        return bool(row.get("fits"))

    guess = GUESSES[name] if method == "plain" else 3 * (plain or GUESSES[name])
    try:
        for times in (1, 2, 3) if plain else ():
            if not fits(times * plain):
                break
        known = {batch: bool(row.get("fits")) for batch, row in rows.items()}
        largest, failing = largest_fitting(fits, guess, known, probes=probes)
    except Broken as error:
        entry["error"] = str(error)
        return
    if not largest:
        entry["error"] = "no batch fits"
        return
    best = rows[largest]
    entry |= {
        "largest_batch": largest,
        "smallest_failing": failing,
        "to_the_unit": failing is not None and failing - largest <= UNIT,
        "images_per_second": best["images_per_second"],
        "reserved_bytes": best["reserved_bytes"],
        "cap_held": all(row["reserved_bytes"] <= CAP for row in rows.values() if row.get("fits")),
    }
    if plain:
        entry["times_plain"] = largest / plain
        entry["multiples"] = {
            str(times): {
                key: rows[times * plain][key]
                for key in ("batch", "images_per_second", "reserved_bytes")
            }
            for times in (1, 2, 3)
            if rows.get(times * plain, {}).get("fits")
        }


def points(name: str, methods: list[str], ask: Ask, work: dict[str, Any], save: Save) -> None:
    """Each method's step time over plain's, and what it held at most."""
    chosen = [method for method in METHODS if method in methods]
    if "plain" not in chosen and "seconds" not in work.get("plain", {}):
        chosen.insert(0, "plain")
    for method in chosen:
        plain = work.get("plain", {})
        if method != "plain" and "seconds" not in plain:
            work[method] = {"error": "plain failed"}
            show_point(name, method, "", work[method])
        elif method not in POLICIES:
            row = work[method] = ask("points", name, method, [])[0]
            beside_plain(row, row if method == "plain" else plain)
            show_point(name, method, "", row)
        else:
            entry: Row = {}
            work[method] = entry
            left = list(REDUCTIONS)
            while left:  # again in a new process, should one of them fail
                budgets = [int((1 - float(less)) * plain["peak_bytes"]) for less in left]
                found = ask("points", name, method, budgets)
                for less, row in zip(left, found, strict=False):
                    beside_plain(row, plain)
                    entry[less] = row
                    show_point(name, method, f"-{float(less):.0%}", row)
                left = left[len(found) :]
            for less in REDUCTIONS:
                if "error" in entry[less] and method == "delta":
                    entry[less]["reached"] = nearest(name, method, float(less), plain, ask)
        save()


def nearest(name: str, method: str, less: float, plain: Row, ask: Ask) -> Row | None:
    """What it can do where it cannot do that."""
    for step in (1, 2, 3):
        nearer = less - 0.05 * step
        row = ask("points", name, method, [int((1 - nearer) * plain["peak_bytes"])])[0]
        beside_plain(row, plain)
        show_point(name, method, f"-{nearer:.0%}", row)
        if "error" not in row:
            return row
    return None


def beside_plain(row: Row, plain: Row) -> None:
    """Add how a row compares."""
    if "error" in row:
        return
    row["ratio"] = row["seconds"] / plain["seconds"]
    row["peak_ratio"] = row["peak_bytes"] / plain["peak_bytes"]
    if row.get("budget_bytes"):
        row["held"] = max(row["peak_bytes"], row["reserved_bytes"]) <= row["budget_bytes"]


def overhead(name: str, ask: Ask, works: dict[str, Any]) -> None:
    """Step time with a budget above the plain peak, over plain's before and after."""
    works[name] = ask("overhead", name)
    for row in works[name]:
        if "error" in row:
            print(f"{name:22} overhead failed: {row['error'][:160]}", flush=True)
            continue
        print(
            f"{name:22} overhead x{row['ratio']:.4f} {row['seconds'] * 1e3:.1f} ms"
            f" with {row['budget_bytes'] / 2**30:.1f} GiB, 1.2 x {row['of']}",
            flush=True,
        )


def same(name: str, ask: Ask, works: dict[str, Any]) -> None:
    """Whether the losses are plain's."""
    row = works[name] = ask("same", name)[0]
    told = {key: value for key, value in row.items() if key not in ("summary", "losses")}
    print(f"{name:22} same {told}", flush=True)


def show_probe(name: str, method: str, batch: int, row: Row) -> None:
    """A line for one probe."""
    line = f"  {name:12} {method:20} batch {batch:5}"
    if row.get("fits"):
        line += f" {row['images_per_second']:7.0f} images/s"
        line += f" reserved {row['reserved_bytes'] / 2**30:.2f} GiB"
    else:
        why = row["error"] if "error" in row else row["why"]
        line += f" does not fit: {why[:110]}"
    print(line, flush=True)


def show_batch(name: str, method: str, entry: Row) -> None:
    """A line for what a search found."""
    line = f"{name:14} {method:20}"
    if "error" in entry:
        line += f" failed: {entry['error'][:160]}"
    else:
        line += f" largest batch {entry['largest_batch']} (not {entry['smallest_failing']})"
        line += f" {entry['images_per_second']:.0f} images/s"
        if "times_plain" in entry:
            line += f" x{entry['times_plain']:.2f} of plain's;"
            for times, row in entry["multiples"].items():
                line += f" at x{times} {row['images_per_second']:.0f}"
    print(line, flush=True)


def show_point(name: str, method: str, less: str, row: Row) -> None:
    """A line for one point."""
    line = f"{name:22} {method:20} {less:5}"
    if "error" in row:
        line += f" failed: {row['error'][:160]}"
    else:
        line += (
            f" {row['seconds'] * 1e3:7.1f} ms x{row['ratio']:.3f}"
            f" {row['peak_bytes'] / 2**30:6.2f} GiB ({row['peak_ratio'] - 1:+.1%},"
            f" reserved {row['reserved_bytes'] / 2**30:.2f})"
        )
        if "held" in row:
            line += f" {'held' if row['held'] else 'NOT HELD'}"
            line += f" {row['budget_bytes'] / 2**30:.2f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
