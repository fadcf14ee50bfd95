"""A report as one JSON object, for programs. docs/json.md describes every field."""

from __future__ import annotations

from typing import Any

from dpmon.model.communication_fields import communication_fields, rank_fields
from dpmon.model.evidence import DeviceFacts, Evidence, HostFacts, ModeFacts
from dpmon.model.verdict import sentence
from dpmon.rates import as_fields
from dpmon.report.story import PARTS, Bin, Story
from dpmon.store.figures import counted_as_fields

_GAPS = 100


def as_object(story: Story) -> dict[str, Any]:
    """The report of `story` as an object with these members."""
    info, how = story.info, story.exit
    return {
        "run": {
            **{name: getattr(info, name) for name in ("id", "name", "script", "cwd", "python", "started_unix")},
            "command": list(info.command),
            "versions": dict(info.versions),
            "directory": story.directory,
        },
        "end": {
            "state": story.state,
            **{name: getattr(how, name, None) for name in ("status", "signal", "error", "seconds")},
        },
        "processes": [one._asdict() for one in story.processes],
        "steps": story.steps,
        "calls": story.calls,
        "dropped": story.dropped,
        "pruned": story.pruned,
        "nothing": story.nothing,
        "standing": story.standing,
        "modes": [_mode(mode) for mode in story.evidence.modes],
        "evaluations": [_mode(mode) for mode in story.evaluations],
        "elapsed": _elapsed(story.evidence),
        "findings": [finding._asdict() for finding in story.findings],
        "replicas": _replicas(story),
        "sizes": [line._asdict() for line in story.replicas],
        "ranks": _ranks(story),
        "communication": communication_fields(story.evidence.communication),
        "stages": _stages(story),
        "devices": [_device(device) for device in story.evidence.devices],
        "gpu_absent": story.gpu_absent,
        "host": _host(story.host, story.evidence.host),
        "memory": _memory(story),
        "compared": _compared(story),
        "mode_changes": _changes(story),
        "paused": _paused(story),
        "pauses": _pauses(story),
        "pauses_left_out": story.pauses_left_out,
        "refusals_left_out": story.refusals_left_out,
        "inputs": [
            {"process": process, "t_s": begin / 1e9, "seconds": (end - begin) / 1e9}
            for process, begin, end in story.evidence.inputs
        ],
        "warnings": list(story.warnings),
        "time": {
            "width_s": story.bin_ns / 1e9,
            "stretches": [_bin(one) for one in story.bins],
        },
    }


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _mode(mode: ModeFacts) -> dict[str, Any]:
    return {
        "mode": mode.mode or None,
        "virtual": mode.virtual,
        "steps": mode.all_steps,
        **as_fields(mode.rate),
        "process": mode.process,
        "rank": mode.rank,
        "process_steps": mode.steps,
        "median_ms": _ms(mode.median_ns),
        "p95_ms": _ms(mode.p95_ns),
        "phases": {
            phase.name: {
                "share": phase.share,
                "median_ms": _ms(phase.median_ns),
                "p95_ms": _ms(phase.p95_ns),
                "device_median_ms": _ms(phase.device_ns),
                "device_count": phase.device_count,
                "count": phase.ran,
            }
            for phase in mode.phases
        },
        "quantities": counted_as_fields(mode.counted),
    }


def _elapsed(evidence: Evidence) -> dict[str, Any]:
    if not evidence.spent:
        return {}
    gaps = [
        {"process": gap.process, "after_step": gap.after_step, "t_s": gap.begin_ns / 1e9, "seconds": gap.ns / 1e9}
        for gap in evidence.gaps[:_GAPS]
    ]
    return {**{f"{activity}_s": ns / 1e9 for activity, ns in evidence.spent.items()}, "gaps": gaps}


def _replicas(story: Story) -> list[dict[str, Any]]:
    found = []
    for fact in story.evidence.replicas:
        said = fact._asdict()
        times = {"median_ms": _ms(said.pop("median_ns")), "p95_ms": _ms(said.pop("p95_ns"))}
        on_device = _on_device(_ms(said.pop("device_ns")), said.pop("device_calls"), said.pop("untimed"))
        found.append({**said, **times, **on_device})
    return found


def _on_device(middle: float | None, calls: int, untimed: str | None) -> dict[str, Any]:
    absent = {} if untimed is None else {"device_median_ms": untimed}
    return {"device_median_ms": middle, "device_calls": calls, "absent": absent}


