import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(skip)
