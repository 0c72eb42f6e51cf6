"""Programs -> kernels that make what PyTorch makes, to the last bit, or none."""

from collections.abc import Callable, Sequence

import torch

from lowtide._runtime.fused.kernel import Kernel, make_kernel, run_step, taken
from lowtide._runtime.fused.program import GRADIENTS, Input, Made, Program, Read, Step
from lowtide._runtime.swap.quiet import quiet

COMPARED = 1 << 19  # elements at once
_TRIED, _FARTHEST = 4113, 1 << 20  # elements that are tried (no whole blocks), and the last's place
_WORDS = {2: torch.int16, 4: torch.int32}


class Kernels:
    """Those of one device, by what they compute. `tell` is given a line if one cannot be made."""

    def __init__(self, device: torch.device, *, verify: bool, tell: Callable[[str], None]) -> None:
        self.device = device
        self.verify = verify
        self.tell = tell
        self._made: dict[Program, Kernel | None] = {}
        self._works: bool | None = None
        self._told = False
        self.wrong = 0  # kernels that did not make the same

    def of(self, program: Program) -> Kernel | None:
        """None: there is none that can be used."""
        if program not in self._made:
            self._made[program] = self._make(program)
        return self._made[program]

    def _make(self, program: Program) -> Kernel | None:
        try:
            kernel = make_kernel(program, self.device)
            if kernel is None or not self.verify or _agrees(program, kernel, self.device):
                return kernel
            self.wrong += 1
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, calls run one by one
            if not self._told:
                self._told = True
                self.tell(f"ops that run again are not fused ({type(error).__name__}: {error})")
            return None

    def works(self) -> bool:
        """Whether kernels can be made here, and those of all ops make what PyTorch makes."""
        if self._works is None:
            with quiet(), torch.no_grad():
                self._works = self._make(PROBE) is not None
        return self._works

    def can(self, op: str, dtype: torch.dtype) -> bool:
        """Whether an op that only backward has does, tried alone."""
        return op not in GRADIENTS or self.of(_alone(op, dtype)) is not None

    def makes_same(
        self,
        kernel: Kernel,
        dtypes: Sequence[torch.dtype],
        inputs: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        count: int,
    ) -> bool:
        """Of these types, from these `inputs`: what the ops have `made`, so many elements."""
        right = True
        try:
            for first in range(0, count, COMPARED):
                some = min(COMPARED, count - first)
                rows = [torch.empty(some, dtype=dtype, device=self.device) for dtype in dtypes]
                kernel(inputs, rows, first, some)
                right = right and _same(rows, [row[first : first + some] for row in made])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.tell(f"a kernel for ops that run again failed, and is not used ({error})")
            right = False
        self.wrong += not right
        return right


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


def _alone(op: str, dtype: torch.dtype) -> Program:
    """Of two tensors, and half of one if there is a third."""
    operands = (Read(0), Read(1), 0.5)[: GRADIENTS[op]]
    return Program(0, (Input(dtype, ()), Input(dtype, ())), (Step(op, operands, dtype),), (0,))


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
