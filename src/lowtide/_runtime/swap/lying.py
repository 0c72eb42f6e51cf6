"""A plan whose step lies within the budget: with what no layout can use between its blocks."""

from collections.abc import Callable

from lowtide._ir import Plan, Trace
from lowtide._layout.from_plan import height_of
from lowtide._policy.autoswap import CannotFit
from lowtide._simulate.remade import remade

_ROUNDS = 2  # of lowering the limit
_SECONDS = 4.0  # of search for a layout, each
_TRUSTED = 0.75  # of what lies between blocks: the pool has more time to find a lower layout


def plan_with_layout(trace: Trace, within: Callable[..., Plan], limit: int, room: int) -> Plan:
    """`within(limit=...)` plans; where its layout is above `room` bytes, for less.

    How much lies between blocks does not change much from one plan to the next. What a step really
    allocates is a little different, so this is a guess: a good one saves trying.
    """
    plan = within(limit=limit)
    for _ in range(_ROUNDS):
        if not plan.swaps and not plan.remakes:
            return plan
        step = remade(trace, plan.remakes).trace
        height = height_of(step, plan.swaps, enough=room, seconds=_SECONDS)
        if height.bytes <= room or room <= height.stays or not height.load:
            return plan
        more = 1 + _TRUSTED * (height.pool / height.load - 1)
        limit = min(plan.peak_bytes - 1, int(height.stays + (room - height.stays) / more))
        try:
            plan = within(limit=limit)
        except CannotFit:
            return plan
    return plan
