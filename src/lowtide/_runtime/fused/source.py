"""A program -> CUDA C++ that computes it.

Every result is rounded to its type before it is used, by instructions that the compiler does not
join with others: `a * b + c` in one program is what two kernels make of it. Functions that PyTorch
computes in one go are written as it writes them.

The source needs no header, and the few functions below are all that is CUDA's own in it: a test
compiles it for the CPU with others in their place. What is stored is rounded already.
"""

from collections.abc import Sequence
from math import isfinite

import torch

from lowtide._runtime.fused.program import Input, Made, Operand, Program, Read, Step

NAME = "fused"
EACH, THREADS = 8, 256  # elements for each thread, and how many of them are in a block
_ROW_BYTES = 16  # that a thread takes at once, of tensors that lie as they are counted

_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_STORED = {
    torch.bfloat16: "unsigned short",
    torch.float16: "unsigned short",
    torch.float32: "float",
}
_EXPRESSIONS = {
    "_to_copy": "{0}",
    "add": "__fadd_rn({0}, {1})",
    "mul": "__fmul_rn({0}, {1})",
    "neg": "-{0}",
    "relu": "{0} != {0} ? {0} : fmaxf({0}, 0.0f)",
    "rsqrt": "rsqrtf({0})",
    "rsub": "__fsub_rn({1}, {0})",
    "sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "silu": "{0} / (1.0f + expf(-{0}))",
    "sub": "__fsub_rn({0}, {1})",
    "tanh": "tanhf({0})",
    "threshold_backward": "{1} <= {2} ? 0.0f : {0}",
}
# PyTorch computes some gradients in the type that they have, and its compiler joins a product with
# a sum where that is a float.
_ROUNDED = {
    "sigmoid_backward": "__fmul_rn({round}(__fmul_rn({0}, {round}(__fsub_rn(1.0f, {1})))), {1})",
    "tanh_backward": "__fmul_rn({0}, {round}(__fsub_rn(1.0f, {round}(__fmul_rn({1}, {1})))))",
}
_JOINED = {
    "silu_backward": ("__fmul_rn(__fmul_rn({0}, {s}), __fmaf_rn({1}, __fsub_rn(1.0f, {s}), 1.0f))"),
    "tanh_backward": "__fmul_rn({0}, __fmaf_rn(-{1}, {1}, 1.0f))",
}

# A number is rounded as the upper half of a pair, the lower of which is zero: that is one fast
# instruction, and the pair is the number as a float. To store it its upper half is taken.
CUDA = """
typedef long long i64;
__device__ __forceinline__ float load_bf16(unsigned short x) {
    return __uint_as_float((unsigned)x << 16);
}
__device__ __forceinline__ float round_bf16(float x) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
    return __uint_as_float(pair);
}
__device__ __forceinline__ unsigned short store_bf16(float x) {
    return (unsigned short)(__float_as_uint(x) >> 16);
}
__device__ __forceinline__ float load_f16(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ unsigned short store_f16(float x) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
    return (unsigned short)pair;
}
__device__ __forceinline__ float round_f16(float x) { return load_f16(store_f16(x)); }
"""

_COMMON = """
__device__ __forceinline__ float load_f32(float x) { return x; }
__device__ __forceinline__ float round_f32(float x) { return x; }
__device__ __forceinline__ float store_f32(float x) { return x; }
template <typename T> struct alignas(WIDTH * sizeof(T)) Row { T at[WIDTH]; };
"""


def source(program: Program, prelude: str = CUDA, threads: int = THREADS) -> str:
    """A kernel of the program's inputs, its outputs, and two numbers: the first element, and how
    many. What it makes of the first element is the first of each output.

    Inputs and outputs that are counted as they lie begin at multiples of 16 bytes, as does the
    first element. A block of `threads` makes `EACH` elements for each of them. These it takes in
    rows of as many as 16 bytes hold, neighbours beside each other: so whole sectors are written.
    """
    read = [_STORED[given.dtype] for given in program.inputs]
    made = [_STORED[program.steps[j].dtype] for j in program.outputs]
    width = _width(program)
    names = [f"in{k}" for k in range(len(read))] + [f"out{k}" for k in range(len(made))]
    pointers = [f"const {kind}* __restrict__ in{k}" for k, kind in enumerate(read)]
    pointers += [f"{kind}* __restrict__ out{k}" for k, kind in enumerate(made)]
    loads, before, given = [], [], []
    for k, one in enumerate(program.inputs):
        row = f"Row<{read[k]}>"
        if not one.dims:
            loads.append(f"{row} row{k}[ROWS];")
            before.append(f"row{k}[r] = *(const {row}*)(in{k} + first + from);")
            given.append(f"row{k}[r].at[e]")
        elif one.dims[0][0] % width:  # a row of it lies in several places
            given.append(f"in{k}[{_place(one, program.count, 'at + e')}]")
        else:
            loads.append(f"i64 place{k}[ROWS];")
            before.append(f"place{k}[r] = {_place(one, program.count, 'first + from')};")
            given.append(f"in{k}[place{k}[r] + e * {one.dims[0][1]}]")
    gives = [f"made{k}.at[e]" for k in range(len(made))]
    locals_ = [f"Row<{kind}> made{k};" for k, kind in enumerate(made)]
    stores = [f"*(Row<{kind}>*)(out{k} + from) = made{k};" for k, kind in enumerate(made)]
    single = [
        f"in{k}[{_place(one, program.count, 'at') if one.dims else 'at'}]"
        for k, one in enumerate(program.inputs)
    ]
    single += [f"out{k}[from]" for k in range(len(made))]
    return f"""#define WIDTH {width}
#define ROWS {EACH // width}
#define THREADS {threads}
{prelude}{_COMMON}
{_element(program)}
__device__ __forceinline__ void single(i64 at, i64 from, {", ".join(pointers)}) {{
    element({", ".join(single)});
}}

extern "C" __global__ void {NAME}({", ".join(pointers)}, i64 first, i64 count) {{
    const i64 begin = (i64)blockIdx.x * (THREADS * WIDTH * ROWS);
    if (begin + THREADS * WIDTH * ROWS > count) {{
#pragma unroll 1
        for (i64 from = begin + threadIdx.x; from < count; from += THREADS)
            single(first + from, from, {", ".join(names)});
        return;
    }}
{_lines(loads, 4)}
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {{
        const i64 from = begin + (r * THREADS + threadIdx.x) * WIDTH;
{_lines(before, 8)}
    }}
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {{
        const i64 from = begin + (r * THREADS + threadIdx.x) * WIDTH;
        const i64 at = first + from;
{_lines(locals_, 8)}
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) element({", ".join([*given, *gives])});
{_lines(stores, 8)}
    }}
}}
"""


