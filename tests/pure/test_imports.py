import gzip
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lowtide import BadInput
from lowtide._analyze.load import find_peak, load_curve
from lowtide._check import find_flaw
from lowtide._ir import Kind, Phase
from lowtide._trace.import_csv import import_csv
from lowtide._trace.import_dtr import import_dtr
from lowtide._trace.import_snapshot import import_snapshot


def test_csv_buffers_have_the_load_of_their_lifetimes(tmp_path: Path) -> None:
    # c | . 4 4      times 10..20..30..40
    # b | 2 2 .
    # a | 1 . .
    path = tmp_path / "buffers.csv"
    path.write_text("id,lower,upper,size\na,10,20,1\nb,10,30,2\nc,20,40,4\n")
    trace = import_csv(path)
    assert find_flaw(trace) is None
    assert load_curve(trace).tolist() == [3, 6, 4]
    assert [value.name for value in trace.values] == ["a", "b", "c"]
    path.write_text("size, upper ,lower,id\n1,20,10,a\n\n")
    assert load_curve(import_csv(path)).tolist() == [1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1: no column 'id'"),
        ("id,lower,upper\na,1,2\n", "line 1: no column 'size'"),
        ("id,lower,upper,size\n", "has no buffers"),
        ("id,lower,upper,size\na,1,1,4\n", "line 2: upper 1 is not above lower 1"),
        ("id,lower,upper,size\na,1,2,4\nb,1,2,0\n", "line 3: size 0 is not positive"),
        ("id,lower,upper,size\na,1,2,4\na,1,2,4\n", "line 3: id 'a' was used before"),
        ("id,lower,upper,size\na,1,two,4\n", "line 2: upper is 'two', not a whole number"),
        ("id,lower,upper,size\na,1,2\n", "line 2: 3 cells under 4 columns"),
    ],
)
def test_bad_csv_is_named_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        import_csv(path)
    assert complaint in str(caught.value)


def _log(*lines: dict[str, Any]) -> bytes:
    return "\n".join(json.dumps(line) for line in lines).encode()


def _constant(name: str, size: int) -> list[dict[str, Any]]:
    return [
        {"INSTRUCTION": "CONSTANT", "NAME": name},
        {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)},
    ]


def _call(name: str, args: list[str], result: str, size: int, alias: int) -> list[dict[str, Any]]:
    return [
        {"INSTRUCTION": "CALL", "NAME": name, "ARGS": args, "RESULT": [result], "TIME": "1000"},
        {"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": str(size)},
        {"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(alias)},
    ]


def _release(name: str) -> dict[str, Any]:
    return {"INSTRUCTION": "RELEASE", "NAME": name}


DTR = [
    *_constant("early", 5),
    *_call("setup", ["early"], "setup_result", 7, -1),
    _release("early"),
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"},
    *_constant("w", 100),
    *_call("mm", ["w"], "h", 10, -1),
    {"INSTRUCTION": "COPY", "DST": "saved", "SRC": "h"},
    *_call("view", ["h"], "flat", 10, 0),
    _release("h"),
    {"INSTRUCTION": "MUTATE", "NAME": "relu_", "ARGS": ["flat"], "MUTATE": [0], "TIME": "500"},
    _release("flat"),
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"},
    *_call("mm_back", ["saved", "w"], "g", 20, -1),
    _release("saved"),
    *_call("sum", ["g"], "s", 1, -1),
    _release("g"),
]


@pytest.mark.parametrize("compress", [False, True])
def test_a_dtr_log_becomes_values_with_lifetimes(compress: bool, tmp_path: Path) -> None:
    path = tmp_path / "step.log"
    path.write_bytes(gzip.compress(_log(*DTR), mtime=0) if compress else _log(*DTR))
    trace = import_dtr(path)
    assert find_flaw(trace) is None
    assert [op.name for op in trace.ops] == ["mm", "view", "relu_", "mm_back", "sum"]
    assert [op.phase for op in trace.ops] == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 2
    assert trace.ops[1].view and trace.ops[0].seconds == 1e-6
    #           setup  7   7   7    7    7
    #           w    100 100 100  100  100
    #           h     10  10  10   10        two references, one storage, overwritten in place
    #           g                  20   20
    #           s                        1
    assert load_curve(trace).tolist() == [117, 117, 117, 137, 128]
    kinds = {(v.bytes, v.version): v.kind for v in trace.values}
    assert kinds[10, 1] is Kind.ACTIVATION
    assert kinds[20, 0] is Kind.TEMPORARY
    assert kinds[100, 0] is Kind.INPUT


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has no ops"),
        (b"{", "line 1 is not a line of a DTR log"),
        (_log({"INSTRUCTION": "JUMP"}), "there is no instruction 'JUMP'"),
        (_log({"INSTRUCTION": "RELEASE", "NAME": "x"}), "'x' is unknown here"),
        (_log(*DTR[:2]), "has no ops"),
        (gzip.compress(_log(*DTR), mtime=0)[:-9], "is cut off"),
        (b"\x1f\x8bnonsense", "is damaged or not a DTR log"),
    ],
)
def test_a_bad_dtr_log_is_one_line(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.log"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        import_dtr(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def _snapshot(history: list[tuple[str, int, int]], blocks: list[tuple[int, int]]) -> bytes:
    frames = [{"filename": "net.py", "name": "forward", "line": 3}]
    return pickle.dumps(
        {
            "device_traces": [
                [{"action": a, "addr": at, "size": n, "frames": frames} for a, at, n in history]
            ],
            "segments": [
                {
                    "device": 0,
                    "address": at,
                    "blocks": [{"size": n, "requested_size": n, "state": "active_allocated"}],
                }
                for at, n in blocks
            ],
        }
    )


ITERATION = [
    ("alloc", 10, 1000),
    ("alloc", 20, 500),
    ("free_requested", 10, 1000),
    ("free_completed", 10, 1000),
    ("alloc", 30, 600),
    ("free_requested", 20, 500),
    ("free_requested", 30, 600),
]


def test_a_snapshot_gives_one_iteration_of_its_history(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    history = [("alloc", 5, 64), ("free_requested", 7, 32), *ITERATION * 3]
    path.write_bytes(_snapshot(history, blocks=[(5, 64), (99, 2048)]))
    trace = import_snapshot(path, whole=False)
    assert find_flaw(trace) is None
    # 512 and 2048 stay; 1024, 1024 + 512, 512 + 1024 come and go
    assert load_curve(trace).tolist() == [3584, 4096, 3584 + 512]
    assert trace.ops[0].module == "forward"
    whole = import_snapshot(path, whole=True)
    assert len(whole.ops) == 10
    assert find_peak(whole).bytes == 4096
    assert find_flaw(whole) is None


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is damaged or not a CUDA memory snapshot"),
        (b"nonsense", "snapshot"),
        (pickle.dumps([1, 2]), "is a pickle, but not of a CUDA memory snapshot"),
        (pickle.dumps({"device_traces": [[]], "segments": []}), "has no allocation history"),
        (_snapshot(ITERATION, [])[:-30], "snapshot"),
        (pickle.dumps({"device_traces": _Evil()}), "was not opened: it asks for"),
        (pickle.dumps(io.BytesIO()), "was not opened: it asks for _io.BytesIO"),
        (b"\x80\x04U\x01xQ.", "was not opened: it asks for an object from elsewhere"),
    ],
)
def test_a_snapshot_runs_no_code_and_a_bad_one_is_one_line(
    content: bytes, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        import_snapshot(path, whole=False)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "owned").exists()
