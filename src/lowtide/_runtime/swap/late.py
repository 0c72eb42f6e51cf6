"""Hooks for tensors that were saved before there were any."""

from contextlib import suppress
from functools import cache

import torch
from torch.autograd.graph import Node

from lowtide._runtime.swap.quiet import quiet
from lowtide._trace.saves import Hooks

_RAW, _SAVED, _PYTHONS = "_raw_saved_", "_saved_", "saved_tensors"


class Late:
    """Hooks what is saved in graphs, each node once."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._known: set[int] = set()  # nodes' numbers: to refer to a node would keep its tensors

    def hook(self, root: Node) -> None:
        """Pack what is saved in the graph that ends with that node, as far as Python can reach it.

        What was modified in place since it was saved stays as it is, so that PyTorch itself raises;
        so do leaves, which are handed back themselves, and what has hooks already.
        """
        nodes = [root]
        with quiet():
            while nodes:
                node = nodes.pop()
                number = node._sequence_nr()
                if number in self._known:
                    continue
                self._known.add(number)
                for raw, saved in _names(type(node)):
                    with suppress(RuntimeError):  # modified, given back already, or hooked
                        _hook(getattr(node, raw), getattr(node, saved), self._hooks)
                nodes.extend(before for before, _ in node.next_functions if before is not None)


@cache
def _names(kind: type[Node]) -> list[tuple[str, str]]:
    """Of what nodes of a kind save: the handle PyTorch has for it, and the tensor itself."""
    found = [name for name in dir(kind) if name.startswith(_RAW)]
    plain = [name.replace(_RAW, _SAVED) for name in found]
    return [
        (raw, name if hasattr(kind, name) else _PYTHONS)
        for raw, name in zip(found, plain, strict=True)
    ]


def _hook(raw: object, saved: object, hooks: Hooks) -> None:
    if isinstance(raw, tuple | list) and isinstance(saved, tuple | list):
        for one, tensor in zip(raw, saved, strict=True):
            with suppress(RuntimeError):
                _hook(one, tensor, hooks)
    elif isinstance(saved, torch.Tensor) and not (saved.is_leaf and saved.requires_grad):
        raw.register_hooks(*hooks)  # type: ignore[attr-defined]
