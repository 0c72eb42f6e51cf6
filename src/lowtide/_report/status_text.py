"""The state of a run in one line, for whoever watches it."""

from lowtide._units import format_bytes


def render_status(
    *,
    step: int,
    mode: str,
    peak_bytes: int,
    budget_bytes: int,
    seconds: float,
    plain_seconds: float,
) -> str:
    """Which step it was, how it ran, what it held of the budget, and its time over plain's.

    What is 0 is not known, and left out.
    """
    parts = [f"step {step}", mode]
    if peak_bytes and budget_bytes:
        parts.append(f"peak {format_bytes(peak_bytes)} of {format_bytes(budget_bytes)}")
    elif budget_bytes:
        parts.append(f"budget {format_bytes(budget_bytes)}")
    if seconds and plain_seconds:
        parts.append(f"{seconds / plain_seconds:.2f}x the plain step")
    return ", ".join(parts)
