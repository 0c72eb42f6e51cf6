"""What a trace says about particular things."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ZOO

import lowtide
from lowtide import Trace
from lowtide._analyze.access import producers
from lowtide._analyze.recompute import Obstacle, obstacles
from lowtide._check import find_flaw
from lowtide._ir import Kind, Phase, Value
from lowtide._trace.record import Recorder


def trace_of(name: str) -> Trace:
    return lowtide.trace(ZOO[name]().step)


def by_name(trace: Trace, name: str) -> list[Value]:
    return [value for value in trace.values if value.name == name]


def test_kinds_and_names() -> None:
    trace = trace_of("inplace_relu_and_batchnorm")
    weight = by_name(trace, "Sequential.0.weight")
    assert {value.kind for value in weight} == {Kind.PARAMETER}
    assert weight[0].before and weight[-1].after and len({v.storage for v in weight}) == 1
    assert weight[0].module == "Sequential.0"
    mean = by_name(trace, "Sequential.1.running_mean")
    assert [value.kind for value in mean] == [Kind.BUFFER, Kind.BUFFER]  # moved along once
    assert by_name(trace, "Sequential.0.weight.grad")[-1].kind is Kind.GRADIENT
    assert by_name(trace, "Sequential.0.weight.momentum_buffer")[0].kind is Kind.STATE
    x = next(v for v in trace.values if v.bytes == 8 * 3 * 16 * 16 * 4)
    assert x.kind is Kind.INPUT and x.before
    kinds = Counter(value.kind for value in trace.values)
    assert kinds[Kind.ACTIVATION] and kinds[Kind.TEMPORARY]


def test_phases_in_order_and_modules_in_backward() -> None:
    trace = trace_of("inplace_relu_and_batchnorm")
    phases = [op.phase for op in trace.ops]
    assert phases == sorted(phases, key=list(Phase).index)
    conv = next(op for op in trace.ops if op.name == "aten.convolution.default")
    back = [op for op in trace.ops if op.name == "aten.convolution_backward.default"]
    assert conv.module == back[-1].module == "Sequential.0"
    assert back[-1].node == "ConvolutionBackward0"
    assert all(op.seconds > 0 for op in trace.ops)


def test_clipping_and_unscaling_belong_to_the_optimizer() -> None:
    trace = trace_of("autocast_with_scaler")
    unscale = next(op for op in trace.ops if "unscale" in op.name)
    norm = next(op for op in trace.ops if "linalg_vector_norm" in op.name or "norm" in op.name)
    assert unscale.phase is Phase.OPTIMIZER
    assert norm.phase is Phase.OPTIMIZER


def test_an_average_of_the_weights_belongs_to_the_optimizer() -> None:
    model = nn.Linear(8, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        out = model(torch.ones(2, 8))
        with torch.no_grad():
            out.argmax()  # a metric
        out.sum().backward()
        optimizer.step()
        average.update_parameters(model)

    trace = lowtide.trace(step)
    assert next(op for op in trace.ops if "argmax" in op.name).phase is Phase.FORWARD
    weights = {i for i, v in enumerate(trace.values) if v.kind is Kind.PARAMETER}
    outside = [op for op in trace.ops if not op.module and weights & {*op.reads}]
    assert {op.phase for op in outside} == {Phase.OPTIMIZER}
    assert len(outside) > 2  # the step itself is two additions


def test_an_inplace_op_makes_a_new_version_of_the_same_storage() -> None:
    trace = trace_of("inplace_relu_and_batchnorm")
    relu = next(op for op in trace.ops if op.name == "aten.relu_.default")
    (new,) = relu.writes
    (old,) = relu.reads
    assert trace.values[new].storage == trace.values[old].storage
    assert trace.values[new].version == trace.values[old].version + 1


def test_batchnorm_updates_statistics_that_its_schema_does_not_mention() -> None:
    trace = trace_of("inplace_relu_and_batchnorm")
    norm = next(op for op in trace.ops if "batch_norm" in op.name and op.phase is Phase.FORWARD)
    assert [trace.values[v].name for v in norm.updates] == [
        "Sequential.1.running_mean",
        "Sequential.1.running_var",
    ]
    assert not set(norm.updates) & set(norm.reads)


def test_random_ops_are_those_that_draw() -> None:
    trace = trace_of("dropout")
    assert [op.name for op in trace.ops if op.random] == ["aten.bernoulli_.float"]
    x = torch.ones(1, 1, 4, 8)
    calm = lowtide.trace(lambda: nn.functional.scaled_dot_product_attention(x, x, x))
    assert not any(op.random for op in calm.ops)  # may draw, says its schema; does not without p


def test_tied_weights_are_one_storage() -> None:
    trace = trace_of("weight_tying")
    weights = {
        v.storage for v in trace.values if v.kind is Kind.PARAMETER and v.bytes == 50 * 24 * 4
    }
    assert len(weights) == 1


def test_views_touch_no_bytes_and_make_no_values() -> None:
    trace = trace_of("views_of_views")
    views = [op for op in trace.ops if op.view]
    assert len(views) > 5
    assert all(op.reads == op.writes == () for op in views)
    assert all(op.operands and op.results for op in views)


def test_a_value_saved_by_several_ops_is_one_value_with_several_saves() -> None:
    trace = trace_of("saved_by_several_ops")
    h = max(trace.values, key=lambda value: len(value.saves))
    nodes = Counter(save.node for save in h.saves)
    assert nodes["MulBackward0"] == 2 and nodes["SigmoidBackward0"] == 0
    for save in h.saves:
        assert save.unpacked and save.op is not None
        assert trace.ops[save.op].phase is Phase.FORWARD
        assert h.first < save.packed <= save.unpacked[0] < h.end


def test_what_checkpointing_does_not_save_is_not_saved() -> None:
    trace = trace_of("checkpointing")
    gelu_inputs = [v for v in trace.values if v.bytes == 2048 * 128 * 4 and v.first < 40]
    forward = [v for v in gelu_inputs if trace.ops[v.first].phase is Phase.FORWARD]
    assert forward and all(not value.saves for value in forward)
    again = [
        op for op in trace.ops if op.phase is Phase.BACKWARD and op.name == "aten.gelu.default"
    ]
    assert len(again) == 3  # recomputed in backward, in the module it belongs to
    assert {op.module for op in again} == {f"Checkpointed.layers.{i}.1" for i in range(3)}


def test_gradient_accumulation_adds_into_the_same_gradient() -> None:
    trace = trace_of("accumulation")
    grad = by_name(trace, "Linear.weight.grad")
    assert len({value.storage for value in grad}) == 1
    assert len(grad) == 1 + 3 + 1  # before, three additions, zeroed
    zero = next(op for op in trace.ops if op.name == "aten.zero_.default")
    assert zero.phase is Phase.OPTIMIZER and zero.reads == ()


def test_the_graph_of_a_step_that_never_went_backward_lives_into_the_next() -> None:
    trace = trace_of("never_backward")
    activations = [v for v in trace.values if v.kind is Kind.ACTIVATION]
    inherited = [v for v in trace.values if v.before and not v.after and v.bytes == 8 * 32 * 4]
    assert activations and inherited
    assert all(save.unpacked == () for value in activations for save in value.saves)
    assert {op.phase for op in trace.ops} == {Phase.FORWARD}


def test_manual_training_without_modules_or_optimizer() -> None:
    trace = trace_of("manual_update")
    kinds = {value.kind for value in trace.values}
    assert {Kind.PARAMETER, Kind.GRADIENT, Kind.INPUT, Kind.ACTIVATION} <= kinds
    update = next(op for op in trace.ops if op.name.startswith("aten.sub_"))
    assert update.phase is Phase.OPTIMIZER


def test_most_of_what_is_saved_can_be_recomputed() -> None:
    trace = trace_of("gpt")
    blocked = obstacles(trace)
    saved = [i for i, v in enumerate(trace.values) if v.kind is Kind.ACTIVATION]
    assert {blocked[i] for i in saved} == {None}
    assert Obstacle.OPAQUE not in {
        blocked[i] for i, v in enumerate(trace.values) if v.bytes > 1000 and v.saves
    }


class NumpySquare(torch.autograd.Function):
    """Computes outside of torch: no op is seen making its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return 2 * x * grads[0]


