"""Summary -> tables for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide._analyze.summary import Summary
from lowtide._ir import Kind
from lowtide._units import format_bytes, format_seconds

_ROWS = 12
_SHORT = {Kind.PARAMETER: "param", Kind.ACTIVATION: "activ", Kind.GRADIENT: "grad"}
_SHORT |= {Kind.STATE: "optim", Kind.TEMPORARY: "temp"}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def render_summary(summary: Summary) -> RenderableType:
    """What is alive at the peak, by kind and module."""
    return Group(_headline(summary), _table(summary))


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
        f" on {summary.device}: {phases}\n",
        (f"peak {format_bytes(peak.bytes)}", "bold"),
        f" at op {peak.op}, {summary.peak_op}{where}\n",
        f"of it {format_bytes(summary.saved_bytes)} saved for backward, "
        f"{format_bytes(summary.recomputable_bytes)} could be recomputed\n",
    )


def _table(summary: Summary) -> Table:
    """Modules down, kinds across, in one unit so that columns can be compared at a glance."""
    unit, scale = next((u for u in _UNITS if summary.peak.bytes >= 4 * u[1]), _UNITS[-1])

    def cell(size: int) -> str:
        return "" if not size else f"{size / scale:.1f}" if size >= scale / 20 else "·"

    kinds = list(summary.by_kind)
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_footer=True)
    table.add_column(f"{unit} at the peak", footer="all", no_wrap=True)
    for kind in kinds:
        total = summary.by_kind[kind]
        table.add_column(_SHORT.get(kind, kind), footer=cell(total), justify="right", no_wrap=True)
    table.add_column("all", footer=cell(summary.peak.bytes), justify="right", no_wrap=True)
    for owner in summary.owners[:_ROWS]:
        label = owner.module or "(outside modules)"
        label += f" ×{owner.modules}" if owner.modules > 1 else ""
        sizes = [owner.by_kind.get(kind, 0) for kind in kinds]
        table.add_row(label, *map(cell, sizes), cell(owner.bytes))
    rest = summary.owners[_ROWS:]
    if rest:
        sizes = [sum(owner.by_kind.get(kind, 0) for owner in rest) for kind in kinds]
        table.add_row(f"({len(rest)} more)", *map(cell, sizes), cell(sum(sizes)))
    for label, size in (
        ("(kernel workspace)", summary.peak.workspace_bytes),
        ("(held by no tensor)", summary.peak.unseen_bytes),
    ):
        if size:
            table.add_row(label, *[""] * len(kinds), cell(size), style="dim")
    return table
