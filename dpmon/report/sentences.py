"""Sentences that the text, the page and the summary share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from dpmon.model.findings.finding_evidence import process_suffix
from dpmon.model.findings.phase_notes import host_waits, timed_steps_note
from dpmon.model.mode_comparison import Comparison, verdict_sentence
from dpmon.model.mode_stats import ModeStats
from dpmon.model.pauses import PauseTotals
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_snapshot import ModeChange, ProcessInfo
from dpmon.record.shared_names import RANK_MODES
from dpmon.report.report_data import ReportData
from dpmon.run.lifecycle import STOPPED_BY_YOU
from dpmon.run.run_directory import ExitInfo
from dpmon.store.time_accounting import ACTIVITIES
from dpmon.text.formatting import (
    format_calls_so_far,
    format_clock,
    format_count_with_noun,
    format_long_duration,
    format_percent,
    format_quantity,
    format_run_time,
)

_GAPS_NAMED = 3
_LEAST_SHOWN_NS = 5_000_000
"""Shorter times would read "0.00 s"."""
_ROOTS_NAMED = 8
_STARTS_NAMED = 4
_NO_END = "without an end in the record"

MOST_STALLS = 5
"""Most stalls in the report, the newest ones."""
_NOT_OVER = {
    "running": "still running",
    "unsupervised": "still running, without a supervisor",
    "starting": "not started yet",
    "ending": "ending",
    "elsewhere": "on another machine; whether it still runs is unknown here",
}


def run_end_sentence(story: ReportData) -> str:
    """How the run ended, or its state while it runs."""
    how = story.exit
    if how is None and story.state == "unsupervised" and story.info.nodes:
        return "not known here, because its mirror has gone"
    if how is None:
        return _NOT_OVER.get(story.state, "how it ended is unknown")
    cause = how.cause or (story.raised if how.signal is None else None)
    return exit_sentence(how, f": {cause}" if cause else "")


def exit_sentence(how: ExitInfo, why: str) -> str:
    """How a run ended, and how long it took; `why` follows a failure."""
    if how.error is not None:
        return how.error
    took = format_run_time(how.seconds)
    if how.stopped:
        return f"{STOPPED_BY_YOU} after {took}"
    if how.status is None:
        return f"ended after {took}, status unknown: {how.unknown or 'nobody recorded it'}"
    if how.signal is not None:
        return f"killed by {how.signal} after {took}{why}"
    return f"finished in {took}" if how.status == 0 else f"failed with exit status {how.status} after {took}{why}"


def is_over(story: ReportData) -> bool:
    """Whether the run is over."""
    return story.exit is not None or story.state not in _NOT_OVER


def basic_facts(story: ReportData) -> list[str]:
    """The basic facts: times and programs, and what is missing from the record."""
    facts, info = story.facts, story.info
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.started_unix))
    process = next(iter(facts.announced.info.values()), ProcessInfo(0))
    texts = [
        f"began {began} in {info.cwd or 'a directory that is gone'}",
        what_ran(story.facts),
        f"Python {process.python or 'unknown'}, torch {process.torch or 'unknown'},"
        f" dpmon {info.versions.get('dpmon', '?')}",
    ]
    if facts.open_calls:
        texts.append(format_calls_so_far(facts.open_calls))
    if story.nothing is not None:
        texts.append(f"nothing was traced: {story.nothing}")
    texts += [*slow_first_step_note(facts), *stall_sentences(facts, story.exit, over=is_over(story))]
    pauses = pause_sentence(story)
    if pauses is not None:
        texts.append(pauses)
    if facts.announced.inputs:
        texts.append(input_wait_sentence(facts.announced.inputs))
    if facts.store.pruned:
        texts.append(
            f"{facts.store.pruned:,} older records were deleted to bound the history: the figures cover all steps, but"
            " single steps and samples of that time are gone"
        )
    if facts.store.dropped:
        texts.append(f"{facts.store.dropped:,} records were lost; the figures cover the rest")
    return texts


def slow_first_step_note(facts: RunAnalysis) -> list[str]:
    """That the first step is in no figure, because it waited long; empty if it is."""
    took = facts.slow_start_ns
    return (
        [f"the first step took {format_long_duration(took)}: it counts as start-up, and no figure has it"]
        if took
        else []
    )


def stall_sentences(facts: RunAnalysis, how: ExitInfo | None, *, over: bool) -> list[str]:
    """When the run stalled, for how long, and which rank stood where: the newest stalls."""
    found = facts.announced.stalls
    last = None if how is None or how.status == 0 else final_stall(found, facts.last_step_ns or 0)
    texts = []
    for stall in found[-MOST_STALLS:]:
        lasts = stall.end_ns is None or stall is last
        until = "" if not lasts else ", until its end" if over else " until now"
        lasted = format_long_duration(stall.duration_ns(facts.until_ns))
        texts.append(f"stalled at {format_clock(stall.since_ns)} for {lasted}{until}: {stall.text}")
    return texts


def what_ran(facts: RunAnalysis) -> str:
    """Processes, steps by mode if there were several, and the initial mode with its reason."""
    count = len(facts.processes) or (len(facts.announced.info) if facts.open_calls else 0)
    modes: Counter[str] = Counter()
    for mode in (*facts.modes, *facts.evaluations):
        modes[RANK_MODES[mode.distributed] if mode.distributed else mode.mode] += mode.all_steps
    several_modes = len(+modes) > 1
    counted = f"{format_count_with_noun(facts.steps, 'step')}, {format_count_with_noun(facts.calls, 'call')}"
    counted += " in all" if count > 1 else ""
    if evaluations := sum(mode.all_steps for mode in facts.evaluations):
        counted += f", {facts.steps - evaluations:,} training and {evaluations:,} evaluation steps"
    if several_modes:
        counted += f" ({', '.join(f'{steps:,} in {name}' for name, steps in modes.items() if steps)})"
    who = f"{count} training processes" if count > 1 else "one training process" if count else "no training process"
    groups: dict[str, list[str]] = {}
    for change in facts.announced.changes:
        if change.requested_by == "start" and change.refused is None and change.mode:
            groups.setdefault(_initial_mode_text(change, facts.layouts.distributed), []).append(change.root or "?")
    several = len(groups) > 1
    began = "began as " if several_modes else ""
    texts = [
        f"{began}{text}: {', '.join(dict.fromkeys(roots[:_ROOTS_NAMED]))}" if several else f"{began}{text}"
        for text, roots in list(groups.items())[:_STARTS_NAMED]
    ]
    return "; ".join([f"{who}, {counted}", *texts])


def _initial_mode_text(change: ModeChange, distributed: str | None) -> str:
    devices = " ".join(change.devices[:8]) + (" ..." if len(change.devices) > 8 else "")
    virtual = "virtual replicas " if change.virtual and change.mode == "dp" else ""
    reason = f" ({change.reason})" if change.reason else ""
    mode = RANK_MODES[distributed] if distributed and change.mode == "single" else change.mode
    return f"{mode} on {virtual}{devices or 'devices unknown'}{reason}"


def input_wait_sentence(inputs: Sequence[tuple[int | None, int, int]]) -> str:
    """The number and time of waits for a line of input, and where that time counts."""
    times = "once" if len(inputs) == 1 else f"{len(inputs):,} times"
    in_all = sum(end - begin for _, begin, end in inputs)
    where = ""
    if any(who is not None for who, _, _ in inputs):
        where = ": step times include that time, rates do not"
    total = f"{format_long_duration(in_all)}{' in all' if len(inputs) > 1 else ''}"
    return f"waited for a line of input {times}, for {total}{where}"


def pause_sentence(story: ReportData) -> str | None:
    """The number and time of pauses in a sentence, and where that time counts; None without pauses."""
    total = story.facts.pause_totals
    if not total.times:
        return None
    nowhere = "that time is in no step, no phase and no figure"
    if story.facts.paused_alone_ns:
        nowhere = (
            f"that time is in no step and no phase; for {format_long_duration(story.facts.paused_alone_ns)} of it"
            " another process was not paused, and the figures of devices include that part"
        )
    return f"{pause_count_text(total, is_over(story))}: {nowhere}"


def pause_count_text(total: PauseTotals, over: bool) -> str:
    """The number and time of pauses. `over`: whether the run is over."""
    times = "once" if total.times == 1 else f"{total.times:,} times"
    several = total.times > 1
    parts = [f"for {format_long_duration(total.ns)}{' in all' if several else ''}"] if total.ns else []
    if total.unended:
        parts.append(f"{total.unended:,} of them without an end in the record" if several else _NO_END)
    if total.on:
        parts.append("and was paused when it ended" if over else "and is paused now")
    return f"paused {', '.join([times, *parts])}"


ACTIVITY_NAMES = {
    **{name: name for name in ACTIVITIES},
    "startup": "start-up",
    "between": "between steps",
    "input": "waiting for input",
    "missed": "not recorded",
    "ending": "after the last step",
}
"""Words for the activities of dpmon.store.time_accounting."""


def time_by_activity_sentences(facts: RunAnalysis, spent: Mapping[str, int], *, over: bool) -> list[str]:
    """The run's time by activity (`spent`) and its longest gaps between steps, in sentences; empty without steps."""
    names = ACTIVITY_NAMES if over else {**ACTIVITY_NAMES, "ending": "since the last step"}
    parts = [f"{names[name]} {format_long_duration(ns)}" for name, ns in spent.items() if ns >= _LEAST_SHOWN_NS]
    if not parts:
        return []
    lines = [f"elapsed {format_long_duration(sum(spent.values()))}: {', '.join(parts)}"]
    gaps = facts.gaps[:_GAPS_NAMED]
    if gaps and spent["between"] >= _LEAST_SHOWN_NS:
        named = [
            f"{format_long_duration(gap.ns)} after step {gap.after_step:,}{process_suffix(gap.process, facts)}"
            f" ({format_clock(gap.begin_ns)})"
            for gap in gaps
        ]
        lines.append(f"the longest gaps between steps: {', '.join(named)}")
    return lines


