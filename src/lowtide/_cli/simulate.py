"""`lowtide simulate`: what a budget would cost, from a recorded step alone."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide._errors import BadInput
from lowtide._policy.budget import parse_bytes, parse_rate
from lowtide._trace.file import load_trace
from lowtide._units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide._ir import Machine, Plan, Trace
    from lowtide._policy.candidates import Reach

SWEEP = (100, 90, 80, 70, 66, 60, 50, 40)  # % of the plain peak
_SMALLEST_SWAPPED = 1 << 20  # bytes of a value that is worth moving, if the budget is not small
_MANY = 1000
_LATENCY_SECONDS = 5e-6  # of a copy on a link of which only the speed is given


@click.command(name="simulate")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--budget", help='Bytes ("8GiB") or a share of the plain peak ("0.5", "50%").')
@click.option(
    "--policy", default="autoswap", show_default=True, type=click.Choice(["autoswap", "tide"])
)
@click.option("--no-swap", is_flag=True, help="With --policy tide: only recompute.")
@click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="How long --policy tide may look for a better plan.",
)
@click.option(
    "--score",
    default="best",
    show_default=True,
    help="What leaves first: doa, aoa, wdoa, swdoa, vote, bayes, or best of some of them.",
)
@click.option(
    "--mode",
    default="limit",
    show_default=True,
    type=click.Choice(["limit", "free"]),
    help="Keep the budget, whatever that costs, or the lowest peak that costs no time.",
)
@click.option("--machine", default="h200", show_default=True, help="A profile's name or a file.")
@click.option(
    "--traced-on", help="The machine that TRACE is from: its times are scaled to --machine."
)
@click.option("--link", help="Replace the machine's link by one of this speed each way: 25GB/s.")
@click.option(
    "--reach",
    default="all",
    show_default=True,
    type=click.Choice(["runtime", "all"]),
    help="Move only what the runtime can move, or all that lies idle.",
)
@click.option("--sweep", is_flag=True, help="A table: budgets against scores.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate_command(
    trace: Path,
    budget: str | None,
    policy: str,
    no_swap: bool,
    seconds: float,
    score: str,
    mode: str,
    machine: str,
    traced_on: str | None,
    link: str | None,
    reach: str,
    sweep: bool,
    as_json: bool,
) -> None:
    """Simulate the step in TRACE under a budget: what it would peak at, and how long it takes.

    Needs no GPU: the step's ops take the time they were recorded with, or with --traced-on that
    time scaled by what both machines can compute and move in a second; copies take that of the
    machine's link. Exit code 3: the budget cannot be met.
    """
    from lowtide._machine.find import find_machine
    from lowtide._machine.roofline import scaled
    from lowtide._policy.candidates import Reach

    if sweep and budget is not None:
        raise BadInput("--sweep tries budgets of its own: leave --budget out")
    if not sweep and budget is None and mode == "limit":
        raise BadInput("give a --budget, or --mode free for the lowest peak, or --sweep for all")
    if policy == "tide" and (sweep or mode != "limit"):
        raise BadInput("--policy tide keeps a budget: give --budget, without --sweep or --mode")
    check_policy(policy, no_swap=no_swap)
    where = machine_with(machine, link)
    step = load_trace(trace)
    if traced_on is not None:
        step = scaled(step, find_machine(traced_on), where)
        click.echo(
            f"lowtide: times are not measured but scaled from {traced_on} to {where.name}, "
            "by a roofline of flops and bytes",
            err=True,
        )
    if sweep:
        _sweep(step, where, Reach(reach), as_json)
    else:

        def plan(limit: int | None) -> "Plan":
            if policy == "autoswap":
                return plan_swaps(step, where, limit, score, mode, Reach(reach))
            assert limit is not None
            return plan_tide(step, where, limit, seconds, no_swap=no_swap)

        show_plan(step, plan_within(step, budget, plan)[0], as_json=as_json)


def check_policy(policy: str, *, no_swap: bool) -> None:
    """Refuse options that contradict each other."""
    if no_swap and policy != "tide":
        raise BadInput(f"--policy {policy} does nothing but swap: leave --no-swap out")


def machine_with(name: str, link: str | None) -> "Machine":
    """The machine of that name, with the link that is asked for."""
    from lowtide._machine.find import find_machine
    from lowtide._machine.link import line

    found = find_machine(name)
    if link is None:
        return found
    each_way = line(_LATENCY_SECONDS, parse_rate(link))
    return dataclasses.replace(found, out=each_way, back=each_way)


def plan_within(
    step: "Trace", budget: str | None, make_plan: "Callable[[int | None], Plan]"
) -> "tuple[Plan, int | None]":
    """The plan and the budget in bytes; one that cannot be met ends the program with 3."""
    from lowtide._analyze.load import find_peak
    from lowtide._policy.autoswap import CannotFit

    peak = find_peak(step).bytes
    limit = None if budget is None else parse_bytes(budget, peak)
    try:
        return make_plan(limit), limit
    except CannotFit as error:
        share = error.smallest_bytes / peak
        click.echo(
            f"lowtide: {error}; the smallest budget that can be met is {error.smallest_bytes} "
            f"({format_bytes(error.smallest_bytes)}, {share:.1%} of the plain peak)",
            err=True,
        )
        sys.exit(3)


def show_plan(step: "Trace", plan: "Plan", *, as_json: bool = False) -> None:
    """Print what comes of a plan: a few lines, or one JSON object."""
    from lowtide._analyze.load import rounded_bytes
    from lowtide._ir import Rerun
    from lowtide._simulate.remade import remade

    values = remade(step, plan.remakes).trace.values
    swapped = sum(rounded_bytes(step, values[swap.value]) for swap in plan.swaps)
    again = [step.ops[one.op].seconds for one in plan.remakes if isinstance(one, Rerun)]
    if as_json:
        figures = {
            "plain_peak_bytes": plan.plain_peak_bytes,
            "peak_bytes": plan.peak_bytes,
            "plain_seconds": plan.plain_seconds,
            "seconds": plan.seconds,
            "overhead": _ratio(plan) - 1,
            "swapped_bytes": swapped,
            "recomputed_seconds": sum(again),
        }
        click.echo(json.dumps(figures))
        return
    click.echo(
        f"peak {format_bytes(plan.peak_bytes)} of {format_bytes(plan.plain_peak_bytes)} plain "
        f"({plan.peak_bytes / plan.plain_peak_bytes:.1%})"
    )
    click.echo(
        f"step {format_seconds(plan.seconds)} of {format_seconds(plan.plain_seconds)} plain "
        f"({_ratio(plan):.3f}×)"
    )
    parts = []
    if again:
        parts.append(f"{len(again)} ops run again, {format_seconds(sum(again))}")
    if plan.swaps or not again:
        parts.append(f"{len(plan.swaps)} swaps, {format_bytes(swapped)} each way")
    where = f" on {plan.machine}" if plan.machine else ""
    click.echo(f"{'; '.join(parts)}; {plan.policy}{where}")


def _sweep(step: "Trace", machine: "Machine", reach: "Reach", as_json: bool) -> None:
    import importlib.util

    from lowtide._analyze.load import find_peak
    from lowtide._policy.autoswap import SCORES, CannotFit

    has_optuna = importlib.util.find_spec("optuna") is not None
    scores = [score for score in SCORES if score != "bayes" or has_optuna]
    peak = find_peak(step).bytes
    ratios: dict[int, dict[str, float | None]] = {}
    for percent in SWEEP:
        limit = peak * percent // 100
        row = ratios[percent] = {}
        for score in scores:
            try:
                row[score] = _ratio(plan_swaps(step, machine, limit, score, "limit", reach))
            except CannotFit:
                row[score] = None
    free = {
        score: plan_swaps(step, machine, None, score, "free", reach).peak_bytes for score in scores
    }
    if as_json:
        rows = [{"budget_bytes": peak * p // 100, "ratios": row} for p, row in ratios.items()]
        found = {"plain_peak_bytes": peak, "rows": rows, "free_peak_bytes": free}
        click.echo(json.dumps(found))
        return
    _show_sweep(machine.name, peak, scores, ratios, free)


def _show_sweep(
    machine: str,
    peak: int,
    scores: list[str],
    ratios: dict[int, dict[str, float | None]],
    free: dict[str, int],
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("budget", "bytes", title=f"step time over plain, {machine}", title_justify="left")
    for score in scores:
        table.add_column(score, justify="right")
    for percent, row in ratios.items():
        cells = ["-" if (ratio := row[score]) is None else f"{ratio:.3f}" for score in scores]
        table.add_row(f"{percent} %", format_bytes(peak * percent // 100), *cells)
    table.add_section()
    table.add_row("free", "lowest peak", *(f"{free[score] / peak:.1%}" for score in scores))
    Console().print(table)


def plan_tide(
    step: "Trace", machine: "Machine", limit: int, seconds: float, *, no_swap: bool
) -> "Plan":
    """By tide, which looks for so many seconds."""
    from lowtide._policy.tide import tide

    return tide(
        step,
        None if no_swap else machine,
        limit=limit,
        seconds=seconds,
        smallest=min(_SMALLEST_SWAPPED, limit // _MANY),
        host_budget=machine.host_bytes,
    )


def plan_swaps(
    step: "Trace",
    machine: "Machine",
    limit: int | None,
    score: str,
    mode: str,
    reach: "Reach",
) -> "Plan":
    """By autoswap."""
    from lowtide._policy.autoswap import autoswap
    from lowtide._policy.candidates import Reach, positions

    return autoswap(
        step,
        machine,
        limit=limit,
        score=score,
        mode="free" if mode == "free" else "limit",
        host_budget=machine.host_bytes,
        reach=reach,
        positions=positions(step) if reach is Reach.RUNTIME else None,
    )


def _ratio(plan: "Plan") -> float:
    return plan.seconds / plan.plain_seconds if plan.plain_seconds > 0 else 1.0
