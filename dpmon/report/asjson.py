"""A report as one JSON object, for programs. The end of a name gives the unit; null is unknown. Times
of events count from the run's start.

run           id, name, script, command, cwd, python, started_unix, versions, directory
end           state (as `ls` calls it), status, signal, error, seconds
processes     process, rank, world, pid, python, torch
steps, calls  numbers, including deleted ones; dropped, pruned: numbers of lost and deleted records
nothing       why there is no step and no call, or null
standing      how long nothing has moved, and where each process is, or null
modes         mode, virtual, steps, steps_per_s, samples_per_s (of elapsed training time: dpmon.rates),
              steps_per_s_within_steps, samples_per_s_within_steps: of all processes. The rest is of one process, as on
              the screen: process, rank, process_steps, median_ms, p95_ms, phases: {name: share, median_ms, p95_ms,
              count, device_median_ms, device_count (number of known device times)}, quantities: {name: sum, steps
              (with a value)}. Evaluations are not included
evaluations   the same for evaluations: steps without backward and optimizer, if other steps of their mode have them
elapsed       startup_s, training_s, evaluation_s, between_s, paused_s, input_s, missed_s (not recorded), ending_s: they
              add up to the run's time; gaps: the longest times between two steps: process, after_step, t_s,
              seconds; {} if there is no step
findings      kind, text, ground, advice, weight; the most important first
replicas      mode, root, replica, device, calls, rows, median_ms, p95_ms, device_median_ms (over the device_calls
              with a known time), virtual, absent (why no call has a device time). Evaluations are not included
sizes         mode, root, replica, device, inputs, outputs, calls, evaluations (calls in evaluations, part of calls):
              every size of a replica
ranks         process, rank, world, device, calls (all), steps, median_ms, the rates (as in modes), inputs, outputs,
              forward_device_median_ms (of a step, on the slowest device), absent; steps, times and rates without
              evaluations
              data_ms, forward_ms, backward_ms (without the wait), exposed_ms, wait_ms: means of the steps, null if
              unknown; joined_steps: steps compared with other ranks, slowest: how often the others waited for it
communication exposed_ms, exposed_share, wait_ms, wait_share (per step, mean of the ranks, the wait without the
              straggler's; null if unknown, with the reason in missing), joined_steps, synced and unsynced (backward
              passes per step), straggler (process and rank of the slowest, ranks: all ranks that are as slow,
              excess_ms, share, slowest, steps, phase, own_ms, others_ms, sentence) or null, torch (process, iteration,
              comm_ms, overlap_ms: torch's own times), sampled (collectives of sampled steps: samples, one_in (the
              interval in steps), absent, operations: name, size (ranks), collectives, bytes, ended, alg_bytes_s,
              bus_bytes_s, absent), wrappers (of one rank, as in the record `ddp`); null if no ranks train together
stages        root, stage, device, parts, calls, median_ms, device_median_ms, device_calls, inputs, outputs, absent
devices       index, name, uuid, called, of_run, samples, util_median_pct, mem_used_max_bytes, mem_run_max_bytes,
              mem_total_bytes, temperature_max_c, power_max_w, throttled: {reason: samples}; gpu_absent: the reason
host          samples, cpu_median_pct, mem_used_max_bytes, mem_total_bytes; cpus (number of processors), medians of
              others_cpus and run_cpus (processors in use by others and by the run) and of load; null if not recorded
memory        device, model_bytes, gradients_bytes, optimizer_bytes, rest_bytes, peak_bytes, absent
compared      dp against single: speedup, low, high (its 95 % interval), efficiency (per device; null for virtual
              replicas), outcome (faster, slower, even), by_mean (the ratio of mean steps; null if it is near the
              speed-up), sentence, missing, steps (number of compared steps by mode); null unless both modes ran
mode_changes  process, root, t_s, step, mode, requested_by, devices, virtual, reason, refused
pauses        process, step (the last one before it), t_s, seconds (null if it had not ended, or its end was not
              recorded), on (whether it had not ended), reason (why the training resumed without a request), refused.
              pauses_left_out and refusals_left_out count the pauses and refusals beyond the first ones listed here
paused        totals of all pauses, listed or not: times, seconds (of pauses with a known end; simultaneous pauses of
              several processes count as one), unended (pauses without a recorded end), on (whether one had not
              ended), alone_s (time while another process was not paused). Steps and phases do not include paused
              time; the use of devices and host includes alone_s
inputs        process (null: one that does not train), t_s, seconds: waits for a line of input; step times
              include these waits, rates do not
warnings      texts
time          steps over time, of the processes that modes and evaluations name: width_s; stretches: start_s, end_s,
              mode, evaluation, steps (that ended in it), mean_ms, elapsed_ms (of training; samples divided by it is the
              rate), longest_ms, samples, parts_ms: {name: sum}. No stretch covers time without steps
"""

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
