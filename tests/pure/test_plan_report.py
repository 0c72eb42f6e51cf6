"""What is shown of a plan: the numbers, the page in a real browser, the step for Perfetto."""

import json
import re
import shutil
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces
from swaps import busy_traces, machines, swapped_steps
from test_cli import lowtide
from test_plan_file import LINK, drop, rerun, swap
from there_and_back import there_and_back

from lowtide import Trace, load_trace, save_trace
from lowtide._analyze.load import find_peak, load_curve
from lowtide._ir import (
    Hold,
    Kind,
    Machine,
    Op,
    OpIndex,
    Phase,
    Plan,
    StorageId,
    Swap,
    Value,
    ValueId,
)
from lowtide._layout.buffers import copies, pieces
from lowtide._layout.from_plan import plan_buffers, present
from lowtide._machine.link import line
from lowtide._policy.autoswap import CannotFit
from lowtide._policy.file import find_bad_plan, load_plan, save_plan
from lowtide._policy.tide import tide
from lowtide._report.fates import Action, find_fates
from lowtide._report.perfetto import render_perfetto
from lowtide._report.plan_html import Measured, render_plan
from lowtide._report.planned import LAYERS, layers, plan_step
from lowtide._simulate.simulate import simulate
from lowtide._trace.digest import digest
from lowtide._trace.text import parse

# op | 0 f  1 g  2 h  3 i  4 back  5 mid  6 back     a second each, as is a copy of 10 bytes
# a  | made used           used                      dropped before h, made again by f before 4
# b  |      made used                     used       swapped: out during i, back during mid
STEP = parse("""
    have x:4 | input name=batch
    have w:6 | parameter name=Net.w @Net
    f x w -> a:10      | 1s forward @Net.f
    is a | activation @Net.f
    g a -> b:10        | 1s forward @Net.<b>g</b>
    is b | activation @Net.<b>g</b>
    h b -> c:10        | 1s forward @Net.h
    i c -> d:10        | 1s forward @Net.i
    back a d -> e:10   | 1s backward @Net.f
    mid e -> m:10      | 1s backward
    back b m -> gw:6   | 1s backward @Net.g workspace=2
    is gw | gradient name=Net.w.grad
""")
MACHINE = Machine("test", 1 << 40, 1 << 40, line(0.0, 10.0), line(0.0, 10.0))
# In the step with its rerun of f, op 4 is op 5, and so on.
PLAN = Plan(
    (swap(3, 2, 4, 6, 7),),
    40,
    8.0,
    50,
    7.0,
    "by hand",
    "test",
    (drop(2, 2), rerun(4, 0)),
)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r"^const data = (.*);$", page, re.MULTILINE)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_example_is_what_it_says() -> None:
    found = plan_step(STEP, PLAN, MACHINE)
    assert (found.outcome.seconds, found.outcome.peak_bytes) == (PLAN.seconds, PLAN.peak_bytes)
    assert find_peak(STEP).bytes == PLAN.plain_peak_bytes
    assert found.starts.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found.again.tolist() == [False] * 4 + [True] + [False] * 3
    assert found.before.tolist() == [0, 1, 2, 3, 4, 4, 5, 6]
    assert not found.waits.any()


# What becomes of values.


def test_what_happens_to_each_value_and_why() -> None:
    found = find_fates(plan_step(STEP, PLAN, MACHINE))
    told = {fate.label: (fate.action, fate.away, fate.why) for fate in found.shown}
    assert told["Net.<b>g</b>"] == (
        Action.SWAP,
        ((4.0, 6.0),),
        "idle for 4 s, copies hidden",
    )
    assert told["Net.f"][:2] == (Action.RECOMPUTE, ((2.0, 4.0),))
    assert told["Net.f"][2] == "made again by 1 op in 1 s"
    [by_h] = [fate for fate in found.shown if fate.op == 2]
    assert (by_h.action, by_h.why) == (Action.KEEP, "in use at the peak")
    assert told["batch"] == (Action.KEEP, (), "idle for 3 s, but others cost less")
    assert told["Net.w.grad"][2] == "not there when memory is short"
    assert found.totals[Action.SWAP] == found.totals[Action.RECOMPUTE] == (1, 10)
    assert sum(count for count, _ in found.totals.values()) == 9
    assert [fate.bytes for fate in found.shown] == [10] * 6 + [6, 6, 4]


