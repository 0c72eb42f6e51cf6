"""benchmarks/pareto.py without its GPU: its budgets, who is asked what, the tables, the plot."""

import json
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import delta
import pareto
import pytest
import readme
from delta import Row
from pareto_aims import AIMS, BUDGETS, COMPILED, FULL, GIB, METHODS, SHARES, WORKS
from pareto_imagined import Imagined
from pareto_plot import plot

GPT, BERT = "GPT-2 medium 16x1024", "BERT-large 16x384"


def measured(name: str, ask: Any = None, **given: list[str]) -> dict[str, Any]:
    """A work as it might be measured."""
    work: dict[str, Any] = {}
    methods = given.get("methods", list(METHODS))
    budgets = given.get("budgets", list(BUDGETS))
    asked = ask or Imagined().ask
    if "compile" in methods:
        pareto.compiled(name, asked, work, lambda _: None)
    pareto.points(name, methods, budgets, asked, work, lambda _: None)
    return work


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["pareto.py", *arguments])
    pareto.main()


def test_budgets_are_shares_of_the_plain_peak_and_the_aims_the_largest_first() -> None:
    plain = {"peak_bytes": 40 * GIB, "reserved_bytes": 44 * GIB}
    rows = pareto.budgets_of(GPT, plain, list(BUDGETS))
    assert [label for label, _ in rows] == [
        "100%", "80%", "30GiB", "66%", "50%", "40%", "14.9GiB", "33%", "25%",
    ]  # fmt: skip
    found = dict(rows)
    assert found["50%"] == 20 * GIB and found["30GiB"] == 30 * GIB
    assert found[FULL] == int(1.05 * 44 * GIB)  # above what plain training reserves
    assert pareto.budgets_of(GPT, plain, ["50%", "8.9GiB"]) == [("50%", 20 * GIB)]
    assert [label for label, _ in pareto.budgets_of(BERT, plain, list(BUDGETS))] == list(SHARES)


def test_rows_are_compared_with_the_plain_steps_of_their_run() -> None:
    work = measured(GPT)
    assert sorted(work) == sorted(METHODS)
    assert work["plain"]["ratio"] == 1.0
    assert list(work["compile"]) == list(COMPILED)
    assert work["compile"]["0.5"]["compiled_ratio"] == pytest.approx(0.9 / 0.75)
    assert work["checkpoint"]["ratio"] == pytest.approx(1.26)
    for label, row in work["tide"].items():
        assert row["held"] and row["aim" if label in AIMS[GPT] else "plan"]
    assert work["tide"]["50%"]["memory_ratio"] == pytest.approx(0.5)


