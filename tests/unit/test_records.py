"""Records: decoding gives what was packed, and JSON has the documented keys."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.codec import STEP_PHASES, Decoder, kept_step_times
from dpmon.record.jsonl import as_json
from dpmon.record.kinds import Call, CallPhase, Event, PhaseSpan, Record, RecordError, Replica, Size, Step
from dpmon.record.payloads import call_head, call_replicas, definition, kind_of, known_times, step_fields, step_times
from dpmon.record.schema import SPAN_PHASES
from dpmon.record.step_spans import MAX_SPANS, SPAN_HEAD_WIDE, SPAN_PHASE, kept_spans, span_words
from dpmon.record.wire import (
    CALL_PHASES,
    FAILED,
    GRAD,
    PLAIN_FORMAT,
    PLAIN_TAG,
    STEP_EXTRA,
    STEP_EXTRAS,
    TIMED_PHASES,
    TRAINING,
    VIRTUAL,
    call_flags,
    mode_number,
    pack_call,
    pack_definition,
    pack_event,
    pack_step,
    pack_timed,
    with_extras,
)
from dpmon.ring import BLOCK_BYTES, Ring
from dpmon.ring_reader import RingReader

DP, SINGLE = mode_number("dp"), mode_number("single")
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


def decoder(*more: bytes) -> Decoder:
    """Return a decoder with definitions of a layout (1), inputs (2), a share (3) and an output (4)."""
    found = Decoder(process=7, rank=2, origin_ns=ORIGIN)
    for number, value in enumerate((LAYOUT, IN, SHARE, OUT), 1):
        assert found.decode(pack_definition(number, value)) is None
    for payload in more:
        assert found.decode(payload) is None
    return found


def call(**changes: Any) -> bytes:
    """Return a call over two of three devices."""
    values: dict[str, Any] = {
        "mode": DP,
        "flags": call_flags(virtual=True, training=True, grad=False, failed=False),
        "layout": 1,
        "step": 12,
        "call": 13,
        "start_ns": ORIGIN + 2_500_000,
        "wall_ns": 5_000_000,
        "inputs": 2,
        "outputs": 4,
        "phases": PHASES,
        "replicas": (3, 4, 330, 3000, 3, 4, 350, 3900),
    }
    return pack_call(**{**values, **changes})


def read(payload: bytes) -> Record:
    found = decoder().decode(payload)
    assert found is not None
    return found


def call_of(payload: bytes) -> Call:
    found = read(payload)
    assert isinstance(found, Call)
    return found


# ------------------------------------------------------------------------------------------------ there and back


def test_a_call() -> None:
    assert call_of(call()) == Call(
        process=7,
        rank=2,
        step=12,
        call=13,
        root="Model",
        via="DataParallel",
        mode="dp",
        virtual=True,
        training=True,
        grad=False,
        failed=False,
        start_ns=2_500_000,
        wall_ns=5_000_000,
        devices=("cpu:0", "cpu:1", "cpu:2"),
        phases={
            "scatter": CallPhase(5, 100),
            "replicate": CallPhase(110, 200),
            "parallel_apply": CallPhase(320, 4000),
            "gather": CallPhase(4330, 50),
        },
        replicas=(
            Replica(0, "cpu:0", 330, 3000, sizes(SHARE), sizes(OUT)),
            Replica(1, "cpu:1", 350, 3900, sizes(SHARE), sizes(OUT)),
        ),
        inputs=sizes(IN),
        outputs=sizes(OUT),
        absent={"device_ms": "the devices are CPUs"},
    )


@pytest.mark.parametrize("bits", range(16))
def test_the_flags_of_a_call(bits: int) -> None:
    flags = [bool(bits & 1 << k) for k in range(4)]
    found = call_of(call(flags=call_flags(*flags)))
    assert [found.virtual, found.training, found.grad, found.failed] == flags
    assert call_flags(*flags) == sum(f for f, on in zip((VIRTUAL, TRAINING, GRAD, FAILED), flags, strict=True) if on)


def test_a_plain_call() -> None:
    """A call with one replica, as the tracer packs it for a bare root."""
    values = (PLAIN_TAG, SINGLE, TRAINING | GRAD, 0, 1, 12, 13, ORIGIN + 50, 7000, 2, 4)
    payload = struct.pack(PLAIN_FORMAT, *values)
    found = call_of(payload)
    assert (found.mode, found.step, found.call, found.start_ns, found.wall_ns) == ("single", 12, 13, 50, 7000)
    assert (found.training, found.grad, found.virtual, found.failed) == (True, True, False, False)
    assert found.phases == {}
    assert found.replicas == (Replica(0, "cpu:0", 0, 7000, sizes(IN), sizes(OUT)),)
    assert (found.inputs, found.outputs) == (sizes(IN), sizes(OUT))
    assert kind_of(payload) == "call"
    assert call_head(payload)[:9] == (SINGLE, TRAINING | GRAD, 0, 1, 12, 13, ORIGIN + 50, 7000, 2)
    assert call_replicas(payload) == [(2, 4, 0, 7000)]


def test_a_step() -> None:
    payload = pack_step(DP, 12, ORIGIN + 5, 1000, 30, (100, 200, 300, 50))
    assert read(payload) == Step(
        process=7,
        rank=2,
        step=12,
        mode="dp",
        start_ns=5,
        wall_ns=1000,
        samples=30,
        phases={"data": 100, "forward": 200, "backward": 300, "optimizer": 50, "other": 350},
    )
    assert kind_of(payload) == "step"
    assert step_fields(payload) == (
        *(DP, 12, ORIGIN + 5, 1000, (100, -1, 200, 300, -1, 50), (30, -1, -1, -1), b"", -1),
    )


COPIED = {"copy": 40, "copied_bytes": 1 << 20}


def test_a_step_that_has_copied() -> None:
    payload = with_extras(pack_step(DP, 12, ORIGIN, 1000, 30, (100, 200, 300, 50)), COPIED)
    step = read(payload)
    assert isinstance(step, Step)
    assert step.phases == {"data": 100, "copy": 40, "forward": 200, "backward": 300, "optimizer": 50, "other": 310}
    assert list(step.phases) == [name for name in STEP_PHASES if name != "sync"]
    assert (step.quantities, kind_of(payload)) == ({"copied_bytes": 1 << 20}, "step")
    assert (step.quantity("copied_bytes"), step.quantity("samples")) == (1 << 20, 30)
    assert step_fields(payload) == (
        *(DP, 12, ORIGIN, 1000, (100, 40, 200, 300, -1, 50), (30, 1 << 20, -1, -1), b"", -1),
    )
    timed = pack_timed(payload, [1.0, 2.0, 3.0, 4.0, 0.5], 0)
    times = {"data": 1.0, "forward": 2.0, "backward": 3.0, "optimizer": 4.0, "copy": 0.5}
    found, kept = read(timed), step_times(timed)
    assert isinstance(found, Step)
    assert kept is not None
    assert found.device_ms == known_times(kept) == times
    assert kept_step_times(step, kept) == found
    said = as_json(found)
    assert (said["phases"]["copy"], said["copied_bytes"]) == (4e-5, 1 << 20)
    assert list(said["device_ms"]) == [name for name in STEP_PHASES if name in TIMED_PHASES and name != "sync"]
    backwards = with_extras(pack_step(DP, 12, ORIGIN, 1000, 30, (100, 200, 300, 50)), dict(reversed(COPIED.items())))
    assert read(backwards) == step


def extras(*pairs: tuple[int, int], count: int | None = None) -> bytes:
    """Return a step with these extras (numbers and values)."""
    plain = pack_step(DP, 12, ORIGIN, 1000, 30, (100, 200, 300, 50))
    tail = b"".join(STEP_EXTRA.pack(*pair) for pair in pairs)
    return bytes((*plain[:2], len(pairs) if count is None else count)) + plain[3:] + tail


@pytest.mark.parametrize(
    "payload",
    [
        *(extras((0, 40), (1, 1 << 20))[:-missing] for missing in (1, 8, 9, 15)),
        extras((0, 40), (1, 1 << 20)) + b"\0",
        extras((0, 40), count=0),
        extras((0, 40), count=2),
        extras(count=255),
        extras((len(STEP_EXTRAS), 40)),
        extras((255, 40)),
        extras((0, 40), (0, 50)),
        extras((1, -1)),
        extras((0, -(1 << 63))),
    ],
)
def test_a_step_with_damaged_extras_is_no_record(payload: bytes) -> None:
    for damaged in (payload, pack_timed(payload, [1.0], 0)):
        with pytest.raises(RecordError):
            Decoder(7).decode(damaged)


def test_a_step_without_copies_has_no_copy_fields() -> None:
    step = read(pack_step(DP, 12, ORIGIN, 1000, 30, (100, 200, 300, 50)))
    assert isinstance(step, Step)
    assert (step.quantities, "copy" in step.phases, "copied_bytes" in as_json(step)) == ({}, False, False)


SHORT = ((0, 0, 100), (1, 100, 250), (4, 120, 40), (2, 360, 300), (2, 660, 0), (3, 700, 50))
"""Phase, start after the step's start, duration."""
SECONDS = tuple((phase, at * 10**7, took * 10**7) for phase, at, took in SHORT)