def test_who_waits_is_told() -> None:
    slow = replace(MACHINE, out=line(0.0, 2.5), back=line(0.0, 5.0))  # 4 s out, 2 s back
    planned = plan_step(STEP, PLAN, slow)
    # out from 3 to 7, for which op 4 waits since 4; back from 9 to 11, op 7 since 10
    assert planned.waits.tolist() == [0, 0, 0, 0, 3, 0, 0, 1]
    assert planned.waited(0) == pytest.approx(4)
    [why] = [f.why for f in find_fates(planned).shown if f.action is Action.SWAP]
    assert why == "idle for 7 s, compute waits 4 s"
    assert find_fates(planned).totals == find_fates(plan_step(STEP, PLAN, MACHINE)).totals


def test_ops_that_run_again_for_others_are_told_apart() -> None:
    trace = parse("""
        have x:4 | input
        f x -> a:10  | 1s
        g a -> b:10  | 1s
        free a
        h b -> c:10  | 1s
        i c -> d:10  | 1s
        back b d ->  | 1s
    """)
    plan = replace(PLAN, swaps=(), remakes=(drop(3, 2), rerun(4, 0), rerun(4, 1), drop(4, 1)))
    found = {fate.op: fate for fate in find_fates(plan_step(trace, plan, None)).shown}
    assert found[1].why == "made again by 2 ops in 2 s"
    assert found[0].why == "made again for others by 1 op in 1 s"
    assert found[1].away == ((3.0, 5.0),) and found[0].away == ()


def test_what_stays_longer_or_less_long_than_in_the_plain_step_is_told() -> None:
    trace = parse("""
        have x:4 | input
        f x -> a:10  | 1s
        g a -> b:10  | 1s
        free a
        h b -> c:10  | 1s
        i c -> d:10  | 1s
        back b d ->  | 1s
        nop ->       | 1s
        free d
    """)
    hold = Hold(OpIndex(1), ValueId(1))
    remakes = (hold, drop(3, 2), rerun(4, 1), drop(4, 1), drop(5, 4))
    found = {
        f.op: f
        for f in find_fates(plan_step(trace, replace(PLAN, swaps=(), remakes=remakes), None)).shown
    }
    assert found[0].why == "held longer: others are made again from it"
    assert found[1].why == "made again by 1 op in 1 s"
    assert found[2].why == "in use at the peak"
    assert found[3].why == "let go early: nothing uses it again"


def test_the_most_important_values_are_shown_and_the_others_counted() -> None:
    found = find_fates(plan_step(STEP, PLAN, MACHINE), most=3)
    assert [fate.action for fate in found.shown].count(Action.KEEP) == 1
    assert len(found.shown) == 3
    assert found.totals == find_fates(plan_step(STEP, PLAN, MACHINE)).totals
    plain = Plan((), 50, 7.0, 50, 7.0)
    assert {f.why for f in find_fates(plan_step(STEP, plain, None)).shown} == {
        "the step fits as it is"
    }


# The numbers.


@given(swapped_steps(), machines())
def test_layers_add_up_to_what_the_simulator_says(
    found: tuple[Trace, tuple[Swap, ...]], machine: Machine
) -> None:
    trace, swaps = found
    total = layers(trace, swaps).sum(axis=0)
    outcome = simulate(trace, machine, swaps)
    assert (int(total.max()), int(total.argmax())) == (outcome.peak_bytes, outcome.peak_op)
    assert (layers(trace, ()).sum(axis=0) == load_curve(trace)).all()


@given(swapped_steps(), machines())
def test_waits_are_those_of_the_simulator(
    found: tuple[Trace, tuple[Swap, ...]], machine: Machine
) -> None:
    trace, swaps = found
    peak = find_peak(trace).bytes
    planned = plan_step(trace, Plan(swaps, peak, 1.0, peak, 1.0), machine)
    if planned.timed:
        stalled = planned.outcome.stall_seconds
        assert planned.waits.sum() == pytest.approx(stalled, abs=1e-6)
        waited = [planned.waited(number) for number in range(len(swaps))]
        assert all(seconds <= stalled + 1e-6 for seconds in waited)
        assert bool(sum(waited) > 1e-6) == bool(stalled > 1e-6)