def _lines(lines: Sequence[str], indent: int) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _width(program: Program) -> int:
    """Elements in 16 bytes of what takes most."""
    whole = [given.dtype for given in program.inputs if not given.dims]
    made = [program.steps[j].dtype for j in program.outputs]
    return _ROW_BYTES // max(dtype.itemsize for dtype in (*whole, *made))


def _element(program: Program) -> str:
    """The function of one element."""
    arguments = [f"const {_STORED[given.dtype]} one{k}" for k, given in enumerate(program.inputs)]
    arguments += [
        f"{_STORED[program.steps[j].dtype]}& out{k}" for k, j in enumerate(program.outputs)
    ]
    lines = [
        f"const float x{k} = load_{_SHORT[given.dtype]}(one{k});"
        for k, given in enumerate(program.inputs)
    ]
    for j, step in enumerate(program.steps):
        rounded = f"round_{_SHORT[step.dtype]}({_expression(step)})"
        lines.append(f"const float y{j} = {rounded};")
    lines += [
        f"out{k} = store_{_SHORT[program.steps[j].dtype]}(y{j});"
        for k, j in enumerate(program.outputs)
    ]
    return (
        f"__device__ __forceinline__ void element({', '.join(arguments)}) {{\n"
        + _lines(lines, 4)
        + "\n}\n"
    )


def _place(given: Input, count: int, at: str) -> str:
    """Where the element `at` is found, by strides."""
    number, end = (f"((unsigned)({at}))", "u") if count < 1 << 32 else (f"({at})", "ll")
    terms, inner = [], 1
    for i, (extent, stride) in enumerate(given.dims):
        if stride:
            index = number if inner == 1 else f"({number} / {inner}{end})"
            if inner * extent < count or i + 1 < len(given.dims):
                index = f"({index} % {extent}{end})"
            terms.append(f"(i64){index} * {stride}")
        inner *= extent
    return " + ".join(terms) or "0"


def _expression(step: Step) -> str:
    given = [_operand(operand) for operand in step.operands]
    if step.op == "pow":
        return _power(given[0], step)
    if step.op == "div":
        if isinstance(step.operands[1], float):  # PyTorch multiplies by its inverse
            return f"__fmul_rn({given[0]}, __fdiv_rn(1.0f, {given[1]}))"
        return f"__fdiv_rn({given[0]}, {given[1]})"
    if step.op in _JOINED and (step.dtype is torch.float32 or step.op not in _ROUNDED):
        sigmoid = _EXPRESSIONS["sigmoid"].format(given[1])
        return _JOINED[step.op].format(*given, s=f"({sigmoid})")
    if step.op in _ROUNDED:
        return _ROUNDED[step.op].format(*given, round=f"round_{_SHORT[step.dtype]}")
    return _EXPRESSIONS[step.op].format(*given)


def _power(base: str, step: Step) -> str:
    """By multiplying, each time in its own type."""
    found = base
    for _ in range(round(float(step.operands[1])) - 1):  # type: ignore[arg-type]
        found = f"round_{_SHORT[step.dtype]}(__fmul_rn({found}, {base}))"
    return found


def _operand(operand: Operand) -> str:
    if isinstance(operand, Read):
        return f"x{operand.place}"
    if isinstance(operand, Made):
        return f"y{operand.place}"
    return f"((float){operand!r})" if isfinite(operand) else f"((float)({_odd(operand)}))"


def _odd(number: float) -> str:
    if number != number:
        return "0.0 / 0.0"
    return "1.0 / 0.0" if number > 0 else "-1.0 / 0.0"
