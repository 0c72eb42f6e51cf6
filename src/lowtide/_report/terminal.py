"""Summary -> tables for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide._analyze.summary import Owner, Summary
from lowtide._ir import Kind
from lowtide._units import format_bytes, format_seconds

_ROWS = 12
_SHORT = {Kind.PARAMETER: "param", Kind.ACTIVATION: "activ", Kind.GRADIENT: "grad"}
_SHORT |= {Kind.STATE: "optim", Kind.TEMPORARY: "temp"}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def render_summary(summary: Summary, width: int) -> RenderableType:
    """What is alive at the peak, by kind and module, on lines of at most `width` characters."""
    return Group(_headline(summary), _table(summary, width))


def _headline(summary: Summary) -> Text:
    peak = summary.peak
    where = f" in {summary.peak_module}" if summary.peak_module else ""
    phases = ", ".join(
        f"{phase} {summary.ops_by_phase[phase]} ops {format_seconds(seconds)}"
        for phase, seconds in summary.seconds_by_phase.items()
        if summary.ops_by_phase[phase]
    )
    return Text.assemble(
        (summary.source or "step", "bold"),
        f" on {summary.device}\n{phases}\n",
        (f"peak {format_bytes(peak.bytes)}", "bold"),
        f" at op {peak.op}, {summary.peak_op}{where}\n",
        f"of it {format_bytes(summary.saved_bytes)} saved for backward, "
        f"{format_bytes(summary.recomputable_bytes)} could be recomputed\n",
    )


def _table(summary: Summary, width: int) -> Table:
    """Modules down, kinds across, in one unit so that columns can be compared at a glance."""
    unit, scale = next((u for u in _UNITS if summary.peak.bytes >= 4 * u[1]), _UNITS[-1])

    def cell(size: int) -> str:
        return "" if not size else f"{size / scale:.1f}" if size >= scale / 20 else "·"

    kinds = list(summary.by_kind)
    heads = [f"{unit} at the peak", *(_SHORT.get(kind, kind) for kind in kinds), "all"]
    foot = ["all", *map(cell, summary.by_kind.values()), cell(summary.peak.bytes)]
    rows = []
    for owner in summary.owners[:_ROWS]:
        sizes = [owner.by_kind.get(kind, 0) for kind in kinds]
        rows.append([_label(owner, summary.owners), *map(cell, sizes), cell(owner.bytes)])
    rest = summary.owners[_ROWS:]
    if rest:
        sizes = [sum(owner.by_kind.get(kind, 0) for owner in rest) for kind in kinds]
        rows.append([f"({len(rest)} more)", *map(cell, sizes), cell(sum(sizes))])
    for label, size in (
        ("(kernel workspace)", summary.peak.workspace_bytes),
        ("(held by no tensor)", summary.peak.unseen_bytes),
    ):
        if size:
            rows.append([label, *[""] * len(kinds), cell(size)])

    lines = [heads, foot, *rows]
    numbers = sum(max(len(line[k]) for line in lines) + 2 for k in range(1, len(heads)))
    room = max(width - numbers, 16)
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_footer=True)
    for k, (head, total) in enumerate(zip(heads, foot, strict=True)):
        table.add_column(head, footer=total, justify="right" if k else "left", no_wrap=True)
    for label, *cells in rows:
        # The end of a path says more than its beginning.
        table.add_row(label if len(label) <= room else "…" + label[-room + 1 :], *cells)
    return table


def _label(owner: Owner, owners: Sequence[Owner]) -> str:
    """The module's path, without the root if there is but one."""
    roots = {other.module.split(".")[0] for other in owners if other.module}
    label = owner.module or "(outside modules)"
    if len(roots) == 1 and "." in owner.module:
        label = owner.module.split(".", 1)[1]
    return f"{label} ×{owner.modules}" if owner.modules > 1 else label
