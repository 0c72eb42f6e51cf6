"""`lowtide plan`: a plan for a recorded step, made offline and kept in a file."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide._cli.simulate import (
    check_policy,
    machine_with,
    plan_swaps,
    plan_tide,
    plan_within,
    show_plan,
)
from lowtide._errors import BadInput
from lowtide._files import check_writable, write_whole
from lowtide._trace.digest import digest
from lowtide._trace.file import load_trace

if TYPE_CHECKING:
    from lowtide._ir import Plan, Trace
    from lowtide._policy.file import PlanFile


@click.command(name="plan")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--budget", required=True, help='Bytes ("8GiB") or a share of the plain peak ("0.5", "50%").'
)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The file to write."
)
@click.option(
    "--policy",
    default="tide",
    show_default=True,
    type=click.Choice(["tide", "autoswap"]),
    help="Swap and recompute, or swap alone.",
)
@click.option("--no-swap", is_flag=True, help="With --policy tide: only recompute.")
@click.option("--machine", default="h200", show_default=True, help="A profile's name or a file.")
@click.option("--link", help="Replace the machine's link by one of this speed each way: 25GB/s.")
@click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="How long --policy tide may look for a better plan.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def plan_command(
    trace: Path,
    budget: str,
    output: Path,
    policy: str,
    no_swap: bool,
    machine: str,
    link: str | None,
    seconds: float,
    force: bool,
) -> None:
    """Plan the step in TRACE within a budget: what is swapped, what is recomputed, and when.

    Needs no GPU. `lowtide report TRACE PLAN` shows the plan. Exit code 3: the budget cannot be
    met.
    """
    from lowtide._policy.candidates import Reach
    from lowtide._policy.file import save_plan

    check_policy(policy, no_swap=no_swap)
    check_writable(output, force=force)
    where = machine_with(machine, link)
    step = load_trace(trace)

    def make(limit: int | None) -> "Plan":
        assert limit is not None
        if policy == "autoswap":
            return plan_swaps(step, where, limit, "best", "limit", Reach.ALL)
        return plan_tide(step, where, limit, seconds, no_swap=no_swap)

    plan, limit = plan_within(step, budget, make)
    save_plan(
        plan,
        output,
        digest=digest(step),
        machine=None if no_swap else where,
        budget_bytes=limit,
    )
    show_plan(step, plan)
    click.echo(f"wrote {output}")


def read_plan(path: Path, step: "Trace", trace: Path) -> "PlanFile":
    """The plan in `path`, if it is one for `step`, which is from the file `trace`."""
    from lowtide._policy.file import find_bad_plan, load_plan

    found = load_plan(path)
    own = digest(step)
    if found.digest != own:
        raise BadInput(
            f"{path} is a plan for another step (digest {found.digest[:12]}, {trace} has "
            f"{own[:12]}): make one for this step with `lowtide plan`"
        )
    flaw = find_bad_plan(step, found.plan)
    if flaw is not None:
        raise BadInput(f"{path} is damaged ({flaw}): make it again with `lowtide plan`")
    return found


def report_plan(
    step: "Trace", file: "PlanFile", output: Path | None, perfetto: Path | None
) -> None:
    """Print what comes of a plan for `step`, and write what is asked for."""
    from lowtide._report.plan_html import render_plan

    show_plan(step, file.plan)
    if output is not None:
        page = render_plan(step, file.plan, file.machine, budget_bytes=file.budget_bytes)
        write_whole(output, page.encode())
        click.echo(f"wrote {output}")
    if perfetto is not None:
        write_perfetto(step, file, perfetto)


def write_perfetto(step: "Trace", file: "PlanFile | None", output: Path) -> None:
    """Write the step with its plan, or as it is."""
    from lowtide._report.perfetto import render_perfetto

    plan, machine = (None, None) if file is None else (file.plan, file.machine)
    write_whole(output, render_perfetto(step, plan, machine).encode())
    click.echo(f"wrote {output}")
