"""Calls that run again in a row -> those that run as one, and whether that makes the same."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowtide._runtime.delta.order import Item
from lowtide._runtime.delta.recipe import Call, Source, Value
from lowtide._runtime.fused.kernel import ALIGNED, Kernel
from lowtide._runtime.fused.kernels import COMPARED, Kernels
from lowtide._runtime.fused.program import Input, Part, Program, part_of, program_of
from lowtide._runtime.swap.cell import State

_MOST_STEPS, _MOST_INPUTS = 32, 12
_MOST_KERNELS, _MOST_PARTS = 512, 20_000
DEVICES = {"cuda"}  # where that pays: on a CPU what is made for the next op is in the cache anyway


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
        self.kernels = Kernels(device, verify=verify, tell=tell)
        self._verify = verify
        self._parts: dict[int, Part | None] = {}
        self._kernels: dict[Hashable, Kernel | None] = {}  # None: it is not to be used
        self._right: set[Hashable] = set()

    @property
    def right(self) -> int:
        """Kernels that are relied on."""
        return len(self._right)

    @property
    def wrong(self) -> int:
        """Kernels that did not make the same."""
        return self.kernels.wrong

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
        kernel = self._kernels[group.key] = self.kernels.of(_program(group))
        return kernel

    def is_trusted(self, group: Group) -> bool:
        """Whether its kernel is known to make the same."""
        return not self._verify or group.key in self._right

    def comparing(self, group: Group) -> int:
        """Bytes that it takes to compare."""
        kernel = self.kernel(group)
        assert kernel is not None
        some = min(COMPARED, group.count)
        each = sum(group.parts[j].dtype.itemsize + 1 for j in group.outputs)
        return some * each + kernel.scratch(some)

    def compare(
        self, group: Group, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Its kernel's outputs with `made`, the same by its calls one by one."""
        kernel = self._kernels[group.key]
        assert kernel is not None
        dtypes = [group.parts[j].dtype for j in group.outputs]
        if self.kernels.makes_same(kernel, dtypes, inputs, made, group.count):
            self._right.add(group.key)
        else:
            self._kernels[group.key] = None

    def works(self) -> bool:
        """Whether kernels can be made here, and those of all ops make what PyTorch makes."""
        return self.kernels.works()


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


def _program(group: Group) -> Program:
    inputs = [given for _, given in group.inputs]
    return program_of(group.parts, group.places, inputs, group.outputs)
