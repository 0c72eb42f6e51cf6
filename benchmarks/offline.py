"""Other people's traces: recomputing alone against DTR's best heuristic, then swapping besides.

python benchmarks/offline.py --data ../shared/data/dtr --out benchmarks/results/offline.json

Each trace and budget is a `lowtide simulate` of its own, as a user would call it; several run at
once. DTR's figures are those of its own simulator, with the best of its heuristics at each budget.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SHARES = (0.9, 0.7, 0.5, 0.4, 0.3)
DTR: dict[str, tuple[float | None, ...]] = {  # total compute over plain, at each share of the peak
    "tv_densenet121": (1.026, 1.104, 1.176, 1.293, 1.426),
    "resnet32": (1.013, 1.046, 1.107, 1.140, 1.179),
    "unet": (1.033, 1.085, 1.159, None, None),
    "lstm": (1.017, 1.031, 1.071, 1.159, 1.365),
}
LINKS = ("12GB/s", "25GB/s", "50GB/s")
LOWTIDE = [sys.executable, "-m", "lowtide"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of *.jsonl.gz")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of search, for each plan")
    parser.add_argument("--swap-seconds", type=float, default=20, help="... with swaps")
    parser.add_argument("--jobs", type=int, default=2, help="plans at once")
    parser.add_argument("--only", default="", help="traces whose names begin like one of these")
    options = parser.parse_args()
    from machine import machine_facts

    names = [name for name in DTR if name.startswith(tuple(options.only.split(",")))]
    results: dict[str, Any] = {"machine": machine_facts(), "seconds": options.seconds, "traces": {}}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for name in names:
            log = str(options.data / f"{name}.jsonl.gz")
            trace = f"{folder}/{name}.trace"
            subprocess.run([*LOWTIDE, "import", "dtr", log, "-o", trace], check=True)
        asked = {
            (name, share): pool.submit(plan, f"{folder}/{name}.trace", share, options.seconds)
            for name in names
            for share in SHARES
        }
        linked = {
            (name, share, link, policy): pool.submit(
                plan, f"{folder}/{name}.trace", share, options.swap_seconds, policy, link
            )
            for name in names
            for share in SHARES
            for link in LINKS
            for policy in ("tide", "autoswap")
        }
        for (name, share), answer in asked.items():
            row = answer.result()
            row["dtr"] = DTR[name][SHARES.index(share)]
            if "error" not in row:
                row["bound"] = bound(f"{folder}/{name}.trace", share)
            results["traces"].setdefault(name, {})[str(share)] = row
            show(name, share, row)
            write(options.out, results)
        for (name, share, link, policy), answer in linked.items():
            rows = results["traces"][name][str(share)].setdefault(link, {})
            rows[policy] = answer.result()
            if policy == "autoswap":
                show_link(name, share, link, rows)
                write(options.out, results)


def write(path: Path | None, results: dict[str, Any]) -> None:
    """What there is so far."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def plan(
    trace: str, share: float, seconds: float, policy: str = "tide", link: str | None = None
) -> dict[str, Any]:
    """What the command says."""
    how = ["--policy", policy, "--json"]
    how += ["--no-swap"] if link is None else ["--link", link]
    how += ["--seconds", str(seconds)] if policy == "tide" else []
    done = subprocess.run(
        [*LOWTIDE, "simulate", trace, "--budget", str(share), *how],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bound(trace: str, share: float) -> float:
    """The overhead that no plan that recomputes can do without."""
    from lowtide._analyze.load import find_peak
    from lowtide._policy.bound import least_extra_seconds
    from lowtide._trace.file import load_trace

    step = load_trace(Path(trace))
    least = least_extra_seconds(step, int(share * find_peak(step).bytes))
    return least / sum(op.seconds for op in step.ops)


def show(name: str, share: float, row: dict[str, Any]) -> None:
    """One line."""
    dtr = f"{row['dtr']:.3f}" if row["dtr"] else "does not fit"
    ours = row.get("error") or f"{1 + row['overhead']:.4f}, no less than {1 + row['bound']:.4f}"
    print(f"{name:16} {share:.1f} of the peak: {ours}  (DTR {dtr})", flush=True)


def show_link(name: str, share: float, link: str, rows: dict[str, Any]) -> None:
    """One line."""
    said = [
        f"{policy} {1 + row['overhead']:.4f}" if "error" not in row else f"{policy} does not fit"
        for policy, row in rows.items()
    ]
    print(f"{name:16} {share:.1f} of the peak at {link}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