def phase_notes(mode: ModeStats) -> list[str]:
    """Notes below the table of phases: about their times, and the quantities of the steps."""
    lines = (
        []
        if mode.who is None
        else [f"{format_count_with_noun(mode.steps, 'step')} of {mode.who}; the others have rows below"]
    )
    lines += [*host_waits(mode.phases), *timed_steps_note(mode.phases)]
    if mode.calls >= 2 * mode.steps and mode.phase("data") is None and mode.phase("backward") is not None:
        lines.append(
            "samples of a step: the rows of all micro-batches, if the same models are called before each backward pass"
            " and no optimizer steps in between; else, as in a GAN, the rows of its largest call"
        )
    return lines + [format_quantity(*each, mode.steps) for each in mode.known_quantities]


def mode_title(mode: ModeStats) -> str:
    """A mode's name, with a note for virtual replicas; "ddp" or "fsdp" for ranks, as on the screen."""
    if mode.distributed:
        return RANK_MODES[mode.distributed]
    return f"{mode.mode} (virtual)" if mode.virtual else mode.mode or "mode unknown"


def rank_suffix_of_run(facts: RunAnalysis) -> str:
    """The words " of rank 0" for times over the run, if the run has several processes; else empty."""
    names = dict.fromkeys(mode.who for mode in facts.modes if mode.who is not None)
    return f" of {' and '.join(names)}" if names else ""


def mode_comparison_sentences(compared: Comparison) -> list[str]:
    """dp against single in sentences."""
    if compared.speedup is None:
        return [compared.missing or "no verdict"]
    value, low, high = compared.speedup
    text = f"speed-up {value:.2f} (95%: {low:.2f} to {high:.2f})"
    if compared.efficiency is not None:
        text += f", {format_percent(compared.efficiency)} per device"
    steps = " and ".join(
        f"{format_count_with_noun(side.steps, 'step')} in {mode}" for mode, side in compared.sides.items()
    )
    without = "not counting the first steps after a change of mode, and steps of another batch size or kind"
    return [verdict_sentence(compared) or "", f"{text}; from {steps}, {without}"]
