"""A saved storage that can be swapped, or dropped and made again."""

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import torch

from lowtide._errors import LowtideError
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Value
from lowtide._runtime.delta.verify import digest
from lowtide._runtime.swap.cell import Cell, State
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.sharing import is_shared
from lowtide._runtime.swap.tier import Tier


class WrongRecipe(LowtideError, RuntimeError):
    """What was made again is not what was dropped."""


class Keeper(Protocol):
    """Who sees to it that there is room, and makes again what was dropped."""

    ledger: Ledger
    digests: bool  # whether what was dropped is compared when it is back

    def with_room(self, work: Callable[[], None], count: int) -> None:
        """Run what takes so many bytes."""

    def remake(self, cell: "DeltaCell") -> None:
        """Have a dropped one's bytes again."""

    def moving(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """An optimizer's tensor is about to lie on another storage."""


class DeltaCell(Cell):
    """Knows its value, and while it is dropped the sources that keep it possible."""

    __slots__ = (
        "__weakref__",
        "_digest",
        "_keeper",
        "bounces",
        "last",
        "needed",
        "pinned",
        "sources",
        "value",
    )

    def __init__(self, storage: torch.UntypedStorage, tier: Tier, keeper: Keeper) -> None:
        super().__init__(storage, tier)
        self._keeper = keeper
        self.bounces = 0
        self.last = keeper.ledger.now  # when it was last used, counted in ops
        self.needed = False  # something that was dropped, or may be, is made from it
        self.pinned = 0  # by those who are about to read it
        self.sources: list[Value] = []
        self._digest = 0
        self.value: Value | None = keeper.ledger.value_of(storage)
        self.value.cell = weakref.ref(self)
        if self.value.bytes and not self.value.promised:
            self.value.held = None  # whoever needs it has it here

    def alone(self) -> bool:
        """Whether nobody but lowtide can reach it; on bytes made again lie no handles' tensors."""
        if self.state is State.GONE:
            return False
        if self.state in (State.LEAVING, State.COMING):
            return True  # it was when it began to leave, and who copies it does not count
        return not is_shared(self.storage, 0 if self.replaced else self.handles)

    def can_go(self) -> bool:
        """Whether its bytes could be had now."""
        return (
            self.state in (State.HERE, State.LEAVING, State.COMING)
            and self.wanted()
            and not self.asked
            and not self.pinned
            and self.storage.nbytes() == self.bytes
        )

    def is_dropped(self) -> bool:
        """Whether its bytes are nowhere."""
        return self.state is State.DROPPED

    def wanted(self) -> bool:
        """Whether it was saved for somebody, or somebody's value is to be made from it."""
        return self.handles > 0 or (self.value is not None and self.value.kept is self)

    def is_made_by(self, ops: Container[int]) -> bool:
        """Whether it is a source of others, and what made it is one of these.

        Any other source is as good as something given: it is held for those made from it.
        """
        call = None if self.value is None else self.value.call
        return self.needed and call is not None and call.number in ops

    def send_back(self) -> None:
        """It came too early: its copy below is still good."""
        assert self.state is State.COMING
        self._wait()
        self._let_go()
        self.state = State.AWAY

    def forgo(self, sources: Sequence[Value]) -> None:
        """Drop the bytes; they can be made again from `sources`."""
        assert self.state is State.HERE
        for source in sources:
            source.dependents.add(self)
            if source.saved() is None and source.is_given():
                source.held = source.storage()
        self.sources = list(sources)
        if self._keeper.digests:
            self._digest = digest(self.storage)
        self._let_go()
        self.state = State.DROPPED

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """These are its bytes, made again."""
        assert self.state is State.DROPPED
        if self._keeper.digests and digest(storage) != self._digest:
            raise WrongRecipe(
                "a saved tensor that was dropped could not be made again bit for bit: "
                "please report it, and go on with policy='autoswap'"
            )
        self._keeper.ledger.away -= self.bytes
        self.storage = storage
        self.key = storage._cdata
        self.replaced = True
        self.state = State.HERE
        self._release_sources()
        if self.value is not None:
            self.value.storage = weakref.ref(storage)
            self._keeper.ledger.values[self.key] = self.value

    def bring(self) -> None:
        """Its bytes are on the device, for lowtide itself to read."""
        if self.state is State.AWAY:
            self.fetch()
        if self.state is State.COMING:
            self._wait()
            self.state = State.HERE
            self._give()
        elif self.state is State.DROPPED:
            self._keeper.remake(self)

    def have(self) -> None:
        """It is here, and whole, for what computes next."""
        if self.state is State.DROPPED:
            self._keeper.remake(self)
        super().have()
        self.asked = False  # what is handed out can be told from what is kept: see `shown`

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor like a handle's, over the bytes as they are now."""
        with quiet():
            if not self.replaced:
                return tensor.detach()
            like = torch.empty(0, dtype=tensor.dtype, device=self.storage.device)
            like.set_(self.storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            if tensor.is_conj():
                torch._C._set_conj(like, True)
            if tensor.is_neg():
                torch._C._set_neg(like, True)
            return like

    def drop(self) -> None:
        """Nobody wants it any more; but as long as others are to be made from it, it stays.

        It may still leave and be dropped meanwhile, as if somebody wanted it.
        """
        if self.state is State.GONE:
            return
        value = self.value
        if value is not None and (value.dependents or self.pinned):
            value.kept = self
            return
        if value is not None and value.kept is self:
            value.kept = None
        if self.state in (State.AWAY, State.DROPPED):
            self._keeper.ledger.away -= self.bytes
        self._release_sources()
        super().drop()

    def _release_sources(self) -> None:
        for source in self.sources:
            source.dependents.discard(self)
            source.let_go()
        self.sources = []

    def _let_go(self) -> None:
        self.storage.resize_(0)
        self._keeper.ledger.gone_away(self.key, self.bytes)

    def _take_again(self) -> None:
        self.pinned += 1
        try:
            self._keeper.with_room(super()._take_again, self.bytes)
        finally:
            self.pinned -= 1
        self._keeper.ledger.away -= self.bytes
        self._keeper.ledger.resized(self.storage)
