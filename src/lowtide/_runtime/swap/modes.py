"""How a step runs by swapping alone."""

from enum import StrEnum


class Mode(StrEnum):
    """How a step runs."""

    CRUDE = "crude"  # no plan: what can leave does when memory is short
    TRACED = "traced"  # the same, and recorded
    PLANNED = "planned"
    DEPARTED = "departed"  # planned up to where it did something else, then crude
    PLAIN = "plain"  # nothing moves in such steps, and there is no budget to hold
