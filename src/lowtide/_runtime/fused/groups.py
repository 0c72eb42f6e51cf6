"""Calls that run again in a row -> those that run as one, and whether that makes the same."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowtide._runtime.delta.order import Item
from lowtide._runtime.delta.recipe import Call, Source, Value
from lowtide._runtime.fused.kernel import ALIGNED, Kernel, make_kernel, run_step, taken
from lowtide._runtime.fused.program import (
    Input,
    Made,
    Operand,
    Part,
    Program,
    Read,
    Step,
    part_of,
)
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.quiet import quiet

_MOST_STEPS, _MOST_INPUTS = 32, 12
_MOST_KERNELS, _MOST_PARTS = 512, 20_000
_COMPARED = 1 << 19  # elements at once
DEVICES = {"cuda"}  # where that pays: on a CPU what is made for the next op is in the cache anyway
_TRIED, _FARTHEST = 1 << 12, 1 << 20  # elements that are tried, and the place of the last
_WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(slots=True)
class Group:
    """Calls that run as one. `made` has the value of each, where anybody knows it.

    `places` are those of each call's sources: of the call that makes it, or from -1 downwards of
    an input.
    """

    calls: list[Call]
    parts: list[Part]
    made: list[Value | None]
    places: list[tuple[int, ...]]
    inputs: list[tuple[Source, Input]]
    outputs: list[int]  # which of the calls make something that is wanted
    key: Hashable

    @property
    def count(self) -> int:
        """Elements of all that is made."""
        return self.parts[0].count

    @property
    def bytes(self) -> int:
        """Of all that is wanted."""
        return self.count * sum(self.parts[j].dtype.itemsize for j in self.outputs)

    def rows(self, count: int, device: torch.device) -> list[torch.Tensor]:
        """Empty, for so many elements of what is wanted."""
        dtypes = [self.parts[j].dtype for j in self.outputs]
        return [torch.empty(count, dtype=dtype, device=device) for dtype in dtypes]

    def can_read(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether they begin where a kernel needs them to."""
        return all(
            given.dims or tensor.data_ptr() % ALIGNED == 0
            for (_, given), tensor in zip(self.inputs, inputs, strict=True)
        )