def test_more_reserved_than_the_budget_is_not_held_and_meets_no_aim(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ask(*task: Any) -> list[Row]:
        rows = Imagined().ask(*task)
        if task[0] == "tide":
            rows[0] |= {"reserved_bytes": task[2][0][1] + 1, "seconds": 0.1}
        return rows

    row = measured(GPT, ask, methods=["tide"], budgets=["30GiB"])["tide"]["30GiB"]
    assert not row["held"] and not pareto.is_met(row)
    assert "NOT HELD 30.00" in capsys.readouterr().out


def test_a_budget_that_fails_leaves_the_next_to_a_new_process() -> None:
    asked: list[list[str]] = []

    def ask(*task: Any) -> list[Row]:
        rows = Imagined().ask(*task)
        if task[0] != "tide":
            return rows
        asked.append([label for label, _ in task[2]])
        return [*rows[:1], {"error": "took longer than 120 s"}]

    work = measured(BERT, ask, methods=["tide"], budgets=["80%", "50%", "25%"])
    assert asked == [["80%", "50%", "25%"], ["25%"]]
    assert list(work) == ["plain", "tide"]
    assert [("error" in row) for row in work["tide"].values()] == [False, True, False]
    assert work["tide"]["50%"]["budget_bytes"] > work["tide"]["25%"]["budget_bytes"]


def test_what_was_measured_before_stays() -> None:
    work = measured(BERT, methods=["tide"], budgets=["80%", "50%"])
    before = work["tide"]["80%"]
    pareto.points(BERT, ["tide"], ["50%"], Imagined().ask, work, lambda _: None)
    assert work["tide"]["80%"] is before


def test_without_plain_nothing_else_is_asked() -> None:
    asked: list[Any] = []

    def ask(*task: Any) -> list[Row]:
        asked.append(task)
        return [{"error": "RuntimeError: no"}]

    assert list(measured(BERT, ask, methods=["tide", "checkpoint"])) == ["plain"]
    assert len(asked) == 1


def test_a_compiler_that_fails_halfway_keeps_the_other_half() -> None:
    def ask(*task: Any) -> list[Row]:
        rows = Imagined().ask(*task)
        return [rows[0], {"error": "no"}] if task[0] == "compile" else rows

    work = measured(BERT, ask, methods=["compile"])
    assert work["compile"]["1.0"]["ratio"] == pytest.approx(0.75)
    assert work["compile"]["0.5"] == {"error": "no"}


def test_a_dry_run_walks_through_everything_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "pareto.json"
    run(monkeypatch, "--dry-run", "--out", str(out))
    shown = capsys.readouterr().out
    told = [line.split("would ask ")[1] for line in shown.splitlines() if "would ask" in line]
    tasks = [json.JSONDecoder().raw_decode(line)[0] for line in told]
    assert {task[0] for task in tasks} == {"warm", "once", "compile", "tide", "same"}
    for kind in ("once", "compile", "tide", "same"):
        assert [task[1] for task in tasks if task[0] == kind] == [
            name for name in WORKS for _ in range(4 if kind == "once" else 1)
        ]
    assert all(pareto.most_seconds(*task) >= 100 for task in tasks)
    assert "all of it would take about" in shown
    assert not out.exists()


def test_a_dry_run_of_a_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        monkeypatch, "--dry-run", "--parts", "points", "--only", "ResNet-50 256 b",
        "--methods", "tide", "--budgets", "50%,30GiB",
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert shown.count("would ask") == 3  # to warm up, plain, tide
    assert "ResNet-50 256 bf16   tide                50%" in shown
    with pytest.raises(SystemExit):
        run(monkeypatch, "--dry-run", "--budgets", "51%")
    assert "51%: known are 100%" in capsys.readouterr().err


def test_no_more_works_at_once_than_there_is_memory_for() -> None:
    memory, free = pareto.Memory(10.0), [10.0]
    lowest = [10.0]

    def work(amount: float) -> None:
        with memory.taken(amount):
            free[0] -= amount
            lowest[0] = min(lowest[0], free[0])
            time.sleep(0.01)
            free[0] += amount

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, [6.0, 3.0, 5.0, 2.0, 10.0, 1.0]))
    assert 0 <= lowest[0] < 10 and free == [10.0]


def made_up() -> dict[str, Any]:
    works = {name: measured(name) for name in (GPT, BERT)}
    works[GPT]["tide"]["25%"] = {"error": "OutOfBudget", "budget_bytes": 12 * GIB}
    works[BERT]["tide"]["25%"] |= {"held": False, "ratio": 3.0}
    del works[BERT]["compile"], works[BERT]["selective"]
    works["ViT-B/16 256 tf32"] = {"plain": {"error": "RuntimeError: no"}}
    same = {
        GPT: {"plain_repeats": True, "identical": True},
        BERT: {"error": "no"},
    }
    machine = {"gpu": "a GPU", "torch": "2.11.0"}
    return {"machine": machine, "works": works, "same": same}


def test_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "pareto.json").write_text(json.dumps(made_up()))
    lines = readme.pareto_tables().splitlines()
    columns = [line.count("|") for line in lines if line.startswith("|")]
    first, second = 2 + 2, 2 + len(AIMS[GPT])  # works, aims; each below a header and a rule
    assert columns == [15] * first + [8] * second
    assert lines[2].startswith(f"| {GPT} | 237 ms, 47.8 GiB | ×1.00 | ×1.03 |")
    assert "| failed | ×1.26 at 42% |" in lines[2]
    assert "| ×3.00, over it | ×1.26 at 44% |  |" in lines[3]
    assert f"| {GPT} | 30.0 GiB | 30.00 GiB | ×1.097 | ×1.03 | -1.0% | +2.0% |" in lines
    assert "Of 16 budgets 14 were held in bytes reserved, 1 were exceeded, 1 failed." in lines[-1]
    assert f"bit for bit ({GPT})" in lines[-1]


