"""A report as one JSON object, for programs. docs/records.md describes every member."""

from __future__ import annotations

from math import isfinite

from dpmon.model.communication import Communication, Wrapper
from dpmon.model.efficiency import Efficiency
from dpmon.model.epoch_progress import Progress, format_progress
from dpmon.model.loss_curves import LossCurve
from dpmon.model.mode_comparison import verdict_sentence
from dpmon.model.pauses import PauseTotals
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.step_history import Column
from dpmon.model.stragglers import RankTimes, Straggler, straggler_sentence
from dpmon.record.schema import EVALUATION, PHASES, STEP_KINDS, TRAINING
from dpmon.report import tables
from dpmon.report.report_data import ReportData
from dpmon.store.loss_table import LossBin
from dpmon.store.memory_growth import MemoryTrend
from dpmon.store.step_stats import StepStats, quantities_to_json, rate_to_json
from dpmon.text.fact_table import fields_of

_MAX_GAPS = 100
_PAUSE = ("process", "step", "took_ns", "on", "reason", "refused")
_MEMORY_PARTS = ("model_bytes", "gradients_bytes", "optimizer_bytes", "rest_bytes")
_OPERATION = ("name", "size", "collectives", "bytes")
_STRAGGLER = ("process", "rank", "share", "slowest", "steps", "phase", "ranks", "excess_ns", "own_ns", "others_ns")
MEMORY_TREND = (
    *("device", "process", "node", "is_growing", "steps_per_s", "used_bytes", "limit", "limit_bytes", "room_bytes"),
    *("steps_left", "seconds_left", "matters"),
)
"""The members of a memory trend, with those of its growth."""
_NO_TIMES = RankTimes(-1, -1, 0, None, {})
_ELSEWHERE = ("number", "iteration", "comm_ns", "overlap_ns", "no_sync_times", "group", "all_used")
_WRAPPER = tuple(name for name in Wrapper._fields if name not in _ELSEWHERE)


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
            "state": report.health.word,
            **{name: getattr(report.health.exit_info, name, None) for name in ("status", "signal", "error", "seconds")},
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
        "epochs": [tables.EPOCHS.as_json(epoch) for epoch in run.progress.epochs],
        "findings": [finding._asdict() for finding in report.findings],
        "replicas": [tables.REPLICAS.as_json(replica) for replica in run.replicas],
        "sizes": _size_members(run),
        "ranks": [
            {**tables.RANKS.as_json(rank), **rate_to_json(rank.rate), **rank_time_members(rank.times)}
            for rank in run.rank_summaries
        ],
        "communication": communication_fields(run.whole_communication),
        "efficiency": efficiency_fields(run.whole_efficiency),
        "losses": [_loss_members(curve) for curve in run.whole_losses],
        "stages": [tables.STAGES.as_json(stage) for stage in run.stages],
        "devices": [tables.DEVICES.as_json(device) for device in run.device_usage],
        "host": _host_members(run),
        "memory": [
            {**tables.MEMORY.as_json(memory), "known": dict(zip(_MEMORY_PARTS, memory.known, strict=True))}
            for memory in run.device_memory
        ],
        "memory_trends": [memory_trend_fields(trend) for trend in run.memory_trends],
        "compared": _mode_comparison_members(run),
        "mode_changes": [
            {name: None if value == "" else value for name, value in fields_of(change, *change._fields).items()}
            for change in run.announced.changes
        ],
        "paused": {**fields_of(run.pause_totals, *PauseTotals._fields), "alone_s": run.paused_alone_ns / 1e9},
        "pauses": [{**fields_of(pause, *_PAUSE), "t_s": pause.start_ns / 1e9} for pause in run.pause_list],
        "inputs": [
            {"process": process, "t_s": start_ns / 1e9, "seconds": (end_ns - start_ns) / 1e9}
            for process, start_ns, end_ns in run.announced.inputs
        ],
        "warnings": list(report.warnings),
        "profiles": run.memory_events["profile"],
        "time": {
            "width_s": run.binned_steps.width_ns / 1e9,
            "stretches": [_bin_members(bin_) for bin_ in run.binned_steps.bins],
        },
    }


def _mode_members(run: RunAnalysis, stats: StepStats) -> dict[str, object]:
    return {
        **tables.mode_table(run).as_json(stats),
        "rank": run.rank(stats.process),
        "mode": stats.mode or None,
        "step_kind": STEP_KINDS[stats.kind],
        "process_steps": stats.steps,
        "process_updates": stats.tally.updates,
        **rate_to_json(stats.rate),
        "phases": {
            phase.name: {**tables.PHASES.as_json(phase), "device_count": phase.device_count, "count": phase.ran}
            for phase in stats.ran_phases
        },
        "quantities": quantities_to_json(stats.known_quantities),
    }


def _elapsed_members(run: RunAnalysis) -> dict[str, object]:
    members: dict[str, object] = {f"{activity}_s": ns / 1e9 for activity, ns in run.time_by_activity.items()}
    if members:
        members["gaps"] = [fields_of(gap, "process", "after_step", "begin_ns", "ns") for gap in run.gaps[:_MAX_GAPS]]
    return members


def _size_members(run: RunAnalysis) -> list[dict[str, object]]:
    """Return the inputs and outputs of each replica by their number of calls; empty if the ranks have them."""
    if len(run.process_numbers) > 1 and run.layouts.have_only_ranks():
        return []
    return [
        {
            **fields_of(replica, "mode", "root", "replica", "device"),
            "inputs": inputs,
            "outputs": outputs,
            "calls": replica.sizes[inputs, outputs],
            "step_kind": STEP_KINDS[replica.kind],
            "evaluations": replica.sizes[inputs, outputs] * (replica.kind == EVALUATION),
        }
        for replica in run.replicas_by_kind
        for inputs, outputs in replica.sizes_by_calls
    ]


