"""The nouns: a traced training step, a machine, a plan. No torch, nothing computed, all frozen.

A *storage* is one allocation. A *value* is one version of one storage: an in-place op makes a
new value on the same storage. A *tensor* is a view of a value, described by a `Geometry`.
Intervals are half-open over op indices.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

OpIndex = NewType("OpIndex", int)  # position of an op in the traced step
ValueId = NewType("ValueId", int)  # position of a value in `Trace.values`
StorageId = NewType("StorageId", int)  # values with the same one share an allocation
GeometryId = NewType("GeometryId", int)  # position in `Trace.geometries`

CUDA_GRANULARITY_BYTES = 512  # what PyTorch's CUDA allocator rounds every size up to
UNREPLAYABLE = '{"unreplayable":'  # in `Op.args`: an argument that could not be written down


class Kind(StrEnum):
    """What a value is to the training step."""

    INPUT = "input"  # came from outside: a batch, a dataset, what an earlier step left behind
    PARAMETER = "parameter"
    BUFFER = "buffer"  # registered on a module, or otherwise persistent and not a parameter
    ACTIVATION = "activation"  # made in the step and kept for backward
    GRADIENT = "gradient"  # the `.grad` of a leaf; gradients of activations are temporaries
    STATE = "optimizer state"
    TEMPORARY = "temporary"  # everything else


class Phase(StrEnum):
    """The part of the step an op belongs to; clipping and unscaling count as optimizer."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies on its storage; shape, strides and offset count elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor argument or result of an op."""

    value: ValueId
    geometry: GeometryId


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen op as it ran.

    `reads` are the values whose bytes matter to what it computes; `updates` are values it reads
    only to overwrite them with their own next version (BatchNorm's running statistics), which a
    replay must therefore protect; `writes` are the values it makes. A view reads nothing.
    `args` is canonical JSON of the call, its tensors given as `{"tensor": k}` into `operands`.
    """

    name: str
    reads: tuple[ValueId, ...] = ()
    updates: tuple[ValueId, ...] = ()
    writes: tuple[ValueId, ...] = ()
    operands: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    args: str = ""
    seconds: float = 0.0  # device time
    workspace_bytes: int = (
        0  # what its kernels took beyond inputs and results, given back in the op
    )
    phase: Phase = Phase.FORWARD
    module: str = ""
    node: str = ""  # the autograd node that ran it, in backward
    random: bool = False  # it drew from a random generator
    factory: bool = False  # it uses no tensor's bytes, only shapes
    view: bool = False  # its results alias its operands, no bytes touched
    grad: bool = False  # grad mode was on: some kernels return more then
    again_seconds: float | None = None  # device time when it runs again, if that takes less


@dataclass(frozen=True, slots=True)
class Save:
    """A value kept for backward.

    `op` is the op whose gradient needs it, `node` the autograd node that holds it ("" when the
    step never asked for it back), `packed` and `unpacked` count the ops that had started.
    """

    op: OpIndex | None
    node: str
    packed: OpIndex
    unpacked: tuple[OpIndex, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """One version of one storage, holding its bytes for op indices `first <= i < end`.

    `before`: it was there when the step began. `after`: it is there when the step ends.
    Versions of one storage follow each other without a gap; an op that overwrites a value in
    place reads it at i == end.
    """

    storage: StorageId
    version: int
    bytes: int
    kind: Kind
    first: OpIndex
    end: OpIndex
    before: bool = False
    after: bool = False
    device: str = "cpu"
    name: str = ""  # qualified name of a parameter, buffer, gradient or optimizer state
    module: str = ""  # the module that owns it, or in which it was made
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One training step: its ops in order, and every value alive in it."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    geometries: tuple[Geometry, ...] = ()
    device: str = "cpu"  # the device whose memory is the subject
    granularity_bytes: int = 1  # what that device's allocator rounds sizes up to
    unseen_bytes: int = 0  # held on that device all along by no tensor: library workspaces
    source: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """How long copies take, one way: measured points, straight lines between them.

    Below the first point time is that of the first, beyond the last it grows as between the
    last two.
    """

    bytes: tuple[int, ...]  # ascending, at least two
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step runs on, as far as a plan needs to know.

    `together` is the share of its speed that each way of the link keeps while both are busy, and
    `drag` how long compute is held up for each second of copying, hidden or not: they share the
    device's memory, and its link with the commands it is given.
    `flops_per_second` is by dtype name; it and `memory_bytes_per_second` are 0 or empty where
    unknown. `sources` says where each figure is from.
    """

    name: str
    device_bytes: int
    host_bytes: int  # what may be taken of the tier below
    out: Link  # from the device
    back: Link  # to the device
    together: float = 1.0
    drag: float = 0.0
    memory_bytes_per_second: float = 0.0
    flops_per_second: tuple[tuple[str, float], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Swap:
    """One stay of a value's storage away from the device, between its uses by `after` and `until`.

    All are positions in the step. The copy out may start when op `after` has ended; before op
    `release` compute waits for it and the bytes are free. Before op `fetch` bytes are taken again
    and the copy back may start; op `until` waits for it. A stay across the step's end has
    `until`, and perhaps `fetch` and `release`, at least the number of ops: in the next step.
    after < release <= fetch <= until.
    """

    value: ValueId
    after: OpIndex
    release: OpIndex
    fetch: OpIndex
    until: OpIndex


@dataclass(frozen=True, slots=True)
class Drop:
    """Before op `before`, the bytes of a value are given up: it can be made again."""

    before: OpIndex
    value: ValueId


@dataclass(frozen=True, slots=True)
class Hold:
    """From op `before` on a value that is there does not go until it is dropped."""

    before: OpIndex
    value: ValueId


@dataclass(frozen=True, slots=True)
class Rerun:
    """Before op `before`, an earlier op runs again; all it makes is there then."""

    before: OpIndex
    op: OpIndex


Remake = Drop | Hold | Rerun


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to each step, and what is expected of it.

    `remakes` are in the order in which they are done. Where there are any, the positions of swaps
    count the ops of the step with its reruns in it, and their values are that step's.
    """

    swaps: tuple[Swap, ...]
    peak_bytes: int
    seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    policy: str = ""
    machine: str = ""
    remakes: tuple[Remake, ...] = ()
