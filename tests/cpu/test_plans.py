"""Plans of steps for which the host has little time or much."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lowtide._analyze.load import find_peak
from lowtide._ir import (
    Drop,
    GeometryId,
    Hold,
    Link,
    Machine,
    Operand,
    OpIndex,
    Plan,
    Remake,
    Rerun,
    Trace,
    ValueId,
)
from lowtide._machine.link import slower
from lowtide._policy.host import Host
from lowtide._runtime import plans
from lowtide._runtime.plans import _ACT_SECONDS, plan_by_swapping, plan_by_tide
from lowtide._runtime.swap.script import ASKED, BEGIN, Act, Observed, write_script
from lowtide._simulate.simulate import simulate
from lowtide._trace.text import parse

MIB = 1 << 20
LINK = Link((1, 1 << 30), (1e-6, 2e-3))
MACHINE = Machine("test", 1 << 40, 1 << 40, LINK, LINK)
OPS = 12  # each way, of a millisecond each


def observed(asked: float, device: str = "cuda:0") -> Observed:
    """A chain whose values, of 2 to 13 MiB, are saved and asked for backwards; the host takes
    `asked` seconds for it.
    """
    lines = [f"device {device}"]
    lines += [
        f"f {'x:8' if not i else f'h{i - 1}'} -> h{i}:{(i + 2) * MIB} | 1ms" for i in range(OPS)
    ]
    lines += [f"b h{i} {'' if i == OPS - 1 else f'g{i + 1}'} -> g{i}:8 | 1ms backward" for i in
              reversed(range(OPS))]  # fmt: skip
    lines += [f"save h{i} | packed={i + 1} unpacked={2 * OPS - 1 - i}" for i in range(OPS)]
    trace = parse("\n".join(lines) + "\n")
    count = len(trace.ops)
    saves: Mapping[ValueId, int] = {
        ValueId(v): k
        for k, v in enumerate(v for v, value in enumerate(trace.values) if value.saves)
    }
    return Observed(
        trace=trace,
        codes=tuple(range(count)),
        positions=tuple(OpIndex(i) for i in range(count)),
        saves=saves,
        states={},
        held={v: trace.values[v].saves[0].packed for v in saves},
        numbers=tuple(range(count)),
        droppable=frozenset(saves),
        asked=tuple(asked * i / count for i in range(count + 1)),
    )


def free(step: Observed) -> list[int]:
    """MiB of what leaves where that is to cost nothing."""
    plan = plan_by_swapping(step, MACHINE, limit=None, host_budget=1 << 40, smallest=MIB)
    return sorted(step.trace.values[swap.value].bytes // MIB for swap in plan.swaps)


def test_nothing_moves_for_free_where_the_host_is_waited_for() -> None:
    seconds = 2 * OPS * 1e-3
    assert len(free(observed(0.5 * seconds))) > 4
    assert len(free(observed(seconds))) > 4, "it waits for the device"
    assert not free(observed(1.2 * seconds)), "to be told of saves takes time, too"
    assert free(observed(1.2 * seconds, "cpu")), "there the host computes"


def test_a_host_that_waits_for_the_device_is_not_taken_for_slow() -> None:
    """Asked for a little later than it could be, all that the step takes is the device's time."""
    seconds = 2 * OPS * 1e-3

    def plain(asked: float, device: str = "cuda:0") -> float:
        step = observed(asked, device)
        plan = plan_by_swapping(step, MACHINE, limit=1 << 40, host_budget=1 << 40, smallest=MIB)
        return plan.plain_seconds

    assert plain(1.04 * seconds) == pytest.approx(seconds)
    assert plain(1.1 * seconds) == pytest.approx(1.1 * seconds)
    assert plain(1.04 * seconds, "cpu") == pytest.approx(1.04 * seconds), "there the host computes"


def test_of_a_limit_a_little_is_left_where_that_can_be() -> None:
    step = observed(0.0)

    def peak(limit: int, spare: float) -> int:
        plan = plan_by_swapping(
            step, MACHINE, limit=limit, host_budget=1 << 40, smallest=MIB, spare=spare
        )
        return plan.peak_bytes

    plain = find_peak(step.trace).bytes
    assert peak(plain, 0.1) == plain, "where all of it fits, nothing moves"
    lowest = 15 * MIB + 16  # while the last is made, of the one before
    assert 40 * MIB >= peak(40 * MIB, 0.0) > 36 * MIB
    assert peak(40 * MIB, 0.1) <= 36 * MIB
    assert lowest <= peak(30 * MIB, 0.2) <= 30 * MIB


def test_within_a_limit_the_host_is_part_of_the_time() -> None:
    seconds = 2 * OPS * 1e-3

    def planned(asked: float) -> tuple[float, int]:
        step = observed(asked)
        plan = plan_by_swapping(step, MACHINE, limit=40 * MIB, host_budget=1 << 40, smallest=MIB)
        assert plan.swaps
        return plan.seconds, len(plan.swaps)

    at_ease, _ = planned(0.1 * seconds)
    assert at_ease < 1.2 * seconds
    late, swaps = planned(2 * seconds)
    assert late == pytest.approx(2 * seconds + 3 * swaps * _ACT_SECONDS)


