"""The pool that stands in front of PyTorch's allocator: its native library."""

import ctypes
import functools

from lowtide._runtime.core import open_library
from lowtide._runtime.torch_build import build_pool


@functools.cache
def cuda_library() -> ctypes.CDLL:
    """Built where it is not there yet, its functions typed."""
    library = open_library(build_pool())
    library.lowtide_torch_install.restype = ctypes.c_char_p
    library.lowtide_torch_pool.restype = ctypes.c_void_p
    library.lowtide_torch_home.restype = ctypes.c_void_p
    library.lowtide_torch_home.argtypes = [ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p]
    library.lowtide_torch_arena.argtypes = [ctypes.c_int32, ctypes.c_int64]
    library.lowtide_torch_pages.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64]
    library.lowtide_torch_settle.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.lowtide_torch_adopt.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int32),
        *(ctypes.c_int64, ctypes.c_int64),
    ]
    library.lowtide_torch_exchange.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.lowtide_torch_refill.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.lowtide_torch_private.argtypes = [ctypes.c_int32]
    library.lowtide_torch_cached.restype = ctypes.c_int64
    library.lowtide_torch_cached.argtypes = [ctypes.c_int32]
    return library
