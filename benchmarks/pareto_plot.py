"""What `pareto.py` has measured, as a picture."""

from pathlib import Path
from typing import Any

from delta import Row
from pareto_aims import AIMS, GIB, ROOM, WORKS

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
    most = max(ROOM * plain["reserved_bytes"], *(row["reserved_bytes"] for row in shown))
    panel.set_xlim(0, 1.08 * most / GIB)
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
            f"×{row['ratio']:.1f}", (at, HIGHEST), textcoords="offset points", xytext=(0, -7),
            rotation=90, ha="center", va="top", fontsize=8, color=colour,
        )  # fmt: skip
