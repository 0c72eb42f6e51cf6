"""`lowtide.fit`: a training loop made to need less memory while a `with` block lasts."""

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from torch import nn
from torch.optim import Optimizer

from lowtide._errors import BadInput, LowtideWarning
from lowtide._native import NoNative
from lowtide._report.pool_text import render_pool
from lowtide._runtime.cuda import CudaPlace
from lowtide._runtime.marks import Marks
from lowtide._runtime.pool import Pool


def fit(
    model: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    pool: bool = True,
) -> "Tide":
    """Give every allocation of the training loop inside the block a planned address.

    `pool` lays each step's memory out so that nothing is lost to fragments; the model, the loop
    and every bit of the result stay as they are. `optimizer` tells where a step ends (without it:
    any optimizer's step), `model` which evaluations are not part of a step.

    The first steps run as ever and are watched. On leaving, the memory goes with its last tensor.
    Where there is no CUDA device, or the pool cannot be built, a warning says so and training
    goes on as without lowtide.
    """
    return Tide(model, optimizer, pool=pool)


class Tide:
    """A fitted training loop; use it as a context manager."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | Iterable[Optimizer] | None,
        *,
        pool: bool,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise BadInput(f"model is a {type(model).__name__}: give an nn.Module or None")
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        try:
            optimizers = list(given or [])
        except TypeError:
            optimizers = [given]  # type: ignore[list-item]
        for one in optimizers:
            if not isinstance(one, Optimizer):
                raise BadInput(f"optimizer is a {type(one).__name__}: give a torch optimizer")
        if not pool:
            raise BadInput("pool=False leaves nothing to do: lowtide has no other means yet")
        self._model = model
        self._optimizers = optimizers
        self._undo: ExitStack | None = None
        self._pool: Pool | None = None
        self._place: CudaPlace | None = None
        self._off = "it has not been entered"

    def __enter__(self) -> Self:
        if self._undo is not None:
            raise BadInput("this fit is entered already: make another one with lowtide.fit")
        self._off = ""
        with ExitStack() as undo:
            try:
                self._place = CudaPlace()
            except NoNative as error:
                self._off = str(error)
                warnings.warn(
                    f"lowtide: the pool is off: {error}; training goes on with PyTorch's own "
                    "allocator",
                    LowtideWarning,
                    stacklevel=2,
                )
            else:
                undo.callback(self._place.leave)
                self._pool = Pool(self._place.core, self._place, _tell)
                undo.callback(self._pool.stop)
                Marks(self._model, self._optimizers, self._mark, undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._undo is not None
        self._undo.close()
        self._undo = None

    def summary(self) -> str:
        """What it did, in a few lines: planned and measured."""
        if self._pool is None or self._place is None:
            return f"pool: off: {self._off}"
        return render_pool(self._pool.summary(), self._place.memory())

    def _mark(self) -> None:
        assert self._pool is not None
        self._pool.mark()


def _tell(line: str) -> None:
    warnings.warn(f"lowtide: {line}", LowtideWarning, stacklevel=2)
