"""Numbers -> text with units."""


def format_bytes(count: float) -> str:
    """1536 -> "1.50 KiB"; below 1 KiB whole bytes."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
