"""`lowtide trace` on scripts that know nothing of it."""

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from lowtide import Trace, load_trace
from lowtide._ir import Kind, Phase

ROOT = Path(__file__).parents[2]
PRELUDE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
x = torch.randn(8, 16)
"""


def run(tmp_path: Path, body: str, *args: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    command = [sys.executable, "-W", "error", "-m", "lowtide", "trace", "-o", "step.trace"]
    command += ["train.py", *args]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


def traced(tmp_path: Path, body: str, *args: str) -> Trace:
    done = run(tmp_path, body, *args)
    assert done.returncode == 0, done.stderr
    return load_trace(tmp_path / "step.trace")


def count(trace: Trace, name: str, phase: Phase | None = None) -> int:
    return Counter((op.name.split(".")[1], phase and op.phase) for op in trace.ops)[name, phase]


def test_a_plain_script_with_arguments(tmp_path: Path) -> None:
    body = """
        import argparse, sys
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int)
        parser.add_argument("-o")
        options = parser.parse_args()
        assert __name__ == "__main__" and sys.argv[0] == "train.py"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(options.steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            print("step", step)
    """
    done = run(tmp_path, body, "--steps", "1000", "-o", "mine")
    assert done.returncode == 0, done.stderr
    assert "step 1\n" in done.stdout and "step 2\n" not in done.stdout  # ended in the third
    assert "at the peak" in done.stdout and "wrote step.trace" in done.stdout
    assert "lowtide: optimizer step 3" in done.stderr
    trace = load_trace(tmp_path / "step.trace")
    assert trace.source == "train.py --steps 1000 -o mine"
    assert count(trace, "addmm") == 2
    assert {value.kind for value in trace.values} >= {Kind.PARAMETER, Kind.STATE, Kind.GRADIENT}


def test_the_same_script_gives_the_same_file_but_for_times(tmp_path: Path) -> None:
    body = """
        optimizer = torch.optim.AdamW(model.parameters())
        drop = nn.Dropout(0.5)
        for _ in range(9):
            optimizer.zero_grad(); drop(model(x)).sum().backward(); optimizer.step()
    """
    outputs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        outputs.append(run(tmp_path / name, body).stdout.splitlines()[-1])
    assert outputs[0] == outputs[1]
    assert "digest" in outputs[0]


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(100):
            (model(x).mean() / 4).backward()
            if i % 4 == 3:
                optimizer.step(); optimizer.zero_grad()
        """,
    )
    assert count(trace, "addmm") == 8


def test_several_optimizers_make_one_step(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        critic = nn.Linear(4, 1)
        for_model = torch.optim.Adam(model.parameters())
        for_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        for i in range(100):
            for _ in range(5):
                for_critic.zero_grad(); critic(model(x).detach()).mean().backward()
                for_critic.step()
            for_model.zero_grad(); critic(model(x)).mean().backward(); for_model.step()
        """,
    )
    assert count(trace, "addmm") == 6 * 3
    assert {v.module for v in trace.values if v.kind is Kind.PARAMETER} >= {
        "Sequential.0",
        "Linear",
    }


def test_optimizers_that_step_inside_backward(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        def update(p):
            optimizers[p].step(); optimizers[p].zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        for _ in range(50):
            model(x).mean().backward()
        """,
    )
    assert count(trace, "addmm") == 2
    assert count(trace, "add_") == 4


def test_an_optimizer_that_never_steps_is_not_waited_for_forever(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        spare = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        """,
    )
    assert count(trace, "addmm") == 2


def test_an_optimizer_that_wraps_another_is_not_waited_for(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        class Wrapper(torch.optim.Optimizer):  # as Accelerate does
            def __init__(self, inner):
                self.inner = inner
            param_groups = property(lambda self: self.inner.param_groups)
            state = property(lambda self: self.inner.state)
            def step(self, closure=None):
                self.inner.step(closure)
            def zero_grad(self, set_to_none=True):
                self.inner.zero_grad(set_to_none)
        optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        for i in range(100):
            assert i < 3, "lowtide waits for something"
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        """,
    )
    assert count(trace, "addmm") == 2


def test_a_closure_is_part_of_the_step(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)
        def closure():
            optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); return loss
        for _ in range(20):
            optimizer.step(closure)
        """,
    )
    phases = {op.phase for op in trace.ops}
    assert phases == set(Phase)


def test_a_loop_without_an_optimizer_is_found_by_its_repetition(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        deep = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))
        for _ in range(1000):
            deep(x).square().mean().backward()
            with torch.no_grad():
                for p in deep.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        """,
    )
    assert count(trace, "addmm") == 12
    assert count(trace, "relu") == 12
    assert trace.ops[0].phase is Phase.FORWARD
    assert {value.kind for value in trace.values} >= {Kind.PARAMETER, Kind.GRADIENT}


