"""What only a CUDA device can show about a trace."""

import gc
from collections.abc import Callable

import pytest
import torch
from models import Job, bert, custom, gpt2
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide._analyze.load import find_peak
from lowtide._check import find_flaw
from lowtide._ir import Kind, Phase
from lowtide._trace.digest import digest


def conv_net() -> Job:
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    ).cuda()
    x = torch.randn(64, 3, 64, 64, device="cuda")
    y = torch.randint(0, 10, (64,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return Job(model, step)


JOBS: dict[str, Callable[[], Job]] = {
    "conv_net": conv_net,
    "gpt2": lambda: gpt2("cuda", 16, 512, n_layer=4, n_embd=512, n_head=8, vocab_size=5000),
    "bert": lambda: bert(
        "cuda",
        32,
        512,
        num_hidden_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        vocab_size=5000,
    ),
    "custom": lambda: custom("cuda", 8192, 2048),
}
every_job = pytest.mark.parametrize("build", JOBS.values(), ids=JOBS)


@every_job
def test_the_load_curve_peaks_where_the_allocator_does(build: Callable[[], Job]) -> None:
    """Models of some size: the allocator counts up to 1 MiB a block that it did not split off."""
    job = build()
    for _ in range(3):
        job.step()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    job.step()
    truth = torch.cuda.max_memory_allocated()
    trace = lowtide.trace(job.step, warmup=0)
    assert find_flaw(trace) is None
    assert trace.device == "cuda:0"
    assert find_peak(trace).bytes == pytest.approx(truth, rel=0.005)


@every_job
def test_tracing_twice_gives_the_same_trace_and_leaves_nothing(build: Callable[[], Job]) -> None:
    job = build()
    for _ in range(3):
        job.step()
    gc.collect()
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    first, second = (lowtide.trace(job.step, warmup=0) for _ in range(2))
    assert digest(first) == digest(second)
    assert torch.cuda.memory_allocated() == held
    assert torch.cuda.max_memory_allocated() >= peak
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_step_that_raises_leaves_no_history_on() -> None:
    def step() -> None:
        torch.ones(8, device="cuda").add(1)
        raise KeyError

    with pytest.raises(KeyError):
        lowtide.trace(step, warmup=0)
    countdown = iter(range(1))

    def second_step_raises() -> None:
        torch.ones(8, device="cuda").add(1)
        if next(countdown, None) is None:
            raise KeyError

    with pytest.raises(KeyError):
        lowtide.trace(second_step_raises, warmup=0)  # here the probe is on
    assert not torch._C._cuda_isHistoryEnabled()


def test_device_times_are_of_kernels_not_of_the_host() -> None:
    a = torch.randn(8192, 8192, device="cuda")
    tiny = torch.randn(8, device="cuda")

    def step() -> None:
        a.mm(a)
        tiny.add(1)

    for _ in range(3):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    measured, traced = [], []
    for _ in range(5):  # others may use the GPU, too: what is fastest was alone
        start.record()
        a.mm(a)
        end.record()
        torch.cuda.synchronize()
        measured.append(start.elapsed_time(end) / 1e3)
        traced.append([op.seconds for op in lowtide.trace(step).ops])
    assert min(large for large, _ in traced) == pytest.approx(min(measured), rel=0.15)
    # Launching it takes the host longer than that.
    assert min(small for _, small in traced) < 8e-6


def test_workspace_is_what_a_kernel_takes_and_gives_back() -> None:
    x = torch.randint(0, 1000, (1 << 22,), device="cuda")
    trace = lowtide.trace(lambda: x.sort())
    sort = next(op for op in trace.ops if "sort" in op.name)
    torch.cuda.synchronize()
    gc.collect()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = x.sort()
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() > held
    assert sort.workspace_bytes == pytest.approx(extra, rel=0.01)
    assert sort.workspace_bytes > 0
    del result


def test_library_workspace_made_in_the_step_is_seen() -> None:
    stream = torch.cuda.Stream()
    a = torch.randn(512, 512, device="cuda")

    def step() -> None:
        with torch.cuda.stream(stream):
            a.mm(a)  # the first product on a new stream makes cuBLAS allocate its workspace
        torch._C._cuda_clearCublasWorkspaces()

    trace = lowtide.trace(step)
    torch.cuda.synchronize()
    truth_is_larger = find_peak(trace).bytes > sum(
        v.bytes for v in trace.values if v.name != "workspace"
    )
    assert find_flaw(trace) is None
    assert truth_is_larger


def test_kinds_and_phases_cross_the_backward_thread() -> None:
    trace = lowtide.trace(conv_net().step)
    assert {op.phase for op in trace.ops} == set(Phase)
    back = [op for op in trace.ops if op.name == "aten.convolution_backward.default"]
    assert {op.module for op in back} == {"Sequential.0", "Sequential.3"}
    kinds = {value.kind for value in trace.values}
    assert kinds >= {Kind.PARAMETER, Kind.GRADIENT, Kind.STATE, Kind.ACTIVATION, Kind.BUFFER}
    saved = [value for value in trace.values if value.saves]
    assert all(save.unpacked for value in saved for save in value.saves)


def test_tracing_changes_no_bit_of_the_result() -> None:
    def train(traced: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch.backends.cudnn.deterministic = True
        job = conv_net()
        job.step()
        if traced:
            lowtide.trace(job.step)
        else:
            for _ in range(4):
                job.step()
        job.step()
        return [tensor.detach().clone() for tensor in job.model.state_dict().values()]

    for expected, found in zip(train(False), train(True), strict=True):
        assert torch.equal(expected, found)


def test_importing_and_reading_traces_does_not_start_cuda() -> None:
    import subprocess
    import sys

    code = "import lowtide, torch; lowtide.trace; assert not torch.cuda.is_initialized()"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
