"""Reads records from their bytes.

`dpmon.record.wire` makes the bytes; a `Decoder` makes objects of them. Code that only counts and sums reads single
numbers instead, without decoding a record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from dpmon.record.kinds import (
    Call,
    Collective,
    Event,
    PartTimes,
    Phase,
    Record,
    RecordError,
    Replica,
    Sampled,
    Size,
    Stage,
    Step,
    collective_in,
)
from dpmon.record.plainjson import load_event, load_json
from dpmon.record.schema import QUANTITIES, STEP_PHASES, SYNC_NUMBER
from dpmon.record.spans import DOING
from dpmon.record.step_spans import kept_spans
from dpmon.record.wire import (
    BODY_PHASES,
    CALL_FORMAT,
    CALL_PHASES,
    CALL_STAGE,
    CALL_TAG,
    COLLECTIVE_TAG,
    DEFINE_HEAD,
    DEFINE_TAG,
    EVENT_TAG,
    FAILED,
    GRAD,
    MODES,
    PLAIN_FORMAT,
    PLAIN_TAG,
    STEP_BODY,
    STEP_EXTRA,
    STEP_EXTRAS,
    STEP_TAG,
    TIMED_HEAD,
    TIMED_PHASES,
    TIMED_TAG,
    TRAINING,
    VIRTUAL,
    Collected,
    unpack_collective,
)

UNTIMED = (
    "",
    "the device had not come to its end when 64 more steps were over",
    "a CUDA graph was being captured: what is recorded then becomes a part of it",
    "too few events were free: the device is so far behind that most of its 256 events are under way",
    "the device's events failed",
    "the process ended before the device had come to its end",
    "it raised an exception",
    "the device is the CPU: host time is all there is",
    "it began on one stream and ended on another, which was ahead",
    "the step has more phases than are timed: 4096",
    "the step copies more tensors to devices than are timed: 16",
    "steps are so short that only some of them are timed on devices, drawn at random",
)
"""Texts of the reasons, by number."""
UNENDED = (
    "",
    "it ran on a device, and the host does not wait for its end",
    "it was not complete after 10 s",
    "the process ended before it was complete",
    "gloo does not tell when a reduce_scatter is complete",
)
"""Texts of the reasons why the end of a collective is unknown, by number."""
BACKWARD_AT, OPTIMIZER_AT = STEP_PHASES.index("backward"), STEP_PHASES.index("optimizer")
_QUANTITY_NAMES = tuple(quantity.name for quantity in QUANTITIES)
SAMPLES_AT = _QUANTITY_NAMES.index("samples")
_BEFORE = "it ran before the first call on a GPU, or on a thread that does not train"
_KINDS = ("", "definition", "call", "step", "event", "call", "", "collective")
_MAX_TIMES = 1 << 13
_PLAIN = struct.Struct(PLAIN_FORMAT)
_NO_PHASES = (-1, 0) * len(CALL_PHASES)
_CALL_HEAD = struct.Struct(CALL_FORMAT)
_CALL_REPLICA = struct.Struct("<IIqq")

MAX_REPLICAS = 4096
MAX_DEFINITIONS = 1 << 16
"""Limit of definitions in a decoder. The writer repeats those in use, so the oldest may be forgotten."""


# ------------------------------------------------------------------------------------------------ decoding


def _sizes(value: Any) -> tuple[Size, ...]:
    return tuple(
        Size(str(path), _shape(shape), str(dtype), int(count), _shape(wholes[0]) if wholes else None)
        for path, shape, dtype, count, *wholes in value
    )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(extent) for extent in value)


@dataclass(frozen=True, slots=True)
class _Layout:
    root: str
    via: str | None
    devices: tuple[str, ...]
    absent: dict[str, str]


def _layout(value: dict[str, Any]) -> _Layout:
    return _Layout(
        str(value["root"]),
        None if value["via"] is None else str(value["via"]),
        tuple(str(name) for name in value["devices"]),
        {str(key): str(reason) for key, reason in value["absent"].items()},
    )


_made = tuple.__new__


_SAMPLE = {"operation": None, "why": None}
"""Stands for the definition of a sample."""


class Decoder:
    """Turns one process's payloads into records, resolving definitions; `origin_ns` is the run's start (monotonic)."""

    def __init__(self, process: int, rank: int | None = None, origin_ns: int = 0) -> None:
        self.process = process
        self.rank = rank
        self.origin_ns = origin_ns
        self._layouts: dict[int, _Layout] = {}
        self._sizes: dict[int, tuple[Size, ...]] = {}
        self._stages: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._collectives: dict[int, dict[str, Any]] = {}

    def decode(self, payload: bytes) -> Record | None:
        """The record in `payload`; None for a definition, which is remembered. Raises RecordError for anything else."""
        try:
            kind = payload[0]
            if kind in (CALL_TAG, PLAIN_TAG):
                return self._call(payload)
            if kind == STEP_TAG:
                return self._step(payload)
            if kind == TIMED_TAG:
                inner, times, why = _timed(payload)
                if inner[0] == STEP_TAG:
                    return _with_step_times(self._step(inner), times, why)
                return _with_times(self._call(inner), times, why)
            if kind == EVENT_TAG:
                return Event(*load_event(payload[1:]))
            if kind == COLLECTIVE_TAG:
                return self.collective(unpack_collective(payload))
            if kind == DEFINE_TAG:
                self.define(*definition(payload))
                return None
        except (
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            ArithmeticError,
            struct.error,
            RecursionError,
        ) as error:
            raise RecordError(f"unreadable record: {type(error).__name__}: {error}") from None
        raise RecordError(f"unknown kind of record: {kind}")

    def define(self, number: int, value: Any) -> None:
        """Remember a definition; LookupError, ValueError, TypeError or AttributeError if it is damaged."""
        if isinstance(value, dict) and "parts" in value:
            self._stages.pop(number, None)
            self._stages[number] = str(value["device"]), tuple(str(name) for name in value["parts"])
        elif isinstance(value, dict) and "operation" in value:
            self._collectives.pop(number, None)
            self._collectives[number] = collective_in(value)
        elif isinstance(value, dict):
            self._layouts.pop(number, None)
            self._layouts[number] = _layout(value)
        else:
            self._sizes.pop(number, None)
            self._sizes[number] = _sizes(value)
        tables: tuple[dict[int, Any], ...] = (self._layouts, self._sizes, self._stages, self._collectives)
        for table in tables:
            if len(table) > MAX_DEFINITIONS:
                del table[next(iter(table))]

    def _known(self, number: int) -> tuple[Size, ...] | None:
        return None if number == 0 else self._sizes[number]

    def _call(self, payload: bytes) -> Call:
        mode, flags, staged, layout_number, step, call, start, wall, inputs, outputs, *phases = call_head(payload)
        shares = call_replicas(payload)
        if len(shares) > MAX_REPLICAS:
            raise RecordError("more replicas than any machine has devices")
        layout, sizes = self._layouts[layout_number], self._sizes
        devices = layout.devices
        return Call(
            process=self.process,
            rank=self.rank,
            step=step,
            call=call,
            root=layout.root,
            via=layout.via,
            mode=MODES[mode],
            virtual=bool(flags & VIRTUAL),
            training=bool(flags & TRAINING),
            grad=bool(flags & GRAD),
            failed=bool(flags & FAILED),
            start_ns=start - self.origin_ns,
            wall_ns=wall,
            devices=devices,
            phases={
                name: _made(Phase, (offset, took, None))
                for name, offset, took in zip(CALL_PHASES, phases[::2], phases[1::2], strict=True)
                if offset >= 0
            },
            replicas=tuple(
                [
                    # The constructor would take twice as long, and this runs millions of times.
                    _made(
                        Replica,
                        (i, devices[i], offset, took, sizes[got] if got else None, sizes[gave] if gave else None, None),
                    )
                    for i, (got, gave, offset, took) in enumerate(shares)
                ]
            ),
            inputs=self._known(inputs),
            outputs=self._known(outputs),
            absent=layout.absent,
            stages=tuple(self._stage(i, *stage) for i, stage in enumerate(call_stages(payload))) if staged else (),
        )

    def _stage(self, index: int, number: int, got: int, gave: int, offset: int, took: int) -> Stage:
        device, parts = self._stages[number]
        ended = took if took >= 0 else None
        return Stage(index, device, parts, offset, ended, self._known(got), self._known(gave))

    def _step(self, payload: bytes) -> Step:
        mode, step, start, wall, phases, quantities, packed, sync_number = step_fields(payload)
        spans, missing, buckets = kept_spans(packed) if packed else (None, 0, ())
        known = {name: took for name, took in zip(STEP_PHASES, phases, strict=False) if took >= 0}
        known["other"] = max(0, wall - sum(known.values()))
        counted = {name: count for name, count in zip(_QUANTITY_NAMES, quantities, strict=True) if count >= 0}
        return Step(
            process=self.process,
            rank=self.rank,
            step=step,
            mode=MODES[mode],
            start_ns=start - self.origin_ns,
            wall_ns=wall,
            samples=counted.pop("samples", None),
            phases=known,
            quantities=counted,
            spans=spans,
            missing_spans=missing,
            buckets=buckets,
            sync_number=sync_number if sync_number >= 0 else None,
        )

    def facts(self, number: int) -> dict[str, Any]:
        """The facts about collectives with this definition; LookupError if it is unknown."""
        return self._collectives[number]

    def collective(self, one: Collected) -> Collective | Sampled:
        """The record of a collective, or of a sample; LookupError if it refers to an unknown definition."""
        facts: dict[str, Any] = self._collectives[one.definition] if one.definition else _SAMPLE
        start, step = one.start - self.origin_ns, one.step or None
        if facts["operation"] is None:
            why = facts["why"]
            count = one.quantity if why is None else None
            return Sampled(self.process, self.rank, step, start, max(one.took, 0), count, why)
        ranks = facts["ranks"]
        return Collective(
            process=self.process,
            rank=self.rank,
            step=step,
            operation=facts["operation"],
            phase=DOING.get(one.phase, "other"),
            bytes=one.quantity,
            dtype=facts["dtype"],
            group=facts["group"],
            size=facts["size"],
            ranks=None if ranks is None else tuple(ranks),
            backend=facts["backend"],
            device=facts["device"],
            start_ns=start,
            took_ns=one.took if one.took >= 0 else None,
            queued_ns=one.queued if one.queued >= 0 else None,
            unended=UNENDED[one.unended] if 0 < one.unended < len(UNENDED) else None,
        )


# ------------------------------------------------------------------------------------------- light reading


def kind_of(payload: bytes) -> str:
    """The kind of a payload without decoding it: definition, call, step, event, or "" if unknown."""
    if payload[:1] == _TIMED_BYTE:
        inner = payload[TIMED_HEAD.size : TIMED_HEAD.size + 1]
        return _KINDS[inner[0]] if inner and inner[0] in (CALL_TAG, PLAIN_TAG, STEP_TAG) else ""
    return _KINDS[payload[0]] if payload and payload[0] < len(_KINDS) else ""


_TIMED_BYTE = bytes((TIMED_TAG,))


def _timed(payload: bytes) -> tuple[bytes, tuple[float, ...], int]:
    """The call or step in a timed record, its times (NaN: unknown) and why one is missing; struct.error if damaged."""
    _, why, count, size = TIMED_HEAD.unpack_from(payload)
    start = TIMED_HEAD.size
    inner = payload[start : start + size]
    if len(inner) != size or not inner or inner[0] not in (CALL_TAG, PLAIN_TAG, STEP_TAG) or count > _MAX_TIMES:
        raise struct.error("a timed record is cut off")
    return inner, struct.unpack_from(f"<{count}f", payload, start + size), why


def is_timed(payload: bytes) -> bool:
    """Whether a call or step has device times."""
    return payload[0] == TIMED_TAG


def bare(payload: bytes) -> bytes:
    """A call or step without its device times; struct.error if it is damaged."""
    return payload if payload[0] != TIMED_TAG else _timed(payload)[0]


def _known_ms(time: float) -> float | None:
    """A time from a record; None if it is not plausible. Rounded to the precision of a 32-bit float."""
    return round(time, 6) if 0 <= time < 1e9 else None


def _reason(times: Iterable[float | None], why: int) -> str | None:
    return None if all(time is not None for time in times) else _why(why)


def _why(number: int) -> str:
    return UNTIMED[number] if 0 < number < len(UNTIMED) else _BEFORE


def _with_times(call: Call, times: Sequence[float], why: int) -> Call:
    """The call with its device times. A part that did not run has none, and needs no reason."""
    known = [_known_ms(time) for time in times]
    known += [None] * (len(CALL_PHASES) + max(len(call.replicas), len(call.stages)) - len(known))
    of_phases = dict(zip(CALL_PHASES, known, strict=False))
    rest = known[len(CALL_PHASES) :]
    phases = {name: phase._replace(device_ms=of_phases[name]) for name, phase in call.phases.items()}
    replicas = tuple(one._replace(device_ms=time) for one, time in zip(call.replicas, rest, strict=False))
    stages = tuple(replace(one, device_ms=time) for one, time in zip(call.stages, rest, strict=False))
    parts: tuple[Any, ...] = (*phases.values(), *replicas, *stages)
    reason = _reason([part.device_ms for part in parts], why)
    absent = {key: text for key, text in call.absent.items() if key != "device_ms"}
    if reason is not None:
        absent["device_ms"] = reason
    return replace(call, phases=phases, replicas=replicas, stages=stages, absent=absent)


def _with_step_times(step: Step, times: Sequence[float], why: int) -> Step:
    """The step with its device times, as `pack_timed` takes them."""
    found = {name: _known_ms(time) for name, time in zip(TIMED_PHASES, times, strict=False) if name in step.phases}
    return replace(step, device_ms=found, untimed=_reason(found.values(), why))


def step_times(payload: bytes) -> bytes | None:
    """The device times of a step, to be stored beside its columns; None if it has none."""
    if payload[0] != TIMED_TAG:
        return None
    head = TIMED_HEAD.size
    return payload[:head] + payload[head + TIMED_HEAD.unpack_from(payload)[3] :]


def known_times(payload: bytes) -> dict[str, float]:
    """The known device times (ms) by phase, of a timed call or of a step's `step_times`."""
    _, _, count, _ = TIMED_HEAD.unpack_from(payload)
    names = TIMED_PHASES if len(payload) == TIMED_HEAD.size + 4 * count else CALL_PHASES
    times = struct.unpack_from(f"<{min(count, len(names))}f", payload, len(payload) - 4 * count)
    return {name: time for name, one in zip(names, times, strict=False) if (time := _known_ms(one)) is not None}


