"""Which module is running: a path for every op, without touching any module.

Global forward hooks push and pop; nothing is stored on a module. The outermost module that is
called lends its class name as the root of the paths below it: `GPT.blocks.0.attn`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class ModulePaths:
    """The stack of running modules, one a thread: backward may re-run modules in its own."""

    def __init__(self, on_root: Callable[[nn.Module, str], None]) -> None:
        self._on_root = on_root
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._roots: Counter[str] = Counter()
        self._stacks: dict[int, list[str]] = {}

    def install(self, undo: ExitStack) -> None:
        """Start watching; `undo` stops it."""
        undo.callback(register_module_forward_pre_hook(self._enter).remove)
        undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def current(self) -> str:
        """The path of the module running in this thread, or ""."""
        stack = self._stacks.get(threading.get_ident())
        return stack[-1] if stack else ""

    def _enter(self, module: nn.Module, _args: Any) -> None:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        name = self._names.get(module)
        if name is None and stack:  # made on the fly, inside of another
            name = f"{stack[-1]}.{type(module).__name__}"
        elif name is None:
            name = self._name_tree(module)
        if not stack:
            self._on_root(module, name)  # each time: buffers may have been assigned anew
        stack.append(name)

    def _leave(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        stack = self._stacks.get(threading.get_ident())
        if stack:  # empty if tracing began inside this module
            stack.pop()

    def _name_tree(self, root: nn.Module) -> str:
        kind = type(root).__name__
        holds = next(root.parameters(), None) is not None
        self._roots[kind] += holds  # those that hold nothing are all alike
        base = f"{kind}#{self._roots[kind]}" if self._roots[kind] > 1 and holds else kind
        for path, module in root.named_modules():
            self._names[module] = f"{base}.{path}" if path else base
        return base


def owned_tensors(root: nn.Module, base: str) -> Iterator[tuple[str, str, Any, bool]]:
    """(module path, qualified name, tensor, is parameter) for everything `root` holds."""
    for is_parameter, pairs in (
        (True, root.named_parameters()),
        (False, root.named_buffers()),
    ):
        for name, tensor in pairs:
            module = ".".join([base, *name.split(".")[:-1]])
            yield module, f"{base}.{name}", tensor, is_parameter
