"""Draws a report as lines of plain text, without colors or control characters."""

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
from dpmon.text.formatting import format_clock, format_duration

NARROWEST = 40
BARS = "▁▂▃▄▅▆▇█"
_KEPT = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|[KMGT]iB)(?!\w))")
"""The space between a number and its unit, at which no line is broken."""


def report_text(directory: Path, width: int = 80) -> list[str]:
    """The report of the run in `directory`, in lines of at most `width` cells. Raises RunError if it is not a run.

    Headings do not begin with a space.
    """
    return text_lines(build_document(collect_report_data(directory)), width)


def text_lines(report: Document, width: int = 80) -> list[str]:
    """The report in at most `width` cells (NARROWEST at least)."""
    width = max(width, NARROWEST)
    lines = _wrap(f"{report.script} ({report.run}): {report.outcome}", width, "", "  ")
    for fact in report.facts:
        lines += _wrap(fact, width)
    for section in report.sections:
        lines += ["", *section_lines(section, width)]
    return lines


def section_lines(section: Section, width: int) -> list[str]:
    """The title of a section and its parts."""
    return [
        sanitize_line(section.title.upper() + section.about),
        *(line for part in section.parts for line in _part(part, width)),
    ]


def _part(part: Part, width: int) -> Iterable[str]:
    if isinstance(part, Paragraph):
        return _wrap(part.text, width)
    if isinstance(part, Table):
        return _table(part, width)
    if isinstance(part, LabeledSentences):
        return _entries(part, width)
    if isinstance(part, Findings):
        return _findings(part, width)
    if isinstance(part, OutputLines):
        return [truncate(f"  {sanitize_line(line)}", width) for line in part.lines]
    return _bars(part, width) if isinstance(part, TextHistogram) else ()


def _wrap(text: str, width: int, first: str = "  ", rest: str | None = None) -> list[str]:
    rest = first if rest is None else rest
    kept = _UNIT.sub(_KEPT, sanitize_line(text))
    lines = textwrap.wrap(kept, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(_KEPT, " ") for line in lines] or [first.rstrip()]


def _omitted_rows_line(rows: Sequence[object], shown: int) -> list[str]:
    return [f"  and {len(rows) - shown:,} more; --json has them all"] if len(rows) > shown else []


def _align_columns(rows: Sequence[Sequence[str]], width: int, left: int) -> list[str]:
    """Columns as wide as their content, `left` of them left-aligned; whatever exceeds `width` is cut."""
    rows = [[sanitize_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(size) if column < left else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(truncate("  " + "  ".join(cells).rstrip(), width))
    return lines


def _table(table: Table, width: int) -> list[str]:
    """The last column of a table that flows goes to lines of its own if it does not fit."""
    rows = [table.head, *table.rows[:MAX_ROWS]]
    more = _omitted_rows_line(table.rows, MAX_ROWS)
    if not table.flows:
        return [*_align_columns(rows, width, left=1), *more]
    narrow = _align_columns([row[:-1] for row in rows], width, left=2)
    widest = max(map(len, narrow))
    if max(len(sanitize_line(row[-1])) for row in rows) <= width - widest - 2:
        return [
            *(f"{line.ljust(widest)}  {sanitize_line(row[-1])}" for line, row in zip(narrow, rows, strict=True)),
            *more,
        ]
    short = f"{table.head[-1]}: " if len(table.head[-1]) == 1 else ""
    lines = narrow[:1]
    for line, row in zip(narrow[1:], rows[1:], strict=True):
        lines += [line, *_wrap(f"{short}{row[-1]}", width, "      ")]
    return [*lines, *more]


def _entries(entries: LabeledSentences, width: int) -> list[str]:
    lines = []
    for row in entries.rows[: entries.most]:
        label, text = (
            ("", "  ".join(row)) if len(row) != 2 else (sanitize_line(row[0]).ljust(entries.indent - 2), row[1])
        )
        lines += _wrap(text, width, f"  {label}", " " * entries.indent)
    return [*lines, *_omitted_rows_line(entries.rows, entries.most)]


def _findings(part: Findings, width: int) -> list[str]:
    lines = []
    for number, finding in enumerate(part.findings, start=1):
        lines += _wrap(finding.text, width, f"{number:>3} ", "    ")
        lines += _wrap(f"evidence: {finding.ground}", width, "    ", "      ")
        lines += _wrap(finding.advice_text, width, "    ", "      ")
    return lines


def _bars(part: TextHistogram, width: int) -> list[str]:
    bins = part.bins
    first, last = bins[0].start_ns, max(one.end_ns for one in bins)
    cells = max(min(width - 4, 120, (last - first) // part.bin_ns), 1)  # the last stretch may be shorter than others
    sums = [[0, 0] for _ in range(cells)]
    for one in bins:
        begin, end = ((at - first) * cells for at in (one.start_ns, one.end_ns))
        for at in range(begin // (last - first), max(-(-end // (last - first)), begin // (last - first) + 1)):
            sums[at][0] += one.wall_ns
            sums[at][1] += one.steps
    means = [wall / steps if steps else None for wall, steps in sums]
    top = max(mean for mean in means if mean is not None)
    bars = "".join(" " if mean is None else BARS[min(int(mean / top * 8), 7)] for mean in means)
    scale = f"time of a step{part.whose}, mean over each {format_duration((last - first) / cells)}"
    scale += f"; the highest bar is {format_duration(top)}" + ("; no bar where no step ran" if None in means else "")
    ends = format_clock(first) + format_clock(last).rjust(max(cells - 8, 9))
    return [*_wrap(scale, width), "  " + bars, "  " + ends]
