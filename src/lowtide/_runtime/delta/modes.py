"""The modes in which a step can run."""

from enum import StrEnum


class Mode(StrEnum):
    """How a step ran."""

    DYNAMIC = "dynamic"  # no plan: values leave when there is no room
    TRACED = "traced"  # the same, and recorded
    PLANNED = "planned"
    LOOSE = "loose"  # far below the budget: nobody watches
    DEPARTED = "departed"  # planned up to where it did something else, then dynamic
