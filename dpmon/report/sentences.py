"""Sentences shared by the text, the page and the summary."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dpmon.config import ConfigError, Settings, load_settings
from dpmon.model.findings.finding_evidence import process_suffix
from dpmon.model.findings.phase_notes import host_waits, timed_steps_note
from dpmon.model.mode_comparison import Comparison, verdict_sentence
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import ProcessInfo
from dpmon.record.schema import EVALUATION, TRAINING
from dpmon.record.shared_names import RANK_MODES
from dpmon.report.report_data import ReportData
from dpmon.run.lifecycle import has_succeeded
from dpmon.run.run_directory import ExitInfo
from dpmon.store.step_stats import StepStats
from dpmon.store.time_accounting import ACTIVITIES
from dpmon.text.formatting import (
    format_calls_so_far,
    format_count_with_noun,
    format_duration,
    format_elapsed,
    format_long_duration,
    format_percent,
    format_quantities,
    format_updates,
)

_MAX_GAPS = 3
_MIN_SHOWN_NS = 5_000_000
"""Shorter times would read "0.00 s"."""
_MAX_DEVICES = 8

MAX_STALLS = 5
"""How many of the newest stalls the report shows."""


def setup_facts(report: ReportData) -> list[str]:
    """Return when and where the run started, and the versions."""
    run_info = report.run_info
    start_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run_info.started_unix))
    process = next(iter(report.run.announced.info.values()), ProcessInfo(0))
    versions = (
        f"Python {process.python or 'unknown'}",
        f"torch {process.torch or 'unknown'}",
        f"dpmon {run_info.versions.get('dpmon', '?')}",
    )
    return [f"started {start_text} in {run_info.cwd or 'a deleted directory'}", ", ".join(versions)]


def basic_facts(report: ReportData) -> list[str]:
    """Return the basic facts: processes, steps and modes, and what is missing from the record."""
    run = report.run
    texts = [processes_and_modes(run)]
    if run.open_calls:
        texts.append(format_calls_so_far(run.open_calls))
    if report.untraced_reason is not None:
        texts.append(f"nothing was traced: {report.untraced_reason}")
    texts += [*slow_first_step_note(run), *stall_sentences(run, report.health.exit_info, has_ended=report.has_ended)]
    pauses = pause_sentence(report)
    if pauses is not None:
        texts.append(pauses)
    if run.announced.inputs:
        texts.append(input_wait_sentence(run.announced.inputs))
    texts += energy_sentences(run)
    if run.store.pruned:
        texts.append(
            f"{run.store.pruned:,} older records were deleted to bound the history: statistics cover all steps, but"
            " single steps and samples of that time are deleted"
        )
    if run.store.dropped:
        texts.append(f"{run.store.dropped:,} records were lost; statistics cover the rest")
    return texts


def slow_first_step_note(run: RunAnalysis) -> list[str]:
    """Return a note that the first step is excluded because it waited long; empty if it is not."""
    duration_ns = run.slow_start_ns
    if not duration_ns:
        return []
    return [f"the first step took {format_long_duration(duration_ns)}: it counts as start-up, not as a step"]


def stall_sentences(run: RunAnalysis, exit_info: ExitInfo | None, *, has_ended: bool) -> list[str]:
    """Return sentences on the newest stalls: when, for how long, and where each rank was."""
    stalls = run.announced.stalls
    last_stall = None if exit_info is None else final_stall(stalls, run.last_step_ns or 0, has_succeeded(exit_info))
    texts = []
    for stall in stalls[-MAX_STALLS:]:
        until_text = ""
        if stall.end_ns is None or stall is last_stall:
            until_text = ", until its end" if has_ended else " until now"
        duration_text = format_long_duration(stall.duration_ns(run.until_ns))
        texts.append(f"stalled at {format_elapsed(stall.since_ns)} for {duration_text}{until_text}: {stall.text}")
    return texts


def processes_and_modes(run: RunAnalysis) -> str:
    """Return the number of processes, steps and calls, steps by mode, and the initial mode with its reason."""
    process_count = len(run.process_numbers) or (len(run.announced.info) if run.open_calls else 0)
    modes: Counter[str] = Counter()
    for stats in run.modes:
        name = RANK_MODES[stats.distributed] if stats.distributed else stats.mode
        modes[name] += run.window.step_counts(stats.kind, stats.mode)[0]
    has_several_modes = len(+modes) > 1
    steps_text = format_count_with_noun(run.steps, "step") + format_updates(*run.window.step_counts(TRAINING))
    other_kinds = {stats.kind: stats.other_kind for stats in run.other_modes}
    kinds = [f"{run.window.step_counts(kind)[0]:,} {word}" for kind, word in other_kinds.items()]
    counts_text = f"{' + '.join([steps_text, *kinds])}, {format_count_with_noun(run.calls, 'call')}"
    counts_text += " total" if process_count > 1 else ""
    if has_several_modes:
        counts_text += f" ({', '.join(f'{steps:,} in {name}' for name, steps in modes.items() if steps)})"
    processes_text = f"{process_count} training processes"
    if process_count <= 1:
        processes_text = "one training process" if process_count else "no training process"
    prefix = "started as " if has_several_modes else ""
    return "; ".join([f"{processes_text}, {counts_text}", *(prefix + text for text in _initial_modes(run))])


def _initial_modes(run: RunAnalysis) -> list[str]:
    """Return each mode at the start with its devices and its reason."""
    distributed = run.layouts.distributed
    devices_by_mode: dict[tuple[str, str], dict[str, None]] = {}
    for change in run.announced.changes:
        if change.requested_by == "start" and change.refused is None and change.mode:
            mode = RANK_MODES[distributed] if distributed and change.mode == "single" else change.mode
            virtual = "virtual replicas " if change.virtual and mode == "dp" else ""
            key = f"{mode} on {virtual}", f" ({change.reason})" if change.reason else ""
            devices_by_mode.setdefault(key, {}).update(dict.fromkeys(change.devices))
    texts = []
    for (mode_text, reason_text), devices in devices_by_mode.items():
        names = [*devices][:_MAX_DEVICES] + (["..."] if len(devices) > _MAX_DEVICES else [])
        texts.append(f"{mode_text}{' '.join(names) or 'devices unknown'}{reason_text}")
    return texts


def input_wait_sentence(inputs: Sequence[tuple[int | None, int, int]]) -> str:
    """Return the number and total time of waits for a line of input, and where that time counts."""
    count_text = "once" if len(inputs) == 1 else f"{len(inputs):,} times"
    total_ns = sum(end_ns - start_ns for _, start_ns, end_ns in inputs)
    where_text = ""
    if any(process is not None for process, _, _ in inputs):
        where_text = ": step times include that time, rates do not"
    total_text = f"{format_long_duration(total_ns)}{' total' if len(inputs) > 1 else ''}"
    return f"waited for a line of input {count_text}, for {total_text}{where_text}"


def pause_sentence(report: ReportData) -> str | None:
    """Return the number and time of pauses, and where that time counts; None without pauses."""
    totals, alone_ns = report.run.pause_totals, report.run.paused_alone_ns
    if not totals.times:
        return None
    has_several = totals.times > 1
    parts = [f"paused {totals.times:,} times" if has_several else "paused once"]
    if totals.ns:
        parts.append(f"for {format_long_duration(totals.ns)}{' total' if has_several else ''}")
    if totals.unended:
        count_text = f"{totals.unended:,} of them " if has_several else ""
        parts.append(f"{count_text}without a recorded end")
    if totals.on:
        parts.append("and was paused when it ended" if report.has_ended else "and is paused now")
    accounting_text = "not counted in any step, phase or metric"
    if alone_ns:
        accounting_text = (
            f"not counted in any step or phase; for {format_long_duration(alone_ns)} of it another process was not"
            " paused, and device metrics include that part"
        )
    return f"{', '.join(parts)}: {accounting_text}"


def energy_sentences(run: RunAnalysis) -> list[str]:
    """Return the energy of the run's GPUs (without any, of the CPUs), its cost, and the energy per sample and token."""
    energy, tally = run.whole_energy, run.window.tally(None)
    if energy.joules is None:
        return []
    settings = Settings()
    with suppress(ConfigError):  # it must not stop the report of a run that has ended
        settings = load_settings(os.environ)
    kwh, devices = energy.joules / 3.6e6, format_count_with_noun(energy.gpus, "GPU") if energy.gpus else "the CPUs"
    cost = kwh * settings.price_per_kwh + run.until_ns / 3.6e12 * settings.price_per_hour
    texts = [f"energy of {devices} {kwh:.3g} kWh" + f", {cost:,.2f} {settings.currency}".rstrip() * (cost > 0)]
    per = {name: energy.joules_per(f"{name}s", tally) for name in ("sample", "token")}
    return ["; ".join(texts + [f"{joules:.3g} J a {name}" for name, joules in per.items() if joules is not None])]


