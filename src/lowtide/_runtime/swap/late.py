"""Hooks for tensors that were saved before there were any."""

from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import Node

from lowtide._runtime.swap.quiet import quiet
from lowtide._trace.saves import Hooks
from lowtide._trace.tensors import has_storage

_RAW, _SAVED, _PYTHONS = "_raw_saved_", "_saved_", "saved_tensors"


class Late:
    """Hooks what is saved in graphs, each node once."""

    def __init__(self, hooks: Hooks) -> None:
        self._pack, self._unpack = hooks
        self._known: set[int] = set()  # nodes' numbers: to refer to a node would keep its tensors
        self._names: dict[type[Node], list[tuple[str, str]]] = {}  # of what nodes of a kind save
        self._error: BaseException | None = None  # that packing has raised

    def hook(self, root: Node) -> None:
        """Pack what is saved in the graph that ends with that node, as far as Python can reach it.

        What was modified in place since it was saved stays as it is, so that PyTorch itself raises;
        so do leaves, which are handed back themselves, and what has hooks already: nobody asks for
        that, as hooks of the program's may make it again then.
        """
        nodes = [root]
        with quiet(classes=True):
            while nodes:
                node = nodes.pop()
                number = node._sequence_nr()
                if number in self._known:
                    continue
                self._known.add(number)
                kind = type(node)
                if kind not in self._names:
                    self._names[kind] = _names(kind)
                for raw, saved in self._names[kind]:
                    with suppress(RuntimeError):  # modified, or given back already
                        self._hook_all(node, raw, saved)
                nodes.extend(before for before, _ in node.next_functions if before is not None)

    def _hook_all(self, node: Node, raw: str, saved: str) -> None:
        handles = _as_tuple(getattr(node, raw))
        if any(one.unpack_hook is not None for one in handles):
            return
        for handle, tensor in zip(handles, _as_tuple(getattr(node, saved)), strict=True):
            if not isinstance(tensor, torch.Tensor) or (tensor.is_leaf and tensor.requires_grad):
                continue
            # It may have been made on another stream than it is copied from.
            if tensor.is_cuda and has_storage(tensor):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            with suppress(RuntimeError):
                handle.register_hooks(self._packed, self._unpack)
            error, self._error = self._error, None
            if error is not None and not isinstance(error, RuntimeError):
                raise error

    def _packed(self, tensor: torch.Tensor) -> Any:
        """PyTorch has let go of it when packing fails: then it stays as it is."""
        try:
            return self._pack(tensor)
        except BaseException as error:  # noqa: BLE001 - raised as soon as it is kept
            self._error = error
            return tensor


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _names(kind: type[Node]) -> list[tuple[str, str]]:
    """The handle PyTorch has for each, and the tensor itself."""
    function = getattr(kind, "_forward_cls", None)
    if getattr(function, "clear_saved_tensors_on_access", False):
        return []  # whoever looks takes it
    found = [name for name in dir(kind) if name.startswith(_RAW)]
    plain = [name.replace(_RAW, _SAVED) for name in found]
    return [
        (raw, name if hasattr(kind, name) else _PYTHONS)
        for raw, name in zip(found, plain, strict=True)
    ]