def test_a_short_loop_without_backward(tmp_path: Path) -> None:
    trace = traced(tmp_path, "for _ in range(5): model(x)")
    assert count(trace, "addmm") == 2


def test_a_script_that_ends_early_gives_its_last_whole_step(tmp_path: Path) -> None:
    body = """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range({steps}):
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        raise SystemExit(0)
    """
    assert count(traced(tmp_path, body.format(steps=2)), "addmm") == 2


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("", "train.py never trains: 9 ops, no optimizer step"),
        ("raise ValueError('bad\\nshape')", "train.py raised ValueError at line 7 before a step"),
        ("import sys; sys.exit(3)", "train.py exited with 3 before a step was recorded"),
        ("def broken(:", "train.py raised SyntaxError at line 7"),
        ("import nowhere", "train.py raised ModuleNotFoundError at line 7"),
        (
            "o = torch.optim.SGD(model.parameters()); model(x).sum().backward(); o.step()",
            "train.py made a single optimizer step",
        ),
        ("model(x)\nprint('hello')", "train.py never trains"),
        ("nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))(x[:, :8])", "train.py never trains"),
    ],
)
def test_a_script_that_cannot_be_traced(body: str, complaint: str, tmp_path: Path) -> None:
    done = run(tmp_path, body)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"lowtide: {complaint}"), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "step.trace").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py"]


def test_a_script_that_changes_directory(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        import os
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        for _ in range(9):
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        """,
    )
    assert count(trace, "addmm") == 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_script_that_runs_no_op(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    command = [sys.executable, "-m", "lowtide", "trace", "-o", "x.trace", "hello.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "lowtide: hello.py ran no torch op: name a script that trains\n"


def test_a_missing_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lowtide", "trace", "-o", "x.trace", "nowhere.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("lowtide: nowhere.py is not a file")


def test_an_evaluation_before_training_is_not_the_step(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            for _ in range(1000):
                model(x)
        for _ in range(9):
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        """,
    )
    assert {op.phase for op in trace.ops} == set(Phase)


def test_workers_forked_by_the_script_are_left_alone(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        class Data(torch.utils.data.Dataset):
            scale = nn.Linear(16, 16)
            def __len__(self):
                return 4000
            def __getitem__(self, i):
                with torch.no_grad():
                    return self.scale(torch.ones(16) * i)
        loader = torch.utils.data.DataLoader(Data(), batch_size=400, num_workers=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad(); model(batch).mean().backward(); optimizer.step()
        """,
    )
    assert count(trace, "addmm") == 2


def test_a_new_optimizer_every_step(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        for _ in range(9):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        """,
    )
    assert count(trace, "addmm") == 2


def test_a_loss_module_made_on_the_fly(tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        """
        for _ in range(200):
            nn.MSELoss()(model(x), x[:, :4]).backward()
            for p in model.parameters():
                p.data -= 0.1 * p.grad
                p.grad = None
        """,
    )
    assert count(trace, "mse_loss") == 1


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(1)", "raise ValueError('late')"])
def test_a_script_that_will_not_be_ended(end: str, tmp_path: Path) -> None:
    trace = traced(
        tmp_path,
        f"""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(9):
            try:
                optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
            except BaseException:
                {end}
        """,
    )
    assert count(trace, "addmm") == 2


def test_the_file_of_a_script_is_absolute_as_under_python(tmp_path: Path) -> None:
    traced(
        tmp_path,
        """
        import os, sys
        os.chdir("/")
        assert open(__file__).read() and sys.argv[0] == "train.py"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(9):
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        """,
    )


def test_a_script_that_forks_is_traced_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import os
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        child = os.fork() == 0
        for _ in range(4):
            optimizer.zero_grad(); model(x).mean().backward(); optimizer.step()
        print("child ends")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("child ends") == 1  # the parent is ended before
    assert done.stdout.count("wrote step.trace") == 1


def test_the_demo_trains_in_half_the_memory(tmp_path: Path) -> None:
    page = tmp_path / "half.html"
    command = [sys.executable, str(ROOT / "examples" / "half.py"), "--steps", "4"]
    done = subprocess.run(
        [*command, "--report", str(page)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    assert "1 dynamic, 1 traced, 2 planned" in done.stdout
    assert page.exists()
