"""A report as one JSON object, for programs. docs/records.md describes every member."""

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
from dpmon.record.schema import EVALUATION, STEP_KINDS, TRAINING
from dpmon.report.report_data import ReportData
from dpmon.store.loss_table import LossBin
from dpmon.store.step_stats import quantities_to_json, rate_to_json
from dpmon.store.tally import SeriesStats

_MAX_GAPS = 100
_MEMORY_PARTS = ("model_bytes", "gradients_bytes", "optimizer_bytes", "rest_bytes")
_DEVICE_FIELDS = (
    *("index", "name", "uuid", "called", "of_run", "samples", "util_median", "mem_used_max", "mem_run_max"),
    *("mem_total", "temperature_max", "power_max", "throttled"),
)


def report_as_json(report: ReportData) -> dict[str, object]:
    """Return a report as a JSON object."""
    run = report.run
    return {
        "run": {
            **fields_of(
                report.run_info, "id", "name", "script", "cwd", "python", "started_unix", "command", "versions"
            ),
            "directory": report.directory,
        },
        "end": {
            "state": report.state,
            **{name: getattr(report.exit_info, name, None) for name in ("status", "signal", "error", "seconds")},
        },
        "processes": [process_info._asdict() for process_info in run.announced.info.values()],
        **fields_of(run, "steps", "calls", "open_calls"),
        "updates": run.window.step_counts(TRAINING)[1],
        **fields_of(run.store, "dropped", "pruned"),
        "nothing": report.untraced_reason,
        "stalls": [fields_of(stall, "since_ns", "end_ns", "text") for stall in run.announced.stalls],
        "gpu_absent": run.samples.gpu_absent,
        "modes": [_mode_members(run, stats) for stats in run.modes],
        "evaluations": [_mode_members(run, stats) for stats in run.other_modes],
        "elapsed": _elapsed_members(run),
        "progress": progress_fields(run.progress),
        "epochs": [fields_of(epoch, *Epoch._fields) for epoch in run.progress.epochs],
        "findings": [finding._asdict() for finding in report.findings],
        "replicas": [
            {
                **fields_of(one, "mode", "root", "replica", "device", "virtual", "calls", "rows"),
                "median_ms": ms(one.time.median),
                "p95_ms": ms(one.time.quantile(0.95)),
                **_device_time_members(one.on_device, one.untimed),
            }
            for one in run.replicas
        ],
        "sizes": [
            {
                **fields_of(line, "mode", "root", "replica", "device", "inputs", "outputs", "calls"),
                "step_kind": STEP_KINDS[line.kind],
                "evaluations": line.calls * (line.kind == EVALUATION),
            }
            for line in run.sizes
        ],
        "ranks": _rank_members(run),
        "communication": communication_fields(run.communication),
        "losses": [
            {
                **loss_fields(curve),
                "process": curve.process,
                "width_s": curve.point_s,
                "points": [{"t_s": point.second, **fields_of(point, *LossBin._fields[1:])} for point in curve.points],
            }
            for curve in run.losses
        ],
        "stages": [
            {
                **fields_of(line, "root", "stage", "device", "parts", "inputs", "outputs", "calls"),
                "median_ms": ms(line.time.median),
                **_device_time_members(line.on_device, line.untimed),
            }
            for line in run.stages
        ],
        "devices": [fields_of(device, *_DEVICE_FIELDS) for device in run.devices],
        "host": _host_members(run.samples.hosts, run.host),
        "memory": [
            {
                **fields_of(row, "device", "model", "gradients", "optimizer", "rest", "peak", "processes"),
                "known": dict(zip(_MEMORY_PARTS, row.known, strict=True)),
                "absent": {
                    name: reason for name, reason in row.absent.items() if getattr(row, name[:-6], None) is None
                },
            }
            for row in run.memory
        ],
        "compared": _mode_comparison_members(run),
        "mode_changes": [
            {
                **fields_of(change, *change._fields),
                **{name: getattr(change, name) or None for name in ("root", "mode", "requested_by")},
            }
            for change in run.announced.changes
        ],
        "paused": {**fields_of(run.pause_totals, *PauseTotals._fields), "alone_s": run.paused_alone_ns / 1e9},
        "pauses": [
            {
                **fields_of(pause, "process", "step", "took_ns", "on", "reason", "refused"),
                "t_s": pause.start_ns / 1e9,
            }
            for pause in run.pauses
        ],
        "inputs": [
            {"process": process, "t_s": start_ns / 1e9, "seconds": (end_ns - start_ns) / 1e9}
            for process, start_ns, end_ns in run.announced.inputs
        ],
        "warnings": list(report.warnings),
        "time": {
            "width_s": run.binned_steps.width_ns / 1e9,
            "stretches": [_bin_members(bin_) for bin_ in run.binned_steps.bins],
        },
    }


