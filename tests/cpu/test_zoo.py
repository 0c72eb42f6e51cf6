"""Laws that hold for every training loop, awkward ones included."""

import gc
from collections.abc import Callable

import pytest
import torch
from independent import cpu_peak_bytes
from zoo import ZOO, Loop

import lowtide
from lowtide._analyze.gaps import idle_gaps
from lowtide._analyze.load import find_peak
from lowtide._analyze.recompute import obstacles
from lowtide._check import find_flaw
from lowtide._trace.digest import digest
from lowtide._trace.file import decode_trace, encode_trace
from lowtide._trace.text import format_trace, parse

every_loop = pytest.mark.parametrize("build", ZOO.values(), ids=ZOO)


@every_loop
def test_the_trace_obeys_its_laws_and_round_trips(build: Callable[[], Loop]) -> None:
    trace = lowtide.trace(build().step)
    assert find_flaw(trace) is None
    assert parse(format_trace(trace)) == trace
    assert decode_trace(encode_trace(trace), "x") == trace
    assert len(obstacles(trace)) == len(trace.values)
    assert idle_gaps(trace)


@every_loop
def test_the_load_curve_peaks_where_the_allocator_does(build: Callable[[], Loop]) -> None:
    truth = cpu_peak_bytes(lambda: build().step, 4)
    gc.collect()
    torch.manual_seed(0)
    others = _bytes_of_other_tensors()
    peak = find_peak(lowtide.trace(build().step)).bytes - others
    assert peak == pytest.approx(truth, rel=0.005)


def _bytes_of_other_tensors() -> int:
    """What the test process itself holds: the independent count began after it."""
    storages = {
        thing.untyped_storage()._cdata: thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided
    }
    return sum(storages.values())


@every_loop
def test_tracing_twice_gives_the_same_trace(build: Callable[[], Loop]) -> None:
    loop = build()
    assert digest(lowtide.trace(loop.step)) == digest(lowtide.trace(loop.step))


@every_loop
def test_tracing_changes_no_bit_of_the_result(build: Callable[[], Loop]) -> None:
    def train(traced: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loop = build()
        loop.step()
        if traced:
            lowtide.trace(loop.step)
        else:
            for _ in range(4):
                loop.step()
        for _ in range(2):
            loop.step()
        return [tensor.detach().clone() for tensor in loop.state()]

    plain, traced = train(False), train(True)
    assert len(plain) == len(traced)
    for expected, found in zip(plain, traced, strict=True):
        assert torch.equal(expected, found)
