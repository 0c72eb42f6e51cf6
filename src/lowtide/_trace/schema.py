"""An ATen overload -> what its schema says about reading and writing, and what it leaves unsaid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._trace.tensors import has_storage, tensors_in

# Batch norms move the running statistics along in training mode. Some say so in their schema,
# some do not; none of their other results depends on the old statistics then.
_STATISTICS = ("running_mean", "running_var")
_BATCH_NORMS = {
    "aten.native_batch_norm",
    "aten.cudnn_batch_norm",
    "aten.miopen_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._batch_norm_with_update",
    "aten._batch_norm_impl_index",
}

# Kernels that spoil an argument without saying so: RNN backward passes reuse the scratch space
# that their forward pass left.
_SPOILED = {
    "aten.mkldnn_rnn_layer_backward": frozenset({"workspace"}),
    "aten._cudnn_rnn_backward": frozenset({"reserve"}),
    "aten.miopen_rnn_backward": frozenset({"reserve"}),
}

# They replace every element of what they write, whatever was there.
_OVERWRITING = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "_foreach_copy_",
    "_foreach_zero_",
}


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What holds for every call of one overload."""

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]  # names of arguments it writes
    overwrites: bool  # and does so without looking at the old content
    statistics: frozenset[str]  # arguments it updates when training
    may_be_random: bool
    factory: bool


@cache
def op_facts(func: OpOverload[..., Any]) -> OpFacts:
    """The facts of `func`, worked out once."""
    schema = func._schema
    base = schema.name.split("::")[1]
    packet = f"{func.namespace}.{base}"
    names = tuple(argument.name for argument in schema.arguments)
    writes_shape_only = torch.Tag.inplace_view in func.tags
    written = frozenset(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not writes_shape_only
    )
    statistics = frozenset(_STATISTICS) if packet in _BATCH_NORMS else frozenset[str]()
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    out = frozenset(argument.name for argument in schema.arguments if argument.is_out)
    return OpFacts(
        name=str(func),
        arguments=names,
        written=(written | _SPOILED.get(packet, frozenset())) - statistics,
        overwrites=base in _OVERWRITING or bool(out),
        statistics=statistics & frozenset(names),
        may_be_random=torch.Tag.nondeterministic_seeded in func.tags,
        factory=not takes_tensors
        or (func.namespace == "aten" and (base.endswith("_like") or base.startswith("new_"))),
    )


def written_tensors(
    facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that this call writes into."""
    return _named(facts.written, facts, args, kwargs)


def _named(
    names: frozenset[str], facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The plain tensors in the arguments called `names`."""
    if not names:
        return []
    found = []
    for position, name in enumerate(facts.arguments):
        if name in names:
            given = args[position] if position < len(args) else kwargs.get(name)
            found += [tensor for tensor in tensors_in(given) if has_storage(tensor)]
    return found


def statistics_tensors(
    facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The running statistics that this call moves along: none unless it is training."""
    if not facts.statistics:
        return []
    if "training" in facts.arguments:
        position = facts.arguments.index("training")
        if not (args[position] if position < len(args) else kwargs.get("training")):
            return []
    return _named(facts.statistics, facts, args, kwargs)
