"""benchmarks/kernels.py: where a step's time goes, by what a profiler saw."""

from typing import Any

import pytest
from kernels import by_call, by_copies, by_gap, by_name, longest_gaps, read_steps, spent


def kernel(name: str, begin: float, end: float, asked: float = 0.0) -> list[dict[str, Any]]:
    """One on the stream that computes, and the call that asked for it; times in microseconds."""
    kernel.number += 1  # type: ignore[attr-defined]
    args = {"stream": 7, "correlation": kernel.number}  # type: ignore[attr-defined]
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": asked, "dur": 0, "args": args},
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": args},
    ]


kernel.number = 0  # type: ignore[attr-defined]


def copy(way: str, begin: float, end: float) -> dict[str, Any]:
    """On a stream of its own."""
    name = f"Memcpy {way} (Device -> Pinned)"
    args = {"stream": 20, "correlation": 0}
    return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": begin, "dur": end - begin} | {
        "args": args
    }


def test_gaps_are_the_hosts_as_far_as_it_had_not_asked_yet() -> None:
    # compute  | a a . . . . b b      b was asked for at 5: three of the four are the host's,
    # host     | a         b          the last is for a copy
    events = [*kernel("a", 0, 2), *kernel("b", 6, 8, asked=5)]
    found = spent(read_steps(events, 1))
    assert found == pytest.approx(
        {"kernels": 4e-6, "host": 3e-6, "waits": 1e-6, "out": 0.0, "in": 0.0}
    )


def test_a_step_is_the_mean_of_those_that_were_profiled() -> None:
    events = [*kernel("a", 0, 2), *kernel("a", 2, 6)]
    assert spent(read_steps(events, 2))["kernels"] == pytest.approx(3e-6)


def test_copies_are_beside_and_other_streams_do_not_count() -> None:
    other = kernel("fill", 0, 1)
    other[1]["args"] = {**other[1]["args"], "stream": 9}
    found = spent(read_steps([*kernel("a", 0, 10), *other, copy("DtoH", 1, 5)], 1))
    assert found["kernels"] == pytest.approx(10e-6)
    assert found["out"] == pytest.approx(4e-6)
    assert found["in"] == 0


def test_kernels_are_compared_by_what_is_copied_meanwhile() -> None:
    # plain  | a a b b          a takes half as long again while something leaves;
    # ours   | a a a b b        b has no copy beside it, and takes what it took
    plain = read_steps([*kernel("a", 0, 2), *kernel("b", 2, 4)], 1)
    ours = read_steps([*kernel("a", 0, 3), *kernel("b", 3, 5), copy("DtoH", 0, 3)], 1)
    found = by_copies(plain, ours)
    assert found["out"] == pytest.approx({"plain_seconds": 2e-6, "slower": 0.5})
    assert found["nothing"] == pytest.approx({"plain_seconds": 2e-6, "slower": 0.0})


def test_what_runs_more_often_is_not_called_slower() -> None:
    plain = read_steps(kernel("a", 0, 2), 1)
    ours = read_steps([*kernel("a", 0, 2), *kernel("a", 2, 9)], 1)
    assert by_copies(plain, ours) == {}
    assert by_name(plain, ours) == [
        {
            "name": "a",
            "plain_calls": 1,
            "calls": 2,
            "plain_seconds": pytest.approx(2e-6),
            "seconds": pytest.approx(9e-6),
        }
    ]


def test_gaps_are_told_by_their_length_and_the_longest_by_name() -> None:
    # 2 us for the host, 150 us for a copy
    events = [*kernel("a", 0, 10), *kernel("b", 12, 20, asked=12), *kernel("c", 170, 180)]
    steps = read_steps(events, 1)
    rows = {row["from_seconds"]: row for row in by_gap(steps)}
    assert rows[1e-4] == pytest.approx({"from_seconds": 1e-4, "times": 1, "seconds": 150e-6})
    assert rows[0.0] == pytest.approx({"from_seconds": 0.0, "times": 1, "seconds": 0.0})
    assert [row["before"] for row in longest_gaps(steps, 1)] == ["c"]


def test_calls_of_the_host_are_counted() -> None:
    plain, ours = read_steps(kernel("a", 0, 2), 1), read_steps(kernel("a", 0, 2) * 2, 1)
    (row,) = by_call(plain, ours)
    assert (row["name"], row["plain_calls"], row["calls"]) == ("launch", 1, 2)


def test_what_runs_in_some_steps_only_is_not_compared() -> None:
    some = read_steps([*kernel("a", 0, 2), *kernel("b", 2, 4), *kernel("a", 4, 6)], 2)
    assert list(by_copies(some, some)) == ["nothing"]  # of a, and not of b
    assert by_copies(some, some)["nothing"]["plain_seconds"] == pytest.approx(2e-6)
