"""Measuring a machine without a GPU, and the command that shows it."""

import contextlib
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from lowtide import __version__
from lowtide._cli.doctor import doctor_command
from lowtide._errors import BadInput
from lowtide._machine import disk
from lowtide._machine.file import decode_machine, find_flaw
from lowtide._machine.find import find_machine
from lowtide._machine.measure import machine_here, measure


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SIZES", (1 << 20, 4 << 20))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder))
    return folder


def test_main_memory_and_a_file_are_measured(tmp_path: Path) -> None:
    said: list[str] = []
    open_files, threads = os.listdir("/proc/self/fd"), threading.active_count()
    machine = measure("cpu", said.append, folder=tmp_path)
    assert find_flaw(machine) is None
    assert machine.out.bytes == machine.back.bytes == (1 << 20, 4 << 20)
    assert machine.device_bytes > 1 << 20 and machine.memory_bytes_per_second > 1e6
    assert 0 < machine.host_bytes < 1 << 50
    assert machine.flops_per_second == ()
    fields = {field for field, _ in machine.sources}
    assert fields == {
        *("device_bytes", "host_bytes", "out", "back", "together", "memory_bytes_per_second")
    }
    assert said == ["measuring the file tier", "measuring main memory"]
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == open_files
    assert threading.active_count() == threads


def test_the_file_has_no_name_while_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []
    write = disk._write

    def spy(file: int, content: memoryview, at: int) -> None:
        seen.append(list(tmp_path.iterdir()))
        write(file, content, at)

    monkeypatch.setattr(disk, "_write", spy)
    measure("cpu", folder=tmp_path)
    assert seen and not any(seen)  # so it cannot stay behind, whatever ends the process


@pytest.mark.parametrize("call", ["_write", "_read"])
def test_a_disk_that_fails_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, call, fail)
    with pytest.raises(BadInput, match=r"cannot measure files in .*: No space left on device"):
        measure("cpu", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_beside_a_read_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk._write

    def fail(file: int, content: memoryview, at: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(5, "Input/output error")
        write(file, content, at)

    monkeypatch.setattr(disk, "_write", fail)
    with pytest.raises(BadInput, match="Input/output error"):
        measure("cpu", folder=tmp_path)


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"cannot measure files in .*/nowhere: No such file"):
        measure("cpu", folder=tmp_path / "nowhere")
    monkeypatch.setattr(disk, "_SIZES", (1 << 50, 1 << 51))
    with pytest.raises(BadInput, match="bytes free: name a folder with at least 16 MiB"):
        measure("cpu", folder=tmp_path)


def test_other_devices_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot measure a meta device: use cuda or cpu"):
        measure("meta")


def test_measuring_leaves_random_numbers_and_settings_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate()
    settings = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    measure("cpu", folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    after = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    assert after == settings


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_products_is_restored(precision: str) -> None:
    from lowtide._machine.measure import _precision

    backends: Any = torch.backends
    products, on_cpu = backends.cuda.matmul, backends.mkldnn.matmul
    before = torch.get_float32_matmul_precision()
    own, own_on_cpu = products.fp32_precision, on_cpu.fp32_precision
    torch.set_float32_matmul_precision(precision)
    try:
        allowed, inner = products.allow_tf32, products.fp32_precision
        for name in ("ieee", "tf32"):
            with contextlib.suppress(ZeroDivisionError), _precision(name):
                assert products.fp32_precision == name
                raise ZeroDivisionError
            assert torch.get_float32_matmul_precision() == precision
            assert (products.allow_tf32, products.fp32_precision) == (allowed, inner)
    finally:
        torch.set_float32_matmul_precision(before)
        products.fp32_precision, on_cpu.fp32_precision = own, own_on_cpu


@pytest.mark.usefixtures("cache")
def test_what_is_remembered_is_not_measured_again(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "one", tmp_path / "other"
    folder.mkdir()
    elsewhere.mkdir()
    said: list[str] = []
    first = machine_here("cpu", said.append, folder=folder)
    assert said
    said.clear()
    second = machine_here("cpu", said.append, folder=folder)
    assert not said
    assert (second.out, second.back) == (first.out, first.back)
    machine_here("cpu", said.append, folder=folder, again=True)
    assert said
    said.clear()
    machine_here("cpu", said.append, folder=elsewhere)
    assert said  # another folder may be another disk


def doctor(*args: str) -> Result:
    result = CliRunner().invoke(doctor_command, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_the_doctor_shows_a_short_table(cache: Path) -> None:
    text = doctor().stdout
    assert __version__ in text and torch.__version__ in text
    if not torch.cuda.is_available():
        assert "no CUDA: main memory and a file" in text
        assert "no: there is no CUDA device" in text
        assert "1.00 MiB" in text
    assert "GB/s" in text and "compiler" in text and "extra exact" in text
    assert len(list(cache.iterdir())) == 1


def test_the_doctor_remembers_and_measures_again_when_asked(cache: Path) -> None:
    assert "measuring" in doctor().stderr
    assert "measuring" not in doctor().stderr
    assert "measuring" in doctor("--again").stderr
    (kept,) = cache.iterdir()
    kept.write_text("damaged")
    assert "measuring" in doctor().stderr
    assert find_machine(str(kept)).out.bytes  # and repaired


def test_the_doctors_json_holds_a_machine_file(cache: Path) -> None:
    document = json.loads(doctor("--json").stdout)
    assert document["lowtide"] == __version__
    assert set(document["extras"]) == {"exact", "bayes"}
    assert document["pool"] is (document["pool_reason"] is None)
    machine = decode_machine(json.dumps(document["machine"]).encode(), "the output")
    (kept,) = cache.iterdir()
    assert find_machine(str(kept)) == machine


def test_the_doctor_without_a_compiler_or_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert json.loads(doctor("--json").stdout)["compiler"] is None
    assert "none: lowtide works" in doctor().stdout
