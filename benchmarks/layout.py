"""How close to the max load are layouts, how fast, and how does the cost grow?

python benchmarks/layout.py --data ../shared/data/dsa --out benchmarks/results/layout.json

Every instance is packed by SmartPool's published heuristic (best and first fit) and by the search,
all in this run on this machine; every layout is checked by comparing what lives together.
`--minimalloc PATH` runs google/minimalloc's binary beside them; without it the times listed with
the data stand in. The random instances run in processes of their own, for their memory.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine_facts

from lowtide import Buffer, Packing, pack
from lowtide._layout.check import find_clash
from lowtide._layout.table import read_buffers, write_buffers

CAPACITY = 1_048_576  # at which minimalloc's set is known to be feasible
LISTED_SECONDS = {"A": 7.2, "B": 5.8, "C": 1.1, "D": 3.8, "E": 5.2, "F": 8.4}
SEEDS = range(5)
COUNTS = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
SHAPES = ("short", "medium", "long")
# `lowtide pack FILE --json --time-limit S`, and then the most memory that the process held
CHILD = """
import re, sys
from lowtide._cli import cli
cli.main(["pack", sys.argv[1], "--json", "--time-limit", sys.argv[2]], standalone_mode=False)
print(int(re.search("VmHWM:\\s*([0-9]+)", open("/proc/self/status").read())[1]) * 1024)
"""


def main() -> None:
    """Measure, print a table, write JSON and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the instances")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--minimalloc", type=Path, help="google/minimalloc's binary")
    parser.add_argument("--timeout", type=float, default=30.0, help="of minimalloc, seconds")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine_facts(),
        "minimalloc_measured": options.minimalloc is not None,
        "instances": {},
    }
    pack([Buffer("a", 0, 1, 1)])  # builds the native library, if that is still to be done
    print(f"{'instance':<20}{'buffers':>8}{'best fit':>10}{'first fit':>10}{'search':>9}"
          f"{'seconds':>9}{'minimalloc s':>14}", flush=True)  # fmt: skip
    for path in sorted(options.data.glob("*.csv")):
        results["instances"][path.stem] = measured = measure(path, options)
        search = measured["search"]
        print(f"{path.stem:<20}{measured['buffers']:>8}{measured['smartpool']['ratio']:>10.4f}"
              f"{measured['smartpool-first']['ratio']:>10.4f}{search['ratio']:>9.4f}"
              f"{search['seconds']:>9.3f}{measured['minimalloc_seconds'] or '-':>14}",
              flush=True)  # fmt: skip
    results["random"] = [scale(shape, count) for shape in SHAPES for count in COUNTS]
    results["verdict"] = verdict(results)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.out.with_name(f"{options.out.stem}-cost.png"))
    print(json.dumps(results["verdict"], indent=1))


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One instance by every method."""
    buffers = read_buffers(path)
    capacity = CAPACITY if path.stem.startswith("minimalloc") else None
    measured: dict[str, Any] = {"buffers": len(buffers), "capacity": capacity}
    for method in ("smartpool", "smartpool-first"):
        measured[method] = describe(buffers, pack(buffers, method=method))
    limits = (2.0, 10.0) if len(buffers) > 20_000 else (10.0,)
    for limit in limits:
        runs = [
            describe(buffers, pack(buffers, capacity=capacity, seconds=limit, seed=seed))
            for seed in SEEDS
        ]
        runs.sort(key=lambda run: (run["seconds"], run["ratio"]))
        measured["search"] = {
            **runs[len(runs) // 2],
            "limit": limit,
            "worst_ratio": max(run["ratio"] for run in runs),
            "worst_seconds": max(run["seconds"] for run in runs),
            "runs": len(runs),
        }
        if limit != limits[-1]:
            measured[f"search_{limit:g}s"] = measured["search"]
    measured["minimalloc_seconds"] = minimalloc(
        path, capacity or measured["search"]["max_load"], options
    )
    return measured


def describe(buffers: list[Buffer], packing: Packing) -> dict[str, Any]:
    """The figures of a packing whose layout holds."""
    offsets = [b.offset for b in packing.buffers if b.offset is not None]
    clash = find_clash(buffers, offsets)
    assert clash is None, clash
    keys = ("height", "max_load", "ratio", "optimal", "seconds")
    return {key: getattr(packing, key) for key in keys}


def minimalloc(path: Path, capacity: int, options: argparse.Namespace) -> float | None:
    """Its seconds for the same capacity, None if it gives up; or those listed with the data."""
    if options.minimalloc is None:
        return LISTED_SECONDS.get(path.stem.removeprefix("minimalloc-"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.csv"
        started = time.perf_counter()
        subprocess.run(
            [options.minimalloc, f"--capacity={capacity}", f"--input={path}", f"--output={out}",
             f"--timeout={options.timeout:g}s"],
            capture_output=True,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        return round(seconds, 3) if out.exists() and out.stat().st_size else None


def scale(shape: str, count: int) -> dict[str, Any]:
    """A random instance in a process of its own: the first layout, and the best in 20 s."""
    measured: dict[str, Any] = {"shape": shape, "buffers": count}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"random-{shape}-{count}.csv"
        path.write_bytes(write_buffers(random_buffers(shape, count)).replace(b",None\n", b",\n"))
        for name, limit in (("first", 0.0), ("full", 20.0)):
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(path), str(limit)],
                capture_output=True,
                text=True,
                check=True,
            )
            said, high_water = (json.loads(line) for line in done.stdout.splitlines())
            measured[name] = {
                "ratio": said["ratio"],
                "optimal": said["optimal"],
                "seconds": said["seconds"],
                "process_seconds": time.perf_counter() - started,
                "process_bytes": high_water,
            }
    first, full = measured["first"], measured["full"]
    print(f"random {shape:<7}{count:>7}  first {first['ratio']:.4f} in {first['seconds']:.3f} s  "
          f"best {full['ratio']:.4f} in {full['process_seconds']:.1f} s  "
          f"{full['process_bytes'] / 2**20:,.0f} MiB", flush=True)  # fmt: skip
    return measured


def random_buffers(shape: str, count: int) -> list[Buffer]:
    """Lives of about 50 moments, 5 % of the step, or any length; sizes from 512 B to 64 MiB."""
    source = random.Random(count)
    end = 2 * count
    buffers = []
    for i in range(count):
        lower = source.randrange(end)
        length = {
            "short": source.expovariate(1 / 50),
            "medium": source.expovariate(20 / end),
            "long": source.uniform(0, end),
        }[shape]
        upper = min(end, lower + 1 + int(length))
        buffers.append(Buffer(str(i), lower, upper, int(2 ** source.uniform(9, 26))))
    return buffers


def verdict(results: dict[str, Any]) -> dict[str, Any]:
    """The figures that issues ask for."""
    named = results["instances"]
    train = [m["search"] for name, m in named.items() if name.startswith("train")]
    hard = [m for name, m in named.items() if name.startswith("minimalloc")]
    large = [m for m in results["random"] if m["buffers"] == COUNTS[-1]]
    huge = named.get("iopddl-S1", {})
    return {
        "train_worst_ratio": max(m["worst_ratio"] for m in train),
        "train_worst_seconds": max(m["worst_seconds"] for m in train),
        "train_median_seconds": median(m["seconds"] for m in train),
        "minimalloc_set_heights_fit": all(m["search"]["height"] <= CAPACITY for m in hard),
        "minimalloc_set_seconds": sum(m["search"]["seconds"] for m in hard),
        "minimalloc_set_worst_seconds": sum(m["search"]["worst_seconds"] for m in hard),
        "minimalloc_set_seconds_of_minimalloc": sum(m["minimalloc_seconds"] or 0 for m in hard),
        "minimalloc_set_seconds_listed": sum(LISTED_SECONDS.values()),
        "iopddl_worst_ratio_2s": huge.get("search_2s", {}).get("worst_ratio"),
        "iopddl_worst_ratio_10s": huge.get("search", {}).get("worst_ratio"),
        "random_100k_worst_process_seconds": max(m["full"]["process_seconds"] for m in large),
        "random_100k_worst_process_bytes": max(m["full"]["process_bytes"] for m in large),
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """Cost per buffer of a first layout over the number of buffers."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    lives = {"short": "about 50 moments", "medium": "5 % of the step", "long": "any length"}
    for shape, colour in zip(SHAPES, ("#33658a", "#edae49", "#d1495b"), strict=True):
        rows = [m for m in results["random"] if m["shape"] == shape]
        counts = [m["buffers"] for m in rows]
        cost = [1e6 * m["first"]["seconds"] / m["buffers"] for m in rows]
        axes.semilogx(counts, cost, "o-", color=colour, label=f"lives of {lives[shape]}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("buffers")
    axes.set_ylabel("µs per buffer, to the first layout")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
