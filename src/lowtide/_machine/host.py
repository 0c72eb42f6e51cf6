"""Main memory as the operating system and the container tell it."""

import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """All main memory, or what the container may use of it."""
    return min([_meminfo("MemTotal") or _physical(), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """What could be taken now without pushing anything out."""
    free = _meminfo("MemAvailable") or _physical() // 2
    return max(0, min([free, *(limit - used for limit, used in _limits())]))


def _meminfo(field: str) -> int | None:
    try:
        for row in _MEMINFO.read_text().splitlines():
            if row.startswith(f"{field}:"):
                return int(row.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> Iterator[tuple[int, int]]:
    """Of every control group around this process: its limit, and what is used of it.

    Files in the system's cache count as used until someone needs the bytes, so they are not.
    """
    for folder in _own_groups():
        limit = _number(folder / "memory.max")
        if limit is not None:
            used = _number(folder / "memory.current") or 0
            yield limit, max(0, used - _cached(folder))
    old = _GROUPS / "memory"  # version 1, where containers see their own group as the root
    limit = _number(old / "memory.limit_in_bytes")
    if limit is not None:
        yield limit, max(0, (_number(old / "memory.usage_in_bytes") or 0) - _cached(old))


def _own_groups() -> Iterator[Path]:
    yield _GROUPS
    try:
        rows = _OWN_GROUP.read_text().splitlines()
    except OSError:
        return
    for row in rows:
        if row.startswith("0::/"):
            folder = _GROUPS
            for part in Path(row[4:]).parts:
                folder = folder / part
                yield folder


def _cached(folder: Path) -> int:
    try:
        rows = (folder / "memory.stat").read_text().splitlines()
        return next((int(row.split()[1]) for row in rows if row.startswith("inactive_file ")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _number(path: Path) -> int | None:
    """What the file says; no limit is written as "max", or in version 1 as a huge number."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number < 1 << 60 else None