def with_spans(
    spans: Sequence[tuple[int, int, int]], wall: int, missing: int = 0, start: int = ORIGIN, **more: int
) -> bytes:
    words = span_words([(phase, start + at, took) for phase, at, took in spans], start, wall, missing)
    payload = pack_step(DP, 12, start, wall, 30, (100, 200, 300, 50), words)
    return with_extras(payload, more) if more else payload


@pytest.mark.parametrize("missing", [0, 1, 70_000])
@pytest.mark.parametrize("more", [{}, COPIED])
@pytest.mark.parametrize("spans", [(), SHORT, SHORT * 40, SECONDS, SECONDS * 40])
def test_the_spans_of_a_step(spans: tuple[tuple[int, int, int], ...], more: dict[str, int], missing: int) -> None:
    payload = with_spans(spans, 10**10, missing, **more)
    for one in (payload, pack_timed(payload, [None] * 5, 3)):
        step = read(one)
        assert isinstance(step, Step)
        assert step.spans == tuple(PhaseSpan(SPAN_PHASES[phase], at, took) for phase, at, took in spans)
        assert step.missing_spans == missing
        assert (step.wall_ns, step.phases["backward"], step.quantities) == (
            *(10**10, 300),
            {name: value for name, value in more.items() if name not in step.phases},
        )
        kept = step_fields(one).spans
        assert kept_spans(kept) == (step.spans, missing, ())
    narrow = spans is not SECONDS and spans != SECONDS * 40
    assert len(kept) == 8 * (len(spans) * (1 if narrow else 2) + (not narrow or missing > 0 or not spans))