def _ranks(story: Story) -> list[dict[str, Any]]:
    found = []
    for line in story.ranks:
        said = line._asdict()
        middle, forward, why = said.pop("median_ns"), said.pop("forward_ns"), said.pop("untimed")
        times = said.pop("times")
        del said["rate"]
        name = "forward_device_median_ms"
        on_device = {name: _ms(forward), "absent": {} if why is None else {name: why}}
        found.append({**said, "median_ms": _ms(middle), **as_fields(line.rate), **on_device, **rank_fields(times)})
    return found


def _stages(story: Story) -> list[dict[str, Any]]:
    found = []
    for line in story.stages:
        said = line._asdict()
        for name in ("time", "on_device", "untimed"):
            del said[name]
        on_device = _on_device(_ms(line.on_device.median), line.on_device.count, line.untimed)
        found.append({**said, "parts": list(line.parts), "median_ms": _ms(line.time.median), **on_device})
    return found


def _device(device: DeviceFacts) -> dict[str, Any]:
    return {
        **{name: getattr(device, name) for name in ("index", "name", "uuid", "called", "of_run", "samples")},
        "util_median_pct": device.util_median,
        "mem_used_max_bytes": device.mem_used_max,
        "mem_run_max_bytes": device.mem_run_max,
        "mem_total_bytes": device.mem_total,
        "temperature_max_c": device.temperature_max,
        "power_max_w": device.power_max,
        "throttled": dict(device.throttled),
    }


def _host(host: DeviceFacts | None, processors: HostFacts | None) -> dict[str, Any] | None:
    if host is None:
        return None
    return {
        "samples": host.samples,
        "cpu_median_pct": host.util_median,
        "mem_used_max_bytes": host.mem_used_max,
        "mem_total_bytes": host.mem_total,
        "cpus": None if processors is None else processors.cpus,
        "others_cpus": None if processors is None else processors.others,
        "run_cpus": None if processors is None else processors.own,
        "load": None if processors is None else processors.load,
    }


def _memory(story: Story) -> list[dict[str, Any]]:
    found = []
    for row in story.evidence.memory:
        parts = ("model", "gradients", "optimizer", "rest", "peak")
        held = {f"{part}_bytes": getattr(row, part) for part in parts}
        found.append({"device": row.device, **held, "absent": dict(row.absent)})
    return found


def _compared(story: Story) -> dict[str, Any] | None:
    found = story.evidence.compared
    if found is None:
        return None
    return {
        "sentence": sentence(found),
        "missing": found.missing,
        **dict(zip(("speedup", "low", "high"), found.speedup or (None, None, None), strict=True)),
        "efficiency": found.efficiency,
        "outcome": found.outcome,
        "steps": {mode: side.steps for mode, side in found.sides.items()},
        "by_mean": found.by_mean,
    }


def _changes(story: Story) -> list[dict[str, Any]]:
    found = []
    for change in story.changes:
        said = change._asdict()
        at = said.pop("t_ns")
        named = {name: said[name] or None for name in ("root", "mode", "requested_by")}
        found.append({**said, **named, "t_s": None if at is None else at / 1e9, "devices": list(change.devices)})
    return found


def _paused(story: Story) -> dict[str, Any]:
    total = story.paused
    return {
        "times": total.times,
        "seconds": total.ns / 1e9,
        "unended": total.unended,
        "on": total.on,
        "alone_s": story.paused_alone_ns / 1e9,
    }


def _pauses(story: Story) -> list[dict[str, Any]]:
    found = []
    for pause in story.pauses:
        said = pause._asdict()
        at, took, _ = (said.pop(name) for name in ("start_ns", "took_ns", "end_ns"))
        seconds = {"t_s": None if at is None else at / 1e9, "seconds": None if took is None else took / 1e9}
        found.append({**said, **seconds})
    return found


def _bin(one: Bin) -> dict[str, Any]:
    return {
        "start_s": one.start_ns / 1e9,
        "end_s": one.end_ns / 1e9,
        "mode": one.mode or None,
        "evaluation": one.evaluation,
        "steps": one.steps,
        "mean_ms": one.wall_ns / one.steps / 1e6,
        "elapsed_ms": one.elapsed_ns / 1e6,
        "longest_ms": one.longest_ns / 1e6,
        "samples": one.samples,
        "parts_ms": {name: took / 1e6 for name, took in zip(PARTS, one.parts, strict=True)},
    }
