"""The command line. Each command's docstring is its help.

What takes long to import (torch, numpy, rich), and what only one command needs, is imported there.
"""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from lowtide import __version__
from lowtide._check import find_flaw
from lowtide._cli.doctor import doctor_command
from lowtide._cli.live import LiveLine
from lowtide._cli.plan import plan_command, read_plan, report_plan, write_perfetto
from lowtide._cli.simulate import simulate_command
from lowtide._errors import BadInput, LowtideError
from lowtide._files import check_writable, write_whole
from lowtide._ir import Trace
from lowtide._layout.buffers import Buffer, check_buffers, rounded
from lowtide._layout.explain import Conflict, crowded, tangled
from lowtide._layout.from_trace import step_buffers
from lowtide._layout.pack import Method, Packing, pack
from lowtide._layout.table import is_layout, read_buffers, write_buffers
from lowtide._report.layout_text import MOST_BUFFERS, draw_layout
from lowtide._trace.digest import digest
from lowtide._trace.file import load_trace, save_trace
from lowtide._units import format_bytes

if TYPE_CHECKING:
    from lowtide._analyze.summary import Summary


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a lowtide error is one line and exit code 2."""
    try:
        cli.main(args=args, prog_name="lowtide")
    except LowtideError as error:
        click.echo(f"lowtide: {error}", err=True)
        sys.exit(2)


@click.group()
@click.version_option(__version__)
def cli() -> None:
    """Train PyTorch models in less memory than they need."""


_output = click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write."
)
_force = click.option("--force", is_flag=True, help="Replace the file if it exists.")


@cli.command(
    name="trace",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@_output
@_force
@click.option(
    "--warmup",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Steps to let pass before the one recorded.",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def trace_command(
    output: Path, force: bool, warmup: int, script: Path, args: tuple[str, ...]
) -> None:
    """Record one steady training step of SCRIPT, which is run unchanged with ARGS.

    A step ends where an optimizer steps; loops without an optimizer are recognised by their
    repeating ops. The script is ended as soon as the step is recorded.
    """
    from lowtide._trace.script import trace_script

    check_writable(output, force=force)
    place = output.absolute()  # the script may change directory
    trace = trace_script(
        script, args, warmup=warmup, tell=lambda line: click.echo(f"lowtide: {line}", err=True)
    )
    _finish(trace, place, output)


@cli.command(
    name="run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--budget",
    help='What the device may hold: bytes ("16GiB"), a share of the plain peak ("0.5"), or "free": '
    "as little as costs no time.",
)
@click.option(
    "--pool-only",
    is_flag=True,
    help="Only lay memory out without fragments: nothing is swapped.",
)
@click.option(
    "--policy",
    default="tide",
    show_default=True,
    help="How: tide swaps and recomputes, op by op at first and then by a plan; delta does without "
    "a plan; autoswap plans, and only swaps; dtr and delta-as-published are there to compare with.",
)
@click.option("--host-budget", help="The most main memory to pin for what is swapped.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where the file for what is swapped lies, if there is no GPU.",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_command(
    budget: str | None,
    pool_only: bool,
    policy: str,
    host_budget: str | None,
    folder: Path | None,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Train with SCRIPT, unchanged, within a budget of bytes; ARGS go to it.

    What it does and prints, and its exit code, are its own. On a terminal a line tells of the
    last step; at the end a summary of the memory is added on the standard error.
    """
    if pool_only == (budget is not None):
        raise BadInput("give lowtide run either a --budget or --pool-only")
    from lowtide._runtime.run import run_script

    line = LiveLine()

    def tell(text: str) -> None:
        line.clear()
        click.echo(text, err=True)

    run_script(
        script,
        args,
        tell=tell,
        live=line.show if line.can_be_seen() else None,
        budget=budget,
        policy=policy,
        host_budget=host_budget,
        folder=folder,
    )


