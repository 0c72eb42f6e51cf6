"""Native code: found in the package, or built once; whole or not at all.

A wheel carries what does not depend on torch. A source checkout has `native/` beside `src` and
builds on first use, under a name that changes with the sources and the flags. What is built
against the installed torch is always built on first use, from sources that the wheel carries too.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGED = Path(__file__).with_name("_native_sources")  # in a wheel
_SOURCES = _PACKAGED if _PACKAGED.is_dir() else _ROOT / "native"
_ALLOCATOR = _SOURCES / "allocator"
_FLAGS = ("-O3", "-fPIC", "-pthread")


class NoNative(Exception):
    """There is no native library here; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a library is built: every `.cc` in these folders, with these flags and libraries."""

    name: str
    what: str  # for a person
    folders: tuple[Path, ...]
    flags: tuple[str, ...]
    links: tuple[str, ...] = ()


LAYOUT = Recipe(
    "layout",
    "the native search",
    (_ROOT / "native" / "layout",),
    ("-std=c++17", "-ffp-contract=off"),
)

REMAKE = Recipe(
    "remake",
    "the native pass of plans",
    (_ROOT / "native" / "remake",),
    ("-std=c++17", "-ffp-contract=off"),
)

HOST_POOL = Recipe(
    "pool-host",
    "the pool over main memory",
    (_ALLOCATOR, _ALLOCATOR / "host"),
    ("-std=c++17",),
)


def torch_pool(flags: Sequence[str], links: Sequence[str]) -> Recipe:
    """The pool inside PyTorch; the flags say where the installed torch and CUDA are."""
    folders = _ALLOCATOR, _ALLOCATOR / "torch"
    return Recipe("pool-torch", "the pool", folders, tuple(flags), tuple(links))


def torch_gate(flags: Sequence[str], links: Sequence[str]) -> Recipe:
    """The gate in front of a dispatch mode."""
    return Recipe("gate", "the gate", (_SOURCES / "gate",), tuple(flags), tuple(links))


def built(recipe: Recipe, *also: str, before: Callable[[], None] = lambda: None) -> Path:
    """The library of `recipe`, built now if it is not there yet.

    `also` tells builds apart; `before` is called before one that takes a while.
    """
    if not all(folder.is_dir() for folder in recipe.folders):
        raise NoNative(f"this installation lacks {recipe.what}: install again with a C++ compiler")
    digest = hashlib.sha256(
        repr((recipe.flags, recipe.links, sys.platform, find_compiler(), also)).encode()
    )
    for folder in recipe.folders:
        for file in sorted([*folder.glob("*.cc"), *folder.glob("*.h")]):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    name = f"{recipe.name}-{digest.hexdigest()[:16]}.so"
    for folder in _caches():
        if (folder / name).exists() and (folder / name).stat().st_uid == os.getuid():
            return folder / name
    for folder in _caches():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            before()
            try:
                build(recipe, folder / name)
            except OSError as error:
                raise NoNative(f"{recipe.what} cannot be built in {folder} ({error})") from error
            return folder / name
    raise NoNative(f"{_caches()[0]} cannot be written, so {recipe.what} cannot be built")


def loaded(recipe: Recipe, packaged: Path, abi: int) -> ctypes.CDLL:
    """The library of `recipe`: the one in the package, or else built. Raises NoNative."""
    path = packaged if packaged.exists() else built(recipe)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNative(f"{path} cannot be loaded ({error})") from error
    if getattr(library, f"lowtide_{recipe.name}_abi")() != abi:
        raise NoNative(f"{path} is of another version of lowtide: install it again")
    return library


def _caches() -> list[Path]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = _ROOT / ".cache" / "native" if (_ROOT / "native").is_dir() else home / "lowtide"
    return [own, Path(tempfile.gettempdir()) / f"lowtide-{os.getuid()}"]


def build(recipe: Recipe, target: Path) -> None:
    """Compile and link `recipe` to `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = compile_objects(recipe, Path(scratch))
        whole = f"{scratch}/whole.so"
        _run(recipe, [["-shared", "-pthread", *objects, *recipe.links, "-o", whole]])
        os.replace(whole, target)


def compile_objects(recipe: Recipe, folder: Path) -> list[str]:
    """Compile every source of `recipe` into `folder`, side by side."""
    sources = [path for folder in recipe.folders for path in sorted(folder.glob("*.cc"))]
    objects = [str(folder / f"{i}.o") for i in range(len(sources))]
    commands = [
        [*_FLAGS, *recipe.flags, "-c", str(source), "-o", target]
        for source, target in zip(sources, objects, strict=True)
    ]
    _run(recipe, commands)
    return objects


def _run(recipe: Recipe, commands: Sequence[Sequence[str]]) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise NoNative("there is no C++ compiler: install one, or name it with CXX")
    waiting = list(commands)
    running: list[subprocess.Popen[str]] = []
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                command = [*compiler.split(), *waiting.pop(0)]
                running.append(  # S603: the compiler the user names
                    subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
                )
            process = running.pop(0)
            _, said = process.communicate()
            if process.returncode:
                raise NoNative(f"{compiler} could not build {recipe.what}: {_first_line(said)}")
    except OSError as error:
        raise NoNative(f"{compiler} could not be run ({error.strerror})") from error
    finally:
        for process in running:
            process.kill()
            process.communicate()


def find_compiler() -> str | None:
    return os.environ.get("CXX") or next(
        (name for name in ("c++", "g++", "clang++") if shutil.which(name)), None
    )


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return lines[0].strip() if lines else "no message"
