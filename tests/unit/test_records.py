"""Records: what rows and definitions say, JSON with the documented keys, and how long it may be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dpmon.record.history_rows import Definition, Row
from dpmon.record.jsonl import as_json
from dpmon.record.record_types import BUCKET, Call, PhaseSpan, Record, Size, Step
from dpmon.record.schema import STEP_PHASES
from dpmon.record.shared_names import CALL_PHASES, MAX_JSON, MORE, shorten_name, to_bounded_json
from support.record_builders import RowReader, call_row, calls_alone, flags_of, step_row

LAYOUT = {
    "root": "Model",
    "via": "DataParallel",
    "devices": ["cpu:0", "cpu:1", "cpu:2"],
    "absent": {"device_ms": "the devices are CPUs"},
}
IN = [["0", [30, 5], "float32", 600], ["1.mask", [30], "bool", 30]]
SHARE = [["0", [10, 5], "float32", 200], ["1.mask", [10], "bool", 10]]
OUT = [["", [10, 2], "float32", 80]]
PHASES = (5, 100, 110, 200, 320, 4000, 4330, 50)
ORIGIN = 1_000_000


def sizes(value: list[list[Any]]) -> tuple[Size, ...]:
    return tuple(Size(path, tuple(shape), dtype, count) for path, shape, dtype, count in value)


def resolver(*more: Row) -> RowReader:
    """Return a resolver with definitions of a layout (1), inputs (2), a share (3) and an output (4)."""
    found = RowReader(process=7, rank=2, origin=ORIGIN)
    for number, value in enumerate((LAYOUT, IN, SHARE, OUT), 1):
        assert found.record(Definition(number, value)) is None
    for row in more:
        assert found.record(row) is None
    return found


def call(**changes: Any) -> Step:
    """Return a call of step 12 over two of three devices."""
    values: dict[str, Any] = {
        "mode": "dp",
        "flags": flags_of(virtual=True, training=True, grad=False, failed=False),
        "layout": 1,
        "call": 13,
        "start_ns": ORIGIN + 2_500_000,
        "wall_ns": 5_000_000,
        "inputs": 2,
        "outputs": 4,
        "phases": PHASES,
        "replicas": (3, 4, 330, 3000, 3, 4, 350, 3900),
    }
    return calls_alone(12, call_row(**{**values, **changes}))


def read(row: Row) -> Record:
    found = resolver().record(row)
    assert found is not None
    return found


def call_of(row: Row) -> Call:
    found = read(row)
    assert isinstance(found, Call)
    return found


# ------------------------------------------------------------------------------------------------ there and back


COPIED: dict[str, Any] = {"copy": 40, "copied_bytes": 1 << 20}


def test_a_step_that_has_copied() -> None:
    row = step_row("dp", 12, ORIGIN, 1000, 30, (100, 200, 300, 50), **COPIED)
    step = read(row)
    assert isinstance(step, Step)
    assert step.phases == {"data": 100, "copy": 40, "forward": 200, "backward": 300, "optimizer": 50, "other": 310}
    assert list(step.phases) == [name for name in STEP_PHASES if name != "sync"]
    assert step.quantities == {"copied_bytes": 1 << 20}
    assert (step.quantity("copied_bytes"), step.quantity("samples")) == (1 << 20, 30)
    found = read(row.with_device_times([1.0, 2.0, 3.0, 4.0, 0.5], 0))
    assert isinstance(found, Step)
    assert found.device_ms == {"data": 1.0, "forward": 2.0, "backward": 3.0, "optimizer": 4.0, "copy": 0.5}
    said = as_json(found)
    assert (said["phases"]["copy"], said["copied_bytes"]) == (4e-5, 1 << 20)
    assert list(said["device_ms"]) == [name for name in STEP_PHASES if name not in ("sync", "other")]


SHORT = ((0, 0, 100), (1, 100, 250), (4, 120, 40), (2, 360, 300), (2, 660, 0), (3, 700, 50))
"""Phase, start after the step's start, duration."""


def with_spans(spans: Sequence[tuple[int, int, int]], wall: int, missing: int = 0, **more: int) -> Row:
    absolute = [(phase, ORIGIN + at, took) for phase, at, took in spans]
    row = step_row("dp", 12, ORIGIN, wall, 30, (100, 200, 300, 50), absolute, **more)
    return row._replace(missing_spans=missing)


