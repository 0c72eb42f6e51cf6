"""The command line. Each command's docstring is its help."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from lowtide import __version__
from lowtide._analyze.summary import Summary, summarize
from lowtide._check import find_flaw
from lowtide._errors import BadInput, LowtideError
from lowtide._files import check_writable, write_whole
from lowtide._ir import Trace
from lowtide._report.html import render_timeline
from lowtide._report.terminal import render_summary
from lowtide._trace.digest import digest
from lowtide._trace.file import load_trace, save_trace
from lowtide._trace.import_csv import import_csv
from lowtide._trace.import_dtr import import_dtr
from lowtide._trace.import_snapshot import import_snapshot


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
    from lowtide._trace.script import trace_script  # needs torch; the other commands do not

    check_writable(output, force=force)
    place = output.absolute()  # the script may change directory
    trace = trace_script(
        script, args, warmup=warmup, tell=lambda line: click.echo(f"lowtide: {line}", err=True)
    )
    _finish(trace, place, output)


@cli.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the page with the timeline here."
)
@_force
def report(trace: Path, output: Path | None, force: bool) -> None:
    """Show what a recorded step holds in memory, and when: a table, and a page to look at."""
    if output is not None:
        check_writable(output, force=force)
    step = load_trace(trace)
    summary = summarize(step)
    _print(summary)
    if output is not None:
        write_whole(output, render_timeline(step, summary).encode())
        click.echo(f"wrote {output}")


@cli.group(name="import")
def import_group() -> None:
    """Convert another tool's file to a trace."""


@import_group.command(name="dtr")
@click.argument("file", type=click.Path(path_type=Path))
@_output
@_force
def import_dtr_command(file: Path, output: Path, force: bool) -> None:
    """An operator log of DTR: JSON lines, gzipped or not."""
    check_writable(output, force=force)
    _finish(import_dtr(file), output, output)


@import_group.command(name="snapshot")
@click.argument("file", type=click.Path(path_type=Path))
@_output
@_force
@click.option("--whole", is_flag=True, help="Keep the whole history, not one iteration of it.")
def import_snapshot_command(file: Path, output: Path, force: bool, whole: bool) -> None:
    """A PyTorch CUDA memory snapshot, as torch.cuda.memory._dump_snapshot writes it."""
    check_writable(output, force=force)
    _finish(import_snapshot(file, whole=whole), output, output)


@import_group.command(name="csv")
@click.argument("file", type=click.Path(path_type=Path))
@_output
@_force
def import_csv_command(file: Path, output: Path, force: bool) -> None:
    """Buffers in minimalloc's format: id,lower,upper,size."""
    check_writable(output, force=force)
    _finish(import_csv(file), output, output)


def _finish(trace: Trace, place: Path, output: Path) -> None:
    """Show and write `trace`, in this order: what cannot be shown is not written."""
    flaw = find_flaw(trace)
    if flaw is not None:
        raise BadInput(f"{output} not written: the trace cannot be true ({flaw})")
    summary = summarize(trace)
    save_trace(trace, place)
    _print(summary)
    click.echo(f"wrote {output} (digest {digest(trace)[:12]})")


def _print(summary: Summary) -> None:
    console = Console()
    console.print(render_summary(summary, console.width))
