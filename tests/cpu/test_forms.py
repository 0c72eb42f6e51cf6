"""Ops that are written down in every step: told of once their form is known, seen if it is not."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lowtide._runtime.delta.gate import Gate, load_gate
from lowtide._runtime.delta.mode import SeeingMode

Told = tuple[int, int, Sequence[Any], Sequence[Any], Sequence[int], torch.Tensor | None]


class Watched:
    """A gate at which every op is written down; all that is seen is kept."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.seen: list[str] = []
        self.told: list[Told] = []
        self._mode = SeeingMode(self._see)
        self._mode.learn = gate.learn

    def _see(self, func: Any, _what: Any, args: Any, kwargs: Any) -> Any:
        counts = self.gate.is_open and torch.is_grad_enabled()
        number = self.gate.take_number() if counts else -1
        self.seen.append(str(func))
        result = func(*args, **kwargs)
        if number >= 0:
            self.gate.keep(number)
        return result

    def _record(self, *told: Any) -> None:
        self.told.append(told)

    def begin(self) -> None:
        self._mode.begin()
        self.gate.record_by(self._record)

    def leave(self) -> None:
        self.gate.let_write(False)
        self.gate.close()
        self.gate.record_by(None)
        self.gate.forget()
        self._mode.leave()

    def step(self, work: Callable[[], Any]) -> tuple[list[str], list[Told]]:
        """What is seen, and what is told, of a step."""
        self.gate.number = 0
        self.gate.open(self._mode, frozenset(range(100)))
        self.seen, self.told = [], []
        work()
        return self.seen, self.told


@pytest.fixture
def watched() -> Iterator[Watched]:
    said: list[str] = []
    gate = load_gate(said.append)
    assert gate is not None, said
    gate.forget()
    found = Watched(gate)
    found.begin()
    try:
        yield found
    finally:
        found.leave()


def test_the_same_again_is_told_with_the_storages_it_reads_and_makes(watched: Watched) -> None:
    made: list[torch.Tensor] = []
    given = torch.randn(4, 4, requires_grad=True)

    def work() -> None:
        values, places = torch.max(given[1:], 1)
        made[:] = [values, places, torch.cat([values, values])]

    watched.gate.close()
    work()  # its ops become known
    assert watched.step(work)[0] == ["aten.max.dim", "aten.cat.default"]
    seen, told = watched.step(work)
    assert not seen
    keys = [storage._cdata for storage in (t.untyped_storage() for t in (given, *made))]
    found = [
        (number, [s._cdata for s in read], [s._cdata for s in result], places, random)
        for _, number, read, result, places, random in told
    ]
    assert found == [
        (0, keys[:1], keys[1:3], (0, 1), None),
        (1, [keys[1]] * 2, keys[3:], (0,), None),
    ]
    assert watched.gate.number == 2
    with torch.no_grad():  # as in backward: nothing is repeated then, or has a number
        assert watched.step(work) == ([], [])
        assert watched.gate.number == 0


CUBE, PLACES = torch.randn(4, 4, 4), torch.tensor([1, 2])
WIDE, EVEN = torch.randn(8, 8), torch.full((8, 8), 0.5)
VARIANTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a number": (lambda: WIDE.mul(2.0), lambda: WIDE.mul(2.5)),
    "a zero's sign": (lambda: WIDE.mul(0.0), lambda: WIDE.mul(-0.0)),
    "an int for a float": (lambda: WIDE.mul(2), lambda: WIDE.mul(2.0)),
    "an option": (lambda: WIDE.sum([0]), lambda: WIDE.sum([1])),
    "a flag": (lambda: WIDE.sum([0], True), lambda: WIDE.sum([0], False)),
    "a dtype": (lambda: WIDE.sum([0]), lambda: WIDE.sum([0], dtype=torch.float64)),
    "a shape": (lambda: WIDE.exp(), lambda: WIDE[:4].exp()),
    "a stride": (lambda: WIDE.exp(), lambda: WIDE.t().exp()),
    "an offset": (lambda: WIDE[:4].exp(), lambda: WIDE[4:].exp()),
    "a tensor's dtype": (lambda: WIDE.exp(), lambda: WIDE.double().exp()),
    "how many there are": (lambda: torch.cat([WIDE]), lambda: torch.cat([WIDE, WIDE])),
    "one that is missing": (
        lambda: torch.nn.functional.layer_norm(WIDE, [8]),
        lambda: torch.nn.functional.layer_norm(WIDE, [8], WIDE[0]),
    ),
    "the op": (lambda: WIDE.exp(), lambda: WIDE.tanh()),
    "which of two is the number": (lambda: torch.sub(WIDE, 0.5), lambda: torch.sub(0.5, WIDE)),
    "which of two there is": (lambda: WIDE.clamp(min=EVEN), lambda: WIDE.clamp(max=EVEN)),
    "the weight or the bias": (
        lambda: torch.nn.functional.layer_norm(WIDE, [8], WIDE[0]),
        lambda: torch.nn.functional.layer_norm(WIDE, [8], None, WIDE[0]),
    ),
    "what is picked by which": (lambda: CUBE[:, PLACES, PLACES], lambda: CUBE[PLACES, :, PLACES]),
}


