"""The few calls of the CUDA driver that copying takes, without PyTorch's own cost of a call.

A copy is one of some hundreds in a step, and Python is often no more than a fraction of a
millisecond ahead of the device. PyTorch's streams, events and `copy_` take 75 µs for one, these
calls 5. The driver is there wherever PyTorch runs on CUDA.
"""

import ctypes
import functools

import torch

_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_PTR, _SIZE, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_SIGNATURES: dict[str, list[object]] = {
    "cuEventCreate": [_PTR, _UINT],
    "cuEventRecord": [_PTR, _PTR],
    "cuStreamWaitEvent": [_PTR, _PTR, _UINT],
    "cuMemcpyAsync": [_PTR, _PTR, _SIZE, _PTR],
    "cuPointerGetAttribute": [_PTR, ctypes.c_int, _PTR],
}


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return driver


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
            _check(_driver().cuEventCreate(ctypes.byref(event), _NO_TIMING), "cuEventCreate")
        assert event.value is not None
        return event.value

    def give(self, event: int) -> None:
        """A stream that was told to wait for it does so whatever becomes of it later."""
        self._idle.append(event)


def record(event: int, stream: int) -> None:
    """It happens when all that `stream` was given so far is done."""
    _check(_driver().cuEventRecord(event, stream), "cuEventRecord")


def wait(stream: int, event: int) -> None:
    """What `stream` is given from now on comes after it."""
    _check(_driver().cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")


def copy(to: int, of: int, count: int, stream: int) -> None:
    """Bytes from one address to another, either of which may be page-locked main memory."""
    _check(_driver().cuMemcpyAsync(to, of, count, stream), "cuMemcpyAsync")


def device_address(address: int) -> int:
    """Where the device finds page-locked memory: almost everywhere at the same address."""
    found = ctypes.c_uint64()
    error = _driver().cuPointerGetAttribute(ctypes.byref(found), _DEVICE_POINTER, address)
    _check(error, "cuPointerGetAttribute")
    return found.value
