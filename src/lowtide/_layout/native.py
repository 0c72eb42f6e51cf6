"""The native search: found in the package, or built once from the checkout; then called.

A wheel carries the library. A bare source checkout has `native/layout` beside `src` and builds it
on first use into `.cache/native`, under a name that changes with its sources.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ABI = 1
_PACKAGED = Path(__file__).with_name("layout.so")
_ROOT = Path(__file__).parents[3]
_SOURCES = _ROOT / "native" / "layout"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
_REFUSALS = {1: "the problem breaks a rule", 2: "two fixed buffers share bytes"}
_NO_MEMORY = 3


class NoNative(Exception):
    """There is no native library here; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Request:
    """A problem in the terms of `native/layout/layout.h`, which explains every field."""

    lower: Sequence[int]
    upper: Sequence[int]
    size: Sequence[int]
    fixed: Sequence[int]  # -1: open
    period: int = 0
    align: int = 1
    goal: int = 0
    seed: int = 0
    nodes: int = -1
    seconds: float = -1.0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search came back with."""

    offsets: list[int]
    height: int  # to the aligned end of the highest buffer
    bound: int  # no layout is lower
    nodes: int


class _Problem(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("lower", ctypes.POINTER(ctypes.c_int64)),
        ("upper", ctypes.POINTER(ctypes.c_int64)),
        ("size", ctypes.POINTER(ctypes.c_int64)),
        ("fixed", ctypes.POINTER(ctypes.c_int64)),
        ("period", ctypes.c_int64),
        ("align", ctypes.c_int64),
        ("goal", ctypes.c_int64),
    ]


class _Budget(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("nodes", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("threads", ctypes.c_int32),
    ]


class _Result(ctypes.Structure):
    _fields_ = [
        ("height", ctypes.c_int64),
        ("bound", ctypes.c_int64),
        ("nodes", ctypes.c_int64),
    ]


def search(request: Request) -> Answer:
    """Run the native search. Raises NoNative where there is none."""
    library = _library()
    count = len(request.size)
    row = ctypes.c_int64 * count
    problem = _Problem(
        count,
        row(*request.lower),
        row(*request.upper),
        row(*request.size),
        row(*request.fixed),
        request.period,
        request.align,
        request.goal,
    )
    budget = _Budget(request.seed, request.nodes, request.seconds, request.threads)
    offsets = row()
    result = _Result()
    status = library.lowtide_layout_pack(
        ctypes.byref(problem), ctypes.byref(budget), offsets, ctypes.byref(result)
    )
    if status == _NO_MEMORY:
        raise MemoryError("there is not enough memory for the layout search")
    if status in _REFUSALS:
        raise ValueError(_REFUSALS[status])
    if status:
        raise AssertionError(f"the native layout search failed ({status})")
    return Answer(list(offsets), result.height, result.bound, result.nodes)


@functools.cache
def _library() -> ctypes.CDLL:
    path = _PACKAGED if _PACKAGED.exists() else _built()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoNative(f"{path} cannot be loaded ({error})") from error
    if library.lowtide_layout_abi() != ABI:
        raise NoNative(f"{path} is of another version of lowtide: install it again")
    return library


def _built() -> Path:
    """The library built from this checkout, built now if it is not there yet."""
    if not _SOURCES.is_dir():
        raise NoNative("this installation has no native search: install again with a C++ compiler")
    files = sorted(_SOURCES.glob("*.cc")) + sorted(_SOURCES.glob("*.h"))
    digest = hashlib.sha256(repr((_FLAGS, sys.platform)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\\0" + file.read_bytes())
    name = f"layout-{digest.hexdigest()[:16]}.so"
    folders = [_ROOT / ".cache" / "native", Path(tempfile.gettempdir()) / f"lowtide-{os.getuid()}"]
    for folder in folders:
        if (folder / name).exists() and (folder / name).stat().st_uid == os.getuid():
            return folder / name
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            build(folder / name)
            return folder / name
    raise NoNative(f"{folders[0]} cannot be written, so the native search cannot be built")


def build(target: Path) -> None:
    """Compile `native/layout` to `target`, whole or not at all."""
    compiler = os.environ.get("CXX") or next(
        (name for name in ("c++", "g++", "clang++") if shutil.which(name)), None
    )
    if compiler is None:
        raise NoNative("there is no C++ compiler: install one, or name it with CXX")
    handle, scratch = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        sources = [str(path) for path in sorted(_SOURCES.glob("*.cc"))]
        done = subprocess.run(  # noqa: S603 - the compiler the user names
            [*compiler.split(), *_FLAGS, *sources, "-o", scratch], capture_output=True, text=True
        )
        if done.returncode:
            raise NoNative(
                f"{compiler} could not build the native search: {_first_line(done.stderr)}"
            )
        os.replace(scratch, target)
    except OSError as error:
        raise NoNative(f"{compiler} could not be run ({error.strerror})") from error
    finally:
        Path(scratch).unlink(missing_ok=True)


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return lines[0].strip() if lines else "no message"
