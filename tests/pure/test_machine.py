"""Machines: links, files, the shipped profiles, slots, the cache, times scaled between cards."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lowtide._errors import BadInput
from lowtide._ir import (
    Geometry,
    GeometryId,
    Kind,
    Link,
    Machine,
    Op,
    Operand,
    OpIndex,
    StorageId,
    Trace,
    Value,
    ValueId,
)
from lowtide._machine import host
from lowtide._machine.cache import remember, remembered
from lowtide._machine.file import load_machine, machine_document, save_machine
from lowtide._machine.find import find_machine, profile_names, slot_names
from lowtide._machine.flops import flops
from lowtide._machine.link import line, seconds, share_together
from lowtide._machine.roofline import scaled

LINK = Link((1024, 2048, 4096), (1e-6, 2e-6, 3e-6))
MACHINE = Machine(
    name="a card: größer",
    device_bytes=1 << 30,
    host_bytes=0,
    out=LINK,
    back=line(1e-6, 1e9),
    together=0.5,
    drag=0.03,
    memory_bytes_per_second=1e9,
    flops_per_second=(("float32", 1e12),),
    sources=(("out", "a guess"),),
)


# links


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        *[(0, 1e-6), (1000, 1e-6), (1024, 1e-6)],  # as the first
        *[(1536, 1.5e-6), (2048, 2e-6), (3072, 2.5e-6), (4096, 3e-6)],
        (8192, 5e-6),  # as between the last two
    ],
)
def test_a_link_is_straight_between_its_points(count: int, expected: float) -> None:
    assert seconds(LINK, count) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("count", [1, 4096, 1 << 20, 1 << 30, 1 << 31, 1 << 40])
def test_a_line_is_a_latency_and_a_speed(count: int) -> None:
    link = line(47.2e-6, 1 / 0.0756e-9)
    assert seconds(link, count) == pytest.approx(47.2e-6 + count * 0.0756e-9, rel=1e-12)


@pytest.mark.parametrize(("latency", "speed"), [(-1.0, 1.0), (0.0, 0.0), (math.nan, 1.0)])
def test_a_line_without_speed_is_refused(latency: float, speed: float) -> None:
    with pytest.raises(BadInput, match="give a latency of 0 or more"):
        line(latency, speed)


@pytest.mark.parametrize(
    ("one", "other", "both", "share"),
    [
        (2.0, 2.0, 2.0, 1.0),  # neither is disturbed
        (2.0, 2.0, 4.0, 0.5),  # one after the other
        (1.0, 3.0, 4.0, 0.5),  # 2 s at half speed, then the longer one's other 2 s alone
        (3.0, 1.0, 4.0, 0.5),
        (1.0, 3.0, 2.9, 1.0),  # noise
        (1.0, 3.0, 1.5, 1.0),
    ],
)
def test_the_share_kept_together(one: float, other: float, both: float, share: float) -> None:
    assert share_together(one, other, both) == pytest.approx(share)


# files


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    save_machine(MACHINE, path)
    assert load_machine(path) == MACHINE
    assert find_machine(str(path)) == MACHINE


def test_what_is_unknown_may_be_left_out(tmp_path: Path) -> None:
    document = machine_document(MACHINE)
    for name in ("together", "drag", "memory_bytes_per_second", "flops_per_second", "sources"):
        del document[name]
    path = tmp_path / "card.json"
    path.write_text(json.dumps(document))
    bare = load_machine(path)
    assert (bare.together, bare.memory_bytes_per_second) == (1.0, 0.0)
    assert (bare.flops_per_second, bare.sources) == ((), ())


def points(*rows: tuple[Any, Any]) -> dict[str, list[Any]]:
    return {"bytes": [row[0] for row in rows], "seconds": [row[1] for row in rows]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "lowtide.trace"}, "is not a lowtide machine"),
        ({"version": 2}, "has machine version 2, this lowtide reads up to 1"),
        ({"version": True}, "has machine version True"),
        ({"name": " "}, "name is empty"),
        ({"name": 3}, "name is 3, not text"),
        ({"device_bytes": 0}, "device_bytes is 0"),
        ({"device_bytes": 1.5}, "device_bytes has 1.5, not a whole number"),
        ({"device_bytes": True}, "device_bytes has True"),
        ({"host_bytes": -1}, "host_bytes is -1"),
        ({"host_bytes": None}, "has no 'host_bytes': add it"),
        ({"wheels": 4}, "unknown field 'wheels'"),
        ({"out": [1]}, "out is [1], not an object"),
        ({"out": {"bytes": [1, 2]}}, "out has no 'seconds'"),
        ({"out": points((1, 1), (2, 2)) | {"x": 1}}, "out has an unknown field 'x'"),
        ({"out": points((1, 1.0))}, "out: 1 points: give at least two"),
        ({"out": points((2, 1.0), (2, 1.0))}, "out: bytes has 2 after 2: give ascending"),
        ({"out": points((0, 1.0), (2, 1.0))}, "out: bytes from 0 to 2"),
        ({"back": points((1, 2.0), (2, 1.0))}, "back: seconds has 1.0 after 2.0"),
        ({"back": points((1, 0.0), (2, 1.0))}, "back: seconds has 0.0: give finite times"),
        ({"back": points((1, 1.0), (2, math.inf))}, "back: seconds has inf"),
        ({"back": points((1, math.nan), (2, 1.0))}, "back: seconds has nan"),
        ({"back": points((1, "1"), (2, 1.0))}, "back.seconds has '1', not a number"),
        ({"back": {"bytes": [1, 2], "seconds": [1]}}, "back: 2 bytes but 1 seconds"),
        ({"together": 0}, "together is 0.0"),
        ({"together": 1.01}, "together is 1.01"),
        ({"together": math.nan}, "together is nan"),
        ({"memory_bytes_per_second": -1}, "memory_bytes_per_second is -1.0"),
        ({"flops_per_second": {"float32": 0}}, "flops_per_second of float32 is 0.0"),
        ({"flops_per_second": [1]}, "flops_per_second is [1], not an object"),
        ({"sources": {"colour": "seen"}}, "sources has 'colour', which is no field"),
        ({"sources": {"out": 1}}, "the source of 'out' is 1, not text"),
    ],
)
def test_a_bad_file_is_one_clear_line(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    document = machine_document(MACHINE) | change
    path = tmp_path / "card.json"
    given = {name: content for name, content in document.items() if content is not None}
    path.write_text(json.dumps(given))
    with pytest.raises(BadInput) as caught:
        load_machine(path)
    assert str(caught.value).startswith(str(path))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not a lowtide machine"),
        (b"[]", "is not a lowtide machine"),
        (b"\xff\xfe\x00", "is not a lowtide machine"),
        (b"[" * 100_000, "is not a lowtide machine"),
        (b'{"name": "a", "name": "b"}', "'name' is there twice"),
    ],
)
def test_what_is_no_machine_is_said_to_be_none(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=complaint):
        load_machine(path)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*card\.json"):
        load_machine(tmp_path / "card.json")


# profiles


def test_the_profiles_that_are_shipped() -> None:
    expected = "a100-40gb a100-80gb autoswap-paper h100 h200 rtx3060 rtx3090 rtx4090"
    assert profile_names() == expected.split()


@pytest.mark.parametrize("name", profile_names())
def test_every_figure_of_a_profile_has_a_source(name: str) -> None:
    machine = find_machine(name)
    assert machine.name == name
    named = {"device_bytes", "host_bytes", "out", "back", "together"}
    named |= {"drag"} if machine.drag else set()
    named |= {"memory_bytes_per_second"} if machine.memory_bytes_per_second else set()
    named |= {"flops_per_second"} if machine.flops_per_second else set()
    assert {field for field, source in machine.sources if source.strip()} == named


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "autoswap-paper"])
def test_a_card_is_complete_and_of_the_right_size(name: str) -> None:
    machine = find_machine(name)
    rates = dict(machine.flops_per_second)
    assert list(rates) == ["float32", "tfloat32", "bfloat16", "float16"]
    assert 1e13 < rates["float32"] <= rates["tfloat32"] < rates["bfloat16"] < 1e15
    assert 3e11 < machine.memory_bytes_per_second < 5e12
    for link in (machine.out, machine.back):
        assert 20e9 < (1 << 30) / seconds(link, 1 << 30) < 60e9


def test_the_link_of_the_h200_is_the_measured_one() -> None:
    machine = find_machine("h200")
    for link in (machine.out, machine.back):
        speeds = [size / seconds(link, size) / 1e9 for size in (1 << 20, 1 << 22, 1 << 24, 1 << 31)]
        assert speeds == pytest.approx([47, 53, 55, 55], rel=1e-3)
    assert machine.together * 55 == pytest.approx(50.7, rel=1e-3)


def test_the_link_of_the_paper() -> None:
    machine = find_machine("autoswap-paper")
    assert seconds(machine.out, 1 << 25) == pytest.approx(0.0756e-9 * (1 << 25) + 47.2e-6)
    assert seconds(machine.back, 1 << 25) == pytest.approx(0.0823e-9 * (1 << 25) + 9.7e-6)
    assert machine.flops_per_second == ()


@pytest.mark.parametrize("name", ["RTX4090", "rtx 4090", "RTX-4090"])
def test_a_profile_is_found_as_people_write_it(name: str) -> None:
    assert find_machine(name) == find_machine("rtx4090")


def test_a_slot_replaces_the_link_and_nothing_else() -> None:
    card = find_machine("rtx3090")
    slow = find_machine("RTX3090@PCIe3")
    assert slow.name == "rtx3090@pcie3"
    assert find_machine(slow.name) == slow
    for link in (slow.out, slow.back):
        assert 11e9 < (1 << 30) / seconds(link, 1 << 30) < 13e9
    assert "PCIe 3.0" in dict(slow.sources)["back"]
    same = ("name", "out", "back", "together", "sources")
    again = dataclasses.replace(slow, **{field: getattr(card, field) for field in same})
    assert again == card


def test_faster_slots_are_faster() -> None:
    times = [seconds(find_machine(f"h100@{slot}").out, 1 << 24) for slot in slot_names()]
    assert slot_names() == ["pcie3", "pcie4", "pcie5"]
    assert times == sorted(times, reverse=True)


def test_a_file_can_sit_in_a_slot_too(tmp_path: Path) -> None:
    path = tmp_path / "card@home.json"
    save_machine(MACHINE, path)
    assert find_machine(str(path)) == MACHINE
    assert find_machine(f"{path}@pcie4").out == find_machine("rtx4090").out


@pytest.mark.parametrize("name", ["rtx9999", "", "no/such/file.json", "a\0b", "x" * 5000])
def test_an_unknown_machine_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        BadInput, match=r"no machine .*: name a file .* one of a100-40gb, .*rtx4090"
    ):
        find_machine(name)


def test_an_unknown_slot_lists_the_known_ones() -> None:
    with pytest.raises(BadInput, match="no slot 'agp' in 'h100@agp': use one of pcie3, pcie4"):
        find_machine("h100@agp")


# the cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder))
    return folder


def test_a_machine_is_remembered(cache: Path) -> None:
    assert remembered(MACHINE.name) is None
    path = remember(MACHINE)
    assert path is not None and path.parent == cache
    assert remembered(MACHINE.name) == MACHINE
    assert remembered("a card  größer") is None  # the same file, but another machine


def test_where_machines_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = remember(MACHINE)
    assert path is not None and path.parent == tmp_path / "xdg" / "lowtide"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = remember(MACHINE)
    assert path is not None and path.parent == tmp_path / "home" / ".cache" / "lowtide"


def test_a_cache_that_cannot_be_used_is_an_empty_one(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert remember(MACHINE) is None
    assert remembered(MACHINE.name) is None
    cache.unlink()
    path = remember(MACHINE)
    assert path is not None
    path.write_text("{")
    assert remembered(MACHINE.name) is None


# main memory


def test_a_container_has_less_than_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    meminfo.write_text("MemTotal: 8192 kB\nMemAvailable: 4096 kB\n")
    own.write_text("0::/box/inner\n")
    (groups / "box" / "inner").mkdir(parents=True)
    monkeypatch.setattr(host, "_MEMINFO", meminfo)
    monkeypatch.setattr(host, "_OWN_GROUP", own)
    monkeypatch.setattr(host, "_GROUPS", groups)
    assert (host.total_bytes(), host.available_bytes()) == (8192 * 1024, 4096 * 1024)

    (groups / "box" / "inner" / "memory.max").write_text("max\n")
    assert host.total_bytes() == 8192 * 1024
    (groups / "box" / "memory.max").write_text("1000000\n")
    (groups / "box" / "memory.current").write_text("600000\n")
    assert (host.total_bytes(), host.available_bytes()) == (1000000, 400000)
    (groups / "box" / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert host.available_bytes() == 500000  # cached files can be dropped


# flops and times


def step(name: str, operands: list[str], results: list[str], **more: Any) -> Trace:
    """One op; tensors are written as "2x3" or "2x3 bfloat16"."""
    geometries, values = [], []
    for at, text in enumerate([*operands, *results]):
        sides, _, dtype = text.partition(" ")
        shape = tuple(int(side) for side in sides.split("x"))
        geometries.append(Geometry(dtype or "float32", shape, (), 0))
        size = math.prod(shape) * (2 if dtype.endswith("16") else 4)
        made = at >= len(operands)
        values.append(
            Value(
                StorageId(at), 0, size, Kind.TEMPORARY, OpIndex(0), OpIndex(1), not made, after=made
            )
        )
    tensors = [Operand(ValueId(at), GeometryId(at)) for at in range(len(values))]
    count = len(operands)
    given: dict[str, Any] = {
        "reads": tuple(ValueId(at) for at in range(count)),
        "writes": tuple(ValueId(at) for at in range(count, len(values))),
        "operands": tuple(tensors[:count]),
        "results": tuple(tensors[count:]),
        "seconds": 1e-3,
    }
    return Trace((Op(name, **(given | more)),), tuple(values), tuple(geometries))


PLAIN = '[[{"tensor":0},{"tensor":1},null,[1,1],[1,1],[1,1],false,[0,0],1],{}]'
TURNED = PLAIN.replace("false", "true")
QKV = ["2x3x10x8", "2x3x20x8", "2x3x20x4"]
SDPA = "aten._scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (step("aten.mm.default", ["2x3", "3x5"], ["2x5"]), 2 * 2 * 3 * 5),
        (step("mm", ["2x3", "3x5"], ["2x5"]), 2 * 2 * 3 * 5),
        (step("aten.addmm.default", ["5", "2x3", "3x5"], ["2x5"]), 2 * 2 * 3 * 5),
        (step("aten.bmm.default", ["7x2x3", "7x3x5"], ["7x2x5"]), 7 * 2 * 2 * 3 * 5),
        (step("aten.baddbmm.default", ["1x1x5", "7x2x3", "7x3x5"], ["7x2x5"]), 7 * 2 * 2 * 3 * 5),
        (step("aten.linear.default", ["4x2x3", "5x3"], ["4x2x5"]), 2 * 4 * 2 * 3 * 5),
        # a batch of 2, 3 channels to 8, 3x3 weights, 6x7 places
        (
            step("aten.convolution.default", ["2x3x6x7", "8x3x3x3"], ["2x8x6x7"], args=PLAIN),
            2 * 2 * 8 * 6 * 7 * 3 * 9,
        ),
        # in two groups each output sees half of the 4 channels
        (
            step("aten.convolution.default", ["2x4x6x7", "8x2x3x3"], ["2x8x6x7"], args=PLAIN),
            2 * 2 * 8 * 6 * 7 * 2 * 9,
        ),
        # transposed: each of 6x7 places of the input goes into 2x2 of the output
        (
            step("aten.convolution.default", ["2x3x6x7", "3x8x2x2"], ["2x8x12x14"], args=TURNED),
            2 * 2 * 3 * 6 * 7 * 8 * 4,
        ),
        # gradients of input and weight, and of the bias for nothing
        (
            step(
                "aten.convolution_backward.default",
                ["2x8x6x7", "2x3x6x7", "8x3x3x3"],
                ["2x3x6x7", "8x3x3x3", "8"],
            ),
            2 * 2 * 2 * 8 * 6 * 7 * 3 * 9,
        ),
        # of the weight alone, as in the first layer
        (
            step(
                "aten.convolution_backward.default",
                ["2x8x6x7", "2x3x6x7", "8x3x3x3"],
                ["8x3x3x3", "8"],
            ),
            2 * 2 * 8 * 6 * 7 * 3 * 9,
        ),
        (step(f"{SDPA}.default", QKV, ["2x3x10x4"]), 2 * 2 * 3 * 10 * 20 * (8 + 4)),
        # again queries by keys, then gradients of: values, weights, queries, keys
        (
            step(f"{SDPA}_backward.default", ["2x3x10x4", *QKV, "2x3x10x4"], QKV),
            2 * 2 * 3 * 10 * 20 * (8 + 4 + 4 + 8 + 8),
        ),
        (step("aten.add.Tensor", ["2x3", "2x3"], ["2x3"]), 0),
        (step("mm", [], []), 0),  # typed by hand, without shapes
        (step("aten.convolution.default", [], []), 0),
        (step(f"{SDPA}.default", [], []), 0),
    ],
)
def test_flops_as_counted_by_hand(trace: Trace, expected: int) -> None:
    assert flops(trace, trace.ops[0]) == expected


def card(name: str, memory: float, **rates: float) -> Machine:
    return dataclasses.replace(
        MACHINE, name=name, memory_bytes_per_second=memory, flops_per_second=tuple(rates.items())
    )


FAST = card("fast", 1e12, float32=1e13, tfloat32=1e14, bfloat16=2e14)
SLOW = card("slow", 5e11, float32=2e12, tfloat32=1e13, bfloat16=1e13)
SQUARE = "1024x1024"
WORK = 2 * 1024**3


def ratio(trace: Trace, have: Machine = FAST, want: Machine = SLOW) -> float:
    after = scaled(trace, have, want)
    assert dataclasses.replace(after, ops=trace.ops) == trace
    return after.ops[0].seconds / trace.ops[0].seconds


def test_an_op_bound_by_memory_scales_with_it() -> None:
    assert ratio(step("aten.add.Tensor", [SQUARE, SQUARE], [SQUARE])) == pytest.approx(2)


def test_an_op_bound_by_arithmetic_scales_with_that_of_its_dtype() -> None:
    half = f"{SQUARE} bfloat16"
    assert ratio(step("aten.mm.default", [half, half], [half])) == pytest.approx(20)
    # 1 ms for 2.1 GFLOP is no more than plain float32 can do
    assert ratio(step("aten.mm.default", [SQUARE, SQUARE], [SQUARE])) == pytest.approx(5)
    # float32 to bias, bfloat16 to multiply
    mixed = step("aten.addmm.default", ["1024", half, half], [SQUARE])
    assert ratio(mixed) == pytest.approx(20)


def test_a_product_faster_than_float32_can_be_was_tf32() -> None:
    quick = step("aten.mm.default", [SQUARE, SQUARE], [SQUARE], seconds=WORK / 5e13)
    assert ratio(quick) == pytest.approx(10)
    plain = card("old", 5e11, float32=2e12)  # has no TF32, so it pays the full price
    assert ratio(quick, want=plain) == pytest.approx(50)


def test_the_bound_may_change_sides() -> None:
    # 4 MiB rows by a thin matrix: memory on the fast card, arithmetic on one that has little of it
    thin = step("aten.mm.default", [SQUARE, "1024x16"], ["1024x16"])
    size = 4 * (1024 * 1024 + 2 * 1024 * 16)
    weak = card("weak", 1e12, float32=1e11)
    expected = (2 * 1024 * 1024 * 16 / 1e11) / (size / 1e12)
    assert ratio(thin, want=weak) == pytest.approx(expected)
    assert ratio(thin, have=weak, want=FAST) == pytest.approx(1 / expected)


def test_convolutions_are_taken_to_use_tf32() -> None:
    shapes = ["64x256x32x32", "256x256x3x3"], ["64x256x32x32"]
    assert ratio(step("aten.convolution.default", *shapes, args=PLAIN)) == pytest.approx(10)


def test_ops_without_bytes_keep_their_time() -> None:
    assert ratio(step("aten.t.default", ["8x8"], [], reads=(), view=True)) == 1


def test_there_and_back_is_the_same_step() -> None:
    trace = step("aten.mm.default", [SQUARE, SQUARE], [SQUARE])
    there = scaled(trace, FAST, SLOW)
    assert scaled(there, SLOW, FAST).ops[0].seconds == pytest.approx(trace.ops[0].seconds)
    assert scaled(trace, FAST, FAST) is trace


def test_a_missing_figure_is_named() -> None:
    trace = step("aten.mm.default", ["8x8 float64", "8x8 float64"], ["8x8 float64"])
    with pytest.raises(
        BadInput,
        match=r"machine fast has no flops_per_second for float64, in which"
        r" op 0, aten.mm.default multiplies: add it",
    ):
        scaled(trace, FAST, SLOW)
    with pytest.raises(BadInput, match="autoswap-paper has no memory_bytes_per_second"):
        scaled(trace, FAST, find_machine("autoswap-paper"))
