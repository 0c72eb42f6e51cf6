"""The filter, which value goes, and the director, whether it is swapped or recomputed.

"DELTA: Dynamically Optimizing GPU Memory beyond Tensor Recomputation", Tang et al. 2022; "Dynamic
Tensor Rematerialization", Kirisame et al. 2021. A policy here is a function of a few numbers
of one value; the lowest score goes first.
"""

from dataclasses import dataclass

POLICIES = ("delta", "dtr", "delta-as-published")


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a value that could go."""

    bytes: int
    stale: int  # ops since it was last used
    recompute_seconds: float | None  # its recipe, with all that is gone; None: it has none
    swap_seconds: float | None  # what compute would have to wait for; None: there is no room below
    copy_seconds: float  # one way, waited for or not
    bounces: int  # how often it was brought back


@dataclass(frozen=True, slots=True)
class Choice:
    """What the comparison is made of, and what it says."""

    score: float
    drop: bool


def choose(policy: str, facts: Facts) -> Choice | None:
    """How this value would go, and how good that would be; None: it has to stay."""
    if policy == "dtr":
        return _dtr(facts)
    if policy == "delta-as-published":
        return _as_published(facts)
    return _delta(facts)


def _delta(facts: Facts) -> Choice | None:
    swap, recompute = facts.swap_seconds, facts.recompute_seconds
    if swap is None and recompute is None:
        return None
    # The paper's 2 (m/B) / c, in one unit, and of the transfer only what is not hidden.
    drop = recompute is not None and (swap is None or recompute <= swap)
    staleness = max(1, facts.stale) / (1 + facts.bounces)
    return Choice(1 / (facts.bytes * staleness), drop)


def _dtr(facts: Facts) -> Choice | None:
    if facts.recompute_seconds is None:
        return None
    return Choice(facts.recompute_seconds / (facts.bytes * max(1, facts.stale)), drop=True)


def _as_published(facts: Facts) -> Choice | None:
    """As its code does: microseconds of a transfer against nanoseconds of an op."""
    if facts.swap_seconds is None and facts.recompute_seconds is None:
        return None
    transfer = 2 * facts.copy_seconds * 1e6
    op = (facts.recompute_seconds or 0.0) * 1e9
    can_drop, can_swap = facts.recompute_seconds is not None, facts.swap_seconds is not None
    drop = can_drop and (not can_swap or transfer > op > 0)
    return Choice(1 / (facts.bytes * max(1, facts.stale)), drop)
