"""benchmarks/turns.py: processes that measure do not do so at the same time."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
from turns import VARIABLE, Turn, table


class Watch:
    """Who is at work, and how many were at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def work(self, seconds: float = 0.02) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(seconds)
        with self._lock:
            self.now -= 1


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Turn]:
    with table() as also:
        monkeypatch.setenv(VARIABLE, also[VARIABLE])
        return [Turn() for _ in range(3)]  # each has the file opened for itself, as processes do


def in_threads(*work: object) -> None:
    threads = [threading.Thread(target=one) for one in work]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("alone", "most"), [(True, 1), (False, 3)])
def test_one_at_a_time_or_all_that_do_not_mind(turns: list[Turn], alone: bool, most: int) -> None:
    watch = Watch()

    def use(turn: Turn) -> None:
        with turn.taken(alone=alone):
            watch.work(0.2)

    in_threads(*(lambda turn=turn: use(turn) for turn in turns))
    assert watch.most == most


def test_who_plans_lends_it(turns: list[Turn]) -> None:
    """Both plan at the same time, and neither computes while another does."""
    planning, computing = Watch(), Watch()

    def use(turn: Turn) -> None:
        planner = SimpleNamespace(plan=lambda: planning.work(0.3))
        turn.lend_during(planner, "plan", lambda: None)
        with turn.taken():
            computing.work()
            planner.plan()
            computing.work()

    in_threads(*(lambda turn=turn: use(turn) for turn in turns))
    assert (planning.most, computing.most) == (3, 1)


def test_who_shares_does_not_pass_who_waits_to_be_alone(turns: list[Turn]) -> None:
    first, alone, later = turns
    order: list[str] = []

    def use(turn: Turn, name: str, *, is_alone: bool) -> None:
        with turn.taken(alone=is_alone):
            order.append(name)

    first.have(alone=False)
    waiting = threading.Thread(target=lambda: use(alone, "alone", is_alone=True))
    waiting.start()
    time.sleep(0.2)
    sharing = threading.Thread(target=lambda: use(later, "later", is_alone=False))
    sharing.start()
    time.sleep(0.2)
    order.append("first")
    first.have(None)
    waiting.join()
    sharing.join()
    assert order == ["first", "alone", "later"]


def test_who_had_it_before_has_it_again(turns: list[Turn]) -> None:
    watch = Watch()

    def use(turn: Turn) -> None:
        with turn.taken(alone=False):
            with turn.taken():
                watch.work()
            turn.have(alone=True)
            watch.work()

    in_threads(*(lambda turn=turn: use(turn) for turn in turns))
    assert watch.most == 1


def test_alone_on_a_machine_it_always_has_it() -> None:
    assert VARIABLE not in os.environ
    with Turn().taken(), Turn().taken():
        pass