@pytest.mark.parametrize("what", VARIANTS)
def test_any_other_form_is_seen(what: str, watched: Watched) -> None:
    one, other = VARIANTS[what]
    watched.gate.close()
    one(), other()
    watched.step(one)
    assert not watched.step(one)[0]
    seen, told = watched.step(other)
    assert seen and not told, "taken for what it was before"
    assert not watched.step(other)[0]


def test_several_forms_of_one_number_are_known_but_not_too_many(watched: Watched) -> None:
    """Steps of several kinds may take turns."""
    watched.gate.close()
    WIDE.exp()
    rows = [WIDE[:count] for count in range(1, 9)] + [WIDE[:, :4]]
    for given in rows[:8] * 2:
        watched.step(given.exp)
    assert all(not watched.step(given.exp)[0] for given in rows[:8])
    watched.step(rows[8].exp)
    assert watched.step(rows[0].exp)[0], "the oldest one should be gone"
    assert not watched.step(rows[8].exp)[0]


def test_a_form_belongs_to_the_op_that_was_seen_by_its_number(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was offered and not kept is not kept for another op of the same number."""
    watched.gate.close()
    WIDE.exp(), torch.bernoulli(EVEN)
    with monkeypatch.context() as patch:
        patch.setattr(watched.gate, "keep", lambda _: 0)
        watched.step(lambda: WIDE.exp())  # offered
    watched.step(lambda: torch.bernoulli(EVEN))  # seen, and has no form
    assert watched.step(lambda: WIDE.exp())[0] == ["aten.exp.default"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_what_a_signal_raises_while_something_is_noted_is_raised(
    kind: type[BaseException], watched: Watched
) -> None:
    """Python looks for signals wherever it runs, so there as well."""

    def interrupted(*_: Any) -> None:
        raise kind

    def work() -> None:
        WIDE.exp()
        for _ in range(1000):
            pass

    watched.gate.close()
    WIDE.exp()
    watched.step(lambda: WIDE.exp())
    watched.gate.record_by(interrupted)
    with pytest.raises(kind):
        watched.step(work)
    assert watched.gate.number == 1  # the op has run


def test_ops_that_write_pass_only_as_long_as_they_may(watched: Watched) -> None:
    rows, gradient = torch.zeros(4), torch.ones(4)

    def work() -> None:
        with torch.no_grad():
            rows.add_(gradient)
            torch._foreach_add_([rows], [gradient])
            rows.copy_(rows + 1)  # it could be run again, so it is seen

    watched.gate.close()
    work()
    watched.gate.open(watched._mode, frozenset())
    watched.gate.let_write(True)
    watched.seen = []
    work()
    assert watched.seen == ["aten.copy_.default"]
    watched.gate.let_write(False)
    watched.seen = []
    work()
    assert watched.seen == ["aten.add_.Tensor", "aten._foreach_add_.List", "aten.copy_.default"]
    assert torch.equal(rows, torch.full((4,), 9.0))


def test_an_op_that_writes_and_runs_out_of_memory_is_not_run_again(watched: Watched) -> None:
    """It may have written a part: twice would be other numbers."""
    rows, one = torch.zeros(4), torch.zeros(1, dtype=torch.long)

    def work(count: int) -> None:
        with torch.no_grad():
            rows.index_add_(0, one.expand(count), torch.ones(1).expand(count))

    watched.gate.close()
    work(1)
    watched.gate.open(watched._mode, frozenset())
    watched.gate.let_write(True)
    watched.seen = []
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        work(1 << 50)
    assert not [name for name in watched.seen if "index_add_" in name]