class Fuser:
    """Kernels by what they compute. `tell` is given a line if one cannot be made."""

    def __init__(self, device: torch.device, *, verify: bool, tell: Callable[[str], None]) -> None:
        self._device = device
        self._verify = verify
        self._tell = tell
        self._parts: dict[int, Part | None] = {}
        self._kernels: dict[Hashable, Kernel | None] = {}  # None: it is not to be used
        self._made: dict[Program, Kernel | None] = {}
        self._right: set[Hashable] = set()
        self._works: bool | None = None
        self._told = False
        self.wrong = 0  # kernels that did not make the same

    @property
    def right(self) -> int:
        """Kernels that are relied on."""
        return len(self._right)

    def group(
        self,
        items: Sequence[Item],
        at: int,
        later: Sequence[Mapping[int, int]],
        room: int | None = None,
    ) -> Group | None:
        """The longest that begins there; `later`: how often what each item makes is read then.

        It makes no more than `room` bytes at once. One by one its calls may: what one of them was
        the last to read makes way for what the next one makes.
        """
        if not self._begins(items[at : at + 2]):
            return None  # nearly always: to look closer takes the host longer than an op does
        found = Group([], [], [], [], [], [], ())
        inputs: dict[Hashable, int] = {}
        by: dict[int, int] = {}  # the value -> which of the calls makes it
        given: list[int] = []  # inputs of the calls up to each
        for item in items[at : at + _MOST_STEPS]:
            if type(item) is not Call or not self._join(found, item, inputs, by):
                break
            given.append(len(inputs))
        while len(found.calls) >= 2:
            found.outputs = _wanted(found, later[at : at + len(found.calls)])
            if room is None or found.bytes <= room:
                break
            for row in (found.calls, found.parts, found.made, found.places, given):
                row.pop()
            del found.inputs[given[-1] :]
        if len(found.calls) < 2 or not found.outputs:
            return None
        keys = zip((call.key for call in found.calls), found.places, strict=True)
        found.key = (*keys, *found.outputs)
        return found

    def _begins(self, two: Sequence[Item]) -> bool:
        """Whether these could be the first of a group, by what is known of all calls like them."""
        if len(two) < 2 or not all(type(item) is Call for item in two):
            return False
        first, second = (self._part(call) for call in two if type(call) is Call)
        return first is not None and second is not None and first.count == second.count

    def _join(
        self, group: Group, call: Call, inputs: dict[Hashable, int], by: dict[int, int]
    ) -> bool:
        """Whether it is one more of them, now: it has to do with the others, and is as large."""
        part = self._part(call)
        parts = group.parts
        if part is None or (parts and part.count != group.count):
            return False
        value = call.makes[0][1]()
        if value is not None and (
            id(value) in by or value.bytes != part.count * part.dtype.itemsize
        ):
            return False
        places: list[int] = []
        more: dict[Hashable, tuple[Source, Input]] = {}
        for source, dims in zip(call.sources, part.dims, strict=True):
            place = by.get(id(source.value), -1)
            if place >= 0:
                if dims or source.offset or source.dtype is not parts[place].dtype:
                    return False  # it is not read as it is made
            else:
                seen = id(source.value), source.dtype, source.offset, dims
                known = inputs.get(seen)
                if known is None:
                    known = len(inputs) + [*more, seen].index(seen)
                    more.setdefault(seen, (source, Input(source.dtype, dims)))
                place = -1 - known
            places.append(place)
        alone = len(more) == len(set(places))
        if (parts and alone) or len(inputs) + len(more) > _MOST_INPUTS:
            return False
        for new, given in more.items():
            inputs[new] = len(inputs)
            group.inputs.append(given)
        if value is not None:
            by[id(value)] = len(parts)
        group.calls.append(call)
        group.parts.append(part)
        group.made.append(value)
        group.places.append(tuple(places))
        return True

    def _part(self, call: Call) -> Part | None:
        if call.key not in self._parts:
            if len(self._parts) > _MOST_PARTS:
                self._parts.clear()
            self._parts[call.key] = part_of(call)
        return self._parts[call.key]

    def kernel(self, group: Group) -> Kernel | None:
        """What runs it; None: its calls run one by one."""
        if group.key in self._kernels or len(self._kernels) >= _MOST_KERNELS:
            return self._kernels.get(group.key)
        program = _program(group)
        if program not in self._made:
            self._made[program] = self._make(program)
        kernel = self._kernels[group.key] = self._made[program]
        return kernel

    def _make(self, program: Program) -> Kernel | None:
        try:
            kernel = make_kernel(program, self._device)
            if kernel is None or not self._verify or _agrees(program, kernel, self._device):
                return kernel
            self.wrong += 1
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, calls run one by one
            if not self._told:
                self._told = True
                self._tell(f"ops that run again are not fused ({type(error).__name__}: {error})")
            return None

    def is_trusted(self, group: Group) -> bool:
        """Whether its kernel is known to make the same."""
        return not self._verify or group.key in self._right

    def comparing(self, group: Group) -> int:
        """Bytes that it takes to compare."""
        kernel = self.kernel(group)
        assert kernel is not None
        some = min(_COMPARED, group.count)
        each = sum(group.parts[j].dtype.itemsize + 1 for j in group.outputs)
        return some * each + kernel.scratch(some)

    def compare(
        self, group: Group, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Its kernel's outputs with `made`, the same by its calls one by one."""
        kernel = self._kernels[group.key]
        assert kernel is not None
        try:
            right = self._makes(kernel, group, inputs, made)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._tell(f"a kernel for ops that run again failed, and is not used ({error})")
            right = False
        if right:
            self._right.add(group.key)
        else:
            self.wrong += 1
            self._kernels[group.key] = None

    def _makes(
        self,
        kernel: Kernel,
        group: Group,
        inputs: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> bool:
        for first in range(0, group.count, _COMPARED):
            some = min(_COMPARED, group.count - first)
            rows = group.rows(some, self._device)
            kernel(inputs, rows, first, some)
            if not _same(rows, [row[first : first + some] for row in made]):
                return False
        return True

    def works(self) -> bool:
        """Whether kernels can be made here, and those of all ops make what PyTorch makes."""
        if self._works is None:
            with quiet(), torch.no_grad():
                self._works = self._make(PROBE) is not None
        return self._works


def make_fuser(device: torch.device, verify: str, tell: Callable[[str], None]) -> Fuser | None:
    """None: there it does not pay."""
    if device.type not in DEVICES:
        return None
    return Fuser(device, verify=verify != "never", tell=tell)


def _wanted(group: Group, later: Sequence[Mapping[int, int]]) -> list[int]:
    """Which of its calls make something that is dropped, or read by others."""
    read = Counter(place for places in group.places for place in places if place >= 0)
    found = []
    for j, (value, then) in enumerate(zip(group.made, later, strict=True)):
        if value is None:
            continue
        cell = value.saved()
        dropped = cell is not None and cell.state is State.DROPPED
        if dropped or then.get(id(value), 0) > read[j]:
            found.append(j)
    return found


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(
        torch.equal(a.view(_WORDS[a.dtype.itemsize]), b.view(_WORDS[b.dtype.itemsize]))
        for a, b in zip(some, others, strict=True)
    )


def _agrees(program: Program, kernel: Kernel, device: torch.device) -> bool:
    """With PyTorch, op by op, on numbers of all sizes and some that are none.

    What a step has to offer may be all zeros. Other random numbers stay as they are.
    """
    count = min(_TRIED, program.count or _TRIED)
    places = [_places(given, count) for given in program.inputs]
    while max(int(where.max()) for where in places) > _FARTHEST:  # parts of something very large
        count = count // 2
        places = [where[:count] for where in places]
    draw = torch.Generator(device="cpu").manual_seed(0)
    inputs, rows = [], []
    for given, where in zip(program.inputs, places, strict=True):
        tensor = torch.randn(int(where.max()) + 1, generator=draw, device="cpu")
        tensor *= torch.exp2(torch.randint(-20, 20, tensor.shape, generator=draw, device="cpu"))
        odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf], device="cpu")
        tensor[: len(odd)] = odd[: len(tensor)]
        inputs.append(tensor.to(device=device, dtype=given.dtype))
        rows.append(inputs[-1][where.to(device)])
    dtypes = [program.steps[j].dtype for j in program.outputs]
    found = [torch.empty(count, dtype=dtype, device=device) for dtype in dtypes]
    kernel(inputs, found, 0, count)
    made: list[torch.Tensor] = []
    for step in program.steps:
        made.append(run_step(step, [taken(one, rows, made) for one in step.operands]))
    expected = [made[j] for j in program.outputs]
    for some, other in zip(found, expected, strict=True):
        nothing = some.isnan() & other.isnan()  # of which there are many
        some[nothing], other[nothing] = 0, 0
    return _same(found, expected)


