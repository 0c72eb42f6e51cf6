"""What is saved for backward, by whom, and when it is asked for again.

While saved-tensor hooks are on, PyTorch no longer notices that a saved tensor was modified in
place; so the version is kept here and the same error raised. Hooks of the script itself, such as
those of `torch.utils.checkpoint`, lie on top of these: what they save in another way is not
saved here, which is the truth.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide._trace.book import Book
from lowtide._trace.tensors import has_storage, version_of

_DISABLE = "disable_saved_tensors_hooks"
_Disable = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class SaveEntry:
    """One save while the recording goes on."""

    creator: tuple[int, int]  # thread and sequence number of the node that saves
    packed: int
    node: str = ""
    unpacked: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Packed:
    tensor: torch.Tensor  # detached unless a leaf: the original would hold what holds it
    version: int
    origin: tuple[int, str] | None
    entry: SaveEntry | None


class SavedTensors:
    """Pack and unpack hooks that write down and change nothing."""

    def __init__(self, book: Book, quietly: Callable[[], AbstractContextManager[None]]) -> None:
        self.saves: dict[int, list[SaveEntry]] = {}
        self._book: Book | None = book
        self._quietly = quietly
        self._unpacked_storage: int | None = None

    def install(self, undo: ExitStack) -> None:
        """Start watching; `undo` stops it. Graphs that outlive the recording keep working."""
        install_hooks((self._pack, self._unpack), undo)

    def is_unpacking(self, tensor: torch.Tensor) -> bool:
        """Whether a `detach` of `tensor` now is the engine's handling of a hook's result.

        Without hooks it would not happen, so it is no op of the step.
        """
        storage, self._unpacked_storage = self._unpacked_storage, None
        if storage is None or not has_storage(tensor):
            return False
        return bool(tensor.untyped_storage()._cdata == storage)

    def forget_unpacking(self) -> None:
        """Another op came first: no `detach` follows the last unpacking."""
        self._unpacked_storage = None

    def close(self) -> None:
        """Write nothing down any more."""
        self._book = None

    def note_pack(self, tensor: torch.Tensor) -> SaveEntry | None:
        """Backward is going to need `tensor`."""
        if self._book is None or not has_storage(tensor):
            return None
        creator = threading.get_ident(), torch._C._autograd._get_sequence_nr() - 1
        entry = SaveEntry(creator, self._book.started)
        self.saves.setdefault(self._book.current(tensor), []).append(entry)
        return entry

    def note_unpack(self, entry: SaveEntry | None, tensor: torch.Tensor) -> None:
        """Backward asks for what it said it would need."""
        if self._book is None or entry is None:
            return
        entry.unpacked.append(self._book.started)
        node = torch._C._current_autograd_node()
        if node is not None:
            entry.node = node.name()
            entry.creator = entry.creator[0], node._sequence_nr()
            self._unpacked_storage = tensor.untyped_storage()._cdata

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        entry = self.note_pack(tensor)
        # A leaf is handed back itself, as PyTorch does: a function may look at what hangs on it.
        alias = tensor
        if tensor.grad_fn is not None:
            with self._quietly():
                alias = tensor.detach()
        return _Packed(alias, version_of(alias), origin_of(tensor), entry)

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        check_version(packed.tensor, packed.version, packed.origin)
        self.note_unpack(packed.entry, packed.tensor)
        return packed.tensor


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]  # pack and unpack


class InstalledHooks:
    """Saved-tensor hooks until `undo`.

    `torch.func` refuses to run under saved-tensor hooks, so these leave for as long.
    """

    def __init__(self, hooks: Hooks, undo: ExitStack) -> None:
        self._hooks = hooks
        self._resting, self._thread = False, 0
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        undo.callback(self._pop)
        graph = torch.autograd.graph
        disable: _Disable = getattr(graph, _DISABLE)

        @contextmanager
        def disable_without_ours(message: str) -> Iterator[None]:
            if not self._are_on_top():
                with disable(message):  # the script's own hooks: let PyTorch judge them
                    yield
                return
            torch._C._autograd._pop_saved_tensors_default_hooks()
            try:
                with disable(message):
                    yield
            finally:
                torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)

        undo.callback(setattr, graph, _DISABLE, disable)
        setattr(graph, _DISABLE, disable_without_ours)

    def _pop(self) -> None:
        if not self._resting:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def rest(self) -> bool:
        """Nobody is called until `resume`. False: not now, or not in this thread."""
        if not self._are_on_top():
            return False
        self._pop()
        self._resting = True
        self._thread = threading.get_ident()  # hooks are a thread's
        return True

    def resume(self) -> bool:
        """Called again from now on. False: not yet, others are there, or it is another thread."""
        autograd = torch._C._autograd
        alone = autograd._top_saved_tensors_default_hooks(True) is None
        if self._resting and alone and self._thread == threading.get_ident():
            with suppress(RuntimeError):  # the program allows none at the moment
                autograd._push_saved_tensors_default_hooks(*self._hooks)
                self._resting = False
        return not self._resting

    def _are_on_top(self) -> bool:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) == self._hooks

    def exchange(self, hooks: Hooks) -> bool:
        """Others in their place. False: not now, or not in this thread."""
        if not self._are_on_top():
            return False
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        self._hooks = hooks
        return True


def install_hooks(hooks: Hooks, undo: ExitStack) -> InstalledHooks | None:
    """Until `undo`. None: others are there, and only one pair is ever asked."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return InstalledHooks(hooks, undo)


def origin_of(tensor: torch.Tensor) -> tuple[int, str] | None:
    """Which output of which autograd node a tensor is."""
    node = tensor.grad_fn
    return None if node is None else (tensor.output_nr, node.name())


def check_version(tensor: torch.Tensor, expected: int, origin: tuple[int, str] | None) -> None:
    """Raise what PyTorch would have raised, had it looked, if `tensor` was modified in place."""
    version = version_of(tensor)
    if version == expected:
        return
    words = _pytorchs_words()
    where = ""
    if origin is not None:
        output, name = origin
        if f"{_NODE}Backward0" not in words:
            name = re.sub(r"Backward\d+$", "", name)
        where = f", which is output {output} of {name},"
    what = f"[{tensor.type()} {list(tensor.shape)}]{where} is at version {version}; "
    what += f"expected version {expected} instead"
    raise RuntimeError(_SPECIFIC.sub(lambda _: what, words))


_NODE = "Exp"
_SPECIFIC = re.compile(r"\[torch\..* expected version \d+ instead")


@functools.cache
def _pytorchs_words() -> str:
    """The error of this version of PyTorch, from a thread that has no hooks."""
    said: list[str] = []

    def modify() -> None:
        x = torch.ones(1, requires_grad=True).exp()
        x.add_(1)
        try:
            x.backward()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=modify)
    thread.start()
    thread.join()
    return said[0]
