"""A report as one JSON object, for programs: the fields of its facts. docs/json.md describes every member."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.model.device_usage import DeviceUsage, HostUsage
from dpmon.model.epoch_progress import Epoch
from dpmon.model.json_fields import (
    communication_fields,
    fields_of,
    loss_fields,
    ms,
    phase_fields,
    progress_fields,
    rank_fields,
)
from dpmon.model.mode_comparison import verdict_sentence
from dpmon.model.mode_stats import ModeStats
from dpmon.model.pauses import PauseTotals
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.step_history import PARTS, Bin
from dpmon.report.report_data import ReportData
from dpmon.store.query_results import LossBin
from dpmon.store.step_stats import quantities_to_json, rate_to_json
from dpmon.store.tally import SeriesStats

_GAPS = 100
_PARTS = ("model_bytes", "gradients_bytes", "optimizer_bytes", "rest_bytes")
_DEVICE = (
    *("index", "name", "uuid", "called", "of_run", "samples", "util_median", "mem_used_max", "mem_run_max"),
    *("mem_total", "temperature_max", "power_max", "throttled"),
)


def report_as_json(story: ReportData) -> dict[str, object]:
    """The report of `story` as an object with these members."""
    facts = story.facts
    return {
        "run": {
            **fields_of(story.info, "id", "name", "script", "cwd", "python", "started_unix", "command", "versions"),
            "directory": story.directory,
        },
        "end": {
            "state": story.state,
            **{name: getattr(story.exit, name, None) for name in ("status", "signal", "error", "seconds")},
        },
        "processes": [one._asdict() for one in facts.announced.info.values()],
        **fields_of(facts, "steps", "calls", "open_calls"),
        **fields_of(facts.store, "dropped", "pruned"),
        "nothing": story.nothing,
        "stalls": [fields_of(stall, "since_ns", "end_ns", "text") for stall in facts.announced.stalls],
        "gpu_absent": facts.samples.gpu_absent,
        "modes": [_mode(facts, mode) for mode in facts.modes],
        "evaluations": [_mode(facts, mode) for mode in facts.evaluations],
        "elapsed": _elapsed(facts),
        "progress": progress_fields(facts.progress),
        "epochs": [{**fields_of(one, *Epoch._fields), "seconds": one.took_ns / 1e9} for one in facts.progress.epochs],
        "findings": [finding._asdict() for finding in story.findings],
        "replicas": [
            {
                **fields_of(one, "mode", "root", "replica", "device", "virtual", "calls", "rows"),
                "median_ms": ms(one.time.median),
                "p95_ms": ms(one.time.quantile(0.95)),
                **_device_time_members(one.on_device, one.untimed),
            }
            for one in facts.replicas
        ],
        "sizes": [line._asdict() for line in facts.sizes],
        "ranks": _ranks(facts),
        "communication": communication_fields(facts.communication),
        "losses": [
            {
                **loss_fields(curve),
                "process": curve.process,
                "width_s": curve.point_s,
                "points": [{"t_s": one.second, **fields_of(one, *LossBin._fields[1:])} for one in curve.points],
            }
            for curve in facts.losses
        ],
        "stages": [
            {
                **fields_of(line, "root", "stage", "device", "parts", "inputs", "outputs", "calls"),
                "median_ms": ms(line.time.median),
                **_device_time_members(line.on_device, line.untimed),
            }
            for line in facts.stages
        ],
        "devices": [fields_of(device, *_DEVICE) for device in facts.devices],
        "host": _host(facts.samples.hosts, facts.host),
        "memory": [
            {
                **fields_of(row, "device", "model", "gradients", "optimizer", "rest", "peak", "processes"),
                "known": dict(zip(_PARTS, row.known, strict=True)),
                "shared_bytes": sum(row.shared.values()),
                "absent": {name: why for name, why in row.absent.items() if getattr(row, name[:-6], None) is None},
            }
            for row in facts.memory
        ],
        "compared": _mode_comparison_members(facts),
        "mode_changes": [
            {
                **fields_of(change, *change._fields),
                **{name: getattr(change, name) or None for name in ("root", "mode", "requested_by")},
            }
            for change in facts.announced.changes
        ],
        "paused": {**fields_of(facts.pause_totals, *PauseTotals._fields), "alone_s": facts.paused_alone_ns / 1e9},
        "pauses": [
            {
                **fields_of(pause, "process", "step", "took_ns", "on", "reason", "refused"),
                "t_s": pause.start_ns / 1e9,
            }
            for pause in facts.pauses
        ],
        "inputs": [
            {"process": process, "t_s": begin / 1e9, "seconds": (end - begin) / 1e9}
            for process, begin, end in facts.announced.inputs
        ],
        "warnings": list(story.warnings),
        "time": {"width_s": facts.stretches.width_ns / 1e9, "stretches": [_bin(one) for one in facts.stretches.bins]},
    }


def _mode(facts: RunAnalysis, mode: ModeStats) -> dict[str, object]:
    return {
        **fields_of(mode, "virtual", "process"),
        "rank": facts.rank(mode.process),
        **fields_of(mode, "median_ns", "p95_ns"),
        "mode": mode.mode or None,
        "steps": mode.all_steps,
        "process_steps": mode.steps,
        **rate_to_json(mode.rate),
        "phases": {
            phase.name: {
                **phase_fields(phase),
                "device_count": phase.device_count,
                "count": phase.ran,
            }
            for phase in mode.phases
        },
        "quantities": quantities_to_json(mode.known_quantities),
    }


def _elapsed(facts: RunAnalysis) -> dict[str, object]:
    if not facts.time_by_activity:
        return {}
    gaps = [fields_of(gap, "process", "after_step", "begin_ns", "ns") for gap in facts.gaps[:_GAPS]]
    return {**{f"{activity}_s": ns / 1e9 for activity, ns in facts.time_by_activity.items()}, "gaps": gaps}


def _device_time_members(times: SeriesStats, untimed: str | None) -> dict[str, object]:
    absent = {} if untimed is None else {"device_median_ms": untimed}
    return {"device_median_ms": ms(times.median), "device_calls": times.count, "absent": absent}


def _ranks(facts: RunAnalysis) -> list[dict[str, object]]:
    name = "forward_device_median_ms"
    return [
        {
            **fields_of(line, "process", "rank", "node", "world", "device", "inputs", "outputs"),
            **fields_of(line, "calls", "steps", "median_ns"),
            **rate_to_json(line.rate),
            name: ms(line.forward_ns),
            "absent": {} if line.untimed is None else {name: line.untimed},
            **rank_fields(line.times),
        }
        for line in facts.ranks
    ]


def _host(hosts: Sequence[DeviceUsage], processors: HostUsage | None) -> dict[str, object] | None:
    if len(hosts) != 1:
        return None
    (host,) = hosts
    names = {"cpus": "cpus", "others_cpus": "others", "run_cpus": "own", "load": "load"}
    return {
        **fields_of(host, "samples", "mem_used_max", "mem_total"),
        "cpu_median_pct": host.util_median,
        **{member: getattr(processors, name, None) for member, name in names.items()},
    }


def _mode_comparison_members(facts: RunAnalysis) -> dict[str, object] | None:
    compared = facts.mode_comparison
    if compared is None:
        return None
    return {
        "sentence": verdict_sentence(compared),
        **fields_of(compared, "missing", "efficiency", "outcome", "by_mean"),
        **dict(zip(("speedup", "low", "high"), compared.speedup or (None, None, None), strict=True)),
        "steps": {mode: side.steps for mode, side in compared.sides.items()},
    }


def _bin(one: Bin) -> dict[str, object]:
    return {
        **fields_of(one, "start_ns", "end_ns", "evaluation", "steps", "elapsed_ns", "longest_ns", "samples"),
        "mode": one.mode or None,
        "mean_ms": one.wall_ns / one.steps / 1e6,
        "parts_ms": {name: took / 1e6 for name, took in zip(PARTS, one.parts, strict=True)},
    }