class FillsUnseen(torch.autograd.Function):
    """Fills an `empty` and a `zeros` through numpy, as a raw kernel would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out, rest = torch.empty_like(x), torch.zeros(x.shape)
        out.numpy()[:] = x.detach().numpy() * 2
        rest.numpy()[:] = 1
        ctx.save_for_backward(out, rest)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        unused: torch.Tensor = sum(ctx.saved_tensors)
        return 2 * grads[0] + 0 * unused


class MarksDirty(torch.autograd.Function):
    """Changes its input unseen but says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[:] *= 3
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 3 * grads[0]


def trace_function(function: Any) -> tuple[Trace, list[Obstacle | None]]:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def step() -> None:
        layer.zero_grad()
        (function.apply(layer(x)).tanh() ** 2).sum().backward()

    trace = lowtide.trace(step)
    return trace, obstacles(trace)


def test_a_result_computed_outside_torch_has_no_producer() -> None:
    trace, blocked = trace_function(NumpySquare)
    tanh = next(op for op in trace.ops if op.name == "aten.tanh.default")
    (source,) = tanh.reads
    assert blocked[source] is Obstacle.NO_PRODUCER
    assert blocked[tanh.writes[0]] is None  # it can be recomputed as long as its source is held


def test_what_is_filled_unseen_is_never_called_recomputable() -> None:
    trace, blocked = trace_function(FillsUnseen)
    filled = [v for op in trace.ops if op.factory and op.module == "" for v in op.writes]
    saved = [v for v in filled if trace.values[v].saves]
    assert len(saved) == 2
    assert {blocked[v] for v in saved} == {Obstacle.OPAQUE}


