"""What a step takes to be asked for: no plan makes it faster than the host asks."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide._ir import Remake, Rerun, Swap

_ACTS = 3  # of a swap: it begins to leave, is gone, and comes back


@dataclass(frozen=True, slots=True)
class Host:
    """As it was measured in steps by a plan. `seconds` is without what that plan added."""

    seconds: float
    rerun_seconds: float  # for each op that runs again
    act_seconds: float  # for each drop, and each part of a swap, with all that comes with it
    least: tuple[int, ...] = ()  # bytes: plans in which nothing smaller moves ask for less

    def step_seconds(self, remakes: Sequence[Remake], swaps: Sequence[Swap]) -> float:
        """What the host takes for a step with these."""
        reruns = count_reruns(remakes)
        acts = count_acts(remakes, swaps)
        return self.seconds + reruns * self.rerun_seconds + acts * self.act_seconds


def count_reruns(remakes: Sequence[Remake]) -> int:
    """Ops that run again."""
    return sum(isinstance(one, Rerun) for one in remakes)


def count_acts(remakes: Sequence[Remake], swaps: Sequence[Swap]) -> int:
    """What else there is to do."""
    return len(remakes) - count_reruns(remakes) + _ACTS * len(swaps)