def _mode_members(run: RunAnalysis, stats: ModeStats) -> dict[str, object]:
    return {
        **fields_of(stats, "virtual", "process"),
        "rank": run.rank(stats.process),
        **fields_of(stats, "median_ns", "p95_ns"),
        "mode": stats.mode or None,
        "step_kind": STEP_KINDS[stats.kind],
        "steps": run.window.step_counts(stats.kind, stats.mode)[0],
        "process_steps": stats.steps,
        "process_updates": stats.tally.updates,
        **rate_to_json(stats.rate),
        "phases": {
            phase.name: {
                **phase_fields(phase),
                "device_count": phase.device_count,
                "count": phase.ran,
            }
            for phase in stats.phases
        },
        "quantities": quantities_to_json(stats.known_quantities),
    }


def _elapsed_members(run: RunAnalysis) -> dict[str, object]:
    if not run.time_by_activity:
        return {}
    gaps = [fields_of(gap, "process", "after_step", "begin_ns", "ns") for gap in run.gaps[:_MAX_GAPS]]
    return {**{f"{activity}_s": ns / 1e9 for activity, ns in run.time_by_activity.items()}, "gaps": gaps}


def _device_time_members(times: SeriesStats, untimed: str | None) -> dict[str, object]:
    absent = {} if untimed is None else {"device_median_ms": untimed}
    return {"device_median_ms": ms(times.median), "device_calls": times.count, "absent": absent}


def _rank_members(run: RunAnalysis) -> list[dict[str, object]]:
    device_median = "forward_device_median_ms"
    return [
        {
            **fields_of(line, "process", "rank", "node", "world", "device", "inputs", "outputs"),
            **fields_of(line, "calls", "steps", "median_ns"),
            **rate_to_json(line.rate),
            device_median: ms(line.forward_ns),
            "absent": {} if line.untimed is None else {device_median: line.untimed},
            **rank_fields(line.times),
        }
        for line in run.ranks
    ]


def _host_members(hosts: Sequence[DeviceUsage], host_usage: HostUsage | None) -> dict[str, object] | None:
    if len(hosts) != 1:
        return None
    (host,) = hosts
    names = {"cpus": "cpus", "others_cpus": "others", "run_cpus": "own", "load": "load"}
    return {
        **fields_of(host, "samples", "mem_used_max", "mem_total"),
        "cpu_median_pct": host.util_median,
        **{member: getattr(host_usage, name, None) for member, name in names.items()},
    }


def _mode_comparison_members(run: RunAnalysis) -> dict[str, object] | None:
    comparison = run.mode_comparison
    if comparison is None:
        return None
    return {
        "sentence": verdict_sentence(comparison),
        **fields_of(comparison, "missing", "efficiency", "outcome"),
        **dict(zip(("speedup", "low", "high"), comparison.speedup or (None, None, None), strict=True)),
        "steps": {mode: side.steps for mode, side in comparison.sides.items()},
    }


def _bin_members(time_bin: Bin) -> dict[str, object]:
    return {
        **fields_of(time_bin, "start_ns", "end_ns", "steps", "elapsed_ns", "longest_ns", "samples"),
        "evaluation": time_bin.kind == EVALUATION,
        "step_kind": STEP_KINDS[time_bin.kind],
        "mode": time_bin.mode or None,
        "mean_ms": time_bin.wall_ns / time_bin.steps / 1e6,
        "parts_ms": {name: part_ns / 1e6 for name, part_ns in zip(PARTS, time_bin.parts, strict=True)},
    }
