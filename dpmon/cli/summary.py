"""The summary at the end of a run: how it ended, the rates and phases of each mode, and some tables of the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dpmon.errors import HistoryError
from dpmon.model.mode_stats import ModeStats
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.stragglers import straggler_sentence
from dpmon.record.schema import STEP, STEP_KINDS, step_kind
from dpmon.report.plain_text import section_lines
from dpmon.report.report_data import analyze_run
from dpmon.report.sections import detail_sections
from dpmon.report.sentences import (
    exit_sentence,
    input_wait_sentence,
    mode_title,
    pause_count_text,
    slow_first_step_note,
    stall_sentences,
    time_by_activity_sentences,
)
from dpmon.run.activities import nothing_traced_reason
from dpmon.run.run_directory import ExitInfo, RunInfo, load_info
from dpmon.run.run_registry import short_name
from dpmon.sanitize import sanitize_line
from dpmon.store.step_stats import PhaseStats
from dpmon.store.store_opening import open_store
from dpmon.text.cells import span_width
from dpmon.text.formatting import (
    format_calls_so_far,
    format_count,
    format_count_with_noun,
    format_duration,
    format_quantities,
    format_rate,
    format_updates,
)

WIDTH = 113
"""Cells of a table without a terminal."""
_MAX_WARNINGS = 5
_MIN_OTHER_SHARE = 0.05
"""Time by activity is shown if more than this share of it was not training."""


def summary_lines(directory: Path, exit_info: ExitInfo | None, width: int = WIDTH) -> list[str]:
    """Return the lines of the summary of the run in `directory`, safe for a terminal. RunError if it is not a run.

    Its tables are those of the report, in at most `width` cells.

    Medians and p95 (the smallest value that 95% do not exceed) cover every step of the process that the screen shows.
    Their error is at most 0.4%.
    """
    run_info = load_info(directory)
    lines = [_outcome_line(run_info, exit_info)]
    try:
        with open_store(directory) as store:
            lines += _SummaryLines(analyze_run(store, directory, exit_info), run_info, exit_info).lines(
                directory, width
            )
    except HistoryError as error:
        texts = [str(error)]
        lines += [
            *_warning_lines(texts, short_name(run_info)),
            _untraced_summary(directory, run_info, exit_info, texts),
        ]
    lines.append(f"record: {directory}  (dpmon export {short_name(run_info)})")
    return [sanitize_line(text) for text in lines]


def _untraced_summary(directory: Path, run_info: RunInfo, exit_info: ExitInfo | None, reasons: Iterable[str]) -> str:
    reason = nothing_traced_reason(directory, run_info, exit_info, reasons)
    return f"nothing was traced: {reason}" if reason else "nothing was traced"


class _SummaryLines:
    """The summary lines that come from the store of a run."""

    def __init__(self, run: RunAnalysis, run_info: RunInfo, exit_info: ExitInfo | None) -> None:
        self._run, self._run_info, self._exit_info = run, run_info, exit_info

    def lines(self, directory: Path, width: int) -> list[str]:
        """Return all lines except how the run ended and where the record is, the most important first."""
        run = self._run
        warnings = [warning.text for warning in run.announced.warnings]
        stall_lines = stall_sentences(run, self._exit_info, has_ended=self._exit_info is not None)
        lines = [*stall_lines, *self._time_lines(), *self._gap_lines(warnings)]
        mode_kinds = {(mode, step_kind(kind)) for mode, kind in run.store.mode_kinds | run.layouts.modes_and_kinds()}
        if run.open_calls:
            lines.append(format_calls_so_far(run.open_calls))
        elif not mode_kinds:
            lines.append(_untraced_summary(directory, self._run_info, self._exit_info, run.announced.reasons))
        for mode, kind in sorted(mode_kinds):
            lines += self._mode_lines(mode, kind)
        straggler = None if run.communication is None else run.communication.straggler
        lines += [] if straggler is None else [f"  {straggler_sentence(straggler, lately=False)}"]
        return lines + [line for section in detail_sections(run) for line in section_lines(section, width)]

    def _gap_lines(self, warnings: Iterable[str]) -> list[str]:
        """Return what the statistics omit, and warnings."""
        run = self._run
        pauses = run.pause_totals
        gaps = slow_first_step_note(run)
        if pauses.times:
            gaps.append(f"{pause_count_text(pauses, self._exit_info is not None)}: not counted in any step or phase")
        if run.announced.inputs:
            gaps.append(input_wait_sentence(run.announced.inputs))
        if lost_count := run.store.dropped:
            gaps.append(f"{format_count(lost_count)} records were lost; statistics cover the rest")
        return [*gaps, *_warning_lines(warnings, short_name(self._run_info))]

    # ------------------------------------------------------------------------------------------ time and modes

    def _time_lines(self) -> list[str]:
        """Return the time by activity, if more than _MIN_OTHER_SHARE of it was not training."""
        last_ns = self._run.last_step_ns
        if last_ns is None:
            return []
        parts = self._run.spent_until(last_ns if self._exit_info is None else int(self._exit_info.seconds * 1e9))
        total_ns = sum(parts.values())
        if max(parts[name] for name in STEP_KINDS.values()) >= (1 - _MIN_OTHER_SHARE) * total_ns:
            return []
        return time_by_activity_sentences(self._run, parts, has_ended=self._exit_info is not None)

    def _mode_lines(self, mode: str, kind: int) -> list[str]:
        stats = self._run.mode(mode, kind)
        title, rate_text = mode_title(stats), format_rate(stats.rate)
        heading = f"{title}: {self._counts_text(mode, kind)}"
        return [f"{heading}, {rate_text}" if rate_text else heading, *_phase_lines(stats)]

    def _counts_text(self, mode: str, kind: int) -> str:
        """Return the counts of steps, calls and processes. Ranks step together; other processes step independently."""
        run = self._run
        tallies = [run.window.tally(mode, kind, process) for process in run.store.processes]
        counts = [(tally.steps, tally.updates) for tally in tallies if tally.steps]
        calls = format_count_with_noun(run.layouts.calls(mode, kind), "call")
        if not counts and kind != run.window.main_kind:
            return calls
        has_ranks = any(run.rank(process) is not None for process in run.processes)
        is_equal = has_ranks and len(set(counts)) == 1
        steps, updates = counts[0] if is_equal else [sum(column) for column in zip((0, 0), *counts, strict=True)]
        text = format_count_with_noun(steps, "step") + format_updates(steps, updates)
        if len(counts) < 2:
            return f"{text}, {calls}"
        if is_equal:
            return f"{text} of each of {len(counts)} ranks, {calls} total"
        noun = "ranks" if has_ranks else "processes"
        return f"{text} of {len(counts)} {noun} total, {calls}"


def _phase_lines(stats: ModeStats) -> list[str]:
    """Return the times of steps and of each phase that ran (the phases of calls below forward), then the quantities.

    Empty without steps.
    """
    if not stats.steps:
        return []
    step = PhaseStats(STEP, stats.steps, stats.median_ns, stats.p95_ns, stats.mean_ns, 1.0)
    lines = [_phase_line("step" if stats.process_name is None else f"step of {stats.process_name}", step)]
    lines += [_phase_line(f"  {'  ' * depth}{phase.name}", phase) for depth, phase in stats.nested_phases()]
    return lines + [f"  {text}" for text in format_quantities(stats)]


def _phase_line(label: str, phase: PhaseStats) -> str:
    text = f"  {label:<18} median {format_duration(phase.median_ns):>8}   p95 {format_duration(phase.p95_ns):>8}"
    return text if phase.device_ns is None else f"{text}   on device {format_duration(phase.device_ns):>8}"


def _warning_lines(warnings: Iterable[str], name: str) -> list[str]:
    """Return the first few warnings, then the number of others and the command that lists them."""
    texts = list(dict.fromkeys(warnings))
    lines = [f"warning: {text}" for text in texts[:_MAX_WARNINGS]]
    if omitted_count := len(texts) - len(lines):
        count_text = format_count_with_noun(omitted_count, "more warning")
        lines.append(f"{count_text}: dpmon export {name} --kind warning lists all {len(texts)}")
    return lines


def fit_lines(lines: list[str], rows: int, columns: int, command: str) -> list[str]:
    """Return the lines, if they fit in `rows`; else the first ones, how many are omitted, and the last line.

    `command`: prints all of them.
    """

    def row_count(text: str) -> int:
        return max(-(-span_width(text) // columns), 1)

    if len(lines) < 3 or sum(map(row_count, lines)) <= rows:
        return lines
    shown_count, free_rows = 0, rows - row_count(lines[-1]) - row_count(f"{len(lines)} more lines: {command}")
    while (free_rows := free_rows - row_count(lines[shown_count])) >= 0:
        shown_count += 1
    shown_count = max(shown_count, 1)  # how the run ended
    omitted_text = format_count_with_noun(len(lines) - shown_count - 1, "more line")
    return [*lines[:shown_count], f"{omitted_text}: {command}", lines[-1]]


def ending_line(directory: Path, exit_info: ExitInfo | None) -> str:
    """Return how the run in `directory` ended, and the command for more. RunError if it is not a run."""
    run_info = load_info(directory)
    return sanitize_line(f"{_outcome_line(run_info, exit_info)}  (dpmon report {short_name(run_info)})")


def _outcome_line(run_info: RunInfo, exit_info: ExitInfo | None) -> str:
    name = f"{run_info.script} ({short_name(run_info)})"
    if exit_info is None:
        return f"{name}: how it ended is unknown"
    cause_text = ""
    if exit_info.cause:
        cause_text = f": {exit_info.cause}" if exit_info.signal is None else f" ({exit_info.cause})"
    status_text = f", exit status {exit_info.status}" if exit_info.stopped and exit_info.status else ""
    return f"{name}: {exit_sentence(exit_info, cause_text)}{status_text}"
