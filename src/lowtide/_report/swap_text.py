"""What swapping did, in words: predicted and measured side by side."""

from dataclasses import dataclass

from lowtide._ir import Plan
from lowtide._units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class SwapSummary:
    """A run under a budget so far. Zeros where nothing was measured."""

    budget_bytes: int | None
    steps: str
    plan: Plan | None
    swapped_bytes: int
    measured_peak_bytes: int
    measured_seconds: float
    below_bytes: int


def render_swap(summary: SwapSummary) -> str:
    """A few lines."""
    lines = [f"budget: {summary.steps or 'no step yet'}"]
    plan = summary.plan
    if plan is None or summary.budget_bytes is None:
        return lines[0]
    lines.append(
        f"planned   peak {format_bytes(plan.peak_bytes)} of {format_bytes(summary.budget_bytes)}, "
        f"step {format_seconds(plan.seconds)} ({plan.policy} on {plan.machine}); "
        f"plain {format_bytes(plan.plain_peak_bytes)}, {format_seconds(plan.plain_seconds)}"
    )
    measured = []
    if summary.measured_peak_bytes:
        measured.append(f"peak {format_bytes(summary.measured_peak_bytes)}")
    if summary.measured_seconds:
        measured.append(f"step {format_seconds(summary.measured_seconds)}")
    if measured:
        lines.append(f"measured  {', '.join(measured)}")
    lines.append(
        f"{len(plan.swaps)} storages of {format_bytes(summary.swapped_bytes)} leave and come back "
        f"in a step, through {format_bytes(summary.below_bytes)} of the tier below"
    )
    return "\n".join(lines)
