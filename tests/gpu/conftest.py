import gc
from collections.abc import Iterator

import pytest
import torch

_WORKSPACES = 192 << 20  # of libraries, made when a stream first uses them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """What is built once is told of as it is: not in the middle of a test."""
    if torch.cuda.is_available():
        from lowtide._runtime.torch_build import build_gate

        build_gate()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whoever keeps a model or what it has saved is named, and not the next test."""
    if not torch.cuda.is_available():
        yield
        return
    gc.collect()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    assert left <= _WORKSPACES, f"{left} bytes are left"


@pytest.fixture(autouse=True)
def _clean_pool(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test of the pool nothing of it is left."""
    if not request.path.name.startswith("test_pool"):
        yield
        return
    _settle()
    yield
    _settle()  # with the peaks reset, what the pool left behind is gone with it
    from lowtide._runtime.cuda_library import cuda_library

    assert not cuda_library().lowtide_torch_installed()


def _settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