@given(st.integers(1, 12), st.data())
def test_bytes_are_here_when_they_are_not_away(period: int, data: st.DataObject) -> None:
    lower = data.draw(st.integers(0, period - 1))
    upper = data.draw(st.integers(lower + 1, lower + period))
    moments = sorted(data.draw(st.sets(st.integers(0, period - 1), max_size=4)))
    turn = data.draw(st.sampled_from([0, period]))
    away = [(a + turn, b + turn) for a, b in zip(moments[::2], moments[1::2], strict=False)]
    gone = {moment % period for a, b in away for moment in range(a, b)}
    life = {moment % period for moment in range(lower, upper)}
    parts = present(lower, upper, away, period)
    assert all(0 <= a < period and a < b for a, b in parts)
    here = [moment % period for a, b in parts for moment in range(a, b)]
    assert sorted(here) == sorted(life - gone)


@given(swapped_steps(), machines())
def test_the_pool_holds_what_the_step_holds(
    found: tuple[Trace, tuple[Swap, ...]], machine: Machine
) -> None:
    trace, swaps = found
    planned = plan_step(trace, Plan(swaps, 0, 1.0, 0, 1.0), machine)
    buffers, owners, period = plan_buffers(planned.step.trace, planned.plan.swaps)
    load = np.zeros(period)
    for buffer in copies(buffers, period):
        for lower, upper in pieces(buffer, period):
            load[lower:upper] += buffer.size
    held = layers(planned.trace, swaps).sum(axis=0) - trace.unseen_bytes
    assert (load >= held).all()
    kept = [value.before == value.after for value in trace.values]
    if trace.granularity_bytes == 1 and all(kept):
        assert (load == held).all()
    assert len(owners) == len(buffers)


# The page.


def test_every_figure_is_on_the_page() -> None:
    data = data_of(render_plan(STEP, PLAN, MACHINE, Measured(38, 8.8), budget_bytes=42))
    assert data["facts"] == [
        ["budget", "42 B"],
        ["predicted peak", "40 B of 50 B plain (80.0%)"],
        ["predicted step", "8 s of 7 s plain (+14.3%)"],
        ["measured peak", "38 B (-5.0% from predicted)"],
        ["measured step", "8.8 s (+10.0% from predicted)"],
        ["run again", "1 op in 1 s"],
        ["swapped", "10 B each way, 1 stay"],
        ["copies hidden", "100.0% of 2 s"],
        ["policy", "by hand"],
        ["machine", "test"],
    ]
    assert data["notes"] == []
    ticks = data["ticks"] / 8  # a second
    assert [
        [round(a / ticks), round(b / ticks), size] for a, b, _, size in data["copies"]["out"]
    ] == [[3, 4, 10]]
    assert [[round(a / ticks), round(b / ticks)] for a, b, *_ in data["copies"]["back"]] == [[6, 7]]
    assert [op[3] for op in data["ops"]] == [0, 0, 0, 0, 3, 1, 1, 1]  # the rerun is one
    assert data["values"]["more"] == []
    assert data["pool"]["height"] == data["pool"]["load"] == 40


def test_times_of_another_run_are_noticed() -> None:
    other = replace(STEP, ops=tuple(replace(op, seconds=2.0) for op in STEP.ops))
    [note] = data_of(render_plan(other, PLAN, MACHINE))["notes"]
    assert (
        note == "With the times of this trace the step takes 16 s: the plan was made with others."
    )
    untimed = replace(STEP, ops=tuple(replace(op, seconds=0.0) for op in STEP.ops))
    [note] = data_of(render_plan(untimed, PLAN, MACHINE))["notes"]
    assert note.startswith("The trace has no times")


@settings(deadline=None)
@given(st.one_of(swapped_steps(), traces().map(lambda t: (t, ()))), machines())
def test_no_op_is_too_short_to_be_seen(
    found: tuple[Trace, tuple[Swap, ...]], machine: Machine
) -> None:
    trace, swaps = found
    peak = find_peak(trace).bytes
    data = data_of(render_plan(trace, Plan(swaps, peak, 1.0, peak, 1.0), machine))
    for name, total in (
        ("plain", load_curve(trace)),
        ("planned", layers(trace, swaps).sum(axis=0)),
    ):
        chart = data[name]
        shown = np.array(chart["held"]).sum(axis=0)
        assert shown.max(initial=0) == total.max()
        assert (total[chart["ops"]] == shown).all()
        assert chart["at"] == sorted(set(chart["at"])) and chart["at"][0] == 0
        assert chart["end"] <= data["columns"] and chart["at"][-1] < chart["end"]
    shares = np.array(data["compute"]["shares"]).sum(axis=0)
    assert (shares <= 103).all()  # five rounded numbers
    for lane in data["copies"].values():
        assert all(0 <= a <= b <= data["ticks"] for a, b, *_ in lane)
    assert all(0 <= a < b <= data["ticks"] + 1 or a == b for a, b, *_ in data["pool"]["rows"])