def test_buckets_are_apart_from_the_spans() -> None:
    step = read(with_spans([(2, 0, 50), (BUCKET, 20, 0), (BUCKET, 40, 0)], 100))
    assert isinstance(step, Step)
    assert (step.spans, step.buckets) == ((PhaseSpan("backward", 0, 50),), (20, 40))


@pytest.mark.parametrize("ran", range(16))
def test_phases_that_did_not_run_are_missing(ran: int) -> None:
    took = tuple(10 * (k + 1) if ran & 1 << k else -1 for k in range(4))
    step = read(step_row("single", 1, 0, 1000, -1, took))
    assert isinstance(step, Step)
    names = [name for k, name in enumerate(("data", "forward", "backward", "optimizer")) if ran & 1 << k]
    assert list(step.phases) == [*names, "other"]
    assert sum(step.phases.values()) == step.wall_ns
    assert step.samples is None
    phases = tuple(n for k in range(4) for n in ((k, 10) if ran & 1 << k else (-1, 0)))
    found = call_of(call(phases=phases))
    assert list(found.phases) == [name for k, name in enumerate(CALL_PHASES) if ran & 1 << k]


def test_a_definition_may_come_again_and_may_change() -> None:
    known = resolver(Definition(4, [["", [10, 9], "int64", 720]]))
    found = known.record(call())
    assert isinstance(found, Call)
    assert found.outputs == (Size("", (10, 9), "int64", 720),)


def test_a_call_without_its_layout_is_no_record_and_lost_sizes_are_unknown() -> None:
    assert resolver().record(call(layout=99)) is None
    found = resolver().record(call(inputs=99))
    assert isinstance(found, Call)
    assert found.inputs is None


def test_rows_are_those_of_the_first_tensor_that_has_any() -> None:
    known = resolver(Definition(2, [["0", [], "float32", 4], ["1", [12, 3], "float32", 144]]))
    found = known.record(call())
    assert isinstance(found, Call)
    assert found.rows == 12
    assert call_of(call(inputs=0)).rows is None


# ------------------------------------------------------------------------------------------------ JSON

CALL_KEYS = [
    "kind", "process", "rank", "step", "step_kind", "call", "root", "via", "mode", "virtual", "training", "grad",
    "start_s",
    "devices", "phases", "replicas", "inputs", "outputs",
]  # fmt: skip
"""The example of a record, with its duration and the reasons for absent values."""
STEP_KEYS = [
    "kind",
    "process",
    "rank",
    "step",
    "step_kind",
    "mode",
    "start_s",
    "wall_ms",
    "samples",
    "flops",
    "phases",
    "spans",
]


