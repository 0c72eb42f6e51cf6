"""The pool's summary."""

from lowtide._report.pool_text import MemorySummary, PoolSummary, render_pool

GIB = 1 << 30


def test_planned_and_measured_side_by_side() -> None:
    pool = PoolSummary(
        steps=20,
        replayed=16,
        plans=1,
        arena_bytes=5 * GIB,
        load_bytes=4 * GIB,
        allocations=1000,
        planned=900,
        displaced=30,
        unplanned=20,
    )
    memory = MemorySummary(reserved_before=8 * GIB, reserved=6 * GIB, peak_allocated=5 * GIB)
    assert render_pool(pool, memory).splitlines() == [
        "pool: 16 of 20 steps followed a plan, 1 plans",
        "planned   5.00 GiB for a load of 4.00 GiB (+25.00%)",
        "measured  6.00 GiB reserved for a peak of 5.00 GiB allocated (+20.00%); "
        "before: 8.00 GiB reserved",
        "900 of 1,000 allocations at their planned address; others: 20 not foreseen, "
        "30 whose place was still taken, 50 that outlive the plan",
    ]


def test_before_the_first_plan() -> None:
    pool = PoolSummary(2, 0, 0, 0, 0, 0, 0, 0, 0)
    text = render_pool(pool, MemorySummary(0, GIB, GIB))
    assert text == (
        "pool: watching, no plan yet after 2 steps (a step is planned when it has been made twice)"
    )
