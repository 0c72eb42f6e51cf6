"""The tier that planned steps copy to, as large as they need it to be."""

from collections.abc import Sequence

from lowtide._runtime.swap.script import Script
from lowtide._runtime.swap.tier import Tier

_SETTLED = 2  # steps by a plan, and all that it moves is where it says


class Below:
    """Where a plan takes the place of another, what lies below by the old one is in its way.

    So it may have to grow for a step or two, and what it grew by is given back then: once, since
    where it grows again that is needed.
    """

    def __init__(self) -> None:
        self.tier: Tier | None = None
        self._new: Script | None = None  # after which it is to be trimmed

    def prepare(self, tier: Tier | None, scripts: Sequence[Script], new: Script) -> None:
        """For these, of which one is new."""
        self.tier, self._new = tier, new
        if tier is not None:
            tier.prepare(_needed(scripts))

    def followed(self, script: Script, scripts: Sequence[Script]) -> None:
        """A step has gone by one of them."""
        if script is self._new and len(script.seconds) >= _SETTLED:
            self._new = None
            if self.tier is not None:
                self.tier.trim(_needed(scripts))


def _needed(scripts: Sequence[Script]) -> int:
    return max(script.below_bytes for script in scripts)
