"""An op of the program: what it is given written down, room made for it, and it runs."""

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide._runtime.delta.costs import Costs
from lowtide._runtime.delta.forms import Forms
from lowtide._runtime.delta.gate import Gate
from lowtide._runtime.delta.holds import Holds
from lowtide._runtime.delta.ledger import Ledger
from lowtide._runtime.delta.mode import SeeingMode
from lowtide._runtime.delta.randomness import generator_of, rewind
from lowtide._runtime.delta.recipe import Call
from lowtide._runtime.delta.record import Captor, Known, shape_key, written_by
from lowtide._runtime.delta.rehearsal import Rehearsal
from lowtide._runtime.delta.results import Results
from lowtide._runtime.delta.room import Room
from lowtide._runtime.fused.chains import Chains

_SAMPLED = 16  # of so many ops, one is timed to know what seeing it costs


class Seer:
    """Shown every op."""

    def __init__(
        self, ledger: Ledger, costs: Costs, room: Room, gate: Callable[[], Gate | None]
    ) -> None:
        self.ledger = ledger
        self.room = room
        self._costs = costs
        self._captor = Captor(ledger)
        self._results = Results(ledger, costs)
        self.forms = Forms(ledger)
        self.ops = 0  # so far
        self._at = 0  # ... of this step, where there are gradients
        self._load_gate = gate
        self._wants_gate = True  # nobody has asked for it yet
        self._gate: Gate | None = None
        # While a step is traced: runs an op, and asks for the number by which it can run again.
        self.observe: Callable[..., Any] | None = None
        self._captured = -1  # the number of the last op, if it could be run again
        self.not_as_it_was: Callable[[], None] = lambda: None  # told of what is written down then
        self.log: Rehearsal
        self.about_to_write: list[Callable[[torch.UntypedStorage], None]] = []  # who is told first
        self.holds = Holds()  # sources of ops that a plan holds on to
        self.others_watch: Callable[[], object] = lambda: False  # who writes where, besides these
        self.recorded: frozenset[int] | None = None  # ... that are written down; None: all
        self.largest = 0  # bytes that an op of this step made
        self.chains: Chains | None = None  # ops of backward that run as one, behind the gate
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
        number = -1
        if torch.is_grad_enabled():  # others are not repeated, so it does not matter how many
            number = self._take_number()
            if self.recorded is not None and number not in self.recorded:
                number = -1
        if self.observe is not None:
            self._captured = -1
            run = partial(self._see, func, what, args, kwargs, number)
            waits = self.chains is not None and self.chains.may_wait(func, args)
            return self.observe(run, lambda: self._captured, waits=waits)
        see = self._pass if self.room.lax else self._see
        if self.ops % _SAMPLED:
            return see(func, what, args, kwargs, number)
        began = time.perf_counter()
        self._in_op = 0.0
        result = see(func, what, args, kwargs, number, sampled=True)
        self._own_seconds += time.perf_counter() - began - self._in_op
        self._own_ops += 1
        return result

    def _take_number(self) -> int:
        gate = self._gate
        if gate is not None and gate.is_open:
            return gate.take_number()
        at, self._at = self._at, self._at + 1
        return at

    @property
    def at(self) -> int:
        """The number of the next op of this step."""
        return self._gate.number if self._gate is not None and self._gate.is_open else self._at

    @at.setter
    def at(self, number: int) -> None:
        self._at = number
        if self._gate is not None:
            self._gate.number = number

    def tend_gate(self, mode: SeeingMode | None) -> None:
        """Where nobody counts, only ops that are written down, or do more than make something, are
        seen by `mode` from now on; elsewhere all of them.
        """
        number = self.at
        if mode is not None and self.room.lax and self.recorded is not None:
            if self._wants_gate:
                self._wants_gate = False
                self._gate = self._load_gate()
                if self._gate is not None:
                    self._gate.forget()  # what others have kept
            if self._gate is not None:
                self._gate.number = number
                self._gate.record_by(self._note)
                self._gate.watch(None if self.others_watch() else self.ledger.tables())
                self._gate.open(mode, self.recorded)
                mode.learn = self._gate.learn
                if self.chains is not None:
                    self.chains.open()
        elif self._gate is not None and self._gate.is_open:
            self._at = number
            self._close_gate(self._gate)

    def _close_gate(self, gate: Gate) -> None:
        if self.chains is not None:
            self.chains.close()
        gate.close()

    def let_write(self, pass_: bool) -> None:
        """Whether ops that write need not be seen, where there is a gate."""
        self.room.blind = pass_
        if self._gate is not None:
            self._gate.let_write(pass_)

    def see_all_writes(self) -> None:
        """In this step, from now on: others watch, too."""
        if self._gate is not None:
            self._gate.watch(None)

    def leave_gate(self) -> None:
        """PyTorch is as it was."""
        if self.chains is not None:
            self.chains.leave()
        if self._gate is not None:
            self._gate.leave()
            self._gate.record_by(None)
            self._gate.watch(None)

    def begin_step(self) -> None:
        """Ops are numbered from here."""
        self.room.end_step()
        self.at = self.largest = 0
        self.room.calls.clear()

    def _capture(
        self,
        func: OpOverload[..., Any],
        what: Known,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        number: int,
    ) -> Call | None:
        """As the `number`-th of its step. Not in backward, unless that is differentiated, too."""
        if number < 0:
            return None
        self.not_as_it_was()
        known = 0 if self._gate is None else self._gate.known(number)
        if self.log.on and not known:
            self.log.refuse(f"{func} is not known by its form")
        call = self._captor.capture(func, what, args, kwargs)
        if call is not None:
            call.number = self._captured = number
            if number in self.holds.wanted:
                self.holds.hold(call)
            if self.log.on and known:
                self.log.noted(known, call)
        return call

    def _note(
        self,
        form: int,
        number: int,
        read: Sequence[torch.UntypedStorage],
        made: Sequence[torch.UntypedStorage],
        places: Sequence[int],
        random: torch.Tensor | None,
    ) -> None:
        """An op has run that was written down in a step before, and looked just the same."""
        self.ops += 1
        self.ledger.now += 1
        call = self.forms.call(form, number, read, random)
        if call is None:
            return
        if number in self.holds.wanted:
            self.holds.hold(call)
        self.forms.put_down(call, made, places)
        if self.log.on:
            self.log.noted(form, call)

    def _pass(
        self,
        func: OpOverload[..., Any],
        what: Known,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        number: int,
        *,
        sampled: bool = False,
    ) -> Any:
        """Run an op for which a plan has made room. What is written to is noticed as ever."""
        written = self._about_to_write(what, args, kwargs) if what.writes else ()
        call = self._capture(func, what, args, kwargs, number)
        if number < 0 and self.chains is not None:
            self.chains.answer(func, args, kwargs)
        state = self._state_before(call) if what.facts.may_be_random else None
        failures = self.room.failures()
        began = time.perf_counter() if sampled else 0.0
        try:
            result = func._op(*args, **kwargs)
            self.room.made_do(failures)
        except RuntimeError as error:
            if not what.retriable or not self.room.was_short(error, failures):
                raise
            key = shape_key(func, what, args, kwargs)
            need = self._costs.expected_bytes(key, func, args, kwargs) if what.makes else 0
            work = self._work(func, args, kwargs, None, False)
            result = self._run(work, what, need, state, failed=True)
        if sampled:
            self._in_op = time.perf_counter() - began
        if call is not None:
            self._results.put_down(result, written, None, call, None)
            can = what.plain or what.draws or what.only_moves_statistics or what.only_writes
            form = self._gate.keep(number) if can and self._gate is not None else 0
            if form:
                self.forms.keep(form, call)
        elif written:
            self._results.put_down_writes(written, None)
        return result

    def _see(
        self,
        func: OpOverload[..., Any],
        what: Known,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        number: int,
        *,
        sampled: bool = False,
    ) -> Any:
        written = self._about_to_write(what, args, kwargs) if what.writes else ()
        call = self._capture(func, what, args, kwargs, number)
        key: Hashable | None = None
        if call is not None:
            key = call.cost
        elif what.makes:
            key = shape_key(func, what, args, kwargs)
        need = self._costs.expected_bytes(key, func, args, kwargs) if what.makes else 0
        timed = call is not None and self._costs.wants(key)
        wish = self._costs.inside(key, what.facts.name, args)
        taken = self._costs.taken() if self._costs.looks(key) else None
        first = wish > 0 and self._costs.chooses(key)
        hurried = not (timed or sampled or wish or what.facts.may_be_random)
        if not hurried or not self.room.enough(need + wish):
            work = self._work(func, args, kwargs, key if timed else None, sampled)
            state = self._state_before(call) if what.facts.may_be_random else None
            result = self._run(work, what, need, state, wish=wish, first=first)
        else:
            failures = self.room.failures()
            try:
                result = func._op(*args, **kwargs)
                self.room.made_do(failures)
            except RuntimeError as error:
                if not what.retriable or not self.room.was_short(error, failures):
                    raise
                work = self._work(func, args, kwargs, None, False)
                result = self._run(work, what, need, None, failed=True)
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
        state: torch.Tensor | None,
        *,
        wish: int = 0,
        failed: bool = False,
        first: bool = False,
    ) -> Any:
        """With room made for it, and again if that was too little, from the same random state."""
        name = what.facts.name
        if state is None:
            return self.room.run(
                work, need, name, wish=wish, retry=what.retriable, failed=failed, first=first
            )

        def before_retry() -> None:
            rewind(self.ledger.device, state)

        if failed:
            before_retry()
        return self.room.run(
            work,
            need,
            name,
            wish=wish,
            retry=what.retriable,
            before_retry=before_retry,
            failed=failed,
        )

    def _state_before(self, call: Call | None) -> torch.Tensor:
        """Of the generator, as the call has noted it or as it is now."""
        if call is not None and call.random is not None:
            return call.random
        return generator_of(self.ledger.device).get_state()

    def _about_to_write(
        self, what: Known, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Sequence[torch.Tensor]:
        """What the op writes to; what depends on that is had first."""
        written = written_by(what, args, kwargs)
        known = self.ledger.known
        for tensor in written:
            for tell in self.about_to_write:
                tell(tensor.untyped_storage())
            value = known(tensor.untyped_storage())
            if value is not None and value.dependents:
                with self.room.lock:
                    for cell in tuple(value.dependents):
                        cell.bring()
        return written
