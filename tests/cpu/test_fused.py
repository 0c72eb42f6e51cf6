"""Element-wise ops that run again as one: the same bits, or not used at all."""

import copy
import ctypes
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jobs import JOBS, Build, Job, job_of
from tides import entered, planned_of
from tight import find_difference, run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide._errors import OutOfBudget
from lowtide._ir import Link, Machine
from lowtide._runtime import budget as budgeting
from lowtide._runtime.delta.feedback import Verdict
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Call, Value
from lowtide._runtime.delta.record import Captor, known
from lowtide._runtime.delta.replay import Replayer
from lowtide._runtime.fused import groups, kernels
from lowtide._runtime.fused.chains import Chains
from lowtide._runtime.fused.groups import Fuser, Group
from lowtide._runtime.fused.kernel import make_kernel
from lowtide._runtime.fused.program import Input, Made, Program, Read, Step
from lowtide._runtime.fused.source import EACH, NAME, source

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Fuser]:
    """Fusing where it does not pay: who did."""
    made: list[Fuser] = []

    class Noted(Fuser):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(groups, "DEVICES", {"cpu"})
    monkeypatch.setattr(groups, "Fuser", Noted)
    slow = Link((1, 1 << 30), (1.0, 1e3))  # rather made again than swapped
    machine = Machine("slow", 1 << 40, 1 << 40, slow, slow)
    monkeypatch.setattr(budgeting, "machine_here", lambda *_, **__: machine)
    monkeypatch.setattr(budgeting, "_FILE_SPEED", 1e6)
    return made


class Gelu(nn.Module):
    """As Hugging Face writes it, under autocast: some in halves, some not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(wide, 3.0))
        return (0.5 * x * (1.0 + torch.tanh(inner))).to(torch.bfloat16)


def gelus() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (nn.Linear(64, 64, dtype=torch.bfloat16), Gelu())]
    model = nn.Sequential(*parts)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4096, 64).bfloat16()


def train(steps: int, budget: float | None, **how: Any) -> tuple[list[torch.Tensor], Any]:
    model, optimizer, rows = gelus()
    tide = None

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if budget is None:
        for _ in range(steps):
            step()
    else:
        with lowtide.fit(model, optimizer, budget=budget, **how) as tide:
            for _ in range(steps):
                step()
    return [p.detach() for p in model.parameters()], tide


@pytest.mark.parametrize("policy", ["tide", "delta"])
def test_a_chain_runs_as_one_and_bits_are_the_same(on_cpu: list[Fuser], policy: str) -> None:
    plain, _ = train(7, None)
    ours, tide = train(7, 0.5, policy=policy)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    (fuser,) = on_cpu
    assert fuser.right and not fuser.wrong
    assert f"{fuser.right} kernels run several of those at once" in tide.summary()
    longest = max(key.count("(") for key in map(str, fuser._right))
    assert longest > 6, "the chain of a GELU is one kernel"


def test_what_does_not_make_the_same_is_not_used(
    on_cpu: list[Fuser], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_a_bit(program: Program, device: torch.device) -> Any:
        kernel = make_kernel(program, device)
        assert kernel is not None
        if program is kernels.PROBE:
            return kernel

        right = kernel

        class Wrong:
            scratch = right.scratch

            def __call__(self, inputs: Any, outputs: Any, first: int, count: int) -> None:
                right(inputs, outputs, first, count)
                outputs[-1].view(torch.int16)[-1] ^= 1

        return Wrong()

    monkeypatch.setattr(kernels, "make_kernel", off_by_a_bit)
    plain, _ = train(7, None)
    ours, _ = train(7, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    (fuser,) = on_cpu
    assert fuser.wrong and not fuser.right


def test_where_no_kernel_can_be_made_training_goes_on(
    on_cpu: list[Fuser], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(program: Program, device: torch.device) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(kernels, "make_kernel", fail)
    plain, _ = train(5, None)
    with pytest.warns(lowtide.LowtideWarning, match="not fused.*no compiler") as told:
        ours, _ = train(5, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert len(told) == 1


def chained(
    budget: int | float | None, act: Callable[[torch.Tensor, int], torch.Tensor], **how: Any
) -> list[torch.Tensor]:
    """Weights after a few steps of layers with that between them."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(4096, 64)
    around = lowtide.fit(model, optimizer, budget=budget or 0.5, **how)
    with around if budget else nullcontext():
        for _ in range(7):
            x = rows
            for number, layer in enumerate(model):
                x = act(layer(x), number)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("policy", ["tide", "delta"])