def why_number(payload: bytes) -> int:
    """Why a time of a timed call is missing, as an index in UNTIMED; 0 if none is."""
    _, why, count, _ = TIMED_HEAD.unpack_from(payload)
    times = struct.unpack_from(f"<{count}f", payload, len(payload) - 4 * count)
    return 0 if all(_known_ms(time) is not None for time in times) else why


def part_times(payload: bytes) -> PartTimes:
    """The times of a timed call's replicas or stages, in order, without decoding the call."""
    _, why, count, _ = TIMED_HEAD.unpack_from(payload)
    parts = max(count - len(CALL_PHASES), 0)
    times = [_known_ms(time) for time in struct.unpack_from(f"<{parts}f", payload, len(payload) - 4 * parts)]
    return PartTimes(times, _why(why))


def kept_step_times(step: Step, kept: bytes) -> Step:
    """The step with its `step_times`; struct.error if they are damaged."""
    _, why, count, _ = TIMED_HEAD.unpack_from(kept)
    if count > _MAX_TIMES:
        raise struct.error("more times than a step has phases")
    return _with_step_times(step, struct.unpack_from(f"<{count}f", kept, TIMED_HEAD.size), why)


def call_head(payload: bytes) -> tuple[int, ...]:
    """A call's numbers as they are in the payload; struct.error if it is cut off.

    mode, flags, number of stages, layout, step, call, start_ns, wall_ns, inputs, outputs (start on the absolute
    monotonic clock; layout, inputs and outputs by definition), then offset and duration for each of CALL_PHASES (offset
    -1: did not run).
    """
    payload = bare(payload)
    if payload[0] == PLAIN_TAG:
        return (*_PLAIN.unpack(payload)[1:], *_NO_PHASES)
    return _CALL_HEAD.unpack_from(payload)[1:]