def _places(given: Input, count: int) -> torch.Tensor:
    """Where the first elements are found."""
    numbers = torch.arange(count, device="cpu")
    where, inner = torch.zeros_like(numbers), 1
    for extent, stride in given.dims or ((count, 1),):
        where += numbers // inner % extent * stride
        inner *= extent
    return where


def _program(group: Group) -> Program:
    steps = []
    for part, places in zip(group.parts, group.places, strict=True):
        operands: list[Operand] = []
        for one in part.operands:
            if isinstance(one, float):
                operands.append(one)
            else:
                place = places[one]
                operands.append(Made(place) if place >= 0 else Read(-1 - place))
        steps.append(Step(part.op, tuple(operands), part.dtype))
    inputs = tuple(given for _, given in group.inputs)
    count = group.count if any(given.dims for given in inputs) else 0
    return Program(count, inputs, tuple(steps), tuple(group.outputs))


def _probe() -> Program:
    """Every op, of either precision."""
    steps: list[Step] = []
    for k, dtype in enumerate((torch.float32, torch.bfloat16)):
        one, other = Read(2 * k), Read(2 * k + 1)
        square = Made(len(steps))
        steps.append(Step("mul", (one, one), dtype))
        steps += [Step(op, (one, other), dtype) for op in ("add", "div", "mul", "sub")]
        steps += [Step(op, (one, 0.3), dtype) for op in ("add", "div", "mul", "rsub")]
        steps += [Step("pow", (one, power), dtype) for power in (2.0, 3.0)]
        steps += [Step(op, (one,), dtype) for op in ("neg", "relu", "sigmoid", "silu", "tanh")]
        steps += [Step("rsqrt", (square,), dtype)]
    steps += [Step("_to_copy", (Read(0),), torch.bfloat16)]
    steps += [Step("_to_copy", (Read(2),), torch.float32)]
    steps += [Step("add", (Read(0), Read(2)), torch.float32)]
    inputs = [Input(dtype, ()) for dtype in (torch.float32, torch.bfloat16) for _ in range(2)]
    return Program(0, tuple(inputs), tuple(steps), tuple(range(len(steps))))


PROBE = _probe()
