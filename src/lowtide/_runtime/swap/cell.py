"""A storage that was saved for backward: on the device, below it, or on the way."""

from enum import Enum, auto

import torch

from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.sharing import is_shared
from lowtide._runtime.swap.tier import Copy, Place, Tier


class State(Enum):
    """Where the bytes are."""

    HERE = auto()
    LEAVING = auto()  # on the device, and being copied out
    AWAY = auto()
    COMING = auto()  # on the device again, and being copied back
    DROPPED = auto()  # nowhere: it can be made again
    GONE = auto()  # nobody wants it any more


class Cell:
    """One storage and its whereabouts. `handles` says how many saved tensors lie on it."""

    __slots__ = (
        "_copy",
        "_place",
        "_stream",
        "_tier",
        "asked",
        "bytes",
        "first_key",
        "handles",
        "key",
        "replaced",
        "state",
        "storage",
    )

    def __init__(self, storage: torch.UntypedStorage, tier: Tier) -> None:
        self.storage = storage
        self.key: int = storage._cdata
        self.first_key = self.key  # of the storage that was saved
        self.bytes = storage.nbytes()
        self.handles = 0
        self.asked = False  # backward has had it: others may hold it now, so it stays
        self.replaced = False  # its bytes lie in another storage than the one that was saved
        self.state = State.HERE
        self._tier = tier
        self._place: Place | None = None
        self._copy: Copy | None = None  # under way, whatever the state says
        self._stream = tier.stream()  # on which the storage was made and is used

    def here(self) -> bool:
        """Whether its bytes are on the device and no copy is under way."""
        return self.state is State.HERE

    def holds(self) -> bool:
        """Whether it takes bytes of the device."""
        return self.state not in (State.AWAY, State.DROPPED, State.GONE)

    def alone(self) -> bool:
        """Whether nobody but lowtide can reach the storage: only its handles' tensors lie on it."""
        return self.state is not State.GONE and not is_shared(self.storage, self.handles)

    def leave(self, at: int | None = None) -> bool:
        """Start to copy it out. The caller has made sure that it is alone."""
        if self.state is not State.HERE or self.asked or self._copy is not None:
            return False
        if self.storage.nbytes() != self.bytes or self._tier.stream() != self._stream:
            return False  # the program resized it, or is at work on another stream
        place = self._place or self._tier.take(self.bytes, at)
        if place is None:
            return False
        self._place = place
        with quiet():
            self._copy = self._tier.out(self.storage, place)
        self.state = State.LEAVING
        return True

    def release(self) -> bool:
        """Its bytes are free, after a wait for the copy. False: it stays."""
        if self.state is not State.LEAVING or self._tier.stream() != self._stream:
            return self.state is State.AWAY
        if not self._arrived():
            return False
        self._let_go()
        self.state = State.AWAY
        return True

    def _let_go(self) -> None:
        """Of its bytes on the device."""
        self.storage.resize_(0)

    def _take_again(self) -> None:
        """As many bytes of the device as it had."""
        self.storage.resize_(self.bytes)

    def fetch(self) -> bool:
        """Take bytes again and start to copy it back. False: it was not away."""
        if self.state is not State.AWAY:
            return False
        assert self._place is not None
        with quiet():
            self._take_again()
            self._copy = self._tier.back(self.storage, self._place)
        self.state = State.COMING
        return True

    def have(self) -> None:
        """It is here, and whole, for what computes next."""
        self.asked = True
        if self.state is State.GONE:
            return
        if self.state is State.AWAY:
            self.fetch()
        if self.state is State.COMING:
            self._wait()
        elif not self._arrived():
            return
        self.state = State.HERE
        self._give()

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """A saved tensor, over the bytes as they are now."""
        return tensor

    def drop(self) -> None:
        """Nobody wants it any more."""
        if self.state is State.GONE:
            return
        if self.state is State.COMING:
            self._wait()
        else:
            self._arrived()
        self.state = State.GONE
        self._give()
        del self.storage  # others may still look at the cell, and must not keep its bytes

    def _arrived(self) -> bool:
        """Wait for the copy out; if it failed, everything is as before."""
        try:
            self._wait()
        except OSError:
            self._copy = None
            self.state = State.HERE
            self._give()
            return False
        return True

    def _wait(self) -> None:
        # An interrupt may come at any point: what is under way is known until it was waited for.
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def _give(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            self._tier.give(place)
