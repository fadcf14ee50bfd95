"""Records as JSON: what `dpmon export --format jsonl` writes, a line each."""

from __future__ import annotations

from typing import Any

from dpmon.record.kinds import Call, Collective, PhaseSpan, Record, Sampled, Size, Stage, Step
from dpmon.record.schema import EXPOSED, NO_SPANS, NOT_JOINED, QUANTITIES, STEP_PHASES, WAIT
from dpmon.record.wire import MORE


def _ms(ns: int) -> float:
    return ns / 1e6


def _sizes_json(sizes: tuple[Size, ...] | None) -> list[dict[str, Any]] | None:
    if sizes is None:
        return None
    return [_size_json(size) for size in sizes if size.path != MORE]


def _size_json(size: Size) -> dict[str, Any]:
    found = {"path": size.path, "shape": list(size.shape), "dtype": size.dtype, "bytes": size.bytes}
    return found if size.global_shape is None else {**found, "global_shape": list(size.global_shape)}


def _call_json(call: Call) -> dict[str, Any]:
    absent = dict(call.absent)
    for what in ("inputs", "outputs"):
        if any(size.path == MORE for part in (call, *call.replicas) for size in getattr(part, what) or ()):
            absent[what] = "too large to be listed to its end: there may be more tensors"
    if call.failed:
        absent["outputs"] = "the forward raised an exception"
    elif (
        call.inputs is None or call.outputs is None or any(r.inputs is None or r.outputs is None for r in call.replicas)
    ):
        absent.setdefault("sizes", "not seen by a forward hook")
    found: dict[str, Any] = {
        "kind": "call",
        "process": call.process,
        "rank": call.rank,
        "step": call.step,
        "call": call.call,
        "root": call.root,
        "via": call.via,
        "mode": call.mode,
        "virtual": call.virtual,
        "training": call.training,
        "grad": call.grad,
        "start_s": call.start_ns / 1e9,
        "wall_ms": _ms(call.wall_ns),
        "devices": list(call.devices),
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


def _stage_json(stage: Stage, call: Call) -> dict[str, Any]:
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


def _step_json(step: Step) -> dict[str, Any]:
    counted = {quantity: step.quantity(quantity.name) for quantity in QUANTITIES}
    absent = {one.name: one.absent for one, count in counted.items() if count is None and not one.optional}
    found: dict[str, Any] = {
        "kind": "step",
        "process": step.process,
        "rank": step.rank,
        "step": step.step,
        "mode": step.mode or None,
        "start_s": step.start_ns / 1e9,
        "wall_ms": _ms(step.wall_ns),
        **{one.name: count for one, count in counted.items() if not one.optional},
        "phases": {name: _ms(step.phases[name]) for name in STEP_PHASES if name in step.phases},
        **{one.name: count for one, count in counted.items() if one.optional and count is not None},
    }
    if step.device_ms is not None:
        found["device_ms"] = {name: step.device_ms[name] for name in STEP_PHASES if name in step.device_ms}
        if step.untimed is not None:
            absent["device_ms"] = step.untimed
    found["spans"] = None if step.spans is None else [_span_json(span) for span in step.spans]
    if step.spans is None:
        absent["spans"] = NO_SPANS
    if step.missing_spans:
        found["missing_spans"] = step.missing_spans
        absent["spans"] = f"only the first {len(step.spans or ())} of a step are recorded"
    if step.buckets:
        found["buckets_ms"] = [_ms(offset) for offset in step.buckets]
    if step.sync_number is not None:
        found["sync_number"] = step.sync_number
        for name, ns in ((f"{EXPOSED}_ms", step.exposed_ns), (f"{WAIT}_ms", step.wait_ns)):
            found[name] = None if ns is None else _ms(ns)
            if ns is None:
                absent[name] = NOT_JOINED
    return {**found, "absent": absent}


def _span_json(span: PhaseSpan) -> dict[str, Any]:
    return {"phase": span.phase, "start_ms": _ms(span.offset_ns), "ms": _ms(span.host_ns)}


def _collective_json(one: Collective) -> dict[str, Any]:
    absent = {}
    if one.step is None:
        absent["step"] = "it was launched between two steps"
    if one.ranks is None:
        absent["ranks"] = "all ranks, or a group that torch.distributed does not know"
    if one.backend is None:
        absent["backend"] = "the group has no backend for this type of device"
    if one.took_ns is None:
        absent |= dict.fromkeys(("host_ms", "queue_ms", "alg_bytes_s", "bus_bytes_s"), one.unended or "it is not known")
    elif one.alg_bytes_s is None:
        absent |= dict.fromkeys(("alg_bytes_s", "bus_bytes_s"), "it moves no tensor, or took no time")
    return {
        "kind": "collective",
        "process": one.process,
        "rank": one.rank,
        "step": one.step,
        "operation": one.operation,
        "phase": one.phase,
        "bytes": one.bytes,
        "dtype": one.dtype,
        "group": one.group,
        "group_size": one.size,
        "ranks": None if one.ranks is None else list(one.ranks),
        "backend": one.backend,
        "device": one.device,
        "start_s": one.start_ns / 1e9,
        "host_ms": None if one.took_ns is None else _ms(one.took_ns),
        "queue_ms": None if one.queued_ns is None else _ms(one.queued_ns),
        "alg_bytes_s": one.alg_bytes_s,
        "bus_bytes_s": one.bus_bytes_s,
        "absent": absent,
    }


def _sampled_json(one: Sampled) -> dict[str, Any]:
    absent = {} if one.step is not None else {"step": "no step was under way at its middle"}
    if one.why is not None:
        absent["collectives"] = one.why
    return {
        "kind": "sampled",
        "process": one.process,
        "rank": one.rank,
        "step": one.step,
        "start_s": one.start_ns / 1e9,
        "wall_ms": _ms(one.wall_ns),
        "collectives": one.collectives,
        "absent": absent,
    }


def as_json(record: Record) -> dict[str, Any]:
    """The record as an object of `dpmon export --format jsonl`: times in ms, starts in s since the run's start."""
    if isinstance(record, Call):
        return _call_json(record)
    if isinstance(record, Step):
        return _step_json(record)
    if isinstance(record, Collective):
        return _collective_json(record)
    if isinstance(record, Sampled):
        return _sampled_json(record)
    return {"kind": record.kind, **record.data}
