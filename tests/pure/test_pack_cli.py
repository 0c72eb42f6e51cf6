"""`lowtide pack` as a person or a script runs it."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from layouts import Problem, brute_clash
from test_cli import STEP, lowtide

from lowtide import Buffer, save_trace
from lowtide._layout.from_trace import step_buffers
from lowtide._report.layout_text import draw_layout
from lowtide._trace.text import parse

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "example.csv"
    path.write_text(EXAMPLE)
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_layout_is_the_same_csv_with_offsets(example: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    done = lowtide("pack", example, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "5 buffers in 12 bytes (12 B), 1.0000 of the max load, proved lowest" in done.stdout
    assert "A b1   B b2   C b3   D b4   E b5" in done.stdout
    assert out.read_text().startswith("id,lower,upper,size,offset\nb1,0,3,4,")
    placed = rows(out)
    assert [f"{r['id']},{r['lower']},{r['upper']},{r['size']}" for r in placed] == (
        EXAMPLE.splitlines()[1:]
    )
    buffers = [Buffer(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"])) for r in placed]
    assert not brute_clash(Problem(buffers), buffers, [int(r["offset"]) for r in placed])


def test_json_is_one_object_and_nothing_else(example: Path, tmp_path: Path) -> None:
    # published best fit does not see the gap below the first range: 16
    heights = {"search": 12, "smartpool": 16, "smartpool-first": 12, "reference": 12, "exact": 12}
    for method, height in heights.items():
        done = lowtide("pack", example, "-o", tmp_path / "out.csv", "--method", method, "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert list(said) == ["height", "max_load", "ratio", "seconds", "optimal", "method"]
        assert (said["height"], said["max_load"], said["ratio"]) == (height, 12, height / 12)
        assert said["optimal"] is (height == 12)
        assert said["method"] == method and said["seconds"] > 0


def test_a_capacity_that_cannot_be_met_names_the_buffers(example: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    done = lowtide("pack", example, "-o", out, "--capacity", 11)
    assert done.returncode == 3 and not out.exists()
    assert done.stderr == (
        "lowtide: no layout within 11 bytes: 3 buffers are all alive at 0 and need 12: "
        "b1 (4), b3 (4), b5 (4)\n"
    )
    assert lowtide("pack", example, "-o", out, "--capacity", 12).returncode == 0
    # load 6, but seven buffers in a tangle need 7
    example.write_text(
        "id,lower,upper,size\na,1,2,3\nb,1,5,3\nc,3,6,2\nd,4,7,1\ne,5,8,2\nf,6,9,3\ng,8,9,3\n"
    )
    done = lowtide("pack", example, "--capacity", 6, "--time-limit", 1)
    assert done.returncode == 3
    assert "7 buffers cannot all lie below it, in whatever order: a (3), b (3)" in done.stderr
    # a heuristic that just does not get there is no proof
    done = lowtide("pack", example, "--capacity", 7, "--method", "smartpool")
    assert done.returncode == 3 and "the lowest found in 5 s is" in done.stderr


HEAD = "id,lower,upper,size"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "id,lower,upper\na,0,1\n",
            "line 1: no column 'size'; the columns are id,lower,upper,size",
        ),
        (f"{HEAD},size\na,0,1,2,2\n", "line 1: column 'size' is there twice"),
        (f"{HEAD}\na,0,1,2\nb,5,5,2\n", "line 3: upper 5 is not above lower 5"),
        (f"{HEAD}\na,0,1,-2\n", "line 2: size -2 is not positive"),
        (f"{HEAD}\na,0,1,0\n", "line 2: size 0 is not positive"),
        (f"{HEAD}\na,0,1,2\na,1,2,2\n", "line 3: id 'a' was used before"),
        (f"{HEAD}\na,0,1,2.5\n", "line 2: size is '2.5', not a whole number"),
        (f"{HEAD}\na,0,1,\n", "line 2: size is '', not a whole number"),
        (
            f"{HEAD}\na,0,1,9223372036854775808\n",
            "line 2: size 9223372036854775808 is beyond 2**63",
        ),
        (f"{HEAD},offset\na,0,1,2,-4\n", "line 2: offset -4 is negative"),
        (f"{HEAD},offset\na,0,2,2,0\nb,1,2,2,1\n", "no layout: a and b share byte 1 at moment 1"),
        (f"{HEAD},lane\na,0,1,2,2\n", "line 2: lane 2 is neither 0 nor 1"),
        (f"{HEAD}\n", "has no buffers: add a line for each under the header"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(example: Path, text: str, complaint: str) -> None:
    example.write_text(text)
    done = lowtide("pack", example, "-o", example.with_name("out.csv"))
    assert done.returncode == 2
    assert complaint in done.stderr and done.stderr.count("\n") == 1
    assert not example.with_name("out.csv").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--align", 0], "align is 0: give 1 or more"),
        (["--period", 0], "period is 0: give 1 or more"),
        (["--period", 5], "buffer b4: lower 9 is outside the period 0..5"),
        (["--seed", -1], "seed is -1: give a whole number"),
        (["--capacity", -1], "--capacity is -1: give the bytes there are"),
        (["--time-limit", "nan"], "--time-limit is nan: give the seconds it may take"),
        (["--time-limit", -1], "--time-limit is -1.0: give the seconds it may take"),
    ],
)
def test_bad_options_too(example: Path, options: list[object], complaint: str) -> None:
    done = lowtide("pack", example, *options)
    assert done.returncode == 2 and complaint in done.stderr, done.stderr


def test_only_a_layout_or_an_empty_file_is_replaced(example: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.touch()
    for _ in range(2):
        assert lowtide("pack", example, "-o", out).returncode == 0
    layout = out.read_text()
    done = lowtide("pack", out, "-o", out)  # its own input: would forget which were fixed
    assert done.returncode == 2 and "exists" in done.stderr
    assert lowtide("pack", out, "-o", out, "--force").returncode == 0
    assert out.read_text() == layout  # all fixed: nothing moves
    out.write_text("precious")
    done = lowtide("pack", example, "-o", out)
    assert done.returncode == 2 and out.read_text() == "precious"


def test_fixed_offsets_alignment_lanes_and_periods(example: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    example.write_text("id,lower,upper,size,offset,lane\na,0,4,5,8,\nb,1,2,3,,0\nc,6,9,3,,1\n")
    done = lowtide("pack", example, "-o", out, "--align", 8)
    assert done.returncode == 0, done.stderr
    assert [(r["offset"], r["lane"]) for r in rows(out)] == [("8", "0"), ("0", "0"), ("16", "1")]
    placed = out.read_text()
    done = lowtide("pack", out, "-o", out, "--align", 8, "--force")
    assert done.returncode == 0 and out.read_text() == placed
    example.write_text("id,lower,upper,size\nkept,6,12,4\ngrad,8,19,4\nact,3,6,4\n")
    done = lowtide("pack", example, "-o", out, "--period", 10)
    assert done.returncode == 0, done.stderr
    assert [r["id"] for r in rows(out)] == ["kept", "grad#0", "grad#1", "act"]
    at = {r["id"]: int(r["offset"]) for r in rows(out)}
    assert at["kept"] == at["act"] and max(at.values()) == 8


def test_a_trace_is_packed_with_what_lives_across_steps(tmp_path: Path) -> None:
    path = tmp_path / "step.trace"
    save_trace(STEP, path)
    done = lowtide("pack", path, "--picture", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "1.0000 of the max load, proved lowest" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # opens offline
    assert "__DATA__" not in page and "__PAGE__" not in page and "step.trace" in page
    done = lowtide("pack", path, "--period", 4)
    assert done.returncode == 2 and "a trace has its own" in done.stderr


def test_what_a_step_leaves_takes_the_place_of_what_it_found() -> None:
    # The old gradient dies at op 1, the new one is made at op 2: one place for both. The same
    # for the loss, which has no name and was an input when it was found. 'host' is elsewhere.
    step = parse("""
        granularity 512
        have w:4096 | parameter name=w
        have old:700 | gradient name=w.grad
        have last_loss:4 | input
        have host:9000 | buffer device=meta
        zero w host last_loss ->
        free old
        free last_loss
        forward w -> h:512 | workspace=600
        backward w h -> new:700 loss:4
        is new | gradient name=w.grad
        keep new
        keep loss
        free h
        step w new ->
    """)
    buffers, period = step_buffers(step)
    assert period == 4
    grad = next(b for b in buffers if b.name.endswith("w.grad"))
    assert (grad.lower, grad.upper) == (2, period + 1)
    assert {(b.lower, b.upper, b.size) for b in buffers} == {
        (0, 4, 4096),
        (2, 5, 1024),
        (1, 2, 1024),  # the workspace of op 1
        (1, 3, 512),
        (2, 5, 512),
    }


def test_what_has_no_partner_keeps_its_place_all_along() -> None:
    step = parse("""
        have found:8 | input
        a found -> x:16
        free found
        b x -> left:32
        free x
        keep left
    """)
    buffers, period = step_buffers(step)
    lives = sorted((b.size, b.lower, b.upper) for b in buffers)
    assert lives == [(8, 0, period), (16, 0, 2), (32, 0, period)]


def test_a_bare_checkout_builds_on_first_use_or_says_why_not(example: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for folder in ("src", "native"):
        shutil.copytree(root / folder, tmp_path / folder)
    command = [sys.executable, "-W", "error", "-m", "lowtide", "pack", str(example), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "CXX": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["height"] == 12
    assert done.stderr == (
        "lowtide: the search ran in Python, slower than native: "
        "false could not build the native search: no message\n"
    )
    del environment["CXX"]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and json.loads(done.stdout)["height"] == 12
        assert done.stderr == ""
    assert len(list((tmp_path / ".cache" / "native").iterdir())) == 1


def test_the_picture_in_characters() -> None:
    buffers = [Buffer("a", 0, 2, 4, offset=0), Buffer("b", 1, 2, 4, offset=4)]
    assert draw_layout(buffers, width=40, rows=4) == [
        "8 B │........BBBBBBBB",
        "    │........BBBBBBBB",
        "    │AAAAAAAAAAAAAAAA",
        "0 B │AAAAAAAAAAAAAAAA",
        "    └────────────────",
        "     0              2",
        "A a   B b",
    ]
