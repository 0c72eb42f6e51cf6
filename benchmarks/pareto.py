"""Step time against memory: lowtide's policy "tide" at many budgets, beside what else there is.

python benchmarks/pareto.py --out benchmarks/results/pareto.json [--only GPT-2] [--methods tide]

compiled  each work as torch.compile has it: all of them first, since compiling takes a minute of
          many cores, beside which nothing else can be measured
points    each work plain, with tide at shares of the plain peak and at the budgets that are aimed
          at, with checkpoints, with selective ones, and with TRL's OffloadActivations
same      whether tide's losses, dropout and all, are plain's bit for bit

A process for each work and method; what it runs is in pareto_works.py. As many works as there is
memory for are measured side by side, and use the GPU in turns (turns.py): while one waits for its
plan, another computes.
Plain steps are timed in every run, and what is measured in it is compared with them. A file that is
there is added to, so that a run may be parted with --parts, --only, --methods and --budgets, or cut
off anywhere and gone on with by --resume, which leaves out what the file has.
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
from functools import partial
from pathlib import Path
from typing import Any

from delta import Row, Workers
from pareto_aims import (
    AIMS,
    BUDGETS,
    COMPILED,
    FULL,
    GIB,
    KNOWN,
    MEMORY,
    METHODS,
    PARTS,
    ROOM,
    SHARES,
    TRACES,
    WORKS,
)
from pareto_imagined import Imagined
from pareto_plot import plot
from turns import table, write_results

Ask = Callable[..., Iterable[Row]]  # a task -> its answers, at least one
Put = Callable[[dict[str, Any]], None]


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


class Memory:
    """That of the GPU, for those who are measured side by side."""

    def __init__(self, free: float) -> None:
        self._free = free
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, amount: float) -> Iterator[None]:
        """So many GiB, as soon as others have left them."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._changed:
                self._free += amount
                self._changed.notify_all()


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
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--traces", default="", help="write each traced step into this folder")
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

    results, commit = Results(options.out, dry=options.dry_run), "imagined"
    if options.plot:
        plot(results.found, options.out.with_suffix(".png"))
        return
    if not options.dry_run:
        from machine import machine_facts

        facts = results.found["machine"] = machine_facts()
        commit = facts.get("commit", commit)
    began = time.perf_counter()
    with table() as also:
        also[TRACES] = options.traces
        if "same" in parts or "tide" in methods:
            with answering("warm", 1, also, dry=options.dry_run) as answers:
                print("warm", answers.ask("warm")[-1], flush=True)
        imagined = 0.0
        for part in parts:
            since = time.perf_counter()
            if part == "compiled" and "compile" not in methods:
                continue
            left = names
            if options.resume:
                left = [one for one in names if is_left(part, one, methods, budgets, results.found)]
            memory = Memory(MEMORY)
            measure = partial(
                measure_work,
                *(part, methods, budgets, results, also, memory, options.resume, options.dry_run),
                commit,
            )
            with ThreadPoolExecutor(1 if options.dry_run else len(names)) as pool:
                imagined += sum(pool.map(measure, left))
            print(f"{part}: {time.perf_counter() - since:.0f} s", flush=True)
    if options.dry_run:
        print(f"all of it would take about {imagined:.0f} s, one after the other")
    else:
        print(f"{time.perf_counter() - began:.0f} s")


def is_there(entry: Mapping[str, Any]) -> bool:
    """Whether something was measured, and did not fail."""
    return bool(entry) and "error" not in entry


def left_of(
    name: str, methods: list[str], budgets: list[str], work: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """The methods and budgets of a work's points that are not measured yet."""
    done = work.get("tide", {})
    wanted = [label for label in budgets if label in (*SHARES, *AIMS[name])]
    some = [label for label in wanted if not is_there(done.get(label, {}))]
    rest = [method for method in methods if method not in ("plain", "tide", "compile")]
    rest = [method for method in rest if not is_there(work.get(method, {}))]
    return [*(["tide"] if some and "tide" in methods else []), *rest], some


def is_left(
    part: str, name: str, methods: list[str], budgets: list[str], found: Mapping[str, Any]
) -> bool:
    """Whether anything of a work is still to be measured."""
    work = found.get("works", {}).get(name, {})
    if part == "compiled":
        rows = work.get("compile", {})
        return not all(is_there(rows.get(share, {})) for share in COMPILED)
    if part == "points":
        return bool(left_of(name, methods, budgets, work)[0]) or "plain" not in work
    return not is_there(found.get("same", {}).get(name, {}))


def measure_work(
    part: str,
    methods: list[str],
    budgets: list[str],
    results: Results,
    also: Mapping[str, str],
    memory: Memory,
    resume: bool,
    dry: bool,
    commit: str,
    name: str,
) -> float:
    """One work's share of a part; in a dry run, about how many seconds it takes."""
    work = dict(results.found.get("works", {}).get(name, {}))
    if resume and part == "points":
        fresh = ["compile"] if "ratio" not in work.get("compile", {}).get(COMPILED[0], {}) else []
        methods, budgets = left_of(name, methods, budgets, work)
        methods = [*fresh, *methods]
    tasks = len({"plain", *methods} - {"compile"}) if part == "points" else 1
    room = memory.taken(ROOM * KNOWN[name].reserved)
    with room, answering(part, tasks, also, dry=dry) as answers:

        def ask(*task: Any) -> Iterator[Row]:
            began = time.perf_counter()
            for row in answers.rows(*task):  # a file may have rows of several commits
                now = time.perf_counter()
                yield row | {"commit": commit, "took_seconds": round(now - began, 1)}
                began = now

        try:
            put = partial(results.put, "works", name)
            if part == "compiled":
                compiled(name, ask, work, put)
            elif part == "points":
                points(name, methods, budgets, ask, work, put)
            else:
                results.put("same", name, same(name, ask))
        except Exception as error:  # noqa: BLE001 - the other works go on
            print(f"{name:20} {part} broke off: {error!r}", flush=True)
    return answers.seconds if isinstance(answers, Imagined) else 0.0


def compiled(name: str, ask: Ask, work: dict[str, Any], put: Put) -> None:
    """By torch.compile; compared as soon as there are plain steps of the same run."""
    found = list(ask("compile", name))
    work["compile"] = dict(zip(COMPILED, found, strict=False))
    print(f"{name:20} compiled {', '.join(work['compile'])}", flush=True)
    put(work)


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
            entry = work.get(method, {})
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


if __name__ == "__main__":
    main()
