"""Trace, drops and reruns -> what the step then holds and takes; or the law they break. Slowly.

Before each op, and after the last one, its drops and reruns are done in order. The laws:

1. What an op reads is there, when it runs for the first time and when it runs again, unless it
   has no bytes: then there is nothing to keep. What it only updates (running statistics) it needs
   the first time, and does not touch again.
2. Only what is there is dropped; only ops that have run are run again.
3. What outlives the step is there when it ends.
4. What is held is not overwritten.

A value goes when the trace says so, or when it is dropped. What is held, and what is made again and
would be gone by then, stays until it is dropped. An op that runs again makes all its results,
besides those that are still there. Shares no code with what makes plans.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide._errors import LowtideError
from lowtide._ir import Drop, Hold, Remake, Trace


class Unlawful(LowtideError):
    """A plan that cannot be carried out."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What a step with drops and reruns comes to."""

    seconds: float
    rerun_seconds: float
    peak_bytes: int
    peak_op: int  # during which, or before which


def run_remakes(trace: Trace, remakes: Sequence[Remake]) -> Tally:
    """The step with them. Raises `Unlawful`."""
    grain = trace.granularity_bytes
    size = [
        -(-value.bytes // grain) * grain if value.device == trace.device else 0
        for value in trace.values
    ]
    todo: dict[int, list[Remake]] = defaultdict(list)
    for remake in remakes:
        todo[remake.before].append(remake)
    made = {value for op in trace.ops for value in op.writes}
    appearing: dict[int, list[int]] = defaultdict(list)
    there: set[int] = set()
    for number, value in enumerate(trace.values):
        if value.before:
            if value.end > 0 or number in (*trace.ops[0].reads, *trace.ops[0].updates):
                there.add(number)
        elif number not in made:
            at_once = trace.ops[value.first]
            if value.end > value.first or number in (*at_once.reads, *at_once.updates):
                appearing[value.first].append(number)
    ends: dict[int, list[int]] = defaultdict(list)
    for number, value in enumerate(trace.values):
        ends[value.end].append(number)
    held: set[int] = set()
    seconds = again = 0.0
    peak = peak_op = 0

    def look(position: int, extra: int) -> None:
        nonlocal peak, peak_op
        load = sum(size[number] for number in there) + extra + trace.unseen_bytes
        if load > peak:
            peak, peak_op = load, position

    def check(needed: Sequence[int], position: int, what: str) -> None:
        missing = [number for number in needed if number not in there]
        if missing:
            raise Unlawful(f"before op {position}: {what} needs value {missing[0]}, which is gone")

    def remake_before(position: int) -> None:
        nonlocal again
        for remake in todo[position]:
            if isinstance(remake, Hold):
                held.add(remake.value)
                continue
            if isinstance(remake, Drop):
                if remake.value not in there:
                    raise Unlawful(f"before op {position}: value {remake.value} is not there")
                there.discard(remake.value)
                held.discard(remake.value)
                continue
            rerun = trace.ops[remake.op]
            if remake.op >= position:
                raise Unlawful(f"before op {position}: op {remake.op} has not run yet")
            read = [number for number in rerun.reads if trace.values[number].bytes]
            check(read, position, f"op {remake.op} again")
            updated = [trace.values[number].storage for number in rerun.updates]
            makes = [n for n in rerun.writes if trace.values[n].storage not in updated]
            copies = sum(size[number] for number in makes if number in there)
            there.update(makes)
            look(position, copies + rerun.workspace_bytes)
            again += rerun.seconds if rerun.again_seconds is None else rerun.again_seconds

    for position, op in enumerate(trace.ops):
        there.update(appearing[position])
        remake_before(position)
        check((*op.reads, *op.updates), position, f"op {position}")
        overwritten = [n for n in ends[position] if n in (*op.reads, *op.updates)]
        if held.intersection(overwritten):
            raise Unlawful(f"op {position} overwrites a value that is held")
        there.difference_update(overwritten)
        there.update(op.writes)
        look(position, op.workspace_bytes)
        seconds += op.seconds
        following = trace.ops[position + 1] if position + 1 < len(trace.ops) else None
        for number in ends[position + 1]:
            if following is not None and number in (*following.reads, *following.updates):
                continue  # it is going to be overwritten in place
            if not trace.values[number].after and number not in held:
                there.discard(number)
    remake_before(len(trace.ops))
    missing = [n for n, value in enumerate(trace.values) if value.after and n not in there]
    if missing:
        raise Unlawful(f"value {missing[0]} outlives the step, and is gone when it ends")
    return Tally(seconds + again, again, peak, peak_op)
