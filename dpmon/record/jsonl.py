"""Converts records to the JSON lines of `dpmon export --format jsonl`."""

from __future__ import annotations

from typing import Any

from dpmon.record.record_specs import RECORDS
from dpmon.record.record_types import Call, Collective, Record, Sampled, Size, Stage, Step
from dpmon.record.schema import EXPOSED, NOT_JOINED, QUANTITIES, STEP_PHASES, WAIT
from dpmon.record.shared_names import MORE

_MADE = ("phases", "inputs", "outputs", "replicas", "stages", "alg_bytes_s", "bus_bytes_s", "absent")
"""Fields that are no attribute of the record, or that other functions convert."""


def _source(name: str) -> tuple[str, str, float]:
    """Return the name of a field, the attribute of the record that holds it, and the factor between them."""
    if name == "start_s":
        return name, "start_ns", 1e9
    return (name, f"{name[:-3]}_ns", 1e6) if name.endswith("_ms") else (name, name, 0)


_PLAIN = {
    kind: [_source(field.name) for field in RECORDS[kind].fields if not (field.only_csv or field.name in _MADE)]
    for kind in ("call", "collective", "sampled")
}


def _plain(kind: str, record: Call | Collective | Sampled) -> dict[str, object]:
    """Return the other fields of a record."""
    found: dict[str, object] = {"kind": kind}
    for name, attribute, factor in _PLAIN[kind]:
        value = getattr(record, attribute)
        if factor and value is not None:
            value /= factor
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _ms(ns: int) -> float:
    return ns / 1e6


def _sizes_json(sizes: tuple[Size, ...] | None) -> list[dict[str, object]] | None:
    if sizes is None:
        return None
    return [_size_json(size) for size in sizes if size.path != MORE]


def _size_json(size: Size) -> dict[str, object]:
    found = {"path": size.path, "shape": list(size.shape), "dtype": size.dtype, "bytes": size.bytes}
    return found if size.global_shape is None else {**found, "global_shape": list(size.global_shape)}


def _call_json(call: Call) -> dict[str, object]:
    absent = dict(call.absent)
    for side in ("inputs", "outputs"):
        if any(size.path == MORE for part in (call, *call.replicas) for size in getattr(part, side) or ()):
            absent[side] = "the list is cut off: there may be more tensors"
    if call.failed:
        absent["outputs"] = "the forward raised an exception"
    elif (
        call.inputs is None or call.outputs is None or any(r.inputs is None or r.outputs is None for r in call.replicas)
    ):
        absent.setdefault("sizes", "not seen by a forward hook")
    found = {
        **_plain("call", call),
        "phases": {name: {"host_ms": _ms(p.host_ns), "device_ms": p.device_ms} for name, p in call.phases.items()},
        "replicas": [
            {
                "replica": r.replica,
                "device": r.device,
                "host_ms": _ms(r.host_ns),
                "device_ms": r.device_ms,
                "inputs": _sizes_json(r.inputs),
                "outputs": _sizes_json(r.outputs),
            }
            for r in call.replicas
        ],
        "inputs": _sizes_json(call.inputs),
        "outputs": _sizes_json(call.outputs),
        "absent": absent,
    }
    if call.stages:
        found["stages"] = [_stage_json(stage, call) for stage in call.stages]
    return found


def _stage_json(stage: Stage, call: Call) -> dict[str, object]:
    before = call.stages[stage.stage - 1].device if stage.stage else None
    return {
        "stage": stage.stage,
        "device": stage.device,
        "parts": list(stage.parts),
        "start_ms": _ms(stage.offset_ns),
        "host_ms": None if stage.host_ns is None else _ms(stage.host_ns),
        "device_ms": stage.device_ms,
        "from": before,
        "crossed_bytes": stage.crossed,
        "inputs": _sizes_json(stage.inputs),
        "outputs": _sizes_json(stage.outputs),
    }


def _step_json(step: Step) -> dict[str, object]:
    counted = {quantity: step.quantity(quantity.name) for quantity in QUANTITIES}
    absent = {
        quantity.name: quantity.absent for quantity, count in counted.items() if count is None and not quantity.optional
    }
    found: dict[str, object] = {
        "kind": "step",
        "process": step.process,
        "rank": step.rank,
        "step": step.step,
        "mode": step.mode or None,
        "start_s": step.start_ns / 1e9,
        "wall_ms": _ms(step.wall_ns),
        **{quantity.name: count for quantity, count in counted.items() if not quantity.optional},
        "phases": {name: _ms(step.phases[name]) for name in STEP_PHASES if name in step.phases},
        **{quantity.name: count for quantity, count in counted.items() if quantity.optional and count is not None},
    }
    if (times := step.device_ms) is not None:
        found["device_ms"] = {name: times[name] for name in STEP_PHASES if name in times}
        if step.untimed is not None:
            absent["device_ms"] = step.untimed
    spans = step.spans
    found["spans"] = [{"phase": span.phase, "start_ms": _ms(span.offset_ns), "ms": _ms(span.host_ns)} for span in spans]
    if step.missing_spans:
        found["missing_spans"] = step.missing_spans
        absent["spans"] = f"only the first {len(spans)} of a step are recorded"
    if step.buckets:
        found["buckets_ms"] = [_ms(offset) for offset in step.buckets]
    if step.sync_number is not None:
        found["sync_number"] = step.sync_number
        for name, ns in ((f"{EXPOSED}_ms", step.exposed_ns), (f"{WAIT}_ms", step.wait_ns)):
            found[name] = None if ns is None else _ms(ns)
            if ns is None:
                absent[name] = NOT_JOINED
    found |= {name: value for name, value in (("loop", step.loop), ("batch", step.batch)) if value is not None}
    return {**found, "absent": absent}


def _collective_json(collective: Collective) -> dict[str, object]:
    absent = {}
    if collective.step is None:
        absent["step"] = "it was launched between two steps"
    if collective.ranks is None:
        absent["ranks"] = "all ranks, or a group that torch.distributed does not know"
    if collective.backend is None:
        absent["backend"] = "the group has no backend for this type of device"
    if collective.host_ns is None:
        absent |= dict.fromkeys(("host_ms", "queue_ms", "alg_bytes_s", "bus_bytes_s"), collective.unended or "unknown")
    elif (why := collective.alone.no_bandwidth) is not None:
        absent |= dict.fromkeys(("alg_bytes_s", "bus_bytes_s"), why)
    bandwidths = {"alg_bytes_s": collective.alone.alg_bytes_s, "bus_bytes_s": collective.alone.bus_bytes_s}
    return {**_plain("collective", collective), **bandwidths, "absent": absent}


def _sampled_json(sampled: Sampled) -> dict[str, object]:
    absent = {} if sampled.step is not None else {"step": "no step was running at its middle"}
    if sampled.why is not None:
        absent["collectives"] = sampled.why
    return {**_plain("sampled", sampled), "absent": absent}


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