@pytest.mark.parametrize("policy", ["autoswap", "tide"])
def test_plans_are_made_for_a_slower_link_and_timed_by_the_one_there_is(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(plans, "_SECONDS", 0.2)
    step = replace(observed(0.0), droppable=frozenset())
    link = Link((1, 1 << 30), (1e-6, 0.16))
    machine = Machine("test", 1 << 40, 1 << 40, link, link)
    make, planned_for = getattr(plans, policy), []

    def noted(trace: Trace, machine: Machine, **rest: Any) -> Plan:
        planned_for.append(machine)
        made: Plan = make(trace, machine, **rest)
        return made

    monkeypatch.setattr(plans, policy, noted)
    plan: Plan | None
    if policy == "autoswap":
        plan = plan_by_swapping(step, machine, limit=40 * MIB, host_budget=1 << 40, smallest=MIB)
    else:
        plan = plan_by_tide(
            step, machine, limit=40 * MIB, highest=None, host_budget=1 << 40, smallest=MIB
        )
    late = slower(link, 1.03)
    assert planned_for[-1] == replace(machine, out=late, back=late)
    assert plan is not None
    assert plan.seconds == simulate(step.trace, machine, plan.swaps).seconds
    assert plan.seconds < simulate(step.trace, planned_for[-1], plan.swaps).seconds


def test_a_host_that_has_no_time_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_SECONDS", 0.2)
    step = observed(0.0)
    slow = Link((1, 1 << 30), (1.0, 1e3))

    def planned(host: Host | None) -> Plan | None:
        machine = Machine("slow", 1 << 40, 1 << 40, slow, slow)
        return plan_by_tide(
            step,
            machine,
            limit=75 * MIB,
            highest=None,
            host_budget=1 << 40,
            smallest=MIB,
            host=host,
        )

    def dropped(plan: Plan | None) -> list[int]:
        assert plan is not None
        drops = {one.value for one in plan.remakes if isinstance(one, Drop)}
        return sorted(step.trace.values[value].bytes // MIB for value in drops)

    assert min(dropped(planned(None))) <= 8
    act = 0.01
    sizes = (9 * MIB, 11 * MIB)
    found = planned(Host(0.1, 0.0, act, sizes))
    assert found is not None and min(dropped(found)) >= 9
    count = sum(isinstance(one, Drop) for one in found.remakes)
    assert found.seconds == pytest.approx(0.1 + count * act), "no faster than it is asked for"
    assert planned(Host(0.1, 0.0, act, (14 * MIB,))) is None, "nothing is so large"


def seen(
    trace: Trace, codes: tuple[int, ...], positions: Sequence[int], saves: dict[ValueId, int]
) -> Observed:
    """A step with these events."""
    return replace(
        observed(0.0),
        trace=trace,
        codes=codes,
        positions=tuple(map(OpIndex, positions)),
        saves=saves,
        numbers=tuple(range(len(trace.ops))),
    )


@pytest.mark.parametrize("is_before", [True, False])
def test_what_is_held_goes_before_what_runs_again_or_after_it_as_planned(is_before: bool) -> None:
    trace = parse("""
        a x:8 -> p:64
        b p   -> h:64
        c h   -> k:64
        d k   -> y:8
        e k y -> g:8 | backward
        f h g -> z:8 | backward
        save h | packed=1 unpacked=5
        save k | packed=2 unpacked=4
    """)
    _, p, h, k = (ValueId(v) for v in range(4))
    a, b, *others = trace.ops
    trace = replace(trace, ops=(a, replace(b, operands=(Operand(p, GeometryId(0)),)), *others))
    codes = BEGIN, 64, 64, ASKED + 1, ASKED
    step = seen(trace, codes, (0, 1, 2, 4, 5), {h: 0, k: 1})
    goes = Drop(OpIndex(5), p)
    first, second = (Rerun(OpIndex(5), OpIndex(op)) for op in (0, 1))
    again: tuple[Remake, ...] = (goes, first, second) if is_before else (second, goes)
    remakes = (Hold(OpIndex(1), p), Drop(OpIndex(3), h), *again)
    script = write_script(step, Plan((), 1000, 1.0, 1000, 1.0, remakes=remakes))
    held = ((1, 0),)  # what the second op reads
    assert script.lets_go == {4: (held, ()) if is_before else ((), held)}


@pytest.mark.parametrize("late", [False, True])
def test_drops_are_the_first_at_their_op_but_not_before_what_they_drop_is_saved(late: bool) -> None:
    trace = parse("""
        a x:8 -> h:64
        b h   -> y:8
        c y   -> k:64
        d k   -> z:8
        e k h -> g:8 | backward
        save h | packed=0 unpacked=4
        save k | packed=2 unpacked=4
    """)
    _, h, _, k = (ValueId(v) for v in range(4))
    first = (8, 64) if late else (64, 8)
    codes = BEGIN, *first, 64, ASKED + 1, ASKED
    step = seen(trace, codes, (0, 3, 3, 3, 4, 4), {h: 1 if late else 0, k: 2})
    remakes = (Drop(OpIndex(3), h), Rerun(OpIndex(4), OpIndex(0)))
    script = write_script(step, Plan((), 1000, 1.0, 1000, 1.0, remakes=remakes))
    drops = [at for at, some in enumerate(script.actions) if any(a.act is Act.DROP for a in some)]
    assert drops == [2 if late else 1]
