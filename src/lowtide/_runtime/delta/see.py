"""An op of the program: what it is given written down, room made for it, and it runs."""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.recipe import Call
from lowtide._runtime.delta.record import Captor, Known, shape_key, written_by
from lowtide._runtime.delta.replay import generator_of
from lowtide._runtime.delta.results import Results
from lowtide._runtime.delta.room import Room, is_out_of_memory

_SAMPLED = 16  # of so many ops, one is timed to know what seeing it costs


class Seer:
    """Shown every op."""

    def __init__(self, ledger: Ledger, costs: Costs, room: Room) -> None:
        self.ledger = ledger
        self.room = room
        self._costs = costs
        self._captor = Captor(ledger)
        self._results = Results(ledger, costs)
        self.ops = 0  # so far
        self.largest = 0  # bytes that an op of this step made
        self._own_seconds, self._own_ops, self._in_op = 0.0, 0, 0.0

    def own_seconds_per_op(self) -> float:
        """What seeing an op costs, from those on which it was measured."""
        return self._own_seconds / self._own_ops if self._own_ops else 0.0

    def see(
        self, func: OpOverload[..., Any], what: Known, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op of the program that makes or writes bytes."""
        self.ops += 1
        self.ledger.now += 1
        if self.ops % _SAMPLED:
            return self._see(func, what, args, kwargs)
        began = time.perf_counter()
        self._in_op = 0.0
        result = self._see(func, what, args, kwargs, sampled=True)
        self._own_seconds += time.perf_counter() - began - self._in_op
        self._own_ops += 1
        return result

    def _see(
        self,
        func: OpOverload[..., Any],
        what: Known,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        sampled: bool = False,
    ) -> Any:
        written: Sequence[torch.Tensor] = ()
        if what.writes:
            written = written_by(what, args, kwargs)
            for tensor in written:
                self._before_write(tensor)
        call = None
        if torch.is_grad_enabled():  # not in backward, unless that is differentiated, too
            call = self._captor.capture(func, what, args, kwargs)
        key: Hashable | None = None
        if call is not None:
            key = call.cost
        elif what.makes:
            key = shape_key(func, what, args, kwargs)
        need = self._costs.expected_bytes(key, func, args, kwargs) if what.makes else 0
        timed = call is not None and self._costs.wants(key)
        wish = self._costs.inside(key, what.facts.name, args)
        taken = self._costs.taken() if self._costs.looks(key) else None
        if timed or sampled or what.facts.may_be_random or not self.room.enough(need + wish):
            work = self._work(func, args, kwargs, key if timed else None, sampled)
            result = self._run(work, what, need, call, wish=wish)
        else:
            failures = self.room.failures()
            try:
                result = func._op(*args, **kwargs)
                self.room.made_do(failures)
            except RuntimeError as error:
                if not what.retriable or not is_out_of_memory(error):
                    raise
                work = self._work(func, args, kwargs, None, False)
                result = self._run(work, what, need, call, failed=True)
        if taken is not None:
            taken = self._costs.taken() - taken
        made = self._results.put_down(result, written, key, call, taken)
        if made > self.largest:
            self.largest = made
        return result

    def _work(
        self,
        func: OpOverload[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timed: Hashable | None,
        sampled: bool,
    ) -> Callable[[], Any]:
        """The op itself; its kernel is timed under the key `timed`."""

        def work() -> Any:
            if not sampled and timed is None:
                return func(*args, **kwargs)
            began = time.perf_counter()
            if timed is None:
                result = func(*args, **kwargs)
            else:
                started = self._costs.start()
                result = func(*args, **kwargs)
                self._costs.stop(timed, started)
            self._in_op = time.perf_counter() - began
            return result

        return work

    def _run(
        self,
        work: Callable[[], Any],
        what: Known,
        need: int,
        call: Call | None,
        *,
        wish: int = 0,
        failed: bool = False,
    ) -> Any:
        """With room made for it, and again if that was too little."""
        name = what.facts.name
        if not what.facts.may_be_random:
            return self.room.run(work, need, name, wish=wish, retry=what.retriable, failed=failed)
        generator = generator_of(self.ledger.device)
        known_state = None if call is None else call.random
        state = generator.get_state() if known_state is None else known_state

        def before_retry() -> None:
            generator.set_state(state)

        return self.room.run(
            work, need, name, wish=wish, retry=what.retriable, before_retry=before_retry
        )

    def _before_write(self, tensor: torch.Tensor) -> None:
        """What was dropped and depends on these bytes must be had first."""
        value = self.ledger.known(tensor.untyped_storage())
        if value is None or not value.dependents:
            return
        with self.room.lock:
            for cell in tuple(value.dependents):
                cell.bring()
