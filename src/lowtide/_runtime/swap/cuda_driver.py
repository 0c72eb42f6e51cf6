"""The few calls of the CUDA driver that lowtide makes, without PyTorch's own cost of a call.

A copy is one of some hundreds in a step, and Python is often no more than a fraction of a
millisecond ahead of the device. PyTorch's streams, events and `copy_` take 75 µs for one, these
calls 5. The driver is there wherever PyTorch runs on CUDA.
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_PTR, _SIZE, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_SIGNATURES: dict[str, list[object]] = {
    "cuEventCreate": [_PTR, _UINT],
    "cuEventRecord": [_PTR, _PTR],
    "cuStreamWaitEvent": [_PTR, _PTR, _UINT],
    "cuMemcpyAsync": [_PTR, _PTR, _SIZE, _PTR],
    "cuLaunchKernel": [_PTR, *[_UINT] * 7, _PTR, _PTR, _PTR],
    "cuPointerGetAttribute": [_PTR, ctypes.c_int, _PTR],
    "cuDevicePrimaryCtxRetain": [_PTR, ctypes.c_int],
    "cuCtxSetCurrent": [_PTR],
}


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return driver


def _call(name: str, *arguments: object) -> None:
    """In a thread in which PyTorch has not used CUDA yet the driver knows no context."""
    function = getattr(_driver(), name)
    error = function(*arguments)
    if not error:
        return
    if error == _NO_CONTEXT:
        _check(_driver().cuCtxSetCurrent(_context(torch.cuda.current_device())), "cuCtxSetCurrent")
        error = function(*arguments)
    _check(error, name)


@functools.cache
def _context(device: int) -> int | None:
    """PyTorch's own: retained once, for as long as the program runs."""
    context = _PTR()
    error = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    _check(error, "cuDevicePrimaryCtxRetain")
    return context.value


def _check(error: int, what: str) -> None:
    if error:
        raise RuntimeError(f"CUDA error {error} in {what}")


class Events:
    """Events of one device, used again and again: who waits for one has it no longer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[int] = []

    def take(self) -> int:
        """One that nobody waits for."""
        if self._idle:
            return self._idle.pop()
        event = _PTR()
        with torch.cuda.device(self._device):
            _call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        assert event.value is not None
        return event.value

    def give(self, event: int) -> None:
        """A stream that was told to wait for it does so whatever becomes of it later."""
        self._idle.append(event)


def launch_address() -> int:
    """Of the driver's function that launches a kernel."""
    return ctypes.cast(_driver().cuLaunchKernel, _PTR).value or 0


def record(event: int, stream: int) -> None:
    """It happens when all that `stream` was given so far is done."""
    _call("cuEventRecord", event, stream)


def wait(stream: int, event: int) -> None:
    """What `stream` is given from now on comes after it."""
    _call("cuStreamWaitEvent", stream, event, 0)


def copy(to: int, of: int, count: int, stream: int) -> None:
    """Bytes from one address to another, either of which may be page-locked main memory."""
    _call("cuMemcpyAsync", to, of, count, stream)


def device_address(address: int) -> int:
    """Where the device finds page-locked memory: almost everywhere at the same address."""
    found = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(found), _DEVICE_POINTER, address)
    return found.value


def launch(kernel: int, blocks: int, threads: int, arguments: Sequence[int], stream: int) -> None:
    """A kernel that takes pointers and 64-bit numbers."""
    count = len(arguments)
    values = (ctypes.c_int64 * count)(*arguments)
    first = ctypes.addressof(values)
    places = (_PTR * count)(*range(first, first + 8 * count, 8))
    _call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, places, None)