def test_the_json_of_a_call() -> None:
    found = as_json(read(call()))
    assert set(found) == {*CALL_KEYS, "wall_ms", "absent"}
    assert found["kind"] == "call"
    assert (found["process"], found["rank"], found["step"], found["call"]) == (7, 2, 12, 13)
    assert (found["root"], found["via"], found["mode"]) == ("Model", "DataParallel", "dp")
    assert (found["start_s"], found["wall_ms"]) == (0.0025, 5.0)
    assert found["devices"] == ["cpu:0", "cpu:1", "cpu:2"]
    assert list(found["phases"]) == list(CALL_PHASES)
    assert found["phases"]["scatter"] == {"host_ms": 0.0001, "device_ms": None}
    assert found["replicas"][1] == {
        "replica": 1,
        "device": "cpu:1",
        "host_ms": 0.0039,
        "device_ms": None,
        "inputs": [
            {"path": "0", "shape": [10, 5], "dtype": "float32", "bytes": 200},
            {"path": "1.mask", "shape": [10], "dtype": "bool", "bytes": 10},
        ],
        "outputs": [{"path": "", "shape": [10, 2], "dtype": "float32", "bytes": 80}],
    }
    assert found["inputs"][0] == {"path": "0", "shape": [30, 5], "dtype": "float32", "bytes": 600}
    assert found["outputs"] == found["replicas"][0]["outputs"]
    assert found["absent"] == {"device_ms": "the devices are CPUs"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_unknown_fields_of_a_call_are_null_with_a_reason() -> None:
    found = as_json(read(call(inputs=0, replicas=(0, 4, 0, 5))))
    assert found["inputs"] is None
    assert found["replicas"][0]["inputs"] is None
    assert found["replicas"][0]["outputs"] == [{"path": "", "shape": [10, 2], "dtype": "float32", "bytes": 80}]
    assert set(found["absent"]) == {"device_ms", "sizes"}
    assert all(found["absent"].values())


def test_a_call_that_failed_says_so() -> None:
    flags = flags_of(virtual=False, training=True, grad=True, failed=True)
    found = as_json(read(call(flags=flags, outputs=0, replicas=())))
    assert set(found) == {*CALL_KEYS, "wall_ms", "absent"}
    assert found["outputs"] is None
    assert "raised" in found["absent"]["outputs"]
    assert found["replicas"] == []


def test_the_json_of_a_step() -> None:
    spans = [(0, ORIGIN + 2_000_000, 1000), (1, ORIGIN + 2_001_250, 2000)]
    found = as_json(read(step_row("dp", 12, ORIGIN + 2_000_000, 1_000_000, 30, (1000, 2000, -1, -1), spans)))
    assert set(found) == {*STEP_KEYS, "absent"}
    assert found["spans"] == [
        {"phase": "data", "start_ms": 0.0, "ms": 0.001},
        {"phase": "forward", "start_ms": 0.00125, "ms": 0.002},
    ]
    assert (found["kind"], found["process"], found["rank"], found["step"]) == ("step", 7, 2, 12)
    assert (found["mode"], found["start_s"], found["wall_ms"], found["samples"]) == ("dp", 0.002, 1.0, 30)
    assert found["phases"] == {"data": 0.001, "forward": 0.002, "other": 0.997}
    assert set(found["absent"]) == {"flops"}


def test_missing_spans_are_counted_and_reported() -> None:
    found = as_json(read(with_spans(SHORT, 1000, 44)))
    assert (len(found["spans"]), found["missing_spans"]) == (len(SHORT), 44)
    assert found["absent"].pop("flops")
    assert found["absent"] == {"spans": f"only the first {len(SHORT)} of a step are recorded"}
    without = as_json(read(step_row("dp", 12, ORIGIN, 1000, 30, (100, 200, 300, 50))))
    assert (without["spans"], [*without["absent"]], "missing_spans" in without) == ([], ["flops"], False)


def test_samples_that_are_unknown_are_null_with_a_reason() -> None:
    found = as_json(read(step_row("dp", 12, ORIGIN, 1_000_000, -1, (-1, 2000, -1, -1))))
    assert found["samples"] is None
    assert found["absent"]["samples"]


# ------------------------------------------------------------------------------------------------ limits


def test_a_resolver_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops the oldest definitions; a successor of the supervisor writes those in use again."""
    monkeypatch.setattr("dpmon.record.history_rows.MAX_DEFINITIONS", 100)
    known = resolver()
    for number in range(5, 400):
        assert known.record(Definition(number, OUT)) is None
    assert len(known.definitions.sizes) == 100
    lost = known.record(call())
    assert isinstance(lost, Call)
    assert lost.inputs is None
    for number, value in enumerate((LAYOUT, IN, SHARE, OUT), 1):
        assert known.record(Definition(number, value)) is None
    assert isinstance(known.record(call()), Call)


def test_a_name_is_cut_with_a_mark() -> None:
    assert shorten_name("short") == "short"
    assert shorten_name("x" * 200) == "x" * 200
    assert shorten_name("x" * 201) == "x" * 199 + MORE
    assert shorten_name("abcdef", 3) == "ab" + MORE


@pytest.mark.parametrize("character", ["x", "\U0001f600", "\udcff", '"'])
@pytest.mark.parametrize(("count", "length"), [(1, 1_000_000), (64, 120), (64, 5000)])
def test_a_definition_always_fits(character: str, count: int, length: int) -> None:
    packed = to_bounded_json([(character * length, [3, 4], "float32", 48)] * count)
    assert len(packed) <= MAX_JSON
    found = json.loads(packed)
    assert [size[1:] for size in found] == [[[3, 4], "float32", 48]] * count
    assert found[0][0].rstrip(MORE) in character * length


def test_an_event_always_fits() -> None:
    packed = to_bounded_json({"text": "t" * 1_000_000, "absent": {"devices": "d" * 100_000}})
    assert len(packed) <= MAX_JSON
    assert json.loads(packed)["text"] == "t" * 4095 + MORE


def test_a_text_that_fits_is_not_changed() -> None:
    text = "t" * 50_000
    assert json.loads(to_bounded_json({"text": text}))["text"] == text
