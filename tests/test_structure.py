"""The shape of the package: who may import whom, what is public, what needs torch."""

import ast
import subprocess
import sys
from pathlib import Path

import lowtide

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lowtide"

# Each may import from those above it and from itself, never from below.
LAYERS = [
    {"_units", "_errors", "_ir", "_native"},
    {"_check", "_files", "_script"},
    {"_analyze"},
    {"_machine"},
    {"_simulate"},
    {"_policy"},
    {"_layout"},
    {"_trace"},
    {"_report"},
    {"_runtime"},
    {"__init__"},
    {"_cli"},
    {"__main__"},
]

# The recorder and the runtime are all that touches torch; planning runs anywhere.
USES_TORCH = (
    {
        f"_runtime/{name}.py"
        for name in [
            "awaited",
            "budget",
            "cuda",
            "fit",
            "holdings",
            "marks",
            "storages",
            "torch_build",
            "workspaces",
        ]
    }
    | {
        f"_runtime/swap/{name}.py"
        for name in [
            "cell",
            "cuda_driver",
            "driver",
            "file_tier",
            "guests",
            "late",
            "native_saves",
            "observe",
            "optimizers",
            "pieces",
            "pinned_tier",
            "quiet",
            "saved",
            "sharing",
            "states",
            "tier",
        ]
    }
    | {
        f"_runtime/fused/{name}.py"
        for name in ["chains", "groups", "kernel", "kernels", "program", "source"]
    }
    | {
        f"_runtime/delta/{name}.py"
        for name in [
            "asleep",
            "cap",
            "cell",
            "costs",
            "driver",
            "forms",
            "gate",
            "idle",
            "going",
            "holds",
            "ledger",
            "mode",
            "moves",
            "native_tape",
            "planned",
            "randomness",
            "recipe",
            "record",
            "refusal",
            "rehearsal",
            "replay",
            "results",
            "room",
            "see",
            "tapes",
            "tracing",
            "unseen",
            "verify",
        ]
    }
    | {"_machine/measure.py", "_cli/doctor.py"}
    | {
        f"_trace/{name}.py"
        for name in [
            "api",
            "args",
            "book",
            "cuda",
            "modules",
            "optimizers",
            "record",
            "saves",
            "schema",
            "script",
            "tensors",
            "workspace",
        ]
    }
)

# What the package loads when it is first asked for.
LAZY = {"lowtide._trace.api.trace", "lowtide._runtime.fit", "lowtide._runtime.fit.fit"}


def _imports(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_one_way() -> None:
    level = {part: i for i, layer in enumerate(LAYERS) for part in layer}
    for path in PACKAGE.rglob("*.py"):
        here = _part(path)
        for name in _imports(path):
            if name.startswith("lowtide."):
                there = name.split(".")[1]
                there = there if there in level else "__init__"
                lazy = here == "__init__" and name in LAZY
                allowed = level[there] < level[here] or there == here or lazy
                assert allowed, f"{path.name} imports {name}"


def test_only_the_recorder_and_the_runtime_use_torch() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == "torch" for name in _imports(path))
    }
    assert users <= USES_TORCH


def test_importing_lowtide_and_its_command_line_leaves_torch_alone() -> None:
    code = "import sys, lowtide, lowtide._cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_pure_tier_runs_without_torch() -> None:
    """But for those that try a great many cases, or build something: they have run."""
    long = "windows_of_ever_other_sizes or bare_checkout or side_by_side"
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pytest; sys.exit(pytest.main(['-q', 'tests/pure', '-m', 'not hypothesis', "
        f"'-k', 'not ({long})']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_public_names() -> None:
    assert sorted(lowtide.__all__) == [
        "BadInput",
        "Buffer",
        "LowtideError",
        "LowtideWarning",
        "NoStep",
        "OutOfBudget",
        "Packing",
        "ScriptFailed",
        "Tide",
        "Trace",
        "fit",
        "load_trace",
        "pack",
        "save_trace",
        "trace",
    ]
    assert set(lowtide.__all__) <= set(dir(lowtide))
    public = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("_")}
    assert public == {"py.typed"}


def test_modules_stay_small() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
