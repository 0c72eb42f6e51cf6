"""What can go wrong, by whose hand.

LowtideError            one line for a person: what, where, what to do
├── BadInput            a file or an argument that cannot be used
├── OutOfBudget         an op needs more than the budget leaves, whatever leaves
├── ScriptFailed        the script being run raised
└── NoStep              the script ran, but no training step was found in it

LowtideWarning          something cannot be had, and training goes on without it

An `AssertionError` out of lowtide is a bug in lowtide.
"""


class LowtideError(Exception):
    """The base of every error lowtide raises on purpose."""


class BadInput(LowtideError):
    """A file or an argument that cannot be used."""


class OutOfBudget(LowtideError, RuntimeError):
    """An op needs more than the budget leaves when all that can leave has left."""


class ScriptFailed(LowtideError):
    """The script being run raised."""


class NoStep(LowtideError):
    """No training step was found."""


class LowtideWarning(UserWarning):
    """Something cannot be had, and training goes on without it."""
