"""The wrapper of PyTorch's CUDA allocator, compiled against this torch and run on main memory.

`native/allocator/pretend` stands in for CUDA and the caching allocator; `check.cc` has the checks.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import torch

from lowtide._native import compile_objects, find_compiler
from lowtide._runtime import torch_build

SANITIZED = ("-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined")


def test_the_wrapper_keeps_its_promises(tmp_path: Path) -> None:
    recipe = torch_build.recipe()
    pretend = recipe.folders[0] / "pretend"
    flags = (*recipe.flags, *SANITIZED, "-fno-sanitize-recover=all")
    objects = compile_objects(
        replace(recipe, folders=(*recipe.folders, pretend), flags=flags), tmp_path
    )
    libraries = Path(torch.__file__).parent / "lib"
    links = [f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}", "-fsanitize=address,undefined"]
    check = tmp_path / "check"
    compiler = (find_compiler() or "c++").split()
    subprocess.run([*compiler, "-pthread", *objects, *links, "-o", str(check)], check=True)
    quiet = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the pool lives for ever
    done = subprocess.run([str(check)], capture_output=True, text=True, env=quiet)
    assert done.stdout == "checked\n", done.stderr[-2000:]
