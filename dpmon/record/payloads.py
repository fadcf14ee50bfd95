"""Reads single numbers from the bytes of records, without decoding a record."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from dpmon.record.kinds import PartTimes
from dpmon.record.plainjson import load_json
from dpmon.record.schema import QUANTITIES, STEP_PHASES, SYNC_NUMBER
from dpmon.record.wire import (
    BODY_PHASES,
    CALL_FORMAT,
    CALL_PHASES,
    CALL_STAGE,
    CALL_TAG,
    DEFINE_HEAD,
    PLAIN_FORMAT,
    PLAIN_TAG,
    STEP_BODY,
    STEP_EXTRA,
    STEP_EXTRAS,
    STEP_TAG,
    TIMED_HEAD,
    TIMED_PHASES,
    TIMED_TAG,
)

UNTIMED = (
    "",
    "the device had not finished it after 64 more steps",
    "a CUDA graph was being captured: an event recorded then becomes part of the graph",
    "too few events were free: the device is so far behind that most of its 256 events are in use",
    "the device's events failed",
    "the process ended before the device had finished it",
    "it raised an exception",
    "the device is the CPU: host time is all there is",
    "it began on one stream and ended on another, which was ahead",
    "the step has more phases than can be timed (4096)",
    "the step copies more tensors to devices than can be timed (16)",
    "steps are so short that only a random sample of them is timed on devices",
)
"""Why a device time is unknown: the texts for the numbers of `dpmon.record.wire.Untimed`."""
BACKWARD_AT, OPTIMIZER_AT = STEP_PHASES.index("backward"), STEP_PHASES.index("optimizer")
QUANTITY_NAMES = tuple(quantity.name for quantity in QUANTITIES)
SAMPLES_AT = QUANTITY_NAMES.index("samples")
_BEFORE = "it ran before the first call on a GPU, or not on the training thread"
_KINDS = ("", "definition", "call", "step", "event", "call", "", "collective")
MAX_TIMES = 1 << 13
_PLAIN = struct.Struct(PLAIN_FORMAT)
_NO_PHASES = (-1, 0) * len(CALL_PHASES)
_CALL_HEAD = struct.Struct(CALL_FORMAT)
_CALL_REPLICA = struct.Struct("<IIqq")


def kind_of(payload: bytes) -> str:
    """Return the kind of a payload without decoding it, such as "call", "step" or "event"; "" if unknown."""
    if payload[:1] == _TIMED_BYTE:
        inner = payload[TIMED_HEAD.size : TIMED_HEAD.size + 1]
        return _KINDS[inner[0]] if inner and inner[0] in (CALL_TAG, PLAIN_TAG, STEP_TAG) else ""
    return _KINDS[payload[0]] if payload and payload[0] < len(_KINDS) else ""


_TIMED_BYTE = bytes((TIMED_TAG,))


def timed(payload: bytes) -> tuple[bytes, tuple[float, ...], int]:
    """Return the call or step in a timed record, its times (ms, NaN if unknown) and the number of the reason.

    Raises struct.error if it is damaged.
    """
    _, why, count, size = TIMED_HEAD.unpack_from(payload)
    start = TIMED_HEAD.size
    inner = payload[start : start + size]
    if len(inner) != size or not inner or inner[0] not in (CALL_TAG, PLAIN_TAG, STEP_TAG) or count > MAX_TIMES:
        raise struct.error("a timed record is cut off")
    return inner, struct.unpack_from(f"<{count}f", payload, start + size), why


def is_timed(payload: bytes) -> bool:
    """Whether a call or step has a list of device times, known or unknown."""
    return payload[0] == TIMED_TAG


def without_times(payload: bytes) -> bytes:
    """Return a call or step without its device times. Raises struct.error if it is damaged."""
    return payload if payload[0] != TIMED_TAG else timed(payload)[0]


def known_ms(time: float) -> float | None:
    """Return a time from a record (ms), rounded to six decimals; None if it is unknown (NaN) or implausible."""
    return round(time, 6) if 0 <= time < 1e9 else None


def untimed_reason(times: Iterable[float | None], why: int) -> str | None:
    return None if all(time is not None for time in times) else untimed_text(why)


def untimed_text(number: int) -> str:
    return UNTIMED[number] if 0 < number < len(UNTIMED) else _BEFORE


def step_times(payload: bytes) -> bytes | None:
    """Return the packed device times of a step, as the store keeps them; None if it has none."""
    if payload[0] != TIMED_TAG:
        return None
    head = TIMED_HEAD.size
    return payload[:head] + payload[head + TIMED_HEAD.unpack_from(payload)[3] :]


def known_times(payload: bytes) -> dict[str, float]:
    """Return the known device times (ms) by phase. `payload`: a timed call, or the `step_times` of a step."""
    _, _, count, _ = TIMED_HEAD.unpack_from(payload)
    names = TIMED_PHASES if len(payload) == TIMED_HEAD.size + 4 * count else CALL_PHASES
    times = struct.unpack_from(f"<{min(count, len(names))}f", payload, len(payload) - 4 * count)
    return {name: time for name, raw in zip(names, times, strict=False) if (time := known_ms(raw)) is not None}


def why_number(payload: bytes) -> int:
    """Return why a time of a timed call is missing, as an index in UNTIMED; 0 if none is missing."""
    _, why, count, _ = TIMED_HEAD.unpack_from(payload)
    times = struct.unpack_from(f"<{count}f", payload, len(payload) - 4 * count)
    return 0 if all(known_ms(time) is not None for time in times) else why


def part_times(payload: bytes) -> PartTimes:
    """Return the times of a timed call's replicas or stages, in order, without decoding the call."""
    _, why, count, _ = TIMED_HEAD.unpack_from(payload)
    parts = max(count - len(CALL_PHASES), 0)
    times = [known_ms(time) for time in struct.unpack_from(f"<{parts}f", payload, len(payload) - 4 * parts)]
    return PartTimes(times, untimed_text(why))