def test_spans_at_the_limits_of_their_packed_fields() -> None:
    for at in (0, (1 << 30) - 1, 1 << 30, 1 << 57):
        for took in (0, (1 << 30) - 1, 1 << 30, 1 << 57):
            step = read(with_spans([(4, at, took)], 1 << 58, start=0))
            assert isinstance(step, Step)
            assert step.spans == (PhaseSpan("copy", at, took),)


def test_spans_that_reach_out_of_the_step_end_with_it() -> None:
    words = span_words([(1, 90, 1 << 40), (2, 150, 20), (3, 1 << 50, 7)], 100, 60)
    step = read(pack_step(DP, 1, 100, 60, 4, (-1,) * 4, words))
    assert isinstance(step, Step)
    assert step.spans == (PhaseSpan("forward", 0, 60), PhaseSpan("backward", 50, 10), PhaseSpan("optimizer", 60, 0))


@pytest.mark.parametrize(
    "words",
    [
        [13],
        [1, SPAN_PHASE],
        [1] * (2 + 2 * MAX_SPANS),
        [SPAN_PHASE | SPAN_HEAD_WIDE, 1],
        [SPAN_PHASE | SPAN_HEAD_WIDE, 7, 5],
    ],
)
def test_damaged_spans_are_no_record(words: list[int]) -> None:
    with pytest.raises(RecordError):
        Decoder(7).decode(pack_step(DP, 12, ORIGIN, 1000, 30, (100, 200, 300, 50), words))


@pytest.mark.parametrize("ran", range(16))
def test_phases_that_did_not_run_are_missing(ran: int) -> None:
    took = tuple(10 * (k + 1) if ran & 1 << k else -1 for k in range(4))
    step = read(pack_step(SINGLE, 1, 0, 1000, -1, took))
    assert isinstance(step, Step)
    names = [name for k, name in enumerate(("data", "forward", "backward", "optimizer")) if ran & 1 << k]
    assert list(step.phases) == [*names, "other"]
    assert sum(step.phases.values()) == step.wall_ns
    assert step.samples is None
    phases = tuple(n for k in range(4) for n in ((k, 10) if ran & 1 << k else (-1, 0)))
    found = call_of(call(phases=phases))
    assert list(found.phases) == [name for k, name in enumerate(CALL_PHASES) if ran & 1 << k]


def test_a_phase_of_no_time_at_all_did_run() -> None:
    step = read(pack_step(DP, 1, 0, 10, 0, (0, 5, -1, -1)))
    assert isinstance(step, Step)
    assert step.phases == {"data": 0, "forward": 5, "other": 5}
    assert step.samples == 0


