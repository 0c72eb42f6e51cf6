"""A running torch program -> Trace: the recorder.

A dispatch mode sees every ATen op in forward, backward (PyTorch carries modes into its backward
threads) and optimizer; the book resolves tensors to values; global hooks tell modules, steps and
saved tensors. It costs some 50 µs an op: right for a few steps, too slow to stay.

Known to be imperfect: ops that other Python threads run in forward are not seen; what is saved
inside torch.func transforms is not seen as saved, only its ops; on the CPU, a tensor that no op
makes and no op touches (a saved generator state) is not counted.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide._ir import (
    UNREPLAYABLE,
    Geometry,
    GeometryId,
    Kind,
    Op,
    Operand,
    OpIndex,
    Phase,
    Save,
    StorageId,
    Trace,
    Value,
    ValueId,
)
from lowtide._trace.args import encode_args
from lowtide._trace.book import Book, Entry
from lowtide._trace.cuda import CudaProbe
from lowtide._trace.kinds import Claim, main_device, settle_kinds, settle_phases
from lowtide._trace.modules import ModulePaths, owned_tensors
from lowtide._trace.optimizers import OptimizerWatch
from lowtide._trace.saves import SavedTensors
from lowtide._trace.schema import OpFacts, op_facts, statistics_tensors, written_tensors
from lowtide._trace.steps import Mark
from lowtide._trace.tensors import covers_storage, has_storage, is_wrapper, parts, tensors_in

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_UNFINISHED = Op("")


class Recorder(TorchDispatchMode):
    """Records from `__enter__` to `__exit__`; `recording` then gives the whole as one trace.

    `on_progress` is called after every optimizer step, and outside of backward each time the
    number of ops has doubled; it may raise to end the script being recorded. `hooked` says that the
    caller has hooks on saved tensors and optimizers and passes on to `saves` and `optimizers`
    what they see.
    """

    supports_higher_order_operators = True  # they are passed through, and their parts seen

    def __init__(
        self, on_progress: Callable[[], None] = lambda: None, *, hooked: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hooked = hooked
        self._on_progress = on_progress
        self._next_look = 1024
        self.measures = True  # whether arguments and GPU times are taken, which costs time
        self.ops: list[Op] = []
        self.marks: list[Mark] = []
        self.book = Book()
        self.optimizers = OptimizerWatch(self._claim_of_parameter, self._mark_optimizer)
        self._modules = ModulePaths(self._claim_root)
        self.saves = SavedTensors(self.book, self._quietly)
        self.cuda: CudaProbe | None = None
        self._claims: dict[int, Claim] = {}
        self._geometries: dict[tuple[Any, ...], GeometryId] = {}
        self._op_of_node: dict[tuple[int, int], int] = {}
        self._main_thread = threading.get_ident()
        self._backward_module = ""
        self._muted = False
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        gc.collect()
        with ExitStack() as undo:
            if gc.isenabled():
                # Collections at moments that depend on how much the recorder allocates would
                # make two recordings of one step differ.
                gc.disable()
                undo.callback(gc.enable)
            self.book.admit_existing()
            undo.callback(self.book.close)
            self._modules.install(undo)
            undo.callback(self.saves.close)
            if not self._hooked:
                self.optimizers.install(undo)
                self.saves.install(undo)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.pop()
        self._undo.close()

    def abandon(self) -> None:
        """End, but stay on the stack of modes, silent, until `pop`: another one lies on top."""
        self._muted = True
        self._undo.close()

    def pop(self) -> None:
        """Leave the stack of modes."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def mark(self, optimizer: int = -1) -> None:
        """A step ends here, says the caller or an optimizer. Its garbage ends with it."""
        gc.collect(1)  # what is older than the recording was collected at its start
        self.marks.append(Mark(self.book.started, optimizer))

    def stop(self) -> None:
        """Record nothing from now on: what is alive stays alive in the recording."""
        self._muted = True
        self.book.close()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted or not isinstance(func, OpOverload) or func.namespace == "profiler":
            return func(*args, **kwargs)
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented  # let it take itself apart; its parts come here again
        facts = op_facts(func)
        if facts.name == "aten.detach.default" and self.saves.is_unpacking(args[0]):
            result = func(*args, **kwargs)
            result.__dict__.update(args[0].__dict__)  # without hooks it would be the tensor itself
            return result
        self.saves.forget_unpacking()
        return self._run(func, facts, args, kwargs)

    def _run(
        self,
        func: OpOverload[..., Any],
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        tensors = list(tensors_in([*args, *kwargs.values()]))
        text = encode_args(args, kwargs) if self.measures else ""
        operands, values = self._operands(tensors)
        if len(operands) < len(tensors) or any(t.is_conj() or t.is_neg() for t in tensors):
            text = f'[[{UNREPLAYABLE}"tensor that is more than its bytes"}}],{{}}]'
        written = written_tensors(facts, args, kwargs)
        statistics = statistics_tensors(facts, args, kwargs)
        unread = {
            ValueId(self.book.current(tensor))
            for tensor in written
            if facts.overwrites and covers_storage(tensor)
        }
        unread = {value for value in unread if values.count(value) == 1}
        updates = {ValueId(self.book.current(tensor)) for tensor in statistics}
        random_state = _random_state(tensors, kwargs) if facts.may_be_random else None

        index = self.book.started
        phase, module, node = self._whereabouts(index)
        known: dict[str, Any] = {
            "name": facts.name,
            "operands": operands,
            "args": text,
            "phase": phase,
            "module": module,
            "node": node.name() if node is not None else "",
            "grad": torch.is_grad_enabled(),
        }
        self.ops.append(_UNFINISHED)
        probe = self._probe(tensors, kwargs)
        self.book.started = index + 1
        if probe is not None:
            probe.begin(index, facts.name)
        began = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self.ops[index] = Op(**known)  # it did begin
            raise
        finally:
            seconds = time.perf_counter() - began
            if probe is not None:
                probe.end(index, facts.name)

        results, writes = self._outcome(index, [*written, *statistics], result)
        view = bool(results) and not writes
        reads = [value for value in values if value not in unread and value not in updates]
        self.ops[index] = Op(
            **known,
            reads=() if view or facts.factory else tuple(dict.fromkeys(reads)),
            updates=tuple(sorted(updates)),
            writes=tuple(writes),
            results=results,
            seconds=seconds,
            random=random_state is not None and random_state != _random_state(tensors, kwargs),
            factory=facts.factory and bool(writes),
            view=view,
        )
        if known["node"] == _ACCUMULATE:
            for tensor in tensors_in(result):
                self._claim_of_parameter(tensor, Kind.GRADIENT, node.variable, "grad")
        if index >= self._next_look and phase is not Phase.BACKWARD:
            self._next_look *= 2
            self._on_progress()
        return result

    def _operands(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Operand, ...], list[ValueId]]:
        """The plain tensors as operands, and every value touched, those inside sparse ones too."""
        operands = []
        values = []
        for tensor in tensors:
            for part in parts(tensor):
                value = ValueId(self.book.current(part))
                values.append(value)
                if part is tensor:
                    operands.append(Operand(value, self._geometry(tensor)))
        return tuple(operands), values

    def _outcome(
        self, index: int, written: Sequence[torch.Tensor], result: Any
    ) -> tuple[tuple[Operand, ...], list[ValueId]]:
        """What the op that just ran gave back, and the values it made."""
        writes: dict[ValueId, None] = {}
        storages: set[int] = set()  # several arguments may be views of one storage
        for tensor in written:
            storage = self.book.storage_of(tensor)
            if storage not in storages:
                storages.add(storage)
                writes[ValueId(self.book.write(tensor, index))] = None
        results = []
        for tensor in tensors_in(result):
            for part in parts(tensor):
                if self.book.is_known(part):
                    value = ValueId(self.book.current(part))
                else:
                    value = ValueId(self.book.make(part, index))
                    writes[value] = None
                if part is tensor:
                    results.append(Operand(value, self._geometry(tensor)))
        return tuple(results), list(writes)

    def _geometry(self, tensor: torch.Tensor) -> GeometryId:
        key = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        number = self._geometries.get(key)
        if number is None:
            number = self._geometries[key] = GeometryId(len(self._geometries))
        return number

    def _whereabouts(self, index: int) -> tuple[Phase, str, Any]:
        """Phase, module and autograd node of the op that is about to run."""
        thread = threading.get_ident()
        # An op's node is created before the op runs, and has the latest number by then.
        newest_node = thread, torch._C._autograd._get_sequence_nr() - 1
        self._op_of_node.setdefault(newest_node, index)
        module = self._modules.current()
        if torch._C._current_graph_task_id() == -1:
            updating = self.optimizers.running and not module
            return (Phase.OPTIMIZER if updating else Phase.FORWARD), module, None
        node = torch._C._current_autograd_node()
        if not module:
            module = self._backward_module = self._module_of(node)
        return Phase.BACKWARD, module, node

    def _module_of(self, node: Any) -> str:
        """The module whose forward op made `node`; between nodes, that of the last one."""
        if node is None:
            return self._backward_module
        if node.name() == _ACCUMULATE:
            with self._quietly():
                owned = [self.book.storage_of(part) for part in parts(node.variable)]
            claims = [self._claims[storage] for storage in owned if storage in self._claims]
            return claims[0].module if claims else ""
        at = self._op_of_node.get((self._main_thread, node._sequence_nr()))
        return self.ops[at].module if at is not None else self._backward_module

    def _probe(
        self, tensors: Sequence[torch.Tensor], kwargs: Mapping[str, Any]
    ) -> CudaProbe | None:
        """The CUDA probe, if this op runs on a GPU."""
        device = kwargs.get("device")
        named = device is not None and torch.device(device).type == "cuda"
        if not self.measures or not (named or any(tensor.is_cuda for tensor in tensors)):
            return None
        self.probe_cuda()
        return self.cuda

    def probe_cuda(self) -> None:
        """Measure there from now on."""
        if self.cuda is None:
            self.cuda = CudaProbe(self.book)
            self._undo.callback(self.cuda.close)

    def _claim_root(self, root: nn.Module, base: str) -> None:
        for module, name, tensor, is_parameter in owned_tensors(root, base):
            if has_storage(tensor):
                kind = Kind.PARAMETER if is_parameter else Kind.BUFFER
                self._claims[self.book.storage_of(tensor)] = Claim(kind, name, module)

    def _claim_of_parameter(
        self, tensor: torch.Tensor, kind: Kind, parameter: torch.Tensor, suffix: str
    ) -> None:
        if not has_storage(parameter):
            return
        with self._quietly():  # taking a sparse tensor apart is no op of the step
            held = parts(tensor)
        owner = self._claims.setdefault(
            self.book.storage_of(parameter), Claim(Kind.PARAMETER, "", "")
        )
        name = f"{owner.name}.{suffix}" if owner.name and suffix else owner.name
        for part in held:
            self._claims.setdefault(self.book.storage_of(part), Claim(kind, name, owner.module))

    def _mark_optimizer(self, optimizer: int) -> None:
        self.mark(optimizer)
        self._on_progress()

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        was_muted, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = was_muted

    def recording(self) -> Trace:
        """Everything recorded, with what the GPU measured."""
        trace = self.so_far()
        return trace if self.cuda is None else self.cuda.measured(trace, self.book.entries)

    def so_far(self) -> Trace:
        """Everything up to now as one trace, from the first op to the last."""
        entries = self.book.entries
        count = len(self.ops)
        ops = settle_phases(self.ops, [entry.storage for entry in entries], self._claims)
        values = [self._value(i, entry, count) for i, entry in enumerate(entries)]
        made_by_autograd = [entry.made_by_autograd for entry in entries]
        values = settle_kinds(values, ops, self._claims, made_by_autograd)
        return Trace(
            ops=tuple(ops),
            values=tuple(values),
            geometries=tuple(
                Geometry(str(dtype).removeprefix("torch."), tuple(shape), tuple(strides), offset)
                for dtype, shape, strides, offset in self._geometries
            ),
            device=main_device(values),
        )

    def _value(self, i: int, entry: Entry, count: int) -> Value:
        return Value(
            storage=StorageId(entry.storage),
            version=entry.version,
            bytes=entry.bytes,
            kind=Kind.TEMPORARY,
            first=OpIndex(entry.first),
            end=OpIndex(count if entry.end is None else entry.end),
            before=entry.before,
            after=entry.end is None,
            device=entry.device,
            saves=tuple(
                Save(
                    op=self._saver(save.creator),
                    node=save.node,
                    packed=OpIndex(save.packed),
                    unpacked=tuple(OpIndex(at) for at in save.unpacked),
                )
                for save in self.saves.saves.get(i, ())
            ),
        )

    def _saver(self, creator: tuple[int, int]) -> OpIndex | None:
        at = self._op_of_node.get(creator)
        return None if at is None else OpIndex(at)


def _random_state(tensors: Sequence[torch.Tensor], kwargs: Mapping[str, Any]) -> object:
    """Something that changes when the op draws random numbers."""
    if kwargs.get("generator") is not None:
        return object()  # the script's own generator: assume it is used
    device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
    if device.type == "cuda":
        return torch.cuda._get_rng_state_offset(device)
    return torch.default_generator.get_state().numpy().tobytes()