ACTIVITY_NAMES = {
    **{name: name for name in ACTIVITIES},
    "startup": "start-up",
    "forward_only": "forward only",
    "between": "between steps",
    "input": "waiting for input",
    "missed": "not recorded",
    "ending": "after the last step",
}
"""Words for the activities of dpmon.store.time_accounting."""


def time_by_activity_sentences(run: RunAnalysis, ns_by_activity: Mapping[str, int], *, has_ended: bool) -> list[str]:
    """Return sentences on the run's time by activity and its longest gaps between steps; empty without steps."""
    names = {**ACTIVITY_NAMES, "evaluation": run.store.kind_words[EVALUATION]}
    if not has_ended:
        names["ending"] = "since the last step"
    parts = [f"{names[name]} {format_long_duration(ns)}" for name, ns in ns_by_activity.items() if ns >= _MIN_SHOWN_NS]
    if not parts:
        return []
    rank_count = len({run.rank(process) for process in run.process_numbers} - {None})
    mean_text = f"; mean of {rank_count:,} ranks" if rank_count > 1 else ""
    lines = [f"elapsed {format_long_duration(sum(ns_by_activity.values()))}{mean_text}: {', '.join(parts)}"]
    gaps = run.gaps[:_MAX_GAPS]
    if gaps and ns_by_activity["between"] >= _MIN_SHOWN_NS:
        gap_texts = [
            f"{format_long_duration(gap.ns)} after step {gap.after_step:,}{process_suffix(gap.process, run)}"
            f" ({format_elapsed(gap.begin_ns)})"
            for gap in gaps
        ]
        lines.append(f"the longest gaps between steps: {', '.join(gap_texts)}")
    return lines


