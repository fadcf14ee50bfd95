"""Reads records from their bytes.

`dpmon.record.wire` makes the bytes, and a `Decoder` converts them to objects. Code that only counts and sums uses
`dpmon.record.payloads` instead, which reads single numbers without decoding a record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpmon.record.kinds import (
    Call,
    CallPhase,
    Collective,
    Event,
    Record,
    RecordError,
    Replica,
    Sampled,
    Size,
    Stage,
    Step,
    collective_in,
)
from dpmon.record.payloads import (
    MAX_TIMES,
    QUANTITY_NAMES,
    call_head,
    call_replicas,
    call_stages,
    definition,
    known_ms,
    step_fields,
    timed,
    untimed_reason,
)
from dpmon.record.plainjson import load_event
from dpmon.record.schema import STEP_PHASES
from dpmon.record.spans import DOING
from dpmon.record.step_spans import kept_spans
from dpmon.record.wire import (
    CALL_PHASES,
    CALL_TAG,
    COLLECTIVE_TAG,
    DEFINE_TAG,
    EVENT_TAG,
    FAILED,
    GRAD,
    MODES,
    PLAIN_TAG,
    STEP_TAG,
    TIMED_HEAD,
    TIMED_PHASES,
    TIMED_TAG,
    TRAINING,
    VIRTUAL,
    Collected,
    unpack_collective,
)

UNENDED = (
    "",
    "it ran on a device, and the host does not wait for its end",
    "it was not complete after 10 s",
    "the process ended before it was complete",
    "gloo does not report when a reduce_scatter is complete",
)
"""Why the end of a collective is unknown: the texts for the numbers of `dpmon.record.wire.Unended`."""
MAX_REPLICAS = 4096
MAX_DEFINITIONS = 1 << 16
"""Most definitions of each sort in a decoder. Beyond this limit, it drops the oldest."""


# ------------------------------------------------------------------------------------------------ decoding


def _sizes(value: Any) -> tuple[Size, ...]:
    return tuple(
        Size(str(path), _shape(shape), str(dtype), int(count), _shape(wholes[0]) if wholes else None)
        for path, shape, dtype, count, *wholes in value
    )


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(extent) for extent in value)


@dataclass(frozen=True, slots=True)
class _CallLayout:
    root: str
    via: str | None
    devices: tuple[str, ...]
    absent: dict[str, str]
    dim: int


def _layout(value: dict[str, Any]) -> _CallLayout:
    return _CallLayout(
        str(value["root"]),
        None if value["via"] is None else str(value["via"]),
        tuple(str(name) for name in value["devices"]),
        {str(key): str(reason) for key, reason in value["absent"].items()},
        int(value.get("dim", 0)),
    )


_made = tuple.__new__


_SAMPLE = {"operation": None, "why": None}
"""Takes the place of a definition for samples, which have none."""


class Decoder:
    """Turns one process's payloads into records and resolves definitions. `origin_ns`: the run's start (monotonic)."""

    def __init__(self, process: int, rank: int | None = None, origin_ns: int = 0) -> None:
        self.process = process
        self.rank = rank
        self.origin_ns = origin_ns
        self._layouts: dict[int, _CallLayout] = {}
        self._sizes: dict[int, tuple[Size, ...]] = {}
        self._stages: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._collectives: dict[int, dict[str, Any]] = {}

    def decode(self, payload: bytes) -> Record | None:
        """Return the record in `payload`; None for a definition, which is remembered. Raises RecordError if damaged."""
        try:
            kind = payload[0]
            if kind in (CALL_TAG, PLAIN_TAG):
                return self._call(payload)
            if kind == STEP_TAG:
                return self._step(payload)
            if kind == TIMED_TAG:
                inner, times, why = timed(payload)
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
        """Remember a definition. Raises LookupError, ValueError, TypeError or AttributeError if it is damaged."""
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
            dim=layout.dim,
            phases={
                name: _made(CallPhase, (offset, took, None))
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
        spans, missing, buckets = kept_spans(packed) if packed else ((), 0, ())
        known = {name: took for name, took in zip(STEP_PHASES, phases, strict=False) if took >= 0}
        known["other"] = max(0, wall - sum(known.values()))
        counted = {name: count for name, count in zip(QUANTITY_NAMES, quantities, strict=True) if count >= 0}
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
        """Return the definition of a collective by its number. Raises LookupError if it is unknown."""
        return self._collectives[number]

    def collective(self, collected: Collected) -> Collective | Sampled:
        """Return the record of a collective or a sample. Raises LookupError for an unknown definition."""
        facts: dict[str, Any] = self._collectives[collected.definition] if collected.definition else _SAMPLE
        start, step = collected.start - self.origin_ns, collected.step or None
        if facts["operation"] is None:
            why = facts["why"]
            count = collected.quantity if why is None else None
            return Sampled(self.process, self.rank, step, start, max(collected.took, 0), count, why)
        ranks = facts["ranks"]
        return Collective(
            process=self.process,
            rank=self.rank,
            step=step,
            operation=facts["operation"],
            phase=DOING.get(collected.phase, "other"),
            bytes=collected.quantity,
            dtype=facts["dtype"],
            group=facts["group"],
            size=facts["size"],
            ranks=None if ranks is None else tuple(ranks),
            backend=facts["backend"],
            device=facts["device"],
            start_ns=start,
            took_ns=collected.took if collected.took >= 0 else None,
            queued_ns=collected.queued if collected.queued >= 0 else None,
            unended=UNENDED[collected.unended] if 0 < collected.unended < len(UNENDED) else None,
        )


def _with_times(call: Call, times: Sequence[float], why: int) -> Call:
    """Return the call with device times, and with a reason if a part that ran has none."""
    known = [known_ms(time) for time in times]
    known += [None] * (len(CALL_PHASES) + max(len(call.replicas), len(call.stages)) - len(known))
    of_phases = dict(zip(CALL_PHASES, known, strict=False))
    rest = known[len(CALL_PHASES) :]
    phases = {name: phase._replace(device_ms=of_phases[name]) for name, phase in call.phases.items()}
    replicas = tuple(replica._replace(device_ms=time) for replica, time in zip(call.replicas, rest, strict=False))
    stages = tuple(replace(stage, device_ms=time) for stage, time in zip(call.stages, rest, strict=False))
    parts: tuple[Any, ...] = (*phases.values(), *replicas, *stages)
    reason = untimed_reason([part.device_ms for part in parts], why)
    absent = {key: text for key, text in call.absent.items() if key != "device_ms"}
    if reason is not None:
        absent["device_ms"] = reason
    return replace(call, phases=phases, replicas=replicas, stages=stages, absent=absent)


def _with_step_times(step: Step, times: Sequence[float], why: int) -> Step:
    """Return the step with its device times; `times` and `why` as in `pack_timed`."""
    found = {name: known_ms(time) for name, time in zip(TIMED_PHASES, times, strict=False) if name in step.phases}
    return replace(step, device_ms=found, untimed=untimed_reason(found.values(), why))


def kept_step_times(step: Step, kept: bytes) -> Step:
    """Return the step with the device times from `step_times`. Raises struct.error if they are damaged."""
    _, why, count, _ = TIMED_HEAD.unpack_from(kept)
    if count > MAX_TIMES:
        raise struct.error("more times than a step has phases")
    return _with_step_times(step, struct.unpack_from(f"<{count}f", kept, TIMED_HEAD.size), why)
