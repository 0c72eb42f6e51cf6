import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from strategies import traces

from lowtide import BadInput, Trace, load_trace, save_trace
from lowtide._trace.file import decode_trace, encode_trace
from lowtide._trace.text import parse

STEP = parse("mm x:8 w:8 -> h:8 | 1us @Net\nrelu_ h -> h")


@given(traces())
def test_files_round_trip(trace: Trace) -> None:
    content = encode_trace(trace)
    assert decode_trace(content, "x") == trace
    assert encode_trace(decode_trace(content, "x")) == content


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "step.trace"
    save_trace(STEP, path)
    assert load_trace(path) == STEP
    with pytest.raises(BadInput, match="cannot write"):
        save_trace(STEP, tmp_path / "missing" / "step.trace")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="cannot write"):
        save_trace(STEP, tmp_path / "folder")  # fails only when all is written
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "step.trace"]


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    path = str(tmp_path / "step.trace")
    save_trace(STEP, path)
    assert load_trace(path) == STEP
    with pytest.raises(BadInput, match="cannot read"):
        load_trace(path + "s")


def _with(**changes: Any) -> bytes:
    document = json.loads(gzip.decompress(encode_trace(STEP)))
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = document
        for folder in folders:
            place = place[folder]
        place[name] = value
    return gzip.compress(json.dumps(document).encode(), mtime=0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty: record it again"),
        (b"hello", "is not a lowtide trace"),
        (encode_trace(STEP)[:-20], "is cut off"),
        (encode_trace(STEP)[:60] + b"XXXX" + encode_trace(STEP)[64:], "is damaged"),
        (gzip.compress(b"{", mtime=0), "is damaged"),
        (gzip.compress(b"[" * 100_000, mtime=0), "is damaged"),
        (gzip.compress(b'{"a": 1}', mtime=0), "is not a lowtide trace"),
        (_with(version=2), "has trace version 2, this lowtide reads up to 1: upgrade lowtide"),
        (_with(version="x"), "has trace version x"),
        (_with(strings=[]), "is damaged"),
        (_with(ops=None), "is damaged"),
        (_with(ops__seconds=[1.0]), "is damaged"),
        (_with(ops__seconds=["1", "2"]), "is damaged"),
        (_with(values__first=[0, 0, 0, True]), "is damaged"),
        (_with(values__end=[2, 2, 1, 9]), "is damaged (value 3 lives for ops 1..9 of 2)"),
        (_with(device=3), "is damaged"),
        (_with(version=-5), "has trace version -5"),
        (_with(ops__name=[0, -1]), "is damaged (TypeError -1 is not the number of a string)"),
        (_with(ops__name=[0, True]), "is damaged"),
        (_with(ops__seconds=[1.0, float("nan")]), "is damaged (op 1"),
        (_with(ops__seconds=[1.0, 10**400]), "is damaged"),
        (_with(values__bytes=[8, 8, 8, 10**30]), "is damaged (its values have more bytes"),
    ],
)
def test_a_bad_file_is_one_line(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.trace"
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_trace(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_flipped_byte_is_noticed() -> None:
    content = encode_trace(STEP)
    for at in range(10, len(content)):  # the first ten bytes are gzip's header
        broken = content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]
        with pytest.raises(BadInput):
            decode_trace(broken, "x")
