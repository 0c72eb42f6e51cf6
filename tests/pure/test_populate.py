"""Fresh memory whose pages are there before they are asked for."""

import ctypes
import mmap
import threading

import pytest

from lowtide._runtime.swap import populate as populating
from lowtide._runtime.swap.populate import populate

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def resident(memory: mmap.mmap) -> int:
    """Bytes of it that the system has given, by the system's own account."""
    address = address_of(memory)
    with open("/proc/self/smaps") as file:
        inside = False
        total = 0
        for line in file:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start < address + len(memory) and address < end
            elif inside and head == "Rss:":
                total += int(line.split()[1]) << 10
    return total


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.parametrize("portion", [4 * MIB, 1 << 30])
def test_all_pages_are_there_and_nothing_else_is_touched(
    portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populating, "_PORTION", portion)
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = address_of(memory)
    before = resident(memory)
    if not populate(start + 100, 33 * MIB):
        pytest.skip("this system does not do that")
    found = resident(memory) - before
    assert 33 * MIB - 2 * PAGE <= found <= 36 * MIB  # up to the end of a large page
    assert memory[:200] == bytes(200)


def test_what_is_there_stays_as_it_is() -> None:
    memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[5 * MIB : 5 * MIB + 4] = b"tide"
    populate(address_of(memory), len(memory))
    assert memory[5 * MIB : 5 * MIB + 4] == b"tide"


def test_less_than_a_page_is_left_alone() -> None:
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = resident(memory)  # with what lies beside it
    assert populate(address_of(memory) + 1, PAGE)
    assert resident(memory) == before


def test_where_no_thread_can_be_started_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert not populate(address_of(memory), len(memory))


def test_a_system_that_refuses_says_so() -> None:
    """At addresses where there is no memory nothing happens."""
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = address_of(memory)
    del memory
    assert not populate(start, 64 * MIB)
