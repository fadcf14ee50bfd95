"""The summary at the end of a run: how it ended, each mode's speed and phases, and some tables of the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dpmon.errors import HistoryError
from dpmon.model.mode_stats import ModeStats
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.stragglers import straggler_sentence
from dpmon.record.schema import EVALUATION, STEP
from dpmon.report.plain_text import section_lines
from dpmon.report.report_data import analyze_run, read_output_tail
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
from dpmon.run.process_notes import clean_traceback_line
from dpmon.run.run_directory import ExitInfo, RunInfo, load_info
from dpmon.run.run_reader import RunReader
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
    format_quantity,
    format_rate,
)

WIDTH = 113
"""Cells of a table without a terminal."""
_MAX_WARNINGS = 5
_NOT_TRAINING = 0.05
"""The parts of the elapsed time are shown if more than this share of it was not training."""


def summary_lines(directory: Path, how: ExitInfo | None, width: int = WIDTH) -> list[str]:
    """The summary of the run in `directory`, one text per line, safe for a terminal. RunError if it is not a run.

    Its tables are those of the report, in at most `width` cells.

    Medians and p95 (the smallest value that 95% do not exceed) cover every step of the process that the screen shows,
    and are at most 0.4% off.
    """
    info = load_info(directory)
    lines = [_outcome(info, how), *_exception_line(directory, info, how)]
    try:
        with open_store(directory) as store:
            lines += _SummaryLines(analyze_run(store, directory, how), info, how).lines(directory, width)
    except HistoryError as error:
        texts = [f"the history cannot be read: {error}"]
        lines += [*_warnings(texts, short_name(info)), _untraced_summary(directory, info, how, texts)]
    lines.append(f"record: {directory}  (dpmon export {short_name(info)})")
    return [sanitize_line(text) for text in lines]


def _untraced_summary(directory: Path, info: RunInfo, how: ExitInfo | None, reasons: Iterable[str]) -> str:
    why = nothing_traced_reason(directory, info, how, reasons)
    return f"nothing was traced: {why}" if why else "nothing was traced"


class _SummaryLines:
    """The lines from the store of a run."""

    def __init__(self, facts: RunAnalysis, info: RunInfo, how: ExitInfo | None) -> None:
        self._facts, self._info, self._how = facts, info, how

    def lines(self, directory: Path, width: int) -> list[str]:
        """All lines except how it ended and where the record is, the most important first."""
        facts = self._facts
        damaged = [] if facts.store.damaged is None else [facts.store.damaged]
        warnings = [*damaged, *(warning.text for warning in facts.announced.warnings)]
        stalled = stall_sentences(facts, self._how, has_ended=self._how is not None)
        lines = [*stalled, *self._time_lines(), *self._gap_lines(warnings)]
        kinds = facts.store.kinds() | facts.layouts.modes_and_kinds()
        if facts.open_calls:
            lines.append(format_calls_so_far(facts.open_calls))
        elif not kinds:
            lines.append(_untraced_summary(directory, self._info, self._how, [*damaged, *facts.announced.reasons]))
        for mode in sorted({mode for mode, _ in kinds}):
            lines += self._mode_lines(mode, False)
            if facts.window.ever_trains(mode) and any(kind & EVALUATION for name, kind in kinds if name == mode):
                lines += self._mode_lines(mode, True)
        slow = None if facts.communication is None else facts.communication.straggler
        lines += [] if slow is None else [f"  {straggler_sentence(slow, lately=False)}"]
        return lines + [line for section in detail_sections(facts) for line in section_lines(section, width)]

    def _gap_lines(self, warnings: Iterable[str]) -> list[str]:
        """The gaps in the figures, and warnings."""
        facts = self._facts
        paused = facts.pause_totals
        lacks = slow_first_step_note(facts)
        if paused.times:
            lacks.append(f"{pause_count_text(paused, self._how is not None)}: that time is in no step and no phase")
        if facts.announced.inputs:
            lacks.append(input_wait_sentence(facts.announced.inputs))
        if dropped := facts.store.dropped:
            lacks.append(f"{format_count(dropped)} records were lost; the figures cover the rest")
        return [*lacks, *_warnings(warnings, short_name(self._info))]

    # ------------------------------------------------------------------------------------------ time and modes

    def _time_lines(self) -> list[str]:
        """The parts of the elapsed time, if more than _NOT_TRAINING of it was not training."""
        last_ns = self._facts.last_step_ns
        if last_ns is None:
            return []
        parts = self._facts.spent_until(last_ns if self._how is None else int(self._how.seconds * 1e9))
        whole = sum(parts.values())
        if (parts["training"] or parts["evaluation"]) >= (1 - _NOT_TRAINING) * whole:
            return []
        return time_by_activity_sentences(self._facts, parts, has_ended=self._how is not None)

    def _mode_lines(self, mode: str, evaluation: bool) -> list[str]:
        found = self._facts.mode(mode, evaluation)
        title, speed = mode_title(found) + (", evaluation" if evaluation else ""), format_rate(found.rate)
        head = f"{title}: {self._steps(mode, evaluation)}"
        return [f"{head}, {speed}" if speed else head, *_phase_lines(found)]

    def _steps(self, mode: str, evaluation: bool) -> str:
        """Steps, calls and processes. Ranks step together; other processes step independently."""
        facts = self._facts
        tallies = [facts.window.tally(mode, evaluation, process) for process in facts.store.processes]
        counts = [tally.steps for tally in tallies if tally.steps]
        calls = format_count_with_noun(facts.layouts.calls(mode, evaluation, facts.window.ever_trains(mode)), "call")
        if len(counts) < 2:
            return f"{format_count_with_noun(sum(counts), 'step')}, {calls}"
        ranks = any(facts.rank(process) is not None for process in facts.processes)
        if ranks and len(set(counts)) == 1:
            return f"{format_count_with_noun(counts[0], 'step')} of each of {len(counts)} ranks, {calls} in all"
        who = "ranks" if ranks else "processes"
        return f"{format_count_with_noun(sum(counts), 'step')} of {len(counts)} {who} in all, {calls}"


def _phase_lines(found: ModeStats) -> list[str]:
    """The times of steps and of each phase that ran (the phases of calls below forward), then the quantities."""
    if not found.steps:
        return []
    whole = PhaseStats(STEP, found.steps, found.median_ns, found.p95_ns, found.mean_ns, 1.0)
    lines = [_phase_line("step" if found.who is None else f"step of {found.who}", whole)]
    lines += [_phase_line(f"  {'  ' * depth}{phase.name}", phase) for depth, phase in found.nested_phases()]
    return lines + [f"  {format_quantity(*each, found.steps)}" for each in found.known_quantities]


def _phase_line(label: str, phase: PhaseStats) -> str:
    text = f"  {label:<18} median {format_duration(phase.median_ns):>8}   p95 {format_duration(phase.p95_ns):>8}"
    return text if phase.device_ns is None else f"{text}   on device {format_duration(phase.device_ns):>8}"


def _warnings(warnings: Iterable[str], name: str) -> list[str]:
    """The first few warnings, then the number of others and the command that lists them."""
    texts = list(dict.fromkeys(warnings))
    lines = [f"warning: {text}" for text in texts[:_MAX_WARNINGS]]
    if more := len(texts) - len(lines):
        lines.append(
            f"{format_count_with_noun(more, 'more warning')}: dpmon export {name} --kind warning lists all {len(texts)}"
        )
    return lines


def fit_lines(lines: list[str], rows: int, columns: int, more: str) -> list[str]:
    """The lines, if they fit in `rows`; else the first ones, the number of the others, and the last line.

    `more`: the command that prints all.
    """

    def size(text: str) -> int:
        return max(-(-span_width(text) // columns), 1)

    if len(lines) < 3 or sum(map(size, lines)) <= rows:
        return lines
    shown, room = 0, rows - size(lines[-1]) - size(f"{len(lines)} more lines: {more}")
    while (room := room - size(lines[shown])) >= 0:
        shown += 1
    shown = max(shown, 1)  # how the run ended
    return [*lines[:shown], f"{format_count_with_noun(len(lines) - shown - 1, 'more line')}: {more}", lines[-1]]


def ending_line(directory: Path, how: ExitInfo | None) -> str:
    """How the run in `directory` ended, and the command for more; safe for a terminal. RunError if it is not a run."""
    info = load_info(directory)
    return sanitize_line(f"{_outcome(info, how)}  (dpmon report {short_name(info)})")


def _outcome(info: RunInfo, how: ExitInfo | None) -> str:
    name = f"{info.script} ({short_name(info)})"
    if how is None:
        return f"{name}: how it ended is unknown"
    why = "" if not how.cause else f" ({how.cause})" if how.signal is not None else f": {how.cause}"
    return f"{name}: {exit_sentence(how, why)}" + (f", exit status {how.status}" if how.stopped and how.status else "")


def _exception_line(directory: Path, info: RunInfo, how: ExitInfo | None) -> list[str]:
    """The exception that ended a script under a screen, because the script's output disappeared with the screen."""
    reader = RunReader(directory)
    if how is None or not how.status or how.stopped or how.cause or len(reader.output_paths) > 1:
        return []
    last = clean_traceback_line(read_output_tail(reader))
    return [] if last is None else [f"exception: {last}  (dpmon report {short_name(info)})"]
