"""What a pass over the step is told, and how it fails."""

from dataclasses import dataclass

from lowtide._errors import LowtideError


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
