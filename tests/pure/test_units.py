import pytest

from lowtide._units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**30, "1.00 GiB"), (2**50, "1024.00 TiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 µs"), (3e-8, "30 ns")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
