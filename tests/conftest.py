"""What takes longest begins first: else one worker is left with it at the end."""

import gc
import sys

import pytest

_LONG = (
    "test_delta_random.py",
    "test_the_wrapper_keeps_its_promises",
    "test_the_pure_tier_runs_without_torch",
    "test_sixty_percent_of_the_peak_are_enough",
    "test_a_script_runs_within_a_budget",
    "test_the_demo_trains_in_half_the_memory",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in item.nodeid for name in _LONG))


_modules = 0  # that were there when garbage was last collected


def pytest_runtest_setup() -> None:
    """What imports have made stays: to look through all of that for garbage took half of the time.

    Tests look for garbage, and lowtide for tensors, among what is younger.
    """
    global _modules
    if len(sys.modules) != _modules:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()