def rank_time_members(times: RankTimes | None) -> dict[str, object]:
    """Return the mean times of a rank in ms; null if unknown."""
    times = _NO_TIMES if times is None else times
    slowest = times.slowest if times.joined else None
    return {**tables.RANK_TIMES.as_json(times), "slowest": slowest, "joined_steps": times.joined}


def memory_trend_fields(trend: MemoryTrend) -> dict[str, object]:
    """Return the members of the growth of some memory."""
    return {**trend.growth._asdict(), **fields_of(trend, *MEMORY_TREND)}


def _host_members(run: RunAnalysis) -> dict[str, object] | None:
    if len(run.samples.hosts) != 1:
        return None
    (host,) = run.samples.hosts
    names = {"cpus": "cpus", "others_cpus": "others", "run_cpus": "own", "load": "load"}
    return {
        **fields_of(host, "samples", "mem_used_max", "mem_total"),
        "cpu_median_pct": host.util_median,
        **{member: getattr(run.host_usage, name, None) for member, name in names.items()},
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


def _bin_members(time_bin: Column) -> dict[str, object]:
    return {
        **fields_of(time_bin, "start_ns", "end_ns", "elapsed_ns", "longest_ns", "samples"),
        "steps": time_bin.count,
        "evaluation": time_bin.kind == EVALUATION,
        "step_kind": STEP_KINDS[time_bin.kind],
        "mode": time_bin.mode or None,
        "mean_ms": time_bin.wall_ns / time_bin.count / 1e6,
        "parts_ms": {phase.name: ns / 1e6 for phase, ns in zip(PHASES, time_bin.phases, strict=True)},
    }


def progress_fields(progress: Progress) -> dict[str, object]:
    """Return epoch and batch of a process, and the time left in the epoch."""
    members = fields_of(progress, "epoch", "batch", "batches", "left_ns", "error_ns", "absent")
    return {**members, "text": format_progress(progress) or None}


def loss_fields(curve: LossCurve) -> dict[str, object]:
    """Return the newest loss of a line that calls backward; null, with a reason, if it is no finite number."""
    is_finite = curve.last is not None and isfinite(curve.last)
    return {
        **fields_of(curve, "place", "step", "t_ns", "smoothed"),
        "loss": curve.last if is_finite else None,
        "absent": {} if is_finite else {"loss": curve.why or repr(curve.last)},
    }


def efficiency_fields(efficiency: Efficiency) -> dict[str, object]:
    """Return how good the training is, and the FLOPs per second of each process."""
    flops = "flops_per_s", "peak_flops_per_s", "reachable_flops_per_s", "mfu", "hfu", "dtype", "is_lower_bound"
    ranks = [{"process": process, "flops_per_s": flops_per_s} for process, flops_per_s in efficiency.ranks.items()]
    absent = {} if efficiency.reason is None else {"mfu": efficiency.reason}
    if efficiency.joules_per_sample is None:
        absent["joules_per_sample"] = "no energy of a GPU of the run, or of the CPUs, was read, or samples are unknown"
    members = {"text": efficiency.line or None, **fields_of(efficiency, *flops, "joules_per_sample"), "absent": absent}
    return {**members, "ranks": ranks} if ranks else members


def _loss_members(curve: LossCurve) -> dict[str, object]:
    points = [{"t_s": point.second, **fields_of(point, *LossBin._fields[1:])} for point in curve.points]
    return {**loss_fields(curve), "process": curve.process, "width_s": curve.point_s, "points": points}


def communication_fields(communication: Communication | None) -> dict[str, object] | None:
    """Return the communication as JSON members; None if no ranks train together."""
    if communication is None:
        return None
    torch_times, collectives = communication.torch_times, communication.collectives
    return {
        **fields_of(communication, "exposed_ns", "exposed_share", "wait_ns", "wait_share", "missing"),
        "joined_steps": communication.step_count_with_waits,
        **fields_of(communication, "synced", "unsynced"),
        "straggler": _straggler(communication.straggler, communication.lately),
        "torch": None if torch_times is None else _torch_times(torch_times),
        "sampled": {
            "samples": collectives.samples,
            "one_in": communication.one_in,
            "absent": collectives.why,
            "operations": [fields_of(operation, *_OPERATION) for operation in collectives.operations],
        },
        "wrappers": [
            {"wrapper": wrapper.number, **fields_of(wrapper, *_WRAPPER)} for wrapper in communication.wrappers
        ],
    }


def _torch_times(wrapper: Wrapper) -> dict[str, object]:
    members = {**fields_of(wrapper, "process", "iteration", "comm_ns", "overlap_ns"), "absent": {}}
    if len(wrapper.bucket_bytes) < 2:
        single = "with a single bucket nothing can be hidden: its communication begins after the last gradient"
        reason = single if wrapper.bucket_bytes else "the buckets are unknown"
        members |= {"overlap_ms": None, "absent": {"overlap_ms": reason}}
    return members


def _straggler(straggler: Straggler | None, lately: bool) -> dict[str, object] | None:
    if straggler is None:
        return None
    return {**fields_of(straggler, *_STRAGGLER), "sentence": straggler_sentence(straggler, lately=lately)}
