"""The filter, which value goes, and the director, whether it is swapped or recomputed.

"DELTA: Dynamically Optimizing GPU Memory beyond Tensor Recomputation", Tang et al. 2022; "Dynamic
Tensor Rematerialization", Kirisame et al. 2021. A policy here is a function of a few numbers
of one value; the lowest score goes first.
"""

POLICIES = ("delta", "dtr", "delta-as-published")


def score(
    policy: str, count: int, stale: int, bounces: int, recompute_seconds: float | None
) -> float | None:
    """The filter: of `count` bytes, last used `stale` ops ago. None: it has to stay."""
    staleness = stale if stale > 1 else 1
    if policy == "dtr":
        return None if recompute_seconds is None else recompute_seconds / (count * staleness)
    if policy == "delta":  # what was brought back before is likely to be again
        return (1 + bounces) / (count * staleness)
    return 1 / (count * staleness)


def drops(
    policy: str,
    copy_seconds: float,
    swap_seconds: float | None,
    recompute_seconds: float | None,
) -> bool | None:
    """The director: True if it is recomputed, False if it is swapped, None if it has to stay.

    A copy one way takes `copy_seconds`, hidden or not; the paper's 2 m / B is what of both ways
    is not hidden: `swap_seconds`. None: there is no room below. A recipe costs what it has to run
    as things are, in the same unit; None: there is none.
    """
    if recompute_seconds is None:
        return None if swap_seconds is None or policy == "dtr" else False
    if swap_seconds is None or policy == "dtr":
        return True
    if policy == "delta":
        return recompute_seconds <= swap_seconds
    # As the published code does: microseconds of a transfer against nanoseconds of an op.
    return 2 * copy_seconds * 1e6 > recompute_seconds * 1e9 > 0
