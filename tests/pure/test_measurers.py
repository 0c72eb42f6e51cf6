"""benchmarks/measurers.py: nothing that was said is lost, whatever becomes of who said it."""

import sys
import time

from measurers import Measurer


def saying(code: str) -> Measurer:
    return Measurer([sys.executable, "-c", code], {"PYTHONUNBUFFERED": "1"})


def test_what_is_said_is_there_at_once() -> None:
    process = saying("import time\nprint('{\"a\": 1}')\ntime.sleep(600)")
    rows = process.rows()
    began = time.perf_counter()
    assert next(rows) == {"a": 1}
    assert time.perf_counter() - began < 60
    rows.close()  # and the process is gone


def test_who_takes_too_long_is_ended_and_what_it_has_said_stays() -> None:
    process = saying("import time\nprint('{\"a\": 1}')\ntime.sleep(600)")
    assert [*process.rows(limit=3)] == [{"a": 1}, {"error": "took longer than 3 s"}]


def test_who_fails_says_why() -> None:
    process = saying("print('ready')\nprint('{\"a\": 1}')\nraise OSError('no such thing')")
    process.wait_until_ready()
    assert [*process.rows()] == [{"a": 1}, {"error": "OSError: no such thing"}]


def test_a_task_is_told_and_much_that_is_complained_about_holds_nobody_up() -> None:
    code = "import sys\nsys.stderr.write('x' * 1_000_000)\nprint('{\"got\": ' + input() + '}')"
    assert [*saying(code).rows("7\n", limit=60)] == [{"got": 7}]


def test_no_answer_is_an_error() -> None:
    assert [*saying("").rows()] == [{"error": "no answer"}]
