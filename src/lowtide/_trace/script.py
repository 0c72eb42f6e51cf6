"""An unmodified training script -> the trace of one of its steady steps.

The script runs as `python script args` would run it, recorded from its first line, and is ended
as soon as a steady step has been seen.
"""

import gc
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lowtide._errors import BadInput, NoStep, ScriptFailed
from lowtide._ir import Phase, Trace
from lowtide._script import as_main, execute
from lowtide._trace.cut import cut
from lowtide._trace.record import Recorder
from lowtide._trace.steps import Bounds, closing_marks, last_step, repeating_step
from lowtide._trace.workspace import with_cpu_workspace

_PATIENCE = 8  # how many rounds to wait for an optimizer that has not stepped yet


class _Enough(BaseException):
    """Ends the script; no `except Exception` of its own catches it."""


def trace_script(
    script: Path, args: Sequence[str], *, warmup: int, tell: Callable[[str], None]
) -> Trace:
    """Run `script` with `args` until one step after `warmup` others is recorded.

    `tell` is given a line of progress now and then.
    """
    if not script.is_file():
        raise BadInput(f"{script} is not a file: name the training script to run")
    watch = _Watch(warmup, tell)
    with watch.recorder, as_main(script, args):
        try:
            execute(script)
        except _Enough:
            pass
        except SystemExit as error:
            if os.getpid() != watch.process:
                raise  # a child that the script forked goes its own way
            if error.code not in (None, 0) and watch.bounds is None:
                raise ScriptFailed(
                    f"{script} exited with {error.code!r} before a step was recorded: "
                    f"make it run on its own first"
                ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if watch.bounds is None:
                raise ScriptFailed(_failure(script, error)) from error
        finally:
            watch.recorder.stop()
    if os.getpid() != watch.process:
        raise SystemExit(0)  # a child that the script forked ends with the script
    gc.collect()  # frames of the script may hold loaders whose workers want an orderly end
    recording = watch.recorder.recording()
    bounds = watch.bounds or _bounds_at_end(script, recording, watch)
    step = with_cpu_workspace(cut(recording, bounds.start, bounds.stop))
    return replace(step, source=" ".join([script.name, *args]))


class _Watch:
    """Decides when the recorder has seen enough."""

    def __init__(self, warmup: int, tell: Callable[[str], None]) -> None:
        self.recorder = Recorder(self._look)
        self.bounds: Bounds | None = None
        self._wanted = warmup + 1
        self._tell = tell
        self._told = 0
        self.process = os.getpid()

    def _look(self) -> None:
        if os.getpid() != self.process:
            return  # a worker that the script forked
        if self.bounds is None:
            if self.recorder.marks:
                self._look_at_marks()
            elif not self.recorder.optimizers.exist():
                # With an optimizer about, what repeats now may be an evaluation before training.
                self.bounds = self._loop_so_far()
        if self.bounds is not None:
            self.recorder.stop()
            raise _Enough

    def _loop_so_far(self) -> Bounds | None:
        """The step of a loop that trains; one that does not may have another to follow."""
        recording = self.recorder.so_far()
        bounds = repeating_step(recording, times=self._wanted)
        if bounds is None:
            return None
        ops = recording.ops[bounds.start : bounds.stop]
        return bounds if any(op.phase is Phase.BACKWARD for op in ops) else None

    def _look_at_marks(self) -> None:
        marks = self.recorder.marks
        if len(marks) > self._told:
            self._told = len(marks)
            self._tell(f"optimizer step {len(marks)}, {len(self.recorder.ops)} ops recorded")
        closing = closing_marks(marks)
        if len(closing) < self._wanted or closing[-1] is not marks[-1]:
            return
        if self.recorder.optimizers.all_have_stepped() or len(marks) >= _PATIENCE * self._wanted:
            self.bounds = last_step(marks)


def _bounds_at_end(script: Path, recording: Trace, watch: _Watch) -> Bounds:
    """The best step of a script that ended by itself."""
    marks = watch.recorder.marks
    bounds = last_step(marks) if marks else repeating_step(recording)
    if bounds is not None:
        return bounds
    if not recording.ops:
        raise NoStep(f"{script} ran no torch op: name a script that trains")
    if len(marks) == 1:
        raise NoStep(
            f"{script} made a single optimizer step, and what belongs to it cannot be told from "
            f"what came before: let it make at least two, better four"
        )
    raise NoStep(
        f"{script} never trains: {len(recording.ops)} ops, no optimizer step and no sequence of "
        f"ops that repeats; name a script that trains for a few steps"
    )


def _failure(script: Path, error: BaseException) -> str:
    name = os.path.abspath(script)
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == name
    ]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f" at line {lines[-1]}" if lines and lines[-1] else ""
    text = " ".join(str(error).split()) or "no message"
    return (
        f"{script} raised {type(error).__name__}{where} before a step was recorded: {text}; "
        f"run it without lowtide to see all of it"
    )