def call_replicas(payload: bytes) -> list[tuple[int, int, int, int]]:
    """For each replica: inputs, outputs (definitions), offset_ns, host_ns; struct.error if cut off."""
    payload = bare(payload)
    if payload[0] == PLAIN_TAG:
        *_, wall, inputs, outputs = _PLAIN.unpack(payload)
        return [(inputs, outputs, 0, wall)]
    return list(_CALL_REPLICA.iter_unpack(memoryview(payload)[_CALL_HEAD.size : _stages_at(payload)]))


def call_stages(payload: bytes) -> list[tuple[int, int, int, int, int]]:
    """For each stage: device and parts, inputs, outputs (definitions), offset_ns, host_ns; struct.error if cut off."""
    payload = bare(payload)
    if payload[0] == PLAIN_TAG or not payload[3]:
        return []
    return list(CALL_STAGE.iter_unpack(memoryview(payload)[_stages_at(payload) :]))


def _stages_at(payload: bytes) -> int:
    """Offset of the stages, which come last."""
    at = len(payload) - payload[3] * CALL_STAGE.size
    if at < _CALL_HEAD.size:
        raise struct.error("a call is cut off")
    return at


class StepFields(NamedTuple):
    """A step's numbers as they are in its payload; -1 if a phase did not run or a quantity is unknown."""

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
    """For `kept_spans`; empty if unknown."""
    sync_number: int
    """Of its last synchronised backward pass."""


