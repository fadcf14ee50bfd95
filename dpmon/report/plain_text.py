"""Renders a report as lines of plain text, without colors or control characters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpmon.report.document import (
    Document,
    Findings,
    LabeledSentences,
    OutputLines,
    Paragraph,
    Part,
    Section,
    Table,
    TextHistogram,
)
from dpmon.report.report_data import collect_report_data
from dpmon.report.sections import MAX_ROWS, build_document
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import truncate
from dpmon.text.formatting import format_duration, format_elapsed

MIN_WIDTH = 40
BAR_CHARS = "▁▂▃▄▅▆▇█"
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|[KMGT]iB)(?!\w))")
"""The space between a number and its unit, at which lines are not broken."""


def report_text(directory: Path, width: int = 80) -> list[str]:
    """Return the report of the run in `directory` in lines of at most `width` cells. Raises RunError if it is no run.

    Headings do not begin with a space.
    """
    return text_lines(build_document(collect_report_data(directory)), width)


def text_lines(document: Document, width: int = 80) -> list[str]:
    """Return a report in lines of at most `width` cells, but at least MIN_WIDTH."""
    width = max(width, MIN_WIDTH)
    lines = _wrap_lines(f"{document.script} ({document.run}): {document.outcome}", width, "", "  ")
    for fact in document.facts:
        lines += _wrap_lines(fact, width)
    for section in document.sections:
        lines += ["", *section_lines(section, width)]
    return lines


def section_lines(section: Section, width: int) -> list[str]:
    """Return the lines of a section: its title and its parts."""
    return [
        sanitize_line(section.title.upper() + section.subtitle),
        *(line for part in section.parts for line in _render_part(part, width)),
    ]


def _render_part(part: Part, width: int) -> Iterable[str]:
    if isinstance(part, Paragraph):
        return _wrap_lines(part.text, width)
    if isinstance(part, Table):
        return _render_table(part, width)
    if isinstance(part, LabeledSentences):
        return _render_labeled_sentences(part, width)
    if isinstance(part, Findings):
        return _render_findings(part, width)
    if isinstance(part, OutputLines):
        return [truncate(f"  {sanitize_line(line)}", width) for line in part.lines]
    return _render_histogram(part, width) if isinstance(part, TextHistogram) else ()


def _wrap_lines(text: str, width: int, first_indent: str = "  ", indent: str | None = None) -> list[str]:
    indent = first_indent if indent is None else indent
    text = _UNIT_SPACE.sub(_NO_BREAK, sanitize_line(text))
    lines = textwrap.wrap(text, width, initial_indent=first_indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines] or [first_indent.rstrip()]


def _omitted_rows_line(rows: Sequence[object], shown_count: int) -> list[str]:
    return [f"  and {len(rows) - shown_count:,} more; --json has them all"] if len(rows) > shown_count else []


def _align_columns(rows: Sequence[Sequence[str]], width: int, left_aligned: int) -> list[str]:
    """Return lines with columns as wide as their content, `left_aligned` of them left-aligned, truncated to `width`."""
    rows = [[sanitize_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(size) if column < left_aligned else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(truncate("  " + "  ".join(cells).rstrip(), width))
    return lines


def _render_table(table: Table, width: int) -> list[str]:
    """Return the lines of a table. A last column of text goes to lines of its own if it does not fit."""
    rows = [table.headers, *table.rows[:MAX_ROWS]]
    omitted_line = _omitted_rows_line(table.rows, MAX_ROWS)
    if not table.has_text_columns:
        return [*_align_columns(rows, width, left_aligned=1), *omitted_line]
    short_lines = _align_columns([row[:-1] for row in rows], width, left_aligned=2)
    max_width = max(map(len, short_lines))
    if max(len(sanitize_line(row[-1])) for row in rows) <= width - max_width - 2:
        lines = [
            f"{line.ljust(max_width)}  {sanitize_line(row[-1])}" for line, row in zip(short_lines, rows, strict=True)
        ]
        return [*lines, *omitted_line]
    label = f"{table.headers[-1]}: " if len(table.headers[-1]) == 1 else ""
    lines = short_lines[:1]
    for line, row in zip(short_lines[1:], rows[1:], strict=True):
        lines += [line, *_wrap_lines(f"{label}{row[-1]}", width, "      ")]
    return [*lines, *omitted_line]


def _render_labeled_sentences(part: LabeledSentences, width: int) -> list[str]:
    lines = []
    for row in part.rows[: part.max_rows]:
        label, text = "", "  ".join(row)
        if len(row) == 2:
            label, text = row
            label = sanitize_line(label).ljust(part.indent - 2)
        lines += _wrap_lines(text, width, f"  {label}", " " * part.indent)
    return [*lines, *_omitted_rows_line(part.rows, part.max_rows)]


def _render_findings(findings: Findings, width: int) -> list[str]:
    lines = []
    for number, finding in enumerate(findings.findings, start=1):
        lines += _wrap_lines(finding.text, width, f"{number:>3} ", "    ")
        lines += _wrap_lines(f"evidence: {finding.ground}", width, "    ", "      ")
        lines += _wrap_lines(finding.advice_text, width, "    ", "      ")
    return lines


def _render_histogram(histogram: TextHistogram, width: int) -> list[str]:
    """Return a caption, a row of bars with the mean step time, and the times at its edges."""
    bins = histogram.bins
    start_ns, end_ns = bins[0].start_ns, max(time_bin.end_ns for time_bin in bins)
    length_ns = end_ns - start_ns
    cell_count = max(min(width - 4, 120, length_ns // histogram.bin_ns), 1)  # the last bin may be shorter
    wall_ns, steps = [0] * cell_count, [0] * cell_count
    for time_bin in bins:
        first = (time_bin.start_ns - start_ns) * cell_count // length_ns
        last = -(-(time_bin.end_ns - start_ns) * cell_count // length_ns) - 1
        for index in range(first, max(last, first) + 1):
            wall_ns[index] += time_bin.wall_ns
            steps[index] += time_bin.steps
    means = [total / count if count else None for total, count in zip(wall_ns, steps, strict=True)]
    highest = max(mean for mean in means if mean is not None)
    bars = "".join(" " if mean is None else BAR_CHARS[min(int(mean / highest * 8), 7)] for mean in means)
    caption = f"step time{histogram.rank_suffix}, mean over each {format_duration(length_ns / cell_count)}"
    caption += f"; the highest bar is {format_duration(highest)}"
    if None in means:
        caption += "; no bar where no step ran"
    axis = format_elapsed(start_ns) + format_elapsed(end_ns).rjust(max(cell_count - 8, 9))
    return [*_wrap_lines(caption, width), "  " + bars, "  " + axis]
