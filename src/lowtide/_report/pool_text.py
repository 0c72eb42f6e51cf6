"""What a pool did -> a few lines for the terminal."""

from dataclasses import dataclass

from lowtide._units import format_bytes


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """What a pool has done so far."""

    steps: int
    replayed: int  # steps in which every lane with an arena followed a plan from start to end
    plans: int
    arena_bytes: int
    load_bytes: int  # the most that planned steps hold in arenas at once
    allocations: int  # made while there was an arena
    planned: int  # of them, at their planned address
    displaced: int  # of them, whose planned bytes were still in use
    unplanned: int  # of them, that no plan foresaw


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """What PyTorch's statistics say, arenas included."""

    reserved_before: int  # when the first arena was made
    reserved: int
    peak_allocated: int


def render_pool(pool: PoolSummary, memory: MemorySummary) -> str:
    """Planned and measured, side by side."""
    if not pool.arena_bytes:
        return (
            f"pool: watching, no plan yet after {pool.steps} steps "
            "(a step is planned when it has been made twice)"
        )
    waste = pool.arena_bytes / pool.load_bytes - 1 if pool.load_bytes else 0.0
    over = memory.reserved / memory.peak_allocated - 1 if memory.peak_allocated else 0.0
    outlive = pool.allocations - pool.planned - pool.displaced - pool.unplanned
    lines = [
        f"pool: {pool.replayed} of {pool.steps} steps followed a plan, {pool.plans} plans",
        f"planned   {format_bytes(pool.arena_bytes)} for a load of "
        f"{format_bytes(pool.load_bytes)} ({waste:+.2%})",
        f"measured  {format_bytes(memory.reserved)} reserved for a peak of "
        f"{format_bytes(memory.peak_allocated)} allocated ({over:+.2%}); "
        f"before: {format_bytes(memory.reserved_before)} reserved",
        f"{pool.planned:,} of {pool.allocations:,} allocations at their planned address; others: "
        f"{pool.unplanned:,} not foreseen, {pool.displaced:,} whose place was still taken, "
        f"{outlive:,} that outlive the plan",
    ]
    return "\n".join(lines)