@pytest.mark.parametrize("numbers", [(-1.0, -2.0), (-1, -2), (0.0, -0.0)])
def test_calls_that_differ_in_a_number_are_not_taken_for_each_other(
    on_cpu: list[Fuser], numbers: tuple[float, float], policy: str
) -> None:
    """Python's hash of -1 is that of -2."""

    def act(x: torch.Tensor, number: int) -> torch.Tensor:
        return (torch.sigmoid(x + numbers[number % 2]) + x).tanh()

    expected = chained(None, act)
    ours = chained(0.5, act, policy=policy)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert on_cpu[0].right >= 1


def test_what_is_right_of_zeros_alone_is_not_used(
    on_cpu: list[Fuser], monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(program: Program, device: torch.device) -> Any:
        class Zeros:
            def scratch(self, count: int) -> int:
                return 0

            def __call__(self, inputs: Any, outputs: Any, first: int, count: int) -> None:
                for output in outputs:
                    output.zero_()

        return Zeros()

    monkeypatch.setattr(kernels, "make_kernel", zeros)
    chained(0.5, lambda x, _: (x.abs() * 0).tanh().mul(3).exp())
    assert on_cpu[0].wrong and not on_cpu[0].right


@pytest.mark.parametrize("policy", ["tide", "delta"])
def test_where_there_is_no_room_for_all_at_once_they_run_one_by_one(
    on_cpu: list[Fuser], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[bool] = []
    run_group = Replayer._run_group

    def noted(replayer: Replayer, *given: Any) -> bool:
        done = run_group(replayer, *given)
        refused.append(not done)
        return done

    monkeypatch.setattr(Replayer, "_run_group", noted)

    def crowded(group: Group, count: int, device: torch.device) -> list[torch.Tensor]:
        if count == group.count and len(refused) % 2:
            raise OutOfBudget("as if there were no room")
        return rows(group, count, device)

    rows = Group.rows
    monkeypatch.setattr(Group, "rows", crowded)

    def act(x: torch.Tensor, _: int) -> torch.Tensor:
        return (torch.sigmoid(x) + x).tanh()

    expected = chained(None, act)
    ours = chained(0.6, act, policy=policy)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert True in refused and False in refused


def wide() -> Job:
    torch.manual_seed(0)
    parts = [part for _ in range(8) for part in (nn.Linear(64, 64, dtype=torch.bfloat16), Gelu())]
    model = nn.Sequential(*parts)
    rows = torch.randn(4096, 64).bfloat16()
    return job_of(model, lambda: model(rows).square().mean())


def bent() -> Job:
    """What a layer makes is read once, and then makes way for what is saved."""
    torch.manual_seed(0)
    parts = [nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Sigmoid(), nn.Tanh()]
    model = nn.Sequential(*(part for _ in range(8) for part in copy.deepcopy(parts)))
    rows = torch.randn(4096, 64)
    return job_of(model, lambda: model(rows).square().mean())


@pytest.mark.usefixtures("unguarded")
@pytest.mark.parametrize(("build", "share"), [(wide, 0.25), (bent, 0.3), (bent, 0.35)])
def test_steps_hold_no_more_than_is_planned(
    on_cpu: list[Fuser], build: Build, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held longer is let go before anything runs again; several run as one if that fits."""
    monkeypatch.setattr("lowtide._runtime.fused.kernel._PORTION", 1 << 8)  # which takes some, too
    monkeypatch.setattr("lowtide._runtime.delta.replans.judge", lambda _: Verdict.WAIT)
    monkeypatch.setattr("lowtide._runtime.plans._SECONDS", 0.2)
    compared, prove = [0], Chains._prove  # what kernels for backward make, beside what its ops make

    def noted(chains: Chains, number: int, rows: Sequence[torch.Tensor], made: Any) -> None:
        compared.append(sum(row.nbytes for row in rows))
        prove(chains, number, rows, made)

    monkeypatch.setattr(Chains, "_prove", noted)
    plain = run(build, 10)
    with entered() as made:
        ours = run(build, 10, int(share * max(plain.peaks)), policy="tide")
    assert find_difference(ours.result, plain.result) is None
    script = planned_of(made[0]).main_script()
    assert script is not None and on_cpu[0].right
    most = script.plan.peak_bytes + (1 << 17)
    assert max(ours.peaks[5:8]) <= most + max(compared)
    assert max(ours.peaks[8:]) <= most


@pytest.mark.parametrize("name", sorted(JOBS))
def test_jobs_train_bit_for_bit(on_cpu: list[Fuser], name: str) -> None:
    plain = run(JOBS[name], 4)
    budget = int(0.6 * max(plain.peaks)) + (1 << 20)  # a CPU's portions take some
    ours = run(JOBS[name], 4, budget, policy="tide")
    assert find_difference(ours.result, plain.result) is None
    assert on_cpu and not on_cpu[0].wrong


# Programs by themselves: calls that are written down as the runtime does.


class _Writing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger(CPU)
        self.calls: list[Call] = []
        self.results: list[torch.Tensor] = []
        self.values: list[Value] = []
        self._captor = Captor(self.ledger)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = known(func)
        if what.view:
            return func(*args, **(kwargs or {}))
        call = self._captor.capture(func, what, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        assert call is not None
        self.ledger.see(result.untyped_storage())
        value = self.ledger.value_of(result.untyped_storage())
        self.values.append(value)
        call.makes.append((0, weakref.ref(value)))
        self.calls.append(call)
        self.results.append(result)
        return result


def written(work: Any) -> _Writing:
    writing = _Writing()
    with writing:
        work()
    return writing


def grouped(writing: _Writing, room: int | None = None) -> Group | None:
    """With all that is made wanted."""
    later = [{id(call.makes[0][1]()): 99} for call in writing.calls]
    return Fuser(CPU, verify=True, tell=print).group(writing.calls, 0, later, room)


def test_groups_end_where_calls_do_not_belong_together() -> None:
    x, y, z = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)
    row, column, number = torch.ones(4), torch.ones(8, 1), torch.tensor(2.0)
    other = z.t().contiguous()

    def count(work: Any) -> int:
        found = grouped(written(work))
        return 0 if found is None else len(found.calls)

    assert count(lambda: (x * 2).tanh().mul(y)) == 3
    assert count(lambda: ((x * 2).tanh(), y.neg())) == 2, "it has nothing to do with the others"
    assert count(lambda: (x * 2, x + 1, y * x)) == 3, "they read the same"
    assert count(lambda: ((x * 2).t() * y.t()).neg()) == 3, "both are turned"
    assert count(lambda: (x * 2)[::2].neg()) == 0, "with holes"
    assert count(lambda: (x * 2).view(4, 8).t().neg()) == 2, "turned, but whole: as it lies"
    assert count(lambda: (x * 2)[0].neg()) == 0, "of another size"
    assert count(lambda: (x * 2).mul(row).add(column)) == 3
    assert count(lambda: (x * 2).add(z, alpha=2)) == 0, "a factor"
    assert count(lambda: (x * 2).mul(number)) == 0, "a number on the device"
    assert count(lambda: (x * 2).pow(2.5)) == 0
    assert count(lambda: (x * 2).double().neg()) == 0
    assert count(lambda: (x.t() * y.t()) * other) == 0, "they do not lie alike"
    image, place = torch.randn(2, 3, 4, 5), torch.randn(1, 3, 4, 5)
    turned = image.to(memory_format=torch.channels_last)
    assert count(lambda: (image * place).neg()) == 2
    assert count(lambda: (turned * place).neg()) == 2
    assert count(lambda: (place * turned).neg()) == 0, "what comes first decides how it lies"


def test_groups_end_where_there_is_no_room_for_more() -> None:
    x, y, z = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)
    writing = written(lambda: (x * y).tanh().mul(z))

    def group(room: int) -> tuple[int, int] | None:
        found = grouped(writing, room)
        return None if found is None else (len(found.calls), len(found.inputs))

    assert group(3 * x.nbytes) == (3, 3)
    assert group(3 * x.nbytes - 1) == (2, 2)
    assert group(2 * x.nbytes - 1) is None
    later = [{id(value): 1} for value in writing.values[:2]] + [{id(writing.values[2]): 9}]
    found = Fuser(CPU, verify=True, tell=print).group(writing.calls, 0, later, x.nbytes)
    assert found is not None and found.outputs == [2], "what only they read takes none"


PRETEND = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __global__
#define __restrict__
struct Three { unsigned x; };
static Three blockIdx, threadIdx;
typedef long long i64;
static float __fadd_rn(float a, float b) { volatile float c = a + b; return c; }
static float __fsub_rn(float a, float b) { volatile float c = a - b; return c; }
static float __fmul_rn(float a, float b) { volatile float c = a * b; return c; }
static float __fdiv_rn(float a, float b) { volatile float c = a / b; return c; }
static float rsqrtf(float a) { return 1 / std::sqrt(a); }
static float load_bf16(unsigned short x) {
    uint32_t y = (uint32_t)x << 16; float z; std::memcpy(&z, &y, 4); return z;
}
static unsigned short store_bf16(float x) {
    uint32_t y; std::memcpy(&y, &x, 4);
    return x != x ? 0x7fc0 : (y + 0x7fff + ((y >> 16) & 1)) >> 16;
}
static float round_bf16(float x) { return load_bf16(store_bf16(x)); }
static float round_f16(float x) { return x; }
static float load_f16(unsigned short x) { return x; }
static unsigned short store_f16(float x) { return x; }
"""


class Pretended:
    """The CUDA source of a program, compiled for the CPU, its threads one after the other."""

    THREADS = 4  # in a block: there are several, and the last is not full

    def __init__(self, program: Program, folder: Path) -> None:
        loop = f"""
extern "C" void run(i64 blocks, void** a, i64 first, i64 count) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < {self.THREADS}; ++threadIdx.x)
            {NAME}({", ".join(self._casts(program))}, first, count);
}}
"""
        file = folder / "program.cc"
        file.write_text(source(program, PRETEND, self.THREADS) + loop)
        library = folder / "program.so"
        command = ["c++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run([*command, str(file), "-o", str(library)], check=True)
        self._run = ctypes.CDLL(str(library)).run

    def _casts(self, program: Program) -> Iterator[str]:
        kinds = {torch.float32: "float*", torch.bfloat16: "unsigned short*"}
        dtypes = [given.dtype for given in program.inputs]
        dtypes += [program.steps[j].dtype for j in program.outputs]
        for k, dtype in enumerate(dtypes):
            yield f"({kinds[dtype]})a[{k}]"

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        first: int,
        count: int,
    ) -> None:
        pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
        row = (ctypes.c_void_p * len(pointers))(*pointers)
        number = ctypes.c_int64
        self._run(number(-(-count // (self.THREADS * EACH))), row, number(first), number(count))


SHAPES = [(6, 5, 7), (6, 4, 8)]  # in the second a row of elements lies in one row of a part
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_source_computes_what_its_calls_do(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = data.draw
    order, size = draw(st.sampled_from(ORDERS)), draw(st.sampled_from(SHAPES))
    torch.manual_seed(draw(st.integers(0, 1000)))

    def whole() -> torch.Tensor:
        shape = [size[d] for d in order]
        turned = torch.randn(shape).permute(*[order.index(d) for d in range(3)])
        return turned.bfloat16() if draw(st.booleans()) else turned

    wholes = [whole(), whole()]
    a, b, c = size
    broadcast = [(1,), (c,), (b, 1), (a, 1, 1), (b, c), (a, 1, c), (1, b, 1), (a, b, 1)]
    parts = [torch.randn(shape) for shape in broadcast]

    def work() -> None:
        known = [*wholes]
        for _ in range(draw(st.integers(2, 8))):
            one = draw(st.sampled_from(known))
            other: Any = draw(st.sampled_from([*known, 0.25, 2]))  # exact in halves, too
            if draw(st.booleans()):
                other = draw(st.sampled_from(parts))
            op = draw(st.sampled_from(["add", "mul", "sub", "div", "pow", "cast", "relu", "neg"]))
            if op == "cast":
                half = one.dtype is torch.float32
                known.append(one.to(torch.bfloat16 if half else torch.float32))
            elif op == "pow":
                known.append(one**3)
            elif op in ("relu", "neg"):
                known.append(getattr(torch, op)(one))
            elif isinstance(other, torch.Tensor) and draw(st.booleans()):
                known.append(getattr(torch, op)(other, one))
            else:
                known.append(getattr(torch, op)(one, other))

    writing = written(work)
    group = grouped(writing)
    if group is None:
        event("no group")
        return
    event(f"group of {len(group.calls)}")
    program = groups._program(group)
    kernel = Pretended(program, tmp_path_factory.mktemp("program"))
    inputs = []
    for given_, _ in group.inputs:
        storage = given_.value.storage()
        assert storage is not None
        inputs.append(given_.seen_on(storage))
    rows = group.rows(group.count, CPU)
    kernel(inputs, rows, 0, group.count)
    later = group.rows(group.count - 16, CPU)  # and a part of it
    kernel(inputs, later, 16, group.count - 16)
    for j, row, part in zip(group.outputs, rows, later, strict=True):
        result = writing.results[j]
        as_it_lies = result.as_strided((group.count,), (1,))
        for ours, expected in ((row, as_it_lies), (part, as_it_lies[16:])):
            none = expected.isnan()  # of a division, say: what their bits are is not laid down
            assert torch.equal(ours.isnan(), none), (j, program)
            assert torch.equal(ours[~none], expected[~none]), (j, program)


def test_a_default_device_of_the_program_changes_nothing() -> None:
    with torch.device("meta"):
        assert Fuser(CPU, verify=True, tell=pytest.fail).works()


def test_a_part_of_something_very_large_is_tried_without_all_of_it() -> None:
    far = Input(torch.float32, ((1 << 20, 1 << 30), (4, 1)))
    steps = (Step("neg", (Read(0),), torch.float32), Step("mul", (Made(0), 2.0), torch.float32))
    program = Program(1 << 22, (far,), steps, (1,))
    seen: list[int] = []

    class Reading:
        function = 0

        def scratch(self, count: int) -> int:
            return 0

        def __call__(self, inputs: Any, outputs: Any, first: int, count: int) -> None:
            seen.append(inputs[0].numel())
            outputs[0][:] = -inputs[0][:1].expand(count) * 2

    assert kernels._agrees(program, Reading(), CPU)
    assert seen == [1]
