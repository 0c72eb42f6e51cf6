"""Fresh memory -> the same, with its pages there.

The system gives a page when it is first touched, and clears it then. To page-lock memory touches
all of it, in one thread, a small page at a time: 1.6 GB a second. Here several threads do, by
large pages where there are any. If that fails, or in part, nothing is lost: who locks them touches
the rest. (On a machine with several memories, pages come from those that the threads are near to.)
"""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_HUGE_PAGES, _POPULATE = 14, 23  # MADV_HUGEPAGE, MADV_POPULATE_WRITE (Linux 5.14)
_HUGE = 2 << 20
_PORTION = 256 << 20  # bytes in one call
_MOST_THREADS = 8


def populate(address: int, size: int) -> bool:
    """Touch whole pages between these addresses; False: the system does not do that for us."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return True
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):  # it is no Linux
        return False
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise(start, end - start, _HUGE_PAGES)  # or small ones
    first = -(-start // _HUGE) * _HUGE  # no portion ends within a large page
    edges = [start, *range(first + _PORTION, end, _PORTION), end]
    try:
        with ThreadPoolExecutor(_threads(), "lowtide-pages") as pool:
            failed = list(
                pool.map(lambda at, to: advise(at, to - at, _POPULATE), edges[:-1], edges[1:])
            )
    except RuntimeError:  # no thread can be started
        return False
    return not any(failed)


def _threads() -> int:
    count = os.cpu_count() or 1
    with suppress(AttributeError):  # not everywhere
        count = len(os.sched_getaffinity(0))
    return min(_MOST_THREADS, count)