def call_head(payload: bytes) -> tuple[int, ...]:
    """Return a call's numbers as in the payload. Raises struct.error if it is cut off.

    They are mode, flags, number of stages, layout, step, call, start_ns, wall_ns, inputs, outputs, then offset and
    duration for each of CALL_PHASES (offset -1: did not run). start_ns is on the absolute monotonic clock. Layout,
    inputs and outputs are numbers of definitions.
    """
    payload = without_times(payload)
    if payload[0] == PLAIN_TAG:
        return (*_PLAIN.unpack(payload)[1:], *_NO_PHASES)
    return _CALL_HEAD.unpack_from(payload)[1:]


def call_replicas(payload: bytes) -> list[tuple[int, int, int, int]]:
    """Return (inputs, outputs, offset_ns, host_ns) of each replica. Inputs and outputs are numbers of definitions.

    Raises struct.error if the call is cut off.
    """
    payload = without_times(payload)
    if payload[0] == PLAIN_TAG:
        *_, wall, inputs, outputs = _PLAIN.unpack(payload)
        return [(inputs, outputs, 0, wall)]
    return list(_CALL_REPLICA.iter_unpack(memoryview(payload)[_CALL_HEAD.size : _stages_at(payload)]))


def call_stages(payload: bytes) -> list[tuple[int, int, int, int, int]]:
    """Return (device and parts, inputs, outputs, offset_ns, host_ns) of each stage; the first three are definitions.

    Raises struct.error if the call is cut off.
    """
    payload = without_times(payload)
    if payload[0] == PLAIN_TAG or not payload[3]:
        return []
    return list(CALL_STAGE.iter_unpack(memoryview(payload)[_stages_at(payload) :]))


def _stages_at(payload: bytes) -> int:
    """Return the offset of the stages, which come last."""
    at = len(payload) - payload[3] * CALL_STAGE.size
    if at < _CALL_HEAD.size:
        raise struct.error("a call is cut off")
    return at


class StepFields(NamedTuple):
    """A step's numbers as in its payload; -1 if a phase did not run or a quantity is unknown."""

    mode: int
    step: int
    start_ns: int
    """On the absolute monotonic clock."""
    wall_ns: int
    phases: tuple[int, ...]
    """In the order of STEP_PHASES, without the last."""
    quantities: tuple[int, ...]
    """In the order of dpmon.record.schema.QUANTITIES."""
    spans: bytes
    """Packed spans for `kept_spans`; empty if unknown."""
    sync_number: int
    """Number of its last synchronised backward pass."""


_IN_STEP = ("samples", *BODY_PHASES, *STEP_EXTRAS)
_phases_in = itemgetter(*map(_IN_STEP.index, STEP_PHASES[:-1]))
_quantities_in = itemgetter(*map(_IN_STEP.index, QUANTITY_NAMES))
_SYNC_NUMBER_AT = _IN_STEP.index(SYNC_NUMBER)
_NO_EXTRAS = (-1,) * len(STEP_EXTRAS)


def step_fields(payload: bytes) -> StepFields:
    """Return a step's numbers. Raises struct.error if it is damaged."""
    payload = without_times(payload)
    _, mode, count, words, step, start, wall, *numbers = STEP_BODY.unpack_from(payload)
    after_spans = STEP_BODY.size + 8 * words
    numbers += _extras(payload, after_spans, count) if count or len(payload) != after_spans else _NO_EXTRAS
    spans = payload[STEP_BODY.size : after_spans]
    phases, quantities = _phases_in(numbers), _quantities_in(numbers)
    return StepFields(mode, step, start, wall, phases, quantities, spans, numbers[_SYNC_NUMBER_AT])


def _extras(payload: bytes, begin: int, count: int) -> list[int]:
    """Return the extras of a step in the order of STEP_EXTRAS; -1: missing. Raises struct.error if they are damaged."""
    if len(payload) != begin + count * STEP_EXTRA.size:
        raise struct.error("a step is cut off")
    found = list(_NO_EXTRAS)
    for number, value in STEP_EXTRA.iter_unpack(memoryview(payload)[begin:]):
        if number >= len(found) or found[number] >= 0 or value < 0:
            raise struct.error("an extra of a step is unknown, repeated or negative")
        found[number] = value
    return found


def definition(payload: bytes) -> tuple[int, Any]:
    """Return a definition's number and value. Raises ValueError or struct.error if it is damaged."""
    return DEFINE_HEAD.unpack_from(payload)[1], load_json(payload[DEFINE_HEAD.size :])
