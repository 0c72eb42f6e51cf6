"""An independent count of CPU memory: PyTorch's allocator reporting to PyTorch's own profiler.

Shares nothing with the recorder: no dispatch mode, no hooks, no weak references. The profiler
runs from before the model is built, so that what is alive is known to the byte.
"""

from collections.abc import Callable

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function


def cpu_peak_bytes(build: Callable[[], Callable[[], object]], steps: int) -> int:
    """Build, train `steps` steps, and count the highest number of bytes held in the last one."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build()
        for i in range(steps):
            with record_function(f"independent step {i}"):
                step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    last = next(event for event in events if event.name() == f"independent step {steps - 1}")
    moves = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    held = peak = 0
    for at, size in moves:
        held += size
        if last.start_ns() <= at <= last.end_ns():
            peak = max(peak, held)
    return peak