_IN_STEP = ("samples", *BODY_PHASES, *STEP_EXTRAS)
_phases_in = itemgetter(*map(_IN_STEP.index, STEP_PHASES[:-1]))
_quantities_in = itemgetter(*map(_IN_STEP.index, _QUANTITY_NAMES))
_SYNC_NUMBER_AT = _IN_STEP.index(SYNC_NUMBER)
_NO_EXTRAS = (-1,) * len(STEP_EXTRAS)


def step_fields(payload: bytes) -> StepFields:
    """A step's numbers; struct.error if it is damaged."""
    payload = bare(payload)
    _, mode, count, words, step, start, wall, *numbers = STEP_BODY.unpack_from(payload)
    after_spans = STEP_BODY.size + 8 * words
    numbers += _extras(payload, after_spans, count) if count or len(payload) != after_spans else _NO_EXTRAS
    spans = payload[STEP_BODY.size : after_spans]
    phases, quantities = _phases_in(numbers), _quantities_in(numbers)
    return StepFields(mode, step, start, wall, phases, quantities, spans, numbers[_SYNC_NUMBER_AT])


def _extras(payload: bytes, begin: int, count: int) -> list[int]:
    """The extras of a step in the order of STEP_EXTRAS, -1 if it lacks one; struct.error if they are damaged."""
    if len(payload) != begin + count * STEP_EXTRA.size:
        raise struct.error("a step is cut off")
    found = list(_NO_EXTRAS)
    for number, value in STEP_EXTRA.iter_unpack(memoryview(payload)[begin:]):
        if number >= len(found) or found[number] >= 0 or value < 0:
            raise struct.error("an extra of a step is unknown, repeated or negative")
        found[number] = value
    return found


def definition(payload: bytes) -> tuple[int, Any]:
    """A definition's number and value; ValueError or struct.error if it is damaged."""
    return DEFINE_HEAD.unpack_from(payload)[1], load_json(payload[DEFINE_HEAD.size :])
