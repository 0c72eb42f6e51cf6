"""`lowtide doctor`: what this machine has, measured, and what of lowtide works on it."""

import importlib.util
import json
import platform
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from lowtide import __version__
from lowtide._ir import Link, Machine
from lowtide._machine.cache import cache_folder
from lowtide._machine.file import machine_document
from lowtide._machine.link import seconds
from lowtide._native import NoNative, find_compiler
from lowtide._units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

_EXTRAS = {"exact": "ortools", "bayes": "optuna"}  # the package behind each


@dataclass(frozen=True, slots=True)
class Findings:
    """What the doctor found; an empty reason means that it works."""

    torch: str
    device: str  # "cuda:0", or "cpu"
    compiler: str  # "" where there is none
    no_pool: str  # why the pool cannot be used here
    extras: tuple[tuple[str, bool], ...]
    machine: Machine


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--again", is_flag=True, help="Measure anew instead of using what is remembered.")
def doctor_command(as_json: bool, again: bool) -> None:
    """Measure this machine, and say what works on it.

    The measurement takes a few seconds and is remembered, in $LOWTIDE_CACHE or the user's cache
    folder; --again replaces it.
    """
    findings = examine(again=again)
    if as_json:
        click.echo(json.dumps(_document(findings), indent=2))
        return
    from rich.console import Console

    console = Console()
    for table in _tables(findings):
        console.print(table)
        console.print()


def examine(*, again: bool) -> Findings:
    """Look at everything; measures what is not remembered."""
    import torch

    from lowtide._machine.measure import machine_here

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    compiler = _foundfind_compiler()
    return Findings(
        torch=torch.__version__,
        device=str(device),
        compiler=compiler,
        no_pool=_why_no_pool(cuda, compiler),
        extras=tuple(
            (extra, importlib.util.find_spec(package) is not None)
            for extra, package in _EXTRAS.items()
        ),
        machine=machine_here(
            device, lambda line: click.echo(f"lowtide: {line}", err=True), again=again
        ),
    )


def _foundfind_compiler() -> str:
    command = (find_compiler() or "").split()
    return (shutil.which(command[0]) or "") if command else ""


def _why_no_pool(cuda: bool, compiler: str) -> str:
    """Nothing is built to find out."""
    if not cuda:
        return "there is no CUDA device"
    if not compiler:
        return "there is no C++ compiler: install one, or name it with CXX"
    from lowtide._runtime.torch_build import recipe

    try:
        found = recipe()
    except NoNative as reason:
        return str(reason)
    missing = not all(folder.is_dir() for folder in found.folders)
    return f"this installation lacks {found.what}: install lowtide again" if missing else ""


def _document(findings: Findings) -> dict[str, Any]:
    return {
        "lowtide": __version__,
        "python": platform.python_version(),
        "torch": findings.torch,
        "device": findings.device,
        "compiler": findings.compiler or None,
        "pool": not findings.no_pool,
        "pool_reason": findings.no_pool or None,
        "extras": dict(findings.extras),
        "machine": machine_document(findings.machine),
    }


def _tables(findings: Findings) -> "list[Table]":
    from rich.table import Table
    from rich.text import Text

    facts, links = (Table(box=None, padding=(0, 1), pad_edge=False) for _ in range(2))
    facts.show_header = False
    facts.add_column(no_wrap=True)
    facts.add_column()
    for label, text in _facts(findings):
        facts.add_row(label, Text(text))
    links.add_column("one copy of")
    for head in ("out", "", "back", ""):
        links.add_column(head, justify="right", no_wrap=True)
    machine = findings.machine
    for size in machine.out.bytes:
        cells = [cell for link in (machine.out, machine.back) for cell in _speed(link, size)]
        links.add_row(format_bytes(size), *cells)
    return [facts, links]


def _facts(findings: Findings) -> list[tuple[str, str]]:
    machine = findings.machine
    cuda = findings.device != "cpu"
    rates = [f"{dtype} {rate / 1e12:.3g}" for dtype, rate in machine.flops_per_second]
    folder = cache_folder()
    return [
        ("lowtide", f"{__version__}, Python {platform.python_version()}"),
        ("torch", findings.torch),
        ("device", machine.name if cuda else "no CUDA: main memory and a file"),
        ("device memory", format_bytes(machine.device_bytes)),
        ("memory speed", f"{machine.memory_bytes_per_second / 1e9:.3g} GB/s"),
        *([("TFLOP/s", ", ".join(rates))] if rates else []),
        (
            "host memory" if cuda else "file tier",
            f"{format_bytes(machine.host_bytes)} may be taken",
        ),
        ("both ways at once", f"each keeps {machine.together:.0%} of its speed"),
        ("while copying", f"kernels are {machine.drag:.1%} later"),
        ("compiler", findings.compiler or "none: lowtide works, its layout search is slower"),
        ("pool", f"no: {findings.no_pool}" if findings.no_pool else "yes, built on first use"),
        *(
            (f"extra {extra}", "installed" if there else f"no: pip install 'lowtide[{extra}]'")
            for extra, there in findings.extras
        ),
        ("remembered in", str(folder) if folder else "nowhere: there is no home folder"),
    ]


def _speed(link: Link, size: int) -> tuple[str, str]:
    time = seconds(link, size)
    return format_seconds(time), f"{size / time / 1e9:.3g} GB/s"
