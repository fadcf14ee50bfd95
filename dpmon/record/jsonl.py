"""Converts records to the JSON lines of `dpmon export --format jsonl`."""

from __future__ import annotations

from typing import Any

from dpmon.record.record_specs import RECORDS
from dpmon.record.record_types import Call, Collective, Record, Replica, Sampled, Size, Stage, Step
from dpmon.record.schema import EXPOSED, NO_RANK_WAIT, QUANTITIES, STEP_PHASES, WAIT
from dpmon.record.shared_names import MORE

_CONVERTED_FIELDS = ("phases", "inputs", "outputs", "replicas", "stages", "alg_bytes_s", "bus_bytes_s", "absent")
"""Fields that are not an attribute of the record, or that need a conversion of their own."""


def _source_attribute(name: str) -> tuple[str, str, float]:
    """Return the name of a field, the record's attribute with its value, and the divisor between them (0: none)."""
    if name == "start_s":
        return name, "start_ns", 1e9
    if name.endswith("_ms"):
        return name, f"{name.removesuffix('_ms')}_ns", 1e6
    return name, name, 0


_PLAIN_FIELDS = {
    kind: [_source_attribute(field.name) for field in RECORDS[kind].fields if field.name not in _CONVERTED_FIELDS]
    for kind in ("call", "collective", "sampled")
}


def _plain_members(kind: str, record: Call | Collective | Sampled) -> dict[str, object]:
    """Return the kind of a record, and the fields that are attributes of it."""
    members: dict[str, object] = {"kind": kind}
    for name, attribute, divisor in _PLAIN_FIELDS[kind]:
        value = getattr(record, attribute)
        if divisor and value is not None:
            value /= divisor
        members[name] = list(value) if isinstance(value, tuple) else value
    return members


def _ms(ns: int) -> float:
    return ns / 1e6


def _sizes_json(sizes: tuple[Size, ...] | None) -> list[dict[str, object]] | None:
    if sizes is None:
        return None
    return [_size_json(size) for size in sizes if size.path != MORE]


def _size_json(size: Size) -> dict[str, object]:
    members = {"path": size.path, "shape": list(size.shape), "dtype": size.dtype, "bytes": size.bytes}
    return members if size.global_shape is None else {**members, "global_shape": list(size.global_shape)}


def _call_json(call: Call) -> dict[str, object]:
    absent = dict(call.absent)
    sized_parts: tuple[Call | Replica, ...] = (call, *call.replicas)
    for field_name in ("inputs", "outputs"):
        sizes = [size for part in sized_parts for size in getattr(part, field_name) or ()]
        if any(size.path == MORE for size in sizes):
            absent[field_name] = "the list is cut off: there may be more tensors"
    if call.failed:
        absent["outputs"] = "the forward raised an exception"
    elif any(part.inputs is None or part.outputs is None for part in sized_parts):
        absent.setdefault("sizes", "not seen by a forward hook")
    members = {
        **_plain_members("call", call),
        "phases": {
            name: {"host_ms": _ms(phase.host_ns), "device_ms": phase.device_ms} for name, phase in call.phases.items()
        },
        "replicas": [
            {
                "replica": replica.replica,
                "device": replica.device,
                "host_ms": _ms(replica.host_ns),
                "device_ms": replica.device_ms,
                "inputs": _sizes_json(replica.inputs),
                "outputs": _sizes_json(replica.outputs),
            }
            for replica in call.replicas
        ],
        "inputs": _sizes_json(call.inputs),
        "outputs": _sizes_json(call.outputs),
        "absent": absent,
    }
    if call.stages:
        members["stages"] = [_stage_json(stage, call) for stage in call.stages]
    return members


def _stage_json(stage: Stage, call: Call) -> dict[str, object]:
    source_device = call.stages[stage.stage - 1].device if stage.stage else None
    return {
        "stage": stage.stage,
        "device": stage.device,
        "parts": list(stage.parts),
        "start_ms": _ms(stage.offset_ns),
        "host_ms": None if stage.host_ns is None else _ms(stage.host_ns),
        "device_ms": stage.device_ms,
        "from": source_device,
        "crossed_bytes": stage.crossed_bytes,
        "inputs": _sizes_json(stage.inputs),
        "outputs": _sizes_json(stage.outputs),
    }


def _step_json(step: Step) -> dict[str, object]:
    counts = {quantity: step.quantity(quantity.name) for quantity in QUANTITIES}
    absent = {
        quantity.name: quantity.absent
        for quantity, count in counts.items()
        if count is None and not quantity.absent_is_zero
    }
    members: dict[str, object] = {
        "kind": "step",
        "process": step.process,
        "rank": step.rank,
        "step": step.step,
        "step_kind": step.step_kind,
        "mode": step.mode or None,
        "start_s": step.start_ns / 1e9,
        "wall_ms": _ms(step.wall_ns),
        **{quantity.name: count for quantity, count in counts.items() if not quantity.absent_is_zero},
        "phases": {name: _ms(step.phases[name]) for name in STEP_PHASES if name in step.phases},
        **{quantity.name: count for quantity, count in counts.items() if quantity.absent_is_zero and count is not None},
    }
    if (device_times := step.device_ms) is not None:
        members["device_ms"] = {name: device_times[name] for name in STEP_PHASES if name in device_times}
        if step.untimed is not None:
            absent["device_ms"] = step.untimed
    spans = step.spans
    members["spans"] = [
        {"phase": span.phase, "start_ms": _ms(span.offset_ns), "ms": _ms(span.host_ns)} for span in spans
    ]
    if step.missing_spans:
        members["missing_spans"] = step.missing_spans
        absent["spans"] = f"only the first {len(spans)} of a step are recorded"
    if step.buckets:
        members["buckets_ms"] = [_ms(offset) for offset in step.buckets]
    if step.sync_number is not None:
        members["sync_number"] = step.sync_number
        for name, ns in ((f"{EXPOSED}_ms", step.exposed_ns), (f"{WAIT}_ms", step.wait_ns)):
            members[name] = None if ns is None else _ms(ns)
            if ns is None:
                absent[name] = NO_RANK_WAIT
    if step.loop is not None:
        members["loop"] = step.loop
    if step.batch is not None:
        members["batch"] = step.batch
    return {**members, "absent": absent}


def _collective_json(collective: Collective) -> dict[str, object]:
    absent = {}
    if collective.step is None:
        absent["step"] = "it was launched between two steps"
    if collective.ranks is None:
        absent["ranks"] = "all ranks, or a group that torch.distributed does not know"
    if collective.backend is None:
        absent["backend"] = "the group has no backend for this type of device"
    return {**_plain_members("collective", collective), "absent": absent}


def _sampled_json(sampled: Sampled) -> dict[str, object]:
    absent = {} if sampled.step is not None else {"step": "no step was running at its middle"}
    if sampled.why is not None:
        absent["collectives"] = sampled.why
    return {**_plain_members("sampled", sampled), "absent": absent}


def as_json(record: Record) -> dict[str, Any]:
    """Return the record as an object of `dpmon export --format jsonl`: times in ms, starts in s since the run began."""
    if isinstance(record, Call):
        return _call_json(record)
    if isinstance(record, Step):
        return _step_json(record)
    if isinstance(record, Collective):
        return _collective_json(record)
    if isinstance(record, Sampled):
        return _sampled_json(record)
    return {"kind": record.kind, **record.data}
