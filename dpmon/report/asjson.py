"""A report as one JSON object, for programs: the fields of its facts. docs/json.md describes every member."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.model.communication_fields import communication_fields, rank_fields
from dpmon.model.evidence import DeviceFacts, Evidence, HostFacts, ModeFacts
from dpmon.model.history import PARTS, Bin
from dpmon.model.verdict import sentence
from dpmon.report.story import Story
from dpmon.store.figures import counted_as_fields, rate_as_fields

_GAPS = 100
_SECONDS = {
    "t_ns": "t_s",
    "begin_ns": "t_s",
    "start_ns": "start_s",
    "end_ns": "end_s",
    "ns": "seconds",
    "took_ns": "seconds",
}
"""The members with a time since the run's start, or with a long duration; other times are in ms."""
_UNITS = {
    **{name: f"{name}_bytes" for name in ("mem_used_max", "mem_run_max", "mem_total")},
    **{name: f"{name}_bytes" for name in ("model", "gradients", "optimizer", "rest", "peak")},
    "util_median": "util_median_pct",
    "temperature_max": "temperature_max_c",
    "power_max": "power_max_w",
}
_DEVICE = (
    *("index", "name", "uuid", "called", "of_run", "samples", "util_median", "mem_used_max", "mem_run_max"),
    *("mem_total", "temperature_max", "power_max", "throttled"),
)


def as_object(story: Story) -> dict[str, object]:
    """The report of `story` as an object with these members."""
    evidence = story.evidence
    return {
        "run": {
            **_fields(story.info, "id", "name", "script", "cwd", "python", "started_unix", "command", "versions"),
            "directory": story.directory,
        },
        "end": {
            "state": story.state,
            **{name: getattr(story.exit, name, None) for name in ("status", "signal", "error", "seconds")},
        },
        "processes": [one._asdict() for one in story.processes],
        **_fields(story, "steps", "calls", "dropped", "pruned", "nothing", "standing", "gpu_absent"),
        "modes": [_mode(mode) for mode in evidence.modes],
        "evaluations": [_mode(mode) for mode in story.evaluations],
        "elapsed": _elapsed(evidence),
        "findings": [finding._asdict() for finding in story.findings],
        "replicas": [
            {
                **_fields(one, "mode", "root", "replica", "device", "calls", "rows", "median_ns", "p95_ns", "virtual"),
                **_on_device(one.device_ns, one.device_calls, one.untimed),
            }
            for one in evidence.replicas
        ],
        "sizes": [line._asdict() for line in story.replicas],
        "ranks": _ranks(story),
        "communication": communication_fields(evidence.communication),
        "stages": [
            {
                **_fields(line, "root", "stage", "device", "parts", "inputs", "outputs", "calls"),
                "median_ms": _ms(line.time.median),
                **_on_device(line.on_device.median, line.on_device.count, line.untimed),
            }
            for line in story.stages
        ],
        "devices": [_fields(device, *_DEVICE) for device in evidence.devices],
        "host": _host(story.host, evidence.host),
        "memory": [
            _fields(row, "device", "model", "gradients", "optimizer", "rest", "peak", "absent")
            for row in evidence.memory
        ],
        "compared": _compared(evidence),
        "mode_changes": [
            {
                **_fields(change, *change._fields),
                **{name: getattr(change, name) or None for name in ("root", "mode", "requested_by")},
            }
            for change in story.changes
        ],
        "paused": {**_fields(story.paused, "times", "ns", "unended", "on"), "alone_s": story.paused_alone_ns / 1e9},
        "pauses": [
            {**_fields(pause, "process", "step", "took_ns", "on", "reason", "refused"), "t_s": _s(pause.start_ns)}
            for pause in story.pauses
        ],
        **_fields(story, "pauses_left_out", "refusals_left_out"),
        "inputs": [
            {"process": process, "t_s": begin / 1e9, "seconds": (end - begin) / 1e9}
            for process, begin, end in evidence.inputs
        ],
        "warnings": list(story.warnings),
        "time": {"width_s": story.bin_ns / 1e9, "stretches": [_bin(one) for one in story.bins]},
    }


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _s(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9


def _fields(fact: object, *names: str) -> dict[str, object]:
    """These fields of a fact by their names in JSON: times in s or ms instead of ns."""
    members: dict[str, object] = {}
    for name in names:
        value = getattr(fact, name)
        if name in _SECONDS:
            members[_SECONDS[name]] = _s(value)
        elif name.endswith("_ns"):
            members[f"{name[:-3]}_ms"] = _ms(value)
        elif isinstance(value, Mapping):
            members[name] = dict(value)
        else:
            members[_UNITS.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return members


def _mode(mode: ModeFacts) -> dict[str, object]:
    return {
        **_fields(mode, "virtual", "process", "rank", "median_ns", "p95_ns"),
        "mode": mode.mode or None,
        "steps": mode.all_steps,
        "process_steps": mode.steps,
        **rate_as_fields(mode.rate),
        "phases": {
            phase.name: {
                **_fields(phase, "share", "median_ns", "p95_ns", "device_count"),
                "device_median_ms": _ms(phase.device_ns),
                "count": phase.ran,
            }
            for phase in mode.phases
        },
        "quantities": counted_as_fields(mode.counted),
    }


def _elapsed(evidence: Evidence) -> dict[str, object]:
    if not evidence.spent:
        return {}
    gaps = [_fields(gap, "process", "after_step", "begin_ns", "ns") for gap in evidence.gaps[:_GAPS]]
    return {**{f"{activity}_s": ns / 1e9 for activity, ns in evidence.spent.items()}, "gaps": gaps}


def _on_device(median_ns: float | None, calls: int, untimed: str | None) -> dict[str, object]:
    absent = {} if untimed is None else {"device_median_ms": untimed}
    return {"device_median_ms": _ms(median_ns), "device_calls": calls, "absent": absent}


def _ranks(story: Story) -> list[dict[str, object]]:
    name = "forward_device_median_ms"
    return [
        {
            **_fields(line, "process", "rank", "world", "device", "inputs", "outputs", "calls", "steps", "median_ns"),
            **rate_as_fields(line.rate),
            name: _ms(line.forward_ns),
            "absent": {} if line.untimed is None else {name: line.untimed},
            **rank_fields(line.times),
        }
        for line in story.ranks
    ]


def _host(host: DeviceFacts | None, processors: HostFacts | None) -> dict[str, object] | None:
    if host is None:
        return None
    names = {"cpus": "cpus", "others_cpus": "others", "run_cpus": "own", "load": "load"}
    return {
        **_fields(host, "samples", "mem_used_max", "mem_total"),
        "cpu_median_pct": host.util_median,
        **{member: getattr(processors, name, None) for member, name in names.items()},
    }


def _compared(evidence: Evidence) -> dict[str, object] | None:
    compared = evidence.compared
    if compared is None:
        return None
    return {
        "sentence": sentence(compared),
        **_fields(compared, "missing", "efficiency", "outcome", "by_mean"),
        **dict(zip(("speedup", "low", "high"), compared.speedup or (None, None, None), strict=True)),
        "steps": {mode: side.steps for mode, side in compared.sides.items()},
    }


def _bin(one: Bin) -> dict[str, object]:
    return {
        **_fields(one, "start_ns", "end_ns", "evaluation", "steps", "elapsed_ns", "longest_ns", "samples"),
        "mode": one.mode or None,
        "mean_ms": one.wall_ns / one.steps / 1e6,
        "parts_ms": {name: took / 1e6 for name, took in zip(PARTS, one.parts, strict=True)},
    }
