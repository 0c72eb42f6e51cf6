"""Plans in files, and `lowtide plan`, which makes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from swaps import busy_traces, machines, swapped_steps
from test_cli import lowtide
from test_policy import chain

from lowtide import BadInput, Trace, load_trace, save_trace
from lowtide._analyze.load import find_peak
from lowtide._ir import Drop, Machine, OpIndex, Plan, Remake, Rerun, Swap, ValueId
from lowtide._machine.link import line
from lowtide._policy.autoswap import CannotFit
from lowtide._policy.file import (
    PlanFile,
    decode_plan,
    encode_plan,
    find_bad_plan,
    load_plan,
    save_plan,
)
from lowtide._policy.tide import tide
from lowtide._report.perfetto import render_perfetto
from lowtide._simulate.check import find_bad_swap
from lowtide._simulate.remakes import Unlawful, run_remakes
from lowtide._trace.digest import digest
from lowtide._trace.text import parse

LINK = Machine("test", 1 << 40, 1 << 40, line(1e-6, 1e9), line(1e-6, 1e9), 0.9, 0.01)
SWAP = Swap(ValueId(3), OpIndex(1), OpIndex(2), OpIndex(3), OpIndex(4))
PLAN = Plan(
    (SWAP,),
    100,
    0.2,
    200,
    0.1,
    "tide",
    "test",
    (Drop(OpIndex(2), ValueId(1)), Rerun(OpIndex(5), OpIndex(0))),
)
FILE = PlanFile(PLAN, "0" * 64, LINK, 128)


def _plans() -> st.SearchStrategy[Plan]:
    place = st.integers(0, 1 << 40)
    seconds = st.floats(0, 1e6)
    kinds = [st.builds(kind, place, place) for kind in get_args(Remake)]
    return st.builds(
        Plan,
        swaps=st.lists(st.builds(Swap, *[place] * 5), max_size=3).map(tuple),
        peak_bytes=place,
        seconds=seconds,
        plain_peak_bytes=place,
        plain_seconds=seconds,
        policy=st.text(max_size=5),
        machine=st.text(max_size=5),
        remakes=st.lists(st.one_of(kinds), max_size=5).map(tuple),
    )


@given(
    _plans(),
    machines().map(lambda m: replace(m, device_bytes=1, out=LINK.out, back=LINK.back)),
    st.text("0123456789abcdef", min_size=64, max_size=64),
    st.none() | st.integers(0, 1 << 40),
)
def test_files_round_trip(plan: Plan, machine: Machine, trace: str, budget: int | None) -> None:
    file = PlanFile(plan, trace, machine if plan.swaps else None, budget)
    content = encode_plan(file)
    assert decode_plan(content, "x") == file
    assert encode_plan(decode_plan(content, "x")) == content


def test_a_file_can_be_read_by_eye(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, str(path), digest="a" * 64, machine=LINK)
    assert load_plan(path) == PlanFile(PLAN, "a" * 64, LINK, None)
    lines = path.read_text().splitlines()
    assert '"remakes": [["drop",2,1],["rerun",5,0]],' in lines
    assert '"swaps": [[3,1,2,3,4]],' in lines


def _with(**changes: Any) -> bytes:
    document = json.loads(encode_plan(FILE)) | changes
    return json.dumps({key: value for key, value in document.items() if value != "gone"}).encode()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty: make it again with `lowtide plan`"),
        (b"hello", "is not a lowtide plan: make one with `lowtide plan`"),
        (b"\xff\xfe", "is not a lowtide plan"),
        (b"[" * 100_000, "is not a lowtide plan"),
        (b'{"format": "lowtide.trace"}', "is not a lowtide plan"),
        (encode_plan(FILE)[:-9], "is not a lowtide plan"),
        (_with(version=2), "has plan version 2, this lowtide reads up to 1: upgrade lowtide"),
        (_with(version=True), "has plan version True"),
        (_with(swaps="gone"), "is damaged ('swaps' is missing)"),
        (_with(swaps=3), "is damaged (expected a list, found 3)"),
        (_with(swaps=[[1, 2, 3]]), "is damaged (expected a swap, found [1, 2, 3])"),
        (_with(swaps=[[1, 2, 3, 4, -5]]), "is damaged (expected a whole number"),
        (_with(swaps=[[1, 2, 3, 4, 5.0]]), "is damaged (expected a whole number"),
        (_with(swaps=[[True, 2, 3, 4, 5]]), "is damaged (expected a whole number"),
        (_with(remakes=[["burn", 1, 2]]), "is damaged (expected one of drop"),
        (_with(remakes=[["drop", 1]]), "is damaged (expected one of drop"),
        (_with(remakes=[[1, 2, 3]]), "is damaged (expected text, found 1)"),
        (_with(seconds=-1), "is damaged (expected seconds, found -1)"),
        (_with(seconds=10**400), "is damaged"),
        (_with(peak_bytes=10**30), "is damaged (expected a whole number"),
        (_with(trace="abc"), "is damaged ('abc' is not the digest of a trace)"),
        (_with(link=None), "is damaged (it swaps, but says nothing of the link)"),
        (_with(link={}), "is not a lowtide machine"),
        (_with(budget_bytes="8GiB"), "is damaged (expected a whole number"),
    ],
)
def test_a_bad_file_is_one_line(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_plan(path)
    assert f"{path} {complaint}" in str(caught.value)
    assert "\n" not in str(caught.value)


# Plans that come from elsewhere.

STEP = parse("""
    have x:10 | input
    cheap x -> a:100 | 1us
    dear a -> b:100 | 9us
    loss b -> l:10 | 1us
    back b l -> gb:10 | 1us
    free b
    free l
    back a gb -> ga:10 | 1us
    keep ga