def test_an_event() -> None:
    data = {"process": 1, "text": "ünïcode \u202e\x1b[31m", "nested": {"a": [1, None, 2.5]}}
    payload = pack_event("warning", data)
    assert read(payload) == Event("warning", data)
    assert as_json(read(payload)) == {"kind": "warning", **data}
    assert kind_of(payload) == "event"


def test_a_definition() -> None:
    payload = pack_definition(9, LAYOUT)
    assert kind_of(payload) == "definition"
    assert definition(payload) == (9, LAYOUT)


def test_a_definition_may_come_again_and_may_change() -> None:
    known = decoder(pack_definition(4, [["", [10, 9], "int64", 720]]))
    found = known.decode(call())
    assert isinstance(found, Call)
    assert found.outputs == (Size("", (10, 9), "int64", 720),)


@pytest.mark.parametrize("changes", [{"layout": 99}, {"inputs": 99}, {"outputs": 99}, {"replicas": (99, 4, 0, 0)}])
def test_a_definition_that_was_not_seen(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        read(call(**changes))


def test_rows_are_those_of_the_first_tensor_that_has_any() -> None:
    known = decoder(pack_definition(2, [["0", [], "float32", 4], ["1", [12, 3], "float32", 144]]))
    found = known.decode(call())
    assert isinstance(found, Call)
    assert found.rows == 12
    assert call_of(call(inputs=0)).rows is None


def test_a_call_over_eight_replicas_takes_at_most_400_bytes(tmp_path: Path) -> None:
    """In the ring, with everything around it."""
    path = str(tmp_path / "a.ring")
    ring = Ring(path, process=0, capacity=2 * BLOCK_BYTES)
    reader = RingReader(path)
    ends = []
    for number in range(20):
        ring.write(call(call=number, replicas=(3, 4, 330, 3000) * 8))
        assert len(reader.read()) == 1
        ends.append(reader.position)
    reader.close()
    assert max(after - before for before, after in pairwise(ends)) <= 400


# ------------------------------------------------------------------------------------------------ JSON

CALL_KEYS = [
    "kind", "process", "rank", "step", "call", "root", "via", "mode", "virtual", "training", "grad", "start_s",
    "devices", "phases", "replicas", "inputs", "outputs",
]  # fmt: skip
"""The example of a record, with its duration and the reasons for absent values."""
STEP_KEYS = ["kind", "process", "rank", "step", "mode", "start_s", "wall_ms", "samples", "phases", "spans"]


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
    flags = call_flags(virtual=False, training=True, grad=True, failed=True)
    found = as_json(read(call(flags=flags, outputs=0, replicas=())))
    assert set(found) == {*CALL_KEYS, "wall_ms", "absent"}
    assert found["outputs"] is None
    assert "raised" in found["absent"]["outputs"]
    assert found["replicas"] == []


def test_the_json_of_a_step() -> None:
    spans = [(0, ORIGIN + 2_000_000, 1000), (1, ORIGIN + 2_001_250, 2000)]
    words = span_words(spans, ORIGIN + 2_000_000, 1_000_000)
    found = as_json(read(pack_step(DP, 12, ORIGIN + 2_000_000, 1_000_000, 30, (1000, 2000, -1, -1), words)))
    assert set(found) == {*STEP_KEYS, "absent"}
    assert found["spans"] == [
        {"phase": "data", "start_ms": 0.0, "ms": 0.001},
        {"phase": "forward", "start_ms": 0.00125, "ms": 0.002},
    ]
    assert (found["kind"], found["process"], found["rank"], found["step"]) == ("step", 7, 2, 12)
    assert (found["mode"], found["start_s"], found["wall_ms"], found["samples"]) == ("dp", 0.002, 1.0, 30)
    assert found["phases"] == {"data": 0.001, "forward": 0.002, "other": 0.997}
    assert found["absent"] == {}


def test_missing_spans_are_counted_and_reported() -> None:
    found = as_json(read(with_spans(SHORT, 1000, 44)))
    assert (len(found["spans"]), found["missing_spans"]) == (len(SHORT), 44)
    assert found["absent"] == {"spans": f"only the first {len(SHORT)} of a step are recorded"}
    without = as_json(read(pack_step(DP, 12, ORIGIN, 1000, 30, (100, 200, 300, 50))))
    assert (without["spans"], without["absent"], "missing_spans" in without) == ([], {}, False)


def test_samples_that_are_unknown_are_null_with_a_reason() -> None:
    found = as_json(read(pack_step(DP, 12, ORIGIN, 1_000_000, -1, (-1, 2000, -1, -1))))
    assert found["samples"] is None
    assert found["absent"]["samples"]


# ------------------------------------------------------------------------------------------------ what is no record

HOSTILE = [
    b"",
    b"\x00",
    b"\x09whatever",
    b"\x04",
    b"\x04{",
    b"\x04[]",
    b'\x04"text"',
    b"\x04{}",
    b'\x04{"kind": ["a"]}'[:-3],
    b"\x04" + b"[" * 200_000,
    b'\x04{"kind":"a","n":' + b"9" * 10_000 + b"}",
    b"\x04\xff\xfe{}",
    b"\x01",
    b"\x01\0\0\0\1\0\0\0",
    b"\x01\0\0\0\1\0\0\0{}",
    b"\x01\0\0\0\1\0\0\0null",
    b"\x01\0\0\0\1\0\0\0[[1]]",
    b"\x01\0\0\0\1\0\0\0[[1,2,3,4]]",
    b'\x01\0\0\0\1\0\0\0[["0",[1,2],"float32","many"]]',
    b'\x01\0\0\0\1\0\0\0[["0",["x"],"float32",4]]',
    b'\x01\0\0\0\1\0\0\0[["0",[NaN],"float32",4]]',
    b'\x01\0\0\0\1\0\0\0{"root":1,"via":2,"devices":3,"absent":4}',
    b'\x01\0\0\0\1\0\0\0{"root":1,"via":2,"devices":[],"absent":[]}',
    b"\x01\0\0\0\1\0\0\0" + b'{"a":' * 100_000,
]


@pytest.mark.parametrize("payload", HOSTILE, ids=lambda payload: repr(payload[:40]))
def test_bytes_that_do_not_form_a_record(payload: bytes) -> None:
    with pytest.raises(RecordError):
        decoder().decode(payload)


@pytest.mark.parametrize("text", [b"1e999", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize("where", [b'[["0",[%s],"float32",4]]', b'[["0",[1],"float32",%s]]'])
def test_sizes_that_are_nested_or_too_large_are_refused(text: bytes, where: bytes) -> None:
    with pytest.raises(RecordError):
        decoder().decode(b"\x01\0\0\0\1\0\0\0" + where % text)


def survives(known: Decoder, payload: bytes) -> Record | None:
    """Check that decoding raises at most RecordError, and that the record has JSON."""
    try:
        found = known.decode(payload)
    except RecordError:
        return None
    if found is not None:
        json.dumps(as_json(found))
    kind_of(payload)
    return found


def test_random_bytes() -> None:
    chance = random.Random(1)
    known = decoder()
    for _ in range(20_000):
        payload = bytes((chance.randrange(7),)) + chance.randbytes(chance.choice((0, 3, 40, 64, 65, 200, 304)))
        survives(known, payload)


def test_real_records_with_bytes_changed() -> None:
    chance = random.Random(2)
    originals = [
        call(),
        call(replicas=(3, 4, 330, 3000) * 8),
        pack_step(DP, 12, ORIGIN, 1000, 30, (100, 200, 300, 50)),
        with_spans(SHORT, 1000),
        with_spans(SECONDS, 10**10, 3, **COPIED),
        pack_event("mode", {"process": 0, "mode": "dp", "devices": ["cpu"]}),
        *(pack_definition(number, value) for number, value in enumerate((LAYOUT, IN, SHARE, OUT), 1)),
    ]
    survived = 0
    for _ in range(10_000):
        data = bytearray(chance.choice(originals))
        for _ in range(chance.choice((1, 1, 2, 8))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        survived += survives(decoder() if chance.random() < 0.1 else Decoder(0), bytes(data)) is not None
    assert survived > 100


def test_more_replicas_than_devices() -> None:
    with pytest.raises(RecordError):
        read(call(replicas=(3, 4, 0, 0) * 4))
    with pytest.raises(RecordError, match="replicas"):
        read(call(replicas=(3, 4, 0, 0) * 5000))


def test_a_decoder_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops the oldest definitions; the tracer writes those in use again from time to time."""
    monkeypatch.setattr("dpmon.record.codec.MAX_DEFINITIONS", 100)
    known = decoder()
    for number in range(5, 400):
        assert known.decode(pack_definition(number, OUT)) is None
    with pytest.raises(RecordError):
        known.decode(call())
    for number, value in enumerate((LAYOUT, IN, SHARE, OUT), 1):
        assert known.decode(pack_definition(number, value)) is None
    assert isinstance(known.decode(call()), Call)