@cli.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("plan", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the page here.")
@click.option(
    "--perfetto", type=click.Path(path_type=Path), help="Write the step for ui.perfetto.dev here."
)
@_force
def report(
    trace: Path, plan: Path | None, output: Path | None, perfetto: Path | None, force: bool
) -> None:
    """Show what a recorded step holds in memory, and when: figures, and a page to look at.

    With a PLAN of `lowtide plan`: what becomes of the step by it.
    """
    from lowtide._analyze.summary import summarize
    from lowtide._report.html import render_timeline

    if output is not None and output == perfetto:
        raise BadInput(f"{output} cannot be both the page and the step: name two files")
    for path in (output, perfetto):
        if path is not None:
            check_writable(path, force=force)
    step = load_trace(trace)
    if plan is not None:
        report_plan(step, read_plan(plan, step, trace), output, perfetto)
        return
    summary = summarize(step)
    _print(summary)
    if output is not None:
        write_whole(output, render_timeline(step, summary).encode())
        click.echo(f"wrote {output}")
    if perfetto is not None:
        write_perfetto(step, None, perfetto)


@cli.group(name="import")
def import_group() -> None:
    """Convert another tool's file to a trace."""


@import_group.command(name="dtr")
@click.argument("file", type=click.Path(path_type=Path))
@_output
@_force
def import_dtr_command(file: Path, output: Path, force: bool) -> None:
    """An operator log of DTR: JSON lines, gzipped or not."""
    from lowtide._trace.import_dtr import import_dtr

    check_writable(output, force=force)
    _finish(import_dtr(file), output, output)


@import_group.command(name="snapshot")
@click.argument("file", type=click.Path(path_type=Path))
@_output
@_force
@click.option("--whole", is_flag=True, help="Keep the whole history, not one iteration of it.")
def import_snapshot_command(file: Path, output: Path, force: bool, whole: bool) -> None:
    """A PyTorch CUDA memory snapshot, as torch.cuda.memory._dump_snapshot writes it."""
    from lowtide._trace.import_snapshot import import_snapshot

    check_writable(output, force=force)
    _finish(import_snapshot(file, whole=whole), output, output)


@import_group.command(name="csv")
@click.argument("file", type=click.Path(path_type=Path))
@_output
@_force
def import_csv_command(file: Path, output: Path, force: bool) -> None:
    """Buffers in minimalloc's format: id,lower,upper,size."""
    from lowtide._trace.import_csv import import_csv

    check_writable(output, force=force)
    _finish(import_csv(file), output, output)


@cli.command(name="pack")
@click.argument("problem", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the layout here.")
@click.option(
    "--method",
    default=Method.SEARCH.value,
    show_default=True,
    type=click.Choice([method.value for method in Method]),
)
@click.option("--capacity", type=int, help="Bytes there are: stop at the first layout within.")
@click.option("--align", default=1, show_default=True, help="Offsets are multiples of it.")
@click.option(
    "--period", type=int, help="The step repeats after so many moments; lives may go on into it."
)
@click.option("--time-limit", default=5.0, show_default=True, help="Seconds to search.")
@click.option("--seed", default=0, show_default=True, help="Another one searches elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the layout on a page.")
@_force
def pack_command(
    problem: Path,
    output: Path | None,
    method: str,
    capacity: int | None,
    align: int,
    period: int | None,
    time_limit: float,
    seed: int,
    as_json: bool,
    picture: Path | None,
    force: bool,
) -> None:
    """Give each buffer of PROBLEM an offset so that together they need the fewest bytes.

    PROBLEM is a CSV file with the columns id,lower,upper,size, where a buffer lives for
    lower <= t < upper (offset: it has to be there; lane: 0, or 1 for buffers that copies between
    devices touch), or a recorded step (.trace), which repeats. The layout is the same CSV with
    every offset filled in. Exit code 3: no layout within --capacity was found.
    """
    if math.isnan(time_limit) or time_limit < 0:
        raise BadInput(f"--time-limit is {time_limit}: give the seconds it may take")
    if output is not None and output == picture:
        raise BadInput(f"{output} cannot be both the layout and its picture: name two files")
    for path in (output, picture):
        if path is not None:
            own = path == output and is_layout(path) and not _same(path, problem)
            check_writable(path, force=force or own)
    if capacity is not None and capacity < 0:
        raise BadInput(f"--capacity is {capacity}: give the bytes there are")
    buffers, period = _read_problem(problem, period)
    if capacity is not None:
        check_buffers(buffers, align=align, period=period)
        conflict = crowded(buffers, capacity, align=align, period=period)
        if conflict is not None:
            _cannot(capacity, conflict, align=align)
    packing = pack(
        buffers,
        method=method,
        capacity=capacity,
        align=align,
        period=period,
        seconds=time_limit,
        seed=seed,
    )
    if packing.note:
        click.echo(f"lowtide: {packing.note}", err=True)
    if capacity is not None and packing.height > capacity:
        patience = max(1.0, time_limit)
        conflict = tangled(buffers, capacity, align=align, period=period, seconds=patience)
        _cannot(capacity, conflict, packing, time_limit, align=align)
    if output is not None:
        write_whole(output, write_buffers(packing.buffers))
    if picture is not None:
        from lowtide._report.layout_html import render_layout

        write_whole(picture, render_layout(packing, problem.name, period=period).encode())
    if as_json:
        keys = ("height", "max_load", "ratio", "seconds", "optimal", "method")
        click.echo(json.dumps({key: getattr(packing, key) for key in keys}))
        return
    _show(packing, period)
    for path in (output, picture):
        if path is not None:
            click.echo(f"wrote {path}")


def _same(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def _read_problem(path: Path, period: int | None) -> tuple[list[Buffer], int | None]:
    if path.suffix != ".trace":
        return read_buffers(path), period
    if period is not None:
        raise BadInput("--period is for CSV files: a trace has its own, the number of its ops")
    buffers, ops = step_buffers(load_trace(path))
    if not buffers:
        raise BadInput(f"{path} holds nothing on its device: record a step that does")
    return buffers, ops


def _show(packing: Packing, period: int | None) -> None:
    if len(packing.buffers) <= MOST_BUFFERS:
        width = min(shutil.get_terminal_size().columns, 100)
        for line in draw_layout(packing.buffers, width=width, period=period):
            click.echo(line)
    proved = ", proved lowest" if packing.optimal else ""
    click.echo(
        f"{len(packing.buffers):,} buffers in {packing.height} bytes "
        f"({format_bytes(packing.height)}), {packing.ratio:.4f} of the max load{proved}; "
        f"{packing.method}, {packing.seconds:.3g} s"
    )


def _cannot(
    capacity: int,
    conflict: Conflict | None,
    packing: Packing | None = None,
    seconds: float = 0.0,
    *,
    align: int,
) -> NoReturn:
    """Say why there is no layout within the capacity, and end with 3."""
    if conflict is None:
        assert packing is not None
        why = f"the lowest found in {seconds:g} s is {packing.height}: allow more, or more time"
    else:
        names = [f"{b.name} ({b.size})" for b in conflict.buffers]
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        need = sum(rounded(buffer.size, align) for buffer in conflict.buffers)
        together = (
            "cannot all lie below it, in whatever order"
            if conflict.moment is None
            else f"are all alive at {conflict.moment} and need {need}"
        )
        why = f"{len(names)} buffers {together}: {shown}"
    click.echo(f"lowtide: no layout within {capacity} bytes: {why}", err=True)
    sys.exit(3)


def _finish(trace: Trace, place: Path, output: Path) -> None:
    """Show and write `trace`, in this order: what cannot be shown is not written."""
    from lowtide._analyze.summary import summarize

    flaw = find_flaw(trace)
    if flaw is not None:
        raise BadInput(f"{output} not written: the trace cannot be true ({flaw})")
    summary = summarize(trace)
    save_trace(trace, place)
    _print(summary)
    click.echo(f"wrote {output} (digest {digest(trace)[:12]})")


def _print(summary: "Summary") -> None:
    from rich.console import Console

    from lowtide._report.terminal import render_summary

    console = Console()
    console.print(render_summary(summary, console.width))


cli.add_command(doctor_command)
cli.add_command(plan_command)
cli.add_command(simulate_command)