""")


def drop(before: int, value: int) -> Drop:
    return Drop(OpIndex(before), ValueId(value))


def rerun(before: int, op: int) -> Rerun:
    return Rerun(OpIndex(before), OpIndex(op))


def swap(*numbers: int) -> Swap:
    return Swap(ValueId(numbers[0]), *map(OpIndex, numbers[1:]))


@pytest.mark.parametrize(
    ("remakes", "swaps", "flaw"),
    [
        ([drop(2, 1), rerun(4, 0)], [], None),
        ([], [swap(1, 1, 2, 4, 4)], None),
        ([drop(3, 1), rerun(4, 0)], [swap(6, 4, 5, 9, 9)], "swap 0: op 5 uses storage"),
        ([drop(2, 1)], [], "value 1 is gone when it is needed"),
        ([drop(5, 5)], [], "value 5 outlives the step, and is gone when it ends"),
        ([drop(2, 77)], [], "remake 0 names an op or a value that is not there"),
        ([drop(6, 1)], [], "remake 0 names an op or a value that is not there"),
        ([drop(2, 1), rerun(4, 4)], [], "remake 1 names an op or a value that is not there"),
        ([], [swap(77, 1, 2, 3, 4)], "swap 0: value 77 does not exist"),
        ([], [swap(1, 0, 1, 3, 4)], "swap 0: op 1 uses storage"),
    ],
)
def test_what_a_step_cannot_do(remakes: list[Remake], swaps: list[Swap], flaw: str | None) -> None:
    plan = replace(PLAN, remakes=tuple(remakes), swaps=tuple(swaps))
    found = find_bad_plan(STEP, plan)
    assert found == flaw or (flaw and found and found.startswith(flaw)), found


@settings(max_examples=60, deadline=None)
@given(busy_traces(), machines(), st.floats(0.4, 1), st.data())
def test_what_is_spoilt_is_refused_or_can_be_shown(
    trace: Trace, machine: Machine, share: float, data: st.DataObject
) -> None:
    trace = replace(trace, ops=tuple(replace(op, seconds=1e-6) for op in trace.ops))
    peak = find_peak(trace).bytes
    try:
        plan = tide(trace, machine, limit=int(share * peak), seconds=0.01, smallest=1)
    except CannotFit:
        plan = Plan((), peak, 1.0, peak, 1.0)
    assert find_bad_plan(trace, plan) is None
    ops, values = st.integers(0, len(trace.ops)), st.integers(0, len(trace.values))
    kinds = [st.builds(kind, ops, ops if kind is Rerun else values) for kind in get_args(Remake)]
    more = data.draw(st.lists(st.one_of(kinds), max_size=2))
    swaps = data.draw(st.lists(st.builds(Swap, values, ops, ops, ops, ops), max_size=1))
    spoilt = replace(plan, remakes=(*plan.remakes, *more), swaps=(*plan.swaps, *swaps))
    flaw = find_bad_plan(trace, spoilt)
    event("refused" if flaw else "shown")
    if flaw is None:
        render_perfetto(trace, spoilt, machine)


@given(swapped_steps())
def test_swaps_are_judged_as_their_own_checker_does(found: tuple[Trace, tuple[Swap, ...]]) -> None:
    trace, swaps = found
    assert find_bad_swap(trace, swaps) is None
    assert find_bad_plan(trace, replace(PLAN, swaps=swaps, remakes=())) is None


def test_remakes_are_judged_as_their_own_checker_does() -> None:
    for before in range(1, 5):  # while there is something to drop
        for at in range(6):
            remakes = (drop(before, 1), rerun(at, 0))
            try:
                run_remakes(STEP, remakes)
                lawful = True
            except Unlawful:
                lawful = False
            found = find_bad_plan(STEP, replace(PLAN, swaps=(), remakes=remakes))
            assert lawful == (found is None), (before, at, found)


# The command.


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "step.trace"
    save_trace(chain(10, size=2 << 20, seconds="1ms"), path)
    return path


@pytest.mark.parametrize(
    ("how", "word"),
    [
        (["--link", "100GB/s"], "swaps"),
        (["--no-swap"], "run again"),
        (["--policy", "autoswap"], "swaps"),
    ],
)
def test_a_plan_is_made_and_kept(step: Path, how: list[str], word: str) -> None:
    output = step.with_name("plan.json")
    done = lowtide("plan", step, "--budget", "60%", "--seconds", "1", "-o", output, *how)
    assert done.returncode == 0, done.stderr
    assert "MiB of 20.00 MiB plain" in done.stdout and word in done.stdout
    assert done.stdout.endswith(f"wrote {output}\n")
    found = load_plan(output)
    trace = load_trace(step)
    assert found.digest == digest(trace)
    assert found.budget_bytes == 12 << 20
    assert found.plan.peak_bytes <= 12 << 20
    assert (found.machine is None) == (word == "run again")
    assert find_bad_plan(trace, found.plan) is None
    again = lowtide("plan", step, "--budget", "60%", "--seconds", "0", "-o", output, *how)
    assert again.returncode == 2 and "plan.json exists" in again.stderr
    assert load_plan(output) == found
    how += ["--force"]
    assert not lowtide("plan", step, "--budget", "70%", "-o", output, "--seconds", "0", *how).stderr
    assert load_plan(output).budget_bytes == 14 << 20


def test_the_smallest_budget_is_named_and_nothing_written(step: Path) -> None:
    output = step.with_name("plan.json")
    how = ["--seconds", "0.1", "-o", output]
    done = lowtide("plan", step, "--budget", "1MiB", *how)
    assert done.returncode == 3 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert not output.exists()
    smallest = line.split("met is ")[1].split()[0]
    assert lowtide("plan", step, "--budget", smallest, *how).returncode == 0


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["missing.trace", "--budget", "1"], "cannot read missing.trace"),
        (["step.trace", "--budget", "lots"], "'lots' is no budget"),
        (["step.trace", "--budget", "1", "--machine", "abacus"], "no machine 'abacus'"),
        (["step.trace", "--budget", "1", "--link", "fast"], "'fast' is no speed of a link"),
        (
            ["step.trace", "--budget", "1", "--policy", "autoswap", "--no-swap"],
            "--policy autoswap does nothing but swap: leave --no-swap out",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    step: Path, args: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(step.parent)
    done = lowtide("plan", *args, "-o", "plan.json")
    assert done.returncode == 2
    assert done.stderr.startswith(f"lowtide: {complaint}")
    assert done.stderr.count("\n") == 1
    assert not Path("plan.json").exists()