@pytest.mark.parametrize("times", [(0, 1), (1, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)])
def test_a_peak_that_takes_no_time_is_seen(times: tuple[int, ...]) -> None:
    peak = times.index(0)
    ops = [f"op -> v{i}:{90 if i == peak else 5} | {s}s" for i, s in enumerate(times)]
    data = data_of(render_plan(parse("\n".join(ops)), Plan((), 90, 1.0, 90, 1.0), None))
    for name in ("plain", "planned"):
        assert np.array(data[name]["held"]).sum(axis=0).max() == 90


@settings(deadline=None, max_examples=40)
@given(st.one_of(there_and_back(), busy_traces()), machines(), st.floats(0.5, 1))
def test_whatever_tide_plans_can_be_shown(trace: Trace, machine: Machine, share: float) -> None:
    trace = replace(trace, ops=tuple(replace(op, seconds=0.5) for op in trace.ops))
    limit = int(share * find_peak(trace).bytes)
    try:
        plan = tide(trace, machine, limit=limit, seconds=0.01, smallest=1)
    except CannotFit as refusal:
        plan = tide(trace, machine, limit=refusal.smallest_bytes, seconds=0.01, smallest=1)
    data = data_of(render_plan(trace, plan, machine))
    assert data["notes"] == []
    assert data["planned"]["peak"][1] == plan.peak_bytes
    assert data["plain"]["peak"][1] == plan.plain_peak_bytes
    sized = {value.storage for value in trace.values if value.bytes}
    assert sum(count for _, count, _ in data["values"]["totals"]) == len(sized)
    acted = {what for _, what, *_ in data["values"]["rows"]} - {"keep"}
    assert bool(acted) == bool(plan.swaps or any(data["planned"]["again"]))


def large_step(layers_: int) -> Trace:
    """Ten ops a layer: five forward, five backward."""
    ops: list[Op] = []
    values = [
        Value(StorageId(0), 0, 4096, Kind.INPUT, OpIndex(0), OpIndex(10 * layers_), True, True)
    ]
    made: list[int] = []
    end = 10 * layers_
    for i in range(end):
        forward = i < end // 2
        reads = [made[-1]] if made else [0]
        if not forward:
            reads.append(made[end - 1 - i])
        made.append(len(values))
        last = end - i if forward else min(i + 2, end)
        values.append(
            Value(
                StorageId(len(values)),
                0,
                (1 + i * 7919 % 13) << 20,
                Kind.ACTIVATION if forward else Kind.TEMPORARY,
                OpIndex(i),
                OpIndex(max(last, i + 1)),
                module=f"Net.layers.{i // 5 % layers_}",
            )
        )
        ops.append(
            Op(
                f"aten.op{i % 5}.default",
                tuple(ValueId(v) for v in reads),
                (),
                (ValueId(made[-1]),),
                seconds=1e-5 * (1 + i % 7),
                phase=Phase.FORWARD if forward else Phase.BACKWARD,
            )
        )
    return Trace(tuple(ops), tuple(values), source="large")


