"""`lowtide run`: the script is the person's own, and so is how it ends."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowtide._report.status_text import render_status

TRAIN = """
import sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained", *sys.argv[1:], __name__)
"""


def run(
    script: Path, *args: str, flags: tuple[str, ...] = ("--pool-only",)
) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "lowtide", "run", *flags, str(script), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_script_runs_as_ever(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    code, out, err = run(script, "--epochs", "3")
    assert (code, out) == (0, "trained --epochs 3 __main__\n")
    assert err == "lowtide: the pool is off: CUDA is not in use\n"


def test_its_exit_code_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(7)")
    assert run(script)[0] == 7
    script.write_text("import sys; sys.exit('no data')")
    code, _, err = run(script)
    assert code == 1
    assert "no data" in err.splitlines()


def test_its_traceback_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f():\n    raise ValueError('bad data')\nf()\n")
    code, _, err = run(script)
    assert code == 1
    assert "ValueError: bad data" in err
    assert "lowtide/" not in err  # none of our frames
    script.write_text("raise KeyboardInterrupt")
    assert run(script)[0] == 130
    script.write_text("def f(:\n")
    code, _, err = run(script)
    assert code == 1
    assert "SyntaxError" in err


def test_what_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    code, _, err = run(script)
    assert code == 2
    assert err == f"lowtide: {script} is not a file: name the training script to run\n"
    script.write_text(TRAIN)
    code, _, err = run(script, flags=())
    assert code == 2
    assert err.count("\n") == 1
    assert "give lowtide run either a --budget or --pool-only" in err


BUDGETED = """
import torch
from torch import nn

torch.set_num_threads(1)  # with more, plain runs differ now and then on a busy machine
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    loss = model(torch.randn(1024, 512)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sum(p.double().sum().item() for p in model.parameters()))
"""


def test_a_script_runs_within_a_budget(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BUDGETED)
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    ).stdout
    code, out, err = run(script, flags=("--budget", "0.7", "--folder", str(tmp_path)))
    assert (code, out) == (0, plain), err
    assert "8 steps: 2 dynamic, 1 traced, 5 planned" in err
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]
    code, out, err = run(script, flags=("--budget", "1MiB"))
    assert (code, out) == (2, "")
    assert err.startswith("lowtide: the budget is 1.00 MiB (1048576 bytes), but ")
    autoswap = ("--policy", "autoswap")
    code, out, err = run(script, flags=("--budget", "1MiB", *autoswap))
    assert (code, out) == (2, "")
    assert err.startswith("lowtide: the budget is 1.00 MiB (1048576 bytes), but swapping cannot go")
    code, out, err = run(script, flags=("--budget", "free", "--folder", str(tmp_path)))
    assert (code, out) == (0, plain), err
    assert "2 crude, 1 traced, 5 planned" in err


DEEP = """
import torch
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
                              for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(512, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


def test_on_a_terminal_a_line_tells_of_the_last_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DEEP)
    flags = ["--budget", "0.6", "--policy", "tide"]
    command = [sys.executable, "-m", "lowtide", "run", *flags, str(script)]
    reader, writer = os.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True) as process:
        os.close(writer)
        said = b""
        with suppress(OSError):  # how the end of a terminal looks
            while part := os.read(reader, 4096):
                said += part
        os.close(reader)
        assert process.stdout is not None
        assert process.stdout.read() == "trained\n"
    assert process.returncode == 0
    lines = said.decode().split("\r\x1b[K")
    assert any(line.startswith("lowtide: step ") for line in lines), lines
    assert lines[-1].startswith("budget: tide, 6 steps")


def test_what_is_not_known_is_not_said() -> None:
    known: dict[str, Any] = {"step": 3, "mode": "planned", "budget_bytes": 2 << 30}
    assert (
        render_status(**known, peak_bytes=1 << 30, seconds=1.5, plain_seconds=1.0)
        == "step 3, planned, peak 1.00 GiB of 2.00 GiB, 1.50x the plain step"
    )
    assert (
        render_status(**known, peak_bytes=0, seconds=0.0, plain_seconds=0.0)
        == "step 3, planned, budget 2.00 GiB"
    )
