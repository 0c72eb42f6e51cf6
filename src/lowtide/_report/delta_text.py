"""What the dynamic driver did, with plans or without, in words."""

from dataclasses import dataclass

from lowtide._ir import Plan, Rerun
from lowtide._units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """A run under a budget so far."""

    policy: str
    modes: str  # how steps ran, where there may be plans
    plan: Plan | None
    seconds: float  # of a planned step
    budget_bytes: int | None
    steps: int
    peak_bytes: int
    plain_peak_bytes: int
    dropped: int
    dropped_bytes: int
    swapped: int
    swapped_bytes: int
    replayed_ops: int
    replayed_seconds: float
    checked: int
    demoted: int
    out_of_memory: int
    flushes: int  # of the allocator's cache, because of the budget
    made_do: int  # ops of which a library chose a way with less memory
    ops: int
    driver_seconds: float
    kernels: int = 0  # each of which runs several ops again as one
    chains: int = 0  # kernels, each of which runs several ops of backward as one
    kernels_refused: int = 0  # that did not make the same


def render_delta(summary: DeltaSummary) -> str:
    """A few lines."""
    if not summary.steps or summary.budget_bytes is None:
        return f"budget: {summary.policy}, no step yet"
    modes = f": {summary.modes}" if summary.modes else ""
    lines = [
        f"budget: {summary.policy}, {summary.steps} steps{modes}",
        *_planned(summary.plan),
        f"measured  peak {format_bytes(summary.peak_bytes)} of "
        f"{format_bytes(summary.budget_bytes)}; plain would hold "
        f"{format_bytes(summary.plain_peak_bytes)}"
        + (f"; step {format_seconds(summary.seconds)}" if summary.seconds else ""),
        f"{summary.dropped} storages of {format_bytes(summary.dropped_bytes)} dropped, "
        f"{summary.swapped} of {format_bytes(summary.swapped_bytes)} swapped",
        f"{summary.replayed_ops} ops run again, of some "
        f"{format_seconds(summary.replayed_seconds)}; {summary.checked} recipes compared with "
        f"the original, {summary.demoted} refused",
        f"{summary.ops} ops seen, at {format_seconds(summary.driver_seconds)} an op",
    ]
    if summary.kernels or summary.chains or summary.kernels_refused:
        backward = f"{summary.chains} several ops of backward, " if summary.chains else ""
        lines.append(
            f"{summary.kernels} kernels run several of those at once, {backward}"
            f"bit for bit as one by one; {summary.kernels_refused} refused"
        )
    if summary.out_of_memory:
        lines.append(f"{summary.out_of_memory} times out of memory, and on")
    if summary.flushes:
        lines.append(f"{summary.flushes} times PyTorch's allocator gave back what it had cached")
    if summary.made_do:
        lines.append(
            f"{summary.made_do} ops had less memory inside than they asked for: a library may have "
            "computed in another way, with other last bits; give a larger budget"
        )
    return "\n".join(lines)


def _planned(plan: Plan | None) -> list[str]:
    if plan is None:
        return []
    reruns = sum(isinstance(one, Rerun) for one in plan.remakes)
    return [
        f"planned   peak {format_bytes(plan.peak_bytes)}, plain "
        f"{format_bytes(plan.plain_peak_bytes)}; step {format_seconds(plan.seconds)}, plain "
        f"{format_seconds(plan.plain_seconds)}; {len(plan.swaps)} swaps, {reruns} ops run again"
    ]
