"""Train PyTorch models in less memory, without touching the model or a bit of its result."""

from typing import TYPE_CHECKING, Any

from lowtide._errors import (
    BadInput,
    LowtideError,
    LowtideWarning,
    NoStep,
    OutOfBudget,
    ScriptFailed,
)
from lowtide._ir import Trace
from lowtide._layout.buffers import Buffer
from lowtide._layout.pack import Packing, pack
from lowtide._trace.file import load_trace, save_trace

if TYPE_CHECKING:
    from lowtide._runtime.fit import Tide, fit
    from lowtide._trace.api import trace

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "Buffer",
    "LowtideError",
    "LowtideWarning",
    "NoStep",
    "OutOfBudget",
    "Packing",
    "ScriptFailed",
    "Tide",
    "Trace",
    "fit",
    "load_trace",
    "pack",
    "save_trace",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Names that need torch, loaded when first asked for: everything else runs without it."""
    if name == "trace":
        from lowtide._trace.api import trace

        return trace
    if name in ("Tide", "fit"):
        from lowtide._runtime import fit

        return getattr(fit, name)
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
