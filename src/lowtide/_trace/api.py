"""`lowtide.trace`: a function that trains one step -> the trace of one steady step."""

from collections.abc import Callable

from lowtide._errors import NoStep
from lowtide._ir import Trace
from lowtide._trace.cut import cut
from lowtide._trace.record import Recorder
from lowtide._trace.workspace import with_cpu_workspace


def trace(step_fn: Callable[[], object], *, warmup: int = 2) -> Trace:
    """Record one steady training step.

    `step_fn` is called `warmup` + 2 times, for real: the model trains. The warm-up calls run as
    ever (they create optimizer state and let libraries choose their algorithms); the last call is
    the one recorded. The call before it is watched too, because what it leaves behind, such as
    gradients and a loss still referred to, is part of a steady step.

    Nothing stays behind: hooks are removed, also when `step_fn` raises, and no tensor is held.
    """
    for _ in range(warmup):
        step_fn()
    with Recorder() as recorder:
        recorder.measures = False
        step_fn()
        recorder.measures = True
        recorder.mark()
        step_fn()
        recorder.mark()
    start, stop = (mark.at for mark in recorder.marks if mark.optimizer == -1)
    if start == stop:
        raise NoStep("the step ran no torch op: pass a function that trains one step")
    return with_cpu_workspace(cut(recorder.recording(), start, stop))
