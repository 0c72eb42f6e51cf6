"""Measured machines, kept between runs. A cache that cannot be used is as if it were empty."""

import os
import re
from pathlib import Path

from lowtide._errors import BadInput
from lowtide._ir import Machine
from lowtide._machine.file import load_machine, save_machine


def remembered(name: str) -> Machine | None:
    """The machine of that name as it was measured before, if it was."""
    path = _path(name)
    if path is None or not path.is_file():
        return None
    try:
        machine = load_machine(path)
    except BadInput:
        return None
    return machine if machine.name == name else None  # two names may share a file


def remember(machine: Machine) -> Path | None:
    """Keep `machine`; the file it is in, or None where none could be written."""
    path = _path(machine.name)
    if path is None:
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_machine(machine, path)
    except (OSError, BadInput):
        return None
    return path


def cache_folder() -> Path | None:
    """Where they are kept; None for a user without a home."""
    own = os.environ.get("LOWTIDE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "lowtide"
    except RuntimeError:
        return None


def _path(name: str) -> Path | None:
    folder = cache_folder()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:100]
    return None if folder is None else folder / f"machine-{slug or 'unnamed'}.json"
