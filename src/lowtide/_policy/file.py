"""Plan <-> a versioned JSON file, with all that is needed to look at the plan again.

The file names the trace that it is a plan for by its digest, and holds the machine whose link the
copies were planned on: a measured link has no name by which it could be found elsewhere.
"""

import json
import math
import string
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, get_args

from lowtide._check import find_flaw
from lowtide._errors import BadInput
from lowtide._files import read_whole, write_whole
from lowtide._ir import Machine, Plan, Remake, Rerun, Swap, Trace
from lowtide._machine.file import decode_machine, machine_document
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.remade import remade

FORMAT = "lowtide.plan"
VERSION = 1

_AGAIN = "make it again with `lowtide plan`"
_MOST = 1 << 60  # sums of such numbers stay exact in 64 bits
_REMAKES: dict[str, Callable[[Any, Any], Remake]] = {
    kind.__name__.lower(): kind for kind in get_args(Remake)
}


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a file says."""

    plan: Plan
    digest: str  # of the trace
    machine: Machine | None  # None: nothing is swapped
    budget_bytes: int | None


def save_plan(
    plan: Plan,
    path: str | Path,
    *,
    digest: str,
    machine: Machine | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Write `plan`, whole or not at all; `digest` is that of its trace."""
    write_whole(Path(path), encode_plan(PlanFile(plan, digest, machine, budget_bytes)))


def load_plan(path: str | Path) -> PlanFile:
    """Read a plan, checking all that can be checked without its trace."""
    return decode_plan(read_whole(Path(path)), str(path))


def encode_plan(file: PlanFile) -> bytes:
    """The file form: one line a field."""
    plan = file.plan
    document = {
        "format": FORMAT,
        "version": VERSION,
        "trace": file.digest,
        "policy": plan.policy,
        "machine": plan.machine,
        "budget_bytes": file.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "seconds": plan.seconds,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "plain_seconds": plan.plain_seconds,
        "swaps": [astuple(swap) for swap in plan.swaps],
        "remakes": [[type(one).__name__.lower(), *astuple(one)] for one in plan.remakes],
        "link": None if file.machine is None else machine_document(file.machine),
    }
    lines = [f"{_json(name)}: {_json(thing)}" for name, thing in document.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def decode_plan(content: bytes, where: str) -> PlanFile:
    """The plan in `content`; `where` names the file in errors."""
    if not content:
        raise BadInput(f"{where} is empty: {_AGAIN}")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not a lowtide plan: make one with `lowtide plan`") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadInput(f"{where} is not a lowtide plan: make one with `lowtide plan`")
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise BadInput(
            f"{where} has plan version {version!r:.40}, this lowtide reads up to {VERSION}: "
            f"upgrade lowtide or {_AGAIN}"
        )
    try:
        return _build(document, where)
    except KeyError as error:
        raise BadInput(f"{where} is damaged ({error} is missing): {_AGAIN}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{where} is damaged ({error}): {_AGAIN}") from error


def find_bad_plan(trace: Trace, plan: Plan) -> str | None:
    """The first thing in `plan` that cannot be done to the step in `trace`, or None.

    For plans from elsewhere, and fast; `run_remakes` is the check that shares no code.
    """
    ops, values = len(trace.ops), len(trace.values)
    if not ops:
        return "its step has no ops"
    for number, one in enumerate(plan.remakes):
        what, known = (one.op, one.before) if isinstance(one, Rerun) else (one.value, values)
        if not (one.before <= ops and what < known):
            return f"remake {number} names an op or a value that is not there"
    try:
        step = remade(trace, plan.remakes)
    except KeyError as error:
        return f"value {error} is gone when it is needed"
    flaw = find_flaw(step.trace)
    if flaw is not None:
        return flaw
    kept = {step.old[number] for number, value in enumerate(step.trace.values) if value.after}
    for number, value in enumerate(trace.values):
        if value.after and number not in kept:
            return f"value {number} outlives the step, and is gone when it ends"
    return find_bad_swap(step.trace, plan.swaps)


def _build(document: dict[str, Any], where: str) -> PlanFile:
    link, budget = document["link"], document["budget_bytes"]
    digest = _text(document["trace"])
    if len(digest) != 64 or not set(digest) <= set(string.hexdigits):
        raise ValueError(f"{digest!r:.40} is not the digest of a trace")
    plan = Plan(
        swaps=tuple(_swap(row) for row in _list(document["swaps"])),
        peak_bytes=_whole(document["peak_bytes"]),
        seconds=_seconds(document["seconds"]),
        plain_peak_bytes=_whole(document["plain_peak_bytes"]),
        plain_seconds=_seconds(document["plain_seconds"]),
        policy=_text(document["policy"]),
        machine=_text(document["machine"]),
        remakes=tuple(_remake(row) for row in _list(document["remakes"])),
    )
    if plan.swaps and link is None:
        raise ValueError("it swaps, but says nothing of the link")
    return PlanFile(
        plan=plan,
        digest=digest,
        machine=None if link is None else decode_machine(_json(link).encode(), where),
        budget_bytes=None if budget is None else _whole(budget),
    )


def _swap(row: Any) -> Swap:
    numbers = _list(row)
    if len(numbers) != 5:
        raise ValueError(f"expected a swap, found {row!r:.40}")
    value, after, release, fetch, until = map(_whole, numbers)
    return Swap(value, after, release, fetch, until)


def _remake(row: Any) -> Remake:
    parts = _list(row)
    if len(parts) != 3 or _text(parts[0]) not in _REMAKES:
        raise ValueError(f"expected one of {', '.join(_REMAKES)}, found {row!r:.40}")
    return _REMAKES[parts[0]](_whole(parts[1]), _whole(parts[2]))


def _json(thing: Any) -> str:
    return json.dumps(thing, separators=(",", ":"), allow_nan=False)


def _list(thing: Any) -> list[Any]:
    if not isinstance(thing, list):
        raise TypeError(f"expected a list, found {thing!r:.40}")
    return thing


def _text(thing: Any) -> str:
    if not isinstance(thing, str):
        raise TypeError(f"expected text, found {thing!r:.40}")
    return thing


def _whole(thing: Any) -> Any:
    if type(thing) is not int or not 0 <= thing <= _MOST:  # True is an int to isinstance
        raise TypeError(f"expected a whole number of 0 or more, found {thing!r:.40}")
    return thing


def _seconds(thing: Any) -> float:
    if type(thing) not in (int, float) or not 0 <= thing < math.inf:
        raise TypeError(f"expected seconds, found {thing!r:.40}")
    return float(thing)