def test_a_version_that_no_op_made_is_an_opaque_write() -> None:
    trace, blocked = trace_function(MarksDirty)
    tanh = next(op for op in trace.ops if op.name == "aten.tanh.default")
    (source,) = tanh.reads
    assert trace.values[source].version == 1
    assert source not in producers(trace)
    assert blocked[source] is Obstacle.OPAQUE


def test_ordinary_models_have_no_opaque_versions() -> None:
    for name in ("gpt", "resnet", "rnn", "foreach_and_fused", "autocast_with_scaler"):
        trace = trace_of(name)
        made = producers(trace)
        strays = [i for i, v in enumerate(trace.values) if v.version and i not in made]
        assert strays == [], name


def test_a_resized_storage_is_another_storage() -> None:
    def step() -> None:
        x = torch.ones(4)
        y = x * 2
        x.resize_(1000).fill_(1)
        (x + y[0]).sum()

    trace = lowtide.trace(step)
    sizes = {v.bytes for v in trace.values if v.first < len(trace.ops)}
    assert {16, 4000} <= sizes


def test_a_storage_resized_behind_the_back_of_ops_is_another_storage() -> None:
    x = torch.ones(1000)

    def step() -> None:
        x.untyped_storage().resize_(4000)
        x.sum()
        x.untyped_storage().resize_(8000)  # as sharded training does with its weights
        x.sum()

    trace = lowtide.trace(step)
    assert [trace.values[op.reads[0]].bytes for op in trace.ops] == [4000, 8000]


def test_a_step_that_begins_by_overwriting() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    trace = lowtide.trace(step)
    assert find_flaw(trace) is None
    assert trace.ops[0].name == "aten.zero_.default"
    assert trace.ops[0].phase is Phase.OPTIMIZER


def test_garbage_in_cycles_ends_with_its_step() -> None:
    def step() -> None:
        cycle: list[object] = [torch.ones(1000)]
        cycle.append(cycle)

    trace = lowtide.trace(step)
    (value,) = (v for v in trace.values if v.bytes == 4000)
    assert not value.before and not value.after


def test_what_dies_after_the_recording_outlives_it() -> None:
    with Recorder() as recorder:
        x = torch.ones(1000)
    del x
    (value,) = (v for v in recorder.recording().values if v.bytes == 4000)
    assert value.after


def test_an_op_that_raises_is_kept_and_the_rest_goes_on() -> None:
    def step() -> None:
        x = torch.ones(4)
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        (x + 1).sum()

    trace = lowtide.trace(step)
    assert [op.name for op in trace.ops][-2:] == ["aten.add.Tensor", "aten.sum.default"]