def large_plan(trace: Trace) -> Plan:
    """Every third activation of the first half is swapped, every sixth of the others dropped."""
    count, half = len(trace.ops), len(trace.ops) // 2
    remakes: list[Any] = [drop(i + 2, i + 1) for i in range(half // 2, half - 40, 6)]
    for i in reversed(range(half // 2, half - 40, 6)):
        remakes.append(rerun(count - 1 - i, i))
    late = len(range(half // 2, half - 40, 6))  # so many reruns come before they are fetched
    swaps = [
        swap(i + 1, i + 1, i + 20, count - 40 - i + late, count - 1 - i + late)
        for i in range(0, 900, 3)
    ]
    return Plan(
        tuple(swaps), 0, 1.0, find_peak(trace).bytes, 1.0, "by hand", "test", tuple(remakes)
    )


def test_a_large_step_makes_a_small_page() -> None:
    trace = large_step(3000)
    assert len(trace.ops) == 30_000
    plan = large_plan(trace)
    assert find_bad_plan(trace, plan) is None
    began = time.perf_counter()
    page = render_plan(trace, plan, LINK)
    assert time.perf_counter() - began < 30  # 4 s; machines that test are busy
    assert len(page) < 2_000_000
    data = data_of(page)
    assert len(data["values"]["rows"]) == 300
    assert sum(count for _, count, _ in data["values"]["more"]) == 30_001 - 300
    assert data["ops"] == []  # in columns alone
    assert len(data["pool"]["rows"]) == 6000 and data["pool"]["more"] > 20_000


# In a browser.

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")

# Counts what was painted, for what a canvas shows is not in the document.
LOOK = """
<script>
for (const canvas of document.querySelectorAll("canvas")) {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] === 255) seen.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]);
  canvas.dataset.colours = [...seen].map(c => "#" + c.toString(16).padStart(6, "0")).join(" ");
}
</script>
"""
POINT = """
<script>
const frame = panels[1].box.getBoundingClientRect();
const mouse = (what, x) => panels[1].box.dispatchEvent(
  new MouseEvent(what, { bubbles: true, clientX: frame.left + x, clientY: frame.top + 90 }));
mouse("mousemove", 300);
document.body.dataset.tip = $("#tip").innerText;
mouse("mousedown", 300); mouse("mousemove", 400); mouse("mouseup", 400);
document.body.dataset.view = view.to - view.from;
document.querySelectorAll("#filter button")[2].click();
document.querySelectorAll("#values th")[3].click();
</script>
"""


def open_page(page: str, folder: Path) -> str:
    """The document as it is when its scripts have run."""
    path = folder / "page.html"
    path.write_text(page)
    assert BROWSER
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1600"]
    command += [f"--user-data-dir={folder / 'browser'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def body_of(document: str) -> dict[str, str]:
    found = re.search(r"<body([^>]*)>", document)
    assert found
    return dict(re.findall(r'data-(\w+)="([^"]*)"', found[1]))


@needs_browser
def test_the_page_draws(tmp_path: Path) -> None:
    page = render_plan(STEP, PLAN, MACHINE, Measured(38, 8.8), budget_bytes=42)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # opens offline
    assert "<b>g" not in page  # names from a trace are data, not markup
    document = open_page(page.replace("</html>", LOOK + "</html>"), tmp_path)
    assert body_of(document) == {"drawn": "all"}
    canvases = re.findall(
        r'<canvas id="(\w+)"[^>]*data-drawn="yes" data-colours="([^"]*)"', document
    )
    colours = {name: set(found.split()) for name, found in canvases}
    assert set(colours) == {"plain", "planned", "lanes", "pool"}
    activation, forward, again, out, back = "#edae49", "#33658a", "#f08a24", "#66a182", "#2f8f83"
    for name in ("plain", "planned", "pool"):
        assert activation in colours[name]
    assert {forward, again, out, back} <= colours["lanes"]
    rows = document.split("<tbody>")[1].split("</tbody>")[0].split("<tr>")[1:]
    assert len(rows) == 9
    [swapped] = [row for row in rows if "copies hidden" in row]
    assert "Net.&lt;b&gt;g&lt;/b&gt;" in swapped
    assert "measured peak" in document and "38 B (-5.0% from predicted)" in document


@needs_browser
def test_what_is_under_the_pointer_is_told(tmp_path: Path) -> None:
    page = render_plan(STEP, PLAN, MACHINE)
    body = body_of(open_page(page.replace("</html>", POINT + "</html>"), tmp_path))
    assert "error" not in body, body
    assert "op 1 g" in body["tip"] and "activation 20 B" in body["tip"]
    assert 0 < float(body["view"]) < data_of(page)["ticks"] / 5


@needs_browser
def test_a_page_that_cannot_be_drawn_says_so(tmp_path: Path) -> None:
    page = render_plan(STEP, PLAN, MACHINE).replace('"waits":', '"weights":')
    document = open_page(page, tmp_path)
    assert "drawn" not in body_of(document) and "undefined" in body_of(document)["error"]
    assert "This page could not be drawn" in document


@needs_browser
def test_large_and_plain_steps_draw_too(tmp_path: Path) -> None:
    large = large_step(400)
    for trace, plan in (
        (large, large_plan(large)),
        (STEP, Plan((), 50, 7.0, 50, 7.0)),
        (parse("nop -> | 0s"), Plan((), 0, 0.0, 0, 0.0)),
    ):
        document = open_page(render_plan(trace, plan, LINK if plan.swaps else None), tmp_path)
        assert body_of(document) == {"drawn": "all"}


# Perfetto.


def events_of(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def test_perfetto_shows_lanes_and_memory() -> None:
    events = events_of(render_perfetto(STEP, PLAN, MACHINE))
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    told = [(threads[e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in slices]
    assert ("compute", "again: f", "run again", 4e6, 1e6) in told
    assert ("compute", "h", "forward", 2e6, 1e6) in told
    assert ("copies out", "Net.<b>g</b>", "copy out", 3e6, 1e6) in told
    assert ("copies back", "Net.<b>g</b>", "copy back", 6e6, 1e6) in told
    [again] = [e for e in slices if e["cat"] == "run again"]
    assert again["args"] == {"module": "Net.f", "before op": 4}
    memory = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "memory"]
    assert max(memory) == PLAN.peak_bytes
    away = [(e["ts"], e["args"]["bytes"]) for e in events if e["name"] == "away"]
    assert away == [(0, 0), (3e6, 10), (7e6, 0)]
    plain = events_of(render_perfetto(STEP, None, None))
    assert len([e for e in plain if e["ph"] == "X"]) == len(STEP.ops)
    assert "away" not in {e["name"] for e in plain}


@given(swapped_steps(), machines())
def test_slices_of_a_thread_do_not_overlap(
    found: tuple[Trace, tuple[Swap, ...]], machine: Machine
) -> None:
    trace, swaps = found
    events = events_of(render_perfetto(trace, Plan(swaps, 0, 1.0, 0, 1.0), machine))
    for thread in (1, 2, 3):
        own = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == thread
        )
        assert all(end <= start + 2e-3 for (_, end), (start, _) in pairwise(own))
    counted = {e["name"] for e in events if e["ph"] == "C"}
    assert counted <= {"memory", "away", *(f"memory: {name}" for name in LAYERS)}
    by_kind = layers(trace, swaps)
    last = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "memory"][-1]
    assert last == by_kind.sum(axis=0)[-1]


# The command.


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace, plan = tmp_path / "step.trace", tmp_path / "plan.json"
    save_trace(STEP, trace)
    save_plan(PLAN, plan, digest=digest(STEP), machine=MACHINE, budget_bytes=42)
    return trace, plan


def test_report_of_a_plan(files: tuple[Path, Path], tmp_path: Path) -> None:
    page, perfetto = tmp_path / "page.html", tmp_path / "perfetto.json"
    done = lowtide("report", *files, "-o", page, "--perfetto", perfetto)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "peak 40 B of 50 B plain (80.0%)",
        "step 8 s of 7 s plain (1.143×)",
        "1 ops run again, 1 s; 1 swaps, 10 B each way; by hand on test",
        f"wrote {page}",
        f"wrote {perfetto}",
    ]
    assert ["budget", "42 B"] in data_of(page.read_text())["facts"]
    assert len([e for e in events_of(perfetto.read_text()) if e["ph"] == "X"]) == 10
    assert load_plan(files[1]).plan == PLAN and load_trace(files[0]) == STEP
    plain = lowtide("report", files[0], "--perfetto", perfetto, "--force")
    assert plain.returncode == 0 and "param" in plain.stdout
    assert len([e for e in events_of(perfetto.read_text()) if e["ph"] == "X"]) == 7


def test_what_cannot_be_reported_is_one_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, plan = files
    other = tmp_path / "other.trace"
    save_trace(parse("mm x:8 -> y:8 | 1us"), other)
    page = tmp_path / "page.html"
    spoilt = tmp_path / "spoilt.json"
    flawed = replace(PLAN, remakes=(drop(2, 2),))
    save_plan(flawed, spoilt, digest=digest(STEP), machine=MACHINE)
    for args, complaint in (
        ([other, plan, "-o", page], f"{plan} is a plan for another step (digest "),
        ([trace, spoilt, "-o", page], f"{spoilt} is damaged (value 2 is gone when it is needed)"),
        ([trace, trace, "-o", page], f"{trace} is not a lowtide plan"),
        ([trace, plan, "-o", page, "--perfetto", page], f"{page} cannot be both"),
        ([trace, plan, "--perfetto", plan], f"{plan} exists"),
        ([trace, tmp_path / "none.json"], f"cannot read {tmp_path / 'none.json'}"),
    ):
        done = lowtide("report", *args)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith(f"lowtide: {complaint}"), done.stderr
        assert done.stderr.count("\n") == 1
        assert not page.exists()