def test_the_readme_has_a_place_for_them() -> None:
    text = (readme.ROOT / "README.md").read_text()
    assert text.count("<!-- pareto -->") == text.count("<!-- /pareto -->") == 1


def test_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "pareto.json"
    out.write_text(json.dumps(made_up()))
    run(monkeypatch, "--plot", "--out", str(out))
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_is_nothing_to_draw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot({}, tmp_path / "pareto.png")
    with pytest.raises(SystemExit):
        run(monkeypatch, "--plot")


WORKER = """
import fcntl, json, os, sys, time
sys.path.insert(0, {benchmarks!r})
from pareto_imagined import Imagined
from turns import Turn
print("ready", flush=True)
line = sys.stdin.readline()
if line.strip():
    task = json.loads(line)
    with Turn().taken():
        began = time.time()
        imagined = Imagined()
        sys.stdout = sys.stderr
        rows = imagined.ask(*task)
        sys.stdout = sys.__stdout__
        time.sleep(0.01)
        ended = time.time()
    if task[0] == "tide" and task[1].startswith("BERT"):
        sys.exit("this one dies")
    for row in rows:
        print(json.dumps(dict(row, began=began, ended=ended)), flush=True)
"""


def test_works_side_by_side_are_all_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By processes that answer without a GPU; one of them dies."""
    script = tmp_path / "pareto_works.py"
    script.write_text(WORKER.format(benchmarks=str(readme.ROOT / "benchmarks")))
    monkeypatch.setattr(delta, "HERE", tmp_path)
    machine = types.ModuleType("machine")
    vars(machine)["machine_facts"] = lambda: {"gpu": "a GPU", "torch": "2.11.0"}
    monkeypatch.setitem(sys.modules, "machine", machine)
    out = tmp_path / "pareto.json"
    run(monkeypatch, "--out", str(out), "--budgets", "50%,25%")
    assert "NOT HELD" not in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert set(results["works"]) == set(results["same"]) == set(WORKS)
    times: list[tuple[float, float]] = []
    for name, work in results["works"].items():
        assert set(work) == set(METHODS)
        rows = work["tide"]
        assert set(rows) == {"50%", "25%"}
        assert all(("error" in row) == name.startswith("BERT") for row in rows.values())
        others = [work["plain"], work["checkpoint"], *work["compile"].values()]
        times += {(row["began"], row["ended"]) for row in others}
    times.sort()
    assert all(one[1] <= other[0] for one, other in pairwise(times)), "two at a time"
    run(monkeypatch, "--out", str(out), "--only", "BERT", "--methods", "selective")
    assert set(json.loads(out.read_text())["works"]) == set(WORKS)
    # Gone on with: what is missing, or has failed, is asked for, and nothing else.
    results = json.loads(out.read_text())
    del results["works"][GPT]["tide"]["25%"], results["works"]["ViT-B/16 256 tf32"]
    del results["same"][BERT]
    out.write_text(json.dumps(results))
    script.write_text(script.read_text().replace("sys.exit(", "print("))
    run(monkeypatch, "--out", str(out), "--budgets", "50%,25%", "--resume")
    again = json.loads(out.read_text())
    assert set(again["works"]) == set(again["same"]) == set(WORKS)
    for name, work in again["works"].items():
        assert set(work) == set(METHODS) and set(work["tide"]) == {"50%", "25%"}
        assert not any("error" in row for row in work["tide"].values())
        if name not in (GPT, BERT, "ViT-B/16 256 tf32"):
            assert work == results["works"][name]
    assert again["works"][GPT]["tide"]["50%"] == results["works"][GPT]["tide"]["50%"]
    assert again["works"][GPT]["checkpoint"] == results["works"][GPT]["checkpoint"]
