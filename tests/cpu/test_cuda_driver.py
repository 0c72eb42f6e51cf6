"""Calls of the CUDA driver, on one that stands in for it where there is none."""

import pytest
import torch

from lowtide._runtime.swap import cuda_driver


class Driver:
    """Knows no context until one is made current."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[str] = []

    def cuEventRecord(self, *_: object) -> int:  # noqa: N802
        self.calls.append("record")
        return self.error

    def cuDevicePrimaryCtxRetain(self, *_: object) -> int:  # noqa: N802
        self.calls.append("retain")
        return 0

    def cuCtxSetCurrent(self, *_: object) -> int:  # noqa: N802
        self.calls.append("enter")
        self.error = 0
        return 0


@pytest.mark.parametrize(
    ("error", "calls"), [(201, ["record", "retain", "enter", "record"]), (0, ["record"])]
)
def test_a_thread_without_a_context_gets_pytorchs(
    error: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(error)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cuda_driver._context.cache_clear()
    cuda_driver.record(1, 2)
    assert driver.calls == calls


def test_other_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: Driver(700))
    with pytest.raises(RuntimeError, match="CUDA error 700 in cuEventRecord"):
        cuda_driver.record(1, 2)