def profile_sentences(record: Mapping[str, Any], directory: str) -> list[str]:
    """Return the steps and the trace of a profile, and its operators; or why there is none."""
    if "refused" in record:
        return [f"not profiled: {record['refused']}"]
    steps = format_count_with_noun(record["steps"], "step")
    trace = f"{directory}/{record['file']} (open it in ui.perfetto.dev)"
    lines = [f"{steps} of process {record['process']} up to step {record['step']}: {trace}"]
    for operator in record["operators"]:
        took = format_duration(operator["ms"] * 1e6)
        lines.append(f"{operator['name']} on the {operator['on']}: {took} in {operator['calls']:,} calls")
    return lines


def phase_notes(stats: StepStats, calls_per_step: float) -> list[str]:
    """Return notes below the table of phases: on their times, and the quantities of the steps.

    `calls_per_step`: mean number of calls in these steps.
    """
    lines = []
    if stats.process_name is not None:
        counts_text = format_count_with_noun(stats.steps, "step") + format_updates(stats.steps, stats.tally.updates)
        lines.append(f"{counts_text} of {stats.process_name}")
    lines += [*host_waits(stats.ran_phases), *timed_steps_note(stats.ran_phases)]
    if calls_per_step >= 2 and stats.phase("backward") is not None:
        lines.append(
            "samples of a step: the rows of its largest call; if it accumulates gradients, of all its micro-batches"
        )
    return lines + format_quantities(stats)


def mode_title(stats: StepStats) -> str:
    """Return the name of a mode, with a note for virtual replicas; "ddp" or "fsdp" for ranks, as on the screen.

    Steps of another kind than the main kind have its word: "single, evaluation".
    """
    title = stats.mode or "mode unknown"
    if stats.distributed:
        title = RANK_MODES[stats.distributed]
    elif stats.virtual:
        title = f"{stats.mode} (virtual)"
    return f"{title}, {stats.other_kind}" if stats.other_kind else title


def rank_suffix_of_run(run: RunAnalysis) -> str:
    """Return " of rank 0" for times over the run if it has several processes, else an empty text."""
    names = dict.fromkeys(stats.process_name for stats in run.modes if stats.process_name is not None)
    return f" of {' and '.join(names)}" if names else ""


def mode_comparison_sentences(comparison: Comparison) -> list[str]:
    """Return sentences that compare dp with single."""
    if comparison.speedup is None:
        return [comparison.missing or "no verdict"]
    value, low, high = comparison.speedup
    text = f"speed-up {value:.2f} (95%: {low:.2f} to {high:.2f})"
    if comparison.efficiency is not None:
        text += f", {format_percent(comparison.efficiency)} per device"
    steps = " and ".join(
        f"{format_count_with_noun(side.steps, 'step')} in {mode}" for mode, side in comparison.sides.items()
    )
    excluded_text = "without the steps during and just after a mode switch, and steps of another batch size or kind"
    return [verdict_sentence(comparison) or "", f"{text}; from {steps}, {excluded_text}"]
