"""The commands that need no torch, as a person runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import load_trace, save_trace
from lowtide._trace.text import parse

STEP = parse("""
    have w:4096 | parameter @Net.fc name=Net.fc.weight
    mm x:1024 w -> h:2048 | 2ms forward @Net.fc
    is h | activation @Net.fc
    save h | op=1 node=ReluBackward0 packed=1 unpacked=2
    relu h -> y:2048 | 1ms forward @Net.<b>act</b>
    back y h -> g:4096 | 4ms backward @Net.fc
""")


def lowtide(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "lowtide", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    path = tmp_path / "step.trace"
    save_trace(STEP, path)
    return path


def test_report_prints_the_table_and_writes_the_page(step: Path) -> None:
    page = step.with_suffix(".html")
    done = lowtide("report", step, "-o", page)
    assert done.returncode == 0, done.stderr
    assert "peak 13.00 KiB at op 2, back in Net.fc" in done.stdout
    assert "Net.fc" in done.stdout and "param" in done.stdout
    text = page.read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # opens offline
    assert "<b>act" not in text  # names from a trace are data, not markup


def test_a_trace_without_ops_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.trace"
    save_trace(parse(""), path)
    done = lowtide("report", path)
    assert done.returncode == 2
    complaint = "the trace is empty: it has no ops; record a step that runs some"
    assert done.stderr == f"lowtide: {complaint}\n"


def test_import_and_report(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("id,lower,upper,size\na,0,2,8\nb,1,3,8\n")
    done = lowtide("import", "csv", tmp_path / "b.csv", "-o", tmp_path / "b.trace")
    assert done.returncode == 0, done.stderr
    assert "peak 16 B" in done.stdout
    assert len(load_trace(tmp_path / "b.trace").ops) == 3 - 1 + 1


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["report", "missing.trace"], "cannot read missing.trace: No such file or directory"),
        (["report", "."], "cannot read .: Is a directory"),
        (["import", "dtr", "missing.log", "-o", "x.trace"], "cannot read missing.log"),
        (["import", "csv", "old.csv", "-o", "old.csv"], "old.csv exists: choose another name"),
        (["import", "csv", "old.csv", "-o", "no/x"], "no is not a folder: create it first"),
        (["trace", "-o", "old.csv", "train.py"], "old.csv exists: choose another name"),
        (["import", "csv", "old.csv", "-o", "/dev/null", "--force"], "/dev/null is not a file"),
        (["import", "csv", "old.csv", "-o", "x" * 300], f"cannot write {'x' * 300}: File name too"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("precious")
    done = lowtide(*args)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lowtide: {complaint}")
    assert done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["old.csv"]
    assert (tmp_path / "old.csv").read_text() == "precious"
