"""What is built against the torch that is installed: where its headers are, and what they have."""

import os
import re
import sys
import sysconfig
from pathlib import Path

import torch

from lowtide._native import NoNative, Recipe, built, torch_gate, torch_pool

# The allocator interface as the pool implements it, but for what not every version has.
_INTERFACE = """
    raw_alloc raw_alloc_with_stream raw_delete init getMemoryFraction setMemoryFraction
    getExpandableSegmentSizes enable isEnabled cacheInfo getBaseAllocation recordStream snapshot
    beginAllocateToPool endAllocateToPool releasePool getPoolUseCount createOrIncrefPool
    setUseOnOOM setNoSplit checkPoolLiveAllocations shareIpcHandle getIpcDevPtr isHistoryEnabled
    recordHistory recordAnnotation pushCompileContext popCompileContext setUserMetadata
    getUserMetadata attachOutOfMemoryObserver attachAllocatorTraceTracker enablePeerAccess
    memcpyAsync getCheckpointState setCheckpointPoolState name
"""
_GATED = {"dispatch", "detach"}  # of an interpreter's functions, those that the gate has itself
_OPTIONAL = {
    "markCaptureBegin": {"markCaptureBegin", "markCaptureEnd"},
    "getContextForPointer": {"getContextForPointer"},
    "attachOomRejectionObserver": {"attachOomRejectionObserver"},
    "allocateWithAddress": {"allocateWithAddress"},
}


def build_pool() -> Path:
    """The library, built on first use. Raises NoNative where it cannot be."""
    return _built(recipe())


def build_gate() -> Path:
    """Likewise."""
    include = Path(torch.__file__).parent / "include"
    flags = [*_flags(include), f"-DLOWTIDE_FORWARDS={_forwards(include)}"]
    return _built(torch_gate(flags, _links("-ltorch_python", "-ltorch_cpu", "-lc10")))


def _built(recipe: Recipe) -> Path:
    """It takes half a minute: whoever waits sees why. No warning, which may be an error."""

    def show() -> None:
        what = f"building {recipe.what} against torch {torch.__version__}, once"
        sys.stderr.write(f"lowtide: {what}\n")

    return built(recipe, torch.__version__, torch.__file__, before=show)


def _flags(include: Path) -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(include)]


def _links(*names: str) -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    return [f"-L{libraries}", *names, f"-Wl,-rpath,{libraries}"]


def _forwards(include: Path) -> str:
    """Of each function that Python's interpreter has for PyTorch, one that only hands on."""
    header = include / "c10" / "core" / "impl" / "PyInterpreter.h"
    try:
        code = _code(header.read_text())
    except OSError as error:
        raise NoNative(f"torch's headers are missing ({error.filename})") from error
    match = re.search(r"struct C10_API PyInterpreterVTable \{.*?\n};", code, re.DOTALL)
    functions = re.findall(
        r"virtual\s+([^;{}()]*?)\s*\b(\w+)\(([^;]*?)\)\s*const\s*=\s*0;",
        match.group(0) if match else "",
    )
    if not {name for _, name, _ in functions} >= _GATED:
        raise NoNative(f"torch {torch.__version__} is not known to this lowtide: update it")
    return " ".join(
        f"{' '.join(result.split())} {name}({_parameters(given)}) const override "
        f"{{ return real_->{name}({', '.join(f'a{i}' for i in range(_count(given)))}); }}"
        for result, name, given in functions
        if name not in _GATED
    )


def _count(given: str) -> int:
    return given.count(",") + 1 if given.strip() else 0


def _parameters(given: str) -> str:
    """With names of ours in place of those that they may have."""
    types = [" ".join(one.split()) for one in given.split(",")] if given.strip() else []
    bare = [re.sub(r"(?<=[\s*&])\w+$", "", one) for one in types]
    return ", ".join(f"{one} a{i}" for i, one in enumerate(bare))


def recipe() -> Recipe:
    """How the pool is built here."""
    include = Path(torch.__file__).parent / "include"
    flags = [
        *_flags(include),
        *(f"-DLOWTIDE_HAS_{name}" for name in _optional(include)),
        *("-isystem", str(_cuda_headers())),
    ]
    if not (include / "c10/cuda/impl/cuda_cmake_macros.h").exists():  # a torch without CUDA
        flags.append("-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE")
    return torch_pool(flags, _links("-lc10_cuda", "-lc10"))


def _optional(include: Path) -> list[str]:
    """What this torch's allocator has of what not every version has.

    A virtual function that the pool does not hand on would silently do nothing, so an interface
    with one that is not known is refused.
    """
    header = include / "c10" / "cuda" / "CUDACachingAllocator.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise NoNative(f"torch's headers are missing ({error.filename})") from error
    found = virtual_functions(text)
    known = set(_INTERFACE.split()).union(*_OPTIONAL.values())
    unknown = found - known
    if unknown or not found:
        names = ", ".join(sorted(unknown)) or "no virtual function"
        raise NoNative(
            f"the allocator of torch {torch.__version__} has {names}, which this lowtide does not "
            "know: update lowtide"
        )
    return [name for name in _OPTIONAL if name in found]


def virtual_functions(header: str) -> set[str]:
    """The virtual functions of the class CUDAAllocator in torch's header."""
    match = re.search(r"class CUDAAllocator\b.*?\n};", _code(header), re.DOTALL)
    body = match.group(0) if match else ""
    return set(re.findall(r"\bvirtual\s[^;{()]*?(\w+)\(", body))


def _code(header: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)


def _cuda_headers() -> Path:
    """A folder with the CUDA runtime's headers: those beside torch, else an installed toolkit's."""
    packages = Path(sysconfig.get_paths()["purelib"]), Path(torch.__file__).parents[1]
    beside = [
        path
        for package in packages
        for path in (*package.glob("nvidia/cu*/include"), package / "nvidia/cuda_runtime/include")
    ]
    roots = os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"
    installed = [Path(root) / "include" for root in roots if root]
    for folder in [*beside, *installed]:
        if (folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_config.h").exists():
            return folder
    raise NoNative("CUDA's headers are missing: pip install nvidia-cuda-runtime nvidia-cuda-crt")
