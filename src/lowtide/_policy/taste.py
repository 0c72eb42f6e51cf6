"""What a pass over the step is told, and how it fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide._errors import LowtideError

Weights = npt.NDArray[np.float64]


class Stuck(LowtideError):
    """Nothing more can be dropped: so many bytes are needed at once."""

    def __init__(self, op: int, needed_bytes: int) -> None:
        super().__init__(f"op {op} needs {needed_bytes} bytes at once")
        self.op = op
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class Taste:
    """The powers of what dropping a value is judged by."""

    cost: float = 1.0
    size: float = 1.0
    distance: float = 1.0
    around: bool = True  # whether what is gone around a value counts


def quarters(power: float) -> int:
    """A power in quarters: others are not used, since roots of these have one right result."""
    found = round(4 * power)
    assert found == 4 * power
    assert found > 0
    return found


@dataclass(frozen=True, slots=True)
class Stays:
    """What swaps mean for a pass: by value, and by the position at which something happens."""

    there: Sequence[bool]  # when the step begins
    below: Sequence[bool]  # likewise
    from_on: Sequence[int]  # when it can be dropped
    releases: Mapping[int, Sequence[int]]
    fetches: Mapping[int, Sequence[int]]
