"""The summary at the end of a run: how it ended, what is missing, and the first sections of its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpmon.errors import HistoryError
from dpmon.report.outcome import exit_sentence
from dpmon.report.plain_text import section_lines
from dpmon.report.report_data import open_report_data
from dpmon.report.sections import SUMMARY_TITLES, build_document
from dpmon.run.activities import nothing_traced_reason
from dpmon.run.run_directory import ExitInfo, load_info
from dpmon.run.run_registry import short_name
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import span_width
from dpmon.text.formatting import format_count_with_noun

WIDTH = 113
"""Cells of a line without a terminal."""
_MAX_WARNINGS = 5


def summary_lines(directory: Path, exit_info: ExitInfo | None, width: int = WIDTH) -> list[str]:
    """Return the lines of the summary of the run in `directory`, safe for a terminal. RunError if it is not a run.

    Medians and p95 (the smallest value that 95% do not exceed) cover every step of the process that the screen shows.
    Their error is at most 0.4%.
    """
    run_info = load_info(directory)
    name = short_name(run_info)
    lines = [_outcome_line(directory, exit_info)]
    try:
        with open_report_data(directory) as report:
            document = build_document(report)
        lines += [*document.facts, *_warning_lines(report.warnings, name)]
        sections = [section for section in document.sections if section.title in SUMMARY_TITLES]
        lines += [line for section in sections for line in section_lines(section, width)]
    except HistoryError as error:
        reason = nothing_traced_reason(directory, run_info, exit_info, [str(error)])
        lines += [*_warning_lines([str(error)], name), f"nothing was traced{f': {reason}' if reason else ''}"]
    lines.append(f"record: {directory}  (dpmon export {name})")
    return [sanitize_line(text) for text in lines]


def _warning_lines(warnings: Sequence[str], name: str) -> list[str]:
    """Return the first few warnings, then the number of others and the command that lists them."""
    lines = [f"warning: {text}" for text in warnings[:_MAX_WARNINGS]]
    if omitted_count := len(warnings) - len(lines):
        count_text = format_count_with_noun(omitted_count, "more warning")
        lines.append(f"{count_text}: dpmon export {name} --kind warning lists all {len(warnings)}")
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
    return sanitize_line(f"{_outcome_line(directory, exit_info)}  (dpmon report {short_name(load_info(directory))})")


def _outcome_line(directory: Path, exit_info: ExitInfo | None) -> str:
    run_info = load_info(directory)
    return f"{run_info.script} ({short_name(run_info)}): {exit_sentence(exit_info)}"
