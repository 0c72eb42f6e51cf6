"""What the process under a budget really takes, seen from outside, and what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "budgeted_script.py"


def run(kind: str, steps: int, budget: str, folder: Path) -> tuple[str, int]:
    """The last line that it printed, and the most bytes that it ever had in memory."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), kind, str(steps), budget, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        # Freed memory goes back to the system at once, so that what is in use is what is seen.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    # Not what the system counts for children: that begins with what their parent has.
    highest = 0
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        highest = max(highest, int(found[1]) << 10 if found else 0)
        time.sleep(0.02)
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    assert process.returncode == 0
    return said.strip().splitlines()[-1], highest


@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_sixty_percent_of_the_peak_are_enough(kind: str, tmp_path: Path) -> None:
    peak = int(run(kind, 0, "peak", tmp_path)[0])
    plain, plain_bytes = run(kind, 20, "plain", tmp_path)
    ours, our_bytes = run(kind, 20, str(int(0.6 * peak)), tmp_path)
    assert ours == plain
    assert plain.endswith(" []")  # no file has a name, not even while it is in use
    saved = plain_bytes - our_bytes
    assert saved > 0.65 * 0.4 * peak, f"{saved >> 20} of {int(0.4 * peak) >> 20} MiB"


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    peak = int(run("conv", 0, "peak", tmp_path)[0])
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "conv", "10000", str(int(0.6 * peak)), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "step 4\n":
        assert process.poll() is None
    held = os.listdir(f"/proc/{process.pid}/fd")
    links = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in held]
    assert any(re.match(rf"{tmp_path}/lowtide-.* \(deleted\)", link) for link in links)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode != 0
    assert complaint.strip().endswith("KeyboardInterrupt")
    assert not list(tmp_path.iterdir())
