"""Weights and gradients: idle for parts of a step, and the last that goes."""

import weakref
from dataclasses import dataclass

import torch

from lowtide._runtime.swap.cell import Cell, State
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.sharing import in_shared_memory, is_shared
from lowtide._runtime.swap.states import NOTHING, StateCell, like
from lowtide._runtime.swap.tier import Place, Tier
from lowtide._trace.tensors import has_storage

_KINDS = (torch.Tensor, torch.nn.Parameter)


class GuestCell(StateCell):
    """A weight, or its gradient: they are the program's, which frees and replaces them at will.

    So lowtide refers to one only from the moment it leaves until it is back. Like optimizer state
    it shows its bytes where they are, and can be read and written there: a step that needs it
    earlier than expected is slow, and right. Who writes to its bytes says so first (`written_to`):
    what is written by way of `.data` no version tells of.
    """

    __slots__ = ("_aside", "_left", "_parameter", "_seen", "is_gradient")

    def __init__(
        self, parameter: torch.Tensor, tier: Tier, owner: int, piece: int, *, is_gradient: bool
    ) -> None:
        Cell.__init__(self, NOTHING, tier)
        self.bytes = parameter.nbytes
        self.owner, self.piece = owner, piece
        self.handles = 2  # the tensor and the one that shows it whole
        self.is_gradient = is_gradient
        self._parameter = weakref.ref(parameter)
        self._device = parameter.device
        self._whole = None
        self._version = 0
        self._shown = []
        self._left: weakref.ref[torch.Tensor] | None = None  # what has left
        self._seen: weakref.ref[torch.UntypedStorage] | None = None  # the bytes below
        self._aside: list[_Aside] = []  # what has left before, and somebody still has

    def parameter(self) -> torch.Tensor | None:
        """The one it is about, as long as that is there."""
        return self._parameter()

    def is_about(self, parameter: torch.Tensor) -> bool:
        """Whether it is about that one, as it is now."""
        return self._parameter() is parameter and self.bytes == parameter.nbytes

    def subject(self) -> torch.Tensor | None:
        """What may move, as it is now: a gradient is another one in every step."""
        subject = self._parameter()
        if subject is not None and self.is_gradient:
            subject = subject.grad
        return subject if subject is not None and has_storage(subject) else None

    def tensor(self) -> torch.Tensor | None:
        """What has left, unless nobody has it any more; the program may have put it aside."""
        left = None if self._left is None else self._left()
        storage = self._bytes_shown()
        if left is None or storage is None or storage._cdata != left.untyped_storage()._cdata:
            return None
        return left

    def _bytes_shown(self) -> torch.UntypedStorage | None:
        """Those that what has left shows now."""
        if self.state in (State.AWAY, State.COMING):
            return None if self._seen is None else self._seen()
        return self.storage

    def written_to(self, storage: torch.UntypedStorage) -> bool:
        """Somebody is about to write there: whether those are its bytes. No copy is stale then."""
        shown = self._bytes_shown()
        if self.state is State.HERE or shown is None or shown._cdata != storage._cdata:
            return False
        if self.state is State.LEAVING:
            self.have()
        else:
            if self.state is State.COMING:
                self.send_back()
            self._version = -1  # it is no longer what lies below, perhaps
        return True

    def alone(self) -> bool:
        """Whether nobody else looks at its bytes; nor does anybody where there are none."""
        if self.state is not State.HERE:
            return super().alone()
        subject = self.subject()
        if subject is None:
            return True
        storage = subject.untyped_storage()
        return not is_shared(storage, 1)

    def leave(self, at: int | None = None) -> bool:
        """Start to copy it out, if there is one that can."""
        self.settle()
        subject = self.subject()
        if self.state is not State.HERE or subject is None or not self._can_move(subject):
            return False
        self.storage = subject.untyped_storage()
        self.key = self.storage._cdata
        self._left = weakref.ref(subject)
        self._stream = self._tier.stream()
        with quiet(), torch.inference_mode(False):
            self._whole = like(subject, self.storage)
        if super().leave(at):
            return True
        self._part()
        return False

    def release(self) -> bool:
        """Its bytes are free, unless somebody has begun to look at them."""
        here = self.state is State.LEAVING and self._tier.stream() == self._stream
        if here and self._arrived() and not super().alone():
            self.have()
        released = super().release()
        if self._shown:
            self._seen = weakref.ref(self._shown.pop())  # a gradient is free when it is let go
        if self.state is State.HERE:
            self._part()
        return released

    def fetch(self) -> bool:
        """Nothing comes back for nobody."""
        self.settle()
        return super().fetch()

    def have(self) -> None:
        """On the device and whole, and no longer ours."""
        self.settle()
        if self.state is not State.HERE:
            super().have()
            self._part()

    def settle(self) -> None:
        """What has left and is no more is no longer away; nor is what the program put aside.

        That shows its bytes where they are until the end.
        """
        if self.state in (State.HERE, State.GONE):
            return
        left = self.tensor()
        if left is not None and left is self.subject():
            return
        if left is not None and self.state is State.LEAVING:
            super().have()
        else:
            self._wait()
            if self.state is State.AWAY:
                self._found_gone()
            self.state = State.HERE
            self._give()
        self._part()

    def drop(self) -> None:
        """Back on the device, and never ours again; what was put aside, too."""
        self.settle()
        super().drop()
        aside, self._aside = self._aside, []
        for one in aside:
            one.come_home(self._device)
            if one.seen() is None:
                self._tier.give(one.place)

    def _give(self) -> None:
        """Bytes below that somebody still looks at stay as they are, for as long as he does."""
        seen, self._seen = self._seen, None
        if self._place is not None and seen is not None and seen() is not None:
            self._aside.append(_Aside(self._left, seen, self._place))
            self._place = None
        super()._give()
        for one in [one for one in self._aside if one.seen() is None]:
            self._aside.remove(one)
            self._tier.give(one.place)

    def _found_gone(self) -> None:
        """The program has let go of it while it was away."""

    def _part(self) -> None:
        self._whole = self._left = None
        self.storage = NOTHING

    def _can_move(self, tensor: torch.Tensor) -> bool:
        if (
            type(tensor) not in _KINDS
            or tensor.layout is not torch.strided
            or not tensor.is_leaf
            or tensor._base is not None
            or tensor.is_inference()
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.device != self._device
        ):
            return False
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() == self.bytes
            and tensor.storage_offset() == 0
            and storage.resizable()
            and not in_shared_memory(storage)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Aside:
    """Bytes below that somebody looks at, and what had left to there."""

    left: "weakref.ref[torch.Tensor] | None"
    seen: "weakref.ref[torch.UntypedStorage]"
    place: Place

    def come_home(self, device: torch.device) -> None:
        """If that tensor is still there, and still lies on these bytes."""
        tensor = None if self.left is None else self.left()
        storage = self.seen()
        if tensor is None or storage is None:
            return
        if tensor.untyped_storage()._cdata == storage._cdata:
            with quiet(), torch.inference_mode(False), torch.no_grad():
                home = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
                whole = like(tensor, home.untyped_storage())
                tensor.data = whole.copy_(tensor.detach())


def is_worth_moving(parameter: object, smallest: int) -> bool:
    """Whether it is trained, and large enough."""
    return (
        type(parameter) in _KINDS
        and isinstance(parameter, torch.Tensor)
        and parameter.requires_grad
        and parameter.layout is torch.strided
        and parameter.nbytes >= smallest
    )
