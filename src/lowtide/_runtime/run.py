"""An unmodified training script, run inside a fit."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lowtide._errors import BadInput, LowtideError
from lowtide._runtime.fit import Tide
from lowtide._script import as_main, execute


def run_script(
    script: Path,
    args: Sequence[str],
    tell: Callable[[str], None],
    *,
    budget: str | None = None,
    policy: str = "tide",
    host_budget: str | None = None,
    folder: Path | None = None,
    live: Callable[[str], None] | None = None,
) -> None:
    """Run `script` with `args`; what it raises ends it as it would have without lowtide.

    `tell` is given a line where something cannot be had, and the summary at the end; `live`, if
    there is somebody to watch, a line about every step.
    """
    if not script.is_file():
        raise BadInput(f"{script} is not a file: name the training script to run")
    process = os.getpid()
    tide = Tide(
        None,
        None,
        pool=True,
        tell=lambda line: tell(f"lowtide: {line}"),
        budget=budget,
        policy=policy,
        host_budget=host_budget,
        folder=None if folder is None else folder.absolute(),  # the script may change directory
        live=live,
    )
    refused = False
    with as_main(script, args), tide:
        try:
            execute(script)
        except SystemExit:
            raise
        except LowtideError:
            refused = True
            raise
        except BaseException as error:  # noqa: BLE001 - shown, and turned into the exit code
            _show(error, script)
            sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
        finally:
            forked = os.getpid() != process  # a child that the script made
            if not (forked or refused or tide.told_off):
                tell(tide.summary())


def _show(error: BaseException, script: Path) -> None:
    """The traceback as Python shows it, without the frames of lowtide."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != os.path.abspath(script):
        frame = frame.tb_next
    traceback.print_exception(error.with_traceback(frame))
