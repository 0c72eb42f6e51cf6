"""Committed results and the demo's table -> the README, between its marks. Nothing by hand.

python benchmarks/readme.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pareto_aims import FULL, SHARES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def tracing_table() -> str:
    """The truth of traces, one row a model and machine."""
    lines = [
        "| model | on | ops | true peak | trace's error | extra time of tracing |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for path in sorted(RESULTS.glob("tracing-*.json"), reverse=True):
        results: dict[str, Any] = json.loads(path.read_text())
        where = results["machine"].get("gpu") if results["device"] == "cuda" else "CPU"
        for name, m in results["models"].items():
            lines.append(
                f"| {name} | {where} | {m['ops']:,} | {m['true_peak_bytes'] / 2**20:,.1f} MiB "
                f"| {m['peak_error']:+.3%} | {m['extra_seconds']:.1f} s |"
            )
    return "\n".join(lines)


def layout_table() -> str:
    """Height over max load by method, and the time of the search."""
    results: dict[str, Any] = json.loads((RESULTS / "layout.json").read_text())
    lines = [
        "| instance | buffers | best fit | first fit | lowtide | proved | its time | minimalloc |",
        "|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for name, m in results["instances"].items():
        search = m["search"]
        seconds = m["minimalloc_seconds"]
        lines.append(
            f"| {name} | {m['buffers']:,} | {m['smartpool']['ratio']:.4f} "
            f"| {m['smartpool-first']['ratio']:.4f} | {search['ratio']:.4f} "
            f"| {'yes' if search['optimal'] else 'fits'} | {search['seconds']:.3f} s "
            f"| {f'{seconds:.3f} s' if seconds else 'none in 30 s'} |"
        )
    return "\n".join(lines)


def swap_table() -> str:
    """Peak and step time, planned and measured, beside what else there is."""
    results: dict[str, Any] = json.loads((RESULTS / "swap.json").read_text())
    lines = [
        "| work | with | peak | of plain | reserved | step time | planned peak | planned time "
        "| copies hidden |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, work in results["works"].items():
        plain = work["plain"]
        rows = [
            ("`save_on_cpu`", work.get("save_on_cpu")),
            ("TRL `OffloadActivations`", work.get("offload_activations")),
            *(
                (f"lowtide, `{budget}`", row)
                for budget, row in work.get("lowtide", {}).items()
                if "error" not in row
            ),
        ]
        lines.append(
            f"| {name} | plain | {plain['peak_bytes'] / 2**30:.2f} GiB | "
            f"| {plain['reserved_bytes'] / 2**30:.2f} GiB "
            f"| {plain['seconds'] * 1e3:.1f} ms | | | |"
        )
        for label, row in rows:
            if row is None or "error" in row:
                continue
            beside = row.get("plain_seconds", plain["seconds"])
            line = (
                f"| | {label} | {row['peak_bytes'] / 2**30:.2f} GiB "
                f"| {row['peak_bytes'] / plain['peak_bytes'] - 1:+.1%} "
                f"| {row['reserved_bytes'] / 2**30:.2f} GiB "
                f"| ×{row['seconds'] / beside:.3f} "
            )
            if "plan" in row:
                plan = row["plan"]
                line += (
                    f"| {plan['peak_bytes'] / row['peak_bytes'] - 1:+.2%} "
                    f"| {plan['seconds'] / row['seconds'] - 1:+.1%} | {row['hidden']:.0%} |"
                )
            else:
                line += "| | | |"
            lines.append(line)
    measured = [row for work in results["works"].values() for row in _rows_of(work)]
    if commits := _commits(measured):
        lines += ["", commits]
    return "\n".join(lines)


def _rows_of(work: dict[str, Any]) -> list[dict[str, Any]]:
    budgets = work.get("lowtide", {})
    return [row for method, row in work.items() if method != "lowtide"] + [*budgets.values()]


def _commits(rows: list[dict[str, Any]]) -> str:
    commits = sorted({row["commit"] for row in rows if "commit" in row})
    return f"Rows are of commits {', '.join(commits)}." if len(commits) > 1 else ""


def delta_tables() -> str:
    """The largest batch under a hard cap; step time at less memory beside what else there is."""
    results: dict[str, Any] = json.loads((RESULTS / "delta.json").read_text())
    lines = [
        "| at most 16 GiB reserved | with | batch | of plain's | images/s |",
        "|---|---|---:|---:|---:|",
    ]
    for name, methods in results.get("batch", {}).items():
        plain = methods["plain"].get("largest_batch")
        for method, entry in methods.items():
            if "largest_batch" not in entry:
                continue  # a search that broke off says nothing of the largest
            fitting = [row for row in entry["probes"].values() if row.get("fits")]
            for row in sorted(fitting, key=lambda row: row["batch"]):
                if row["batch"] == plain or row["batch"] == max(r["batch"] for r in fitting):
                    lines.append(
                        f"| {name} | {method} | {row['batch']} | ×{row['batch'] / plain:.2f} "
                        f"| {row['images_per_second']:.0f} |"
                    )
    lines += [
        "",
        "| work | with | reserved | peak, of plain | step time |",
        "|---|---|---:|---:|---:|",
    ]
    for name, methods in results.get("points", {}).items():
        for method, entry in methods.items():
            rows = entry.values() if "seconds" not in entry and "error" not in entry else [entry]
            for found in rows:
                row = found.get("reached") or found
                if "seconds" in row:
                    lines.append(
                        f"| {name} | {method} | {row['reserved_bytes'] / 2**30:.2f} GiB "
                        f"| {row['peak_ratio'] - 1:+.1%} | ×{row['ratio']:.3f} |"
                    )
    costs = [
        f"{name} ×{max(row['ratio'] for row in rows):.3f}"
        for name, rows in results.get("overhead", {}).items()
    ]
    if costs:
        lines += ["", f"With a budget above the plain peak: {', '.join(costs)}."]
    return "\n".join(lines)


PARETO_OTHERS = {  # the columns beside tide's
    "checkpoint": "checkpoint",
    "selective": "selective checkpoint",
    "offload_activations": "TRL offload",
    "compile 1.0": "compiled",
    "compile 0.5": "compiled, 0.5",
}


def pareto_tables() -> str:
    """Step time over plain's at each budget, beside what else there is; and what was aimed at."""
    results: dict[str, Any] = json.loads((RESULTS / "pareto.json").read_text())
    works = {name: m for name, m in results["works"].items() if "seconds" in m["plain"]}
    tides = ["tide, loose" if share == FULL else f"tide, {share}" for share in SHARES]
    table = [["work", "plain", *tides, *PARETO_OTHERS.values()]]
    for name, work in works.items():
        plain, tide = work["plain"], work.get("tide", {})
        others = {**work, **{f"compile {key}": row for key, row in work.get("compile", {}).items()}}
        cells = [f"{plain['seconds'] * 1e3:.0f} ms, {plain['peak_bytes'] / 2**30:.1f} GiB"]
        cells += [_under_budget(tide.get(share, {})) for share in SHARES]
        for key in PARETO_OTHERS:
            row = others.get(key, {})
            cell = f"×{row['ratio']:.2f} at {row['memory_ratio']:.0%}" if "ratio" in row else ""
            if key == "compile 0.5" and "compiled_ratio" in row:
                cell += f", ×{row['compiled_ratio']:.2f} of compiled"
            cells.append(cell)
        table.append([name, *cells])
    measured = [column for column in zip(*table, strict=True) if any(column[1:])]
    head, *rest = (" | ".join(row) for row in zip(*measured, strict=True))
    lines = [
        f"| {head} |",
        f"|---|{'---:|' * (len(measured) - 1)}",
        *(f"| {one} |" for one in rest),
    ]
    aimed = [
        (name, label, row)
        for name, work in works.items()
        for label, row in work.get("tide", {}).items()
        if "aim" in row
    ]
    if aimed:
        lines += [
            "",
            "| work | budget | reserved | step time | aim | planned peak | planned time |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
    for name, label, row in aimed:
        budget = f"{row['budget_bytes'] / 2**30:.1f} GiB" + (", loose" if label == FULL else "")
        reserved = f"{row['reserved_bytes'] / 2**30:.2f} GiB" if "ratio" in row else ""
        planned = " | "
        if "plan" in row and "ratio" in row:
            plan = row["plan"]
            planned = (
                f"{plan['peak_bytes'] / row.get('settled_peak_bytes', row['peak_bytes']) - 1:+.1%} "
                f"| {plan['seconds'] / row['seconds'] - 1:+.1%}"
            )
        lines.append(
            f"| {name} | {budget} | {reserved} | {_under_budget(row, digits=3)} "
            f"| ×{row['aim']:.2f} | {planned} |"
        )
    rows = [row for work in works.values() for row in work.get("tide", {}).values()]
    done = [row for row in rows if "ratio" in row]
    held = sum(row["held"] for row in done)
    notes = [
        "Tide's budgets are shares of the plain peak, loose is 5 % more than plain training "
        "reserves; beside the others is what they reserved, over the same peak. "
        f"Of {len(rows)} budgets {held} were held in bytes reserved, {len(done) - held} were "
        f"exceeded, {len(rows) - len(done)} failed."
    ]
    settled = [row for row in done if "plan" in row]
    if settled:
        times = [abs(row["plan"]["seconds"] / row["seconds"] - 1) for row in settled]
        peaks = [
            abs(row["plan"]["peak_bytes"] / row.get("settled_peak_bytes", row["peak_bytes"]) - 1)
            for row in settled
        ]
        notes.append(
            f"Plans were within 5 % of the step time in {sum(one <= 0.05 for one in times)}, and "
            f"within 2 % of the peak in {sum(one <= 0.02 for one in peaks)} of {len(settled)}."
        )
    same = {
        name: m["identical"]
        for name, m in results.get("same", {}).items()
        if m.get("plain_repeats")
    }
    if equal := [name for name, identical in same.items() if identical]:
        notes.append(f"Losses are plain's bit for bit ({', '.join(equal)}).")
    if other := [name for name, identical in same.items() if not identical]:
        notes.append(f"Losses differ from plain's ({', '.join(other)}).")
    machine = results["machine"]
    notes += [said] if (said := _commits(rows)) else []
    notes.append(f"({machine['gpu']}, torch {machine['torch']})")
    lines += ["", " ".join(notes)]
    if (RESULTS / "pareto.png").exists():
        lines += ["", "![step time against memory](benchmarks/results/pareto.png)"]
    return "\n".join(lines)


def _under_budget(row: dict[str, Any], digits: int = 2) -> str:
    if "ratio" not in row:
        return "failed" if "error" in row else ""
    return f"×{row['ratio']:.{digits}f}" + ("" if row["held"] else ", over it")


def pool_table() -> str:
    """Bytes reserved over bytes allocated at the peak, by allocator; and the step time."""
    results: dict[str, Any] = json.loads((RESULTS / "pool.json").read_text())
    lines = [
        "| model, batch | peak allocated | default | expandable | cudaMallocAsync | lowtide "
        "| reserved less than default | step time |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    savings: dict[str, list[float]] = {"default": [], "expandable": [], "async": []}
    for name, m in results["models"].items():
        own = m["lowtide"]
        over = {
            key: f"+{m[key]['reserved_bytes'] / m[key]['allocated_bytes'] - 1:.1%}"
            for key in (*savings, "lowtide")
        }
        for key, found in savings.items():
            found.append(1 - own["reserved_bytes"] / m[key]["reserved_bytes"])
        lines.append(
            f"| {name}, {m['batch']} | {own['allocated_bytes'] / 2**30:.1f} GiB "
            f"| {over['default']} | {over['expandable']} | {over['async']} | {over['lowtide']} "
            f"| {savings['default'][-1]:.1%} | {own['step_ratio'] - 1:+.2%} |"
        )
    means = ", ".join(
        f"{sum(found) / len(found):.1%} less than {WITH[key]}" for key, found in savings.items()
    )
    costs = results["cost"].values()
    native = sum(cost["native_ns"] for cost in costs) / len(costs)
    pool = sum(cost["pool_ns"] for cost in costs) / len(costs)
    hurried = [
        name
        for name, m in results["models"].items()
        if m["lowtide"].get("python_seconds", 0) > 0.9 * m["lowtide"]["plain_seconds"]
    ]
    same = [name for name, m in results["same"].items() if m["plain_repeats"] and m["identical"]]
    lines += [
        "",
        f"On average it reserves {means}. An allocation and its free take {pool:.0f} ns, with "
        f"the default allocator {native:.0f} ns; {' and '.join(hurried)} wait for Python in much "
        f"of a step. Losses of {results['same'][same[0]]['steps']} "
        f"steps with dropout are the same bit for bit ({', '.join(same)}). "
        f"({results['machine']['gpu']}, torch {results['machine']['torch']})",
    ]
    return "\n".join(lines)


def offline_table() -> str:
    """Time over plain's at each share of the peak."""
    results: dict[str, Any] = json.loads((RESULTS / "offline.json").read_text())
    shares = list(next(iter(results["traces"].values())))
    lines = [
        f"| trace | by | {' | '.join(shares)} |",
        f"|---|---|{'---:|' * len(shares)}",
    ]

    def row(name: str, by: str, figures: list[float | None]) -> None:
        cells = ["does not fit" if figure is None else f"{figure:.3f}" for figure in figures]
        lines.append(f"| {name} | {by} | {' | '.join(cells)} |")

    def over(found: dict[str, Any]) -> float | None:
        return None if "error" in found else 1 + found["overhead"]

    for name, points in results["traces"].items():
        rows = [points[share] for share in shares]
        row(name, "recomputing, tide", [over(point) for point in rows])
        row("", "DTR's best", [point["dtr"] for point in rows])
        row("", "no less than", [1 + p["bound"] if "bound" in p else None for p in rows])
        for policy in ("tide", "autoswap") if "25GB/s" in rows[0] else ():
            row("", f"25 GB/s, {policy}", [over(point["25GB/s"][policy]) for point in rows])
    return "\n".join(lines)


WITH = {
    "default": "the default allocator",
    "expandable": "expandable segments",
    "async": "cudaMallocAsync",
}


def demo_output() -> str:
    """What `lowtide report` prints for the small GPT on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        trace = f"{folder}/gpt.trace"
        lowtide = [sys.executable, "-m", "lowtide"]
        script = str(ROOT / "examples" / "train_gpt.py")
        subprocess.run([*lowtide, "trace", "-o", trace, script], check=True, capture_output=True)
        shown = subprocess.check_output([*lowtide, "report", trace], text=True)
    return "```\n" + "\n".join(line.rstrip() for line in shown.splitlines()) + "\n```"


def main() -> None:
    """Rewrite the README's measured parts."""
    path = ROOT / "README.md"
    text = path.read_text()
    parts = {
        "pool": pool_table(),
        "swap": swap_table(),
        "delta": delta_tables(),
        "offline": offline_table(),
        "demo": demo_output(),
        "tracing": tracing_table(),
        "layout": layout_table(),
    }
    if (RESULTS / "pareto.json").exists():
        parts["pareto"] = pareto_tables()
    for mark, content in parts.items():
        start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
        before, rest = text.split(start)
        text = f"{before}{start}\n{content}\n{end}{rest.split(end)[1]}"
    path.write_text(text)


if __name__ == "__main__":
    main()
