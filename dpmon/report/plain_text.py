"""Renders a report as lines of plain text, without colors or control characters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from dpmon.report.document import (
    MAX_ROWS,
    Document,
    Findings,
    OutputLines,
    Paragraph,
    Part,
    Section,
    Table,
    TextHistogram,
)
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import truncate
from dpmon.text.formatting import format_duration, format_elapsed

MIN_WIDTH = 40
_MIN_FLOW_CELLS = 30
"""Fewest cells for the last column of a table; where it has less, its texts are on lines of their own."""
BAR_CHARS = "▁▂▃▄▅▆▇█"
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|[KMGT]iB)(?!\w))")
"""The space between a number and its unit, at which lines are not broken."""


def text_lines(document: Document, width: int = 80) -> list[str]:
    """Return a report in lines of at most `width` cells, but at least MIN_WIDTH. Headings do not begin with a space."""
    width = max(width, MIN_WIDTH)
    lines = _wrap_lines(f"{document.script} ({document.run}): {document.outcome}", width, "", "  ")
    for fact in (*document.setup, *document.facts):
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


def _render_table(table: Table, width: int) -> list[str]:
    """Return the lines of a table, with columns as wide as their content. A last column of text is wrapped."""
    rows = [[sanitize_line(cell) for cell in row] for row in (table.headers, *table.rows[:MAX_ROWS])]
    flows = len(table.headers) - 1 in table.text_columns
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)][: -1 if flows else None]
    start = 2 + sum(widths) + 2 * len(widths)
    has_own_lines = flows and max(len(row[-1]) for row in rows) > width - start and width - start < _MIN_FLOW_CELLS
    label = f"{table.headers[-1]}: " if len(table.headers[-1]) == 1 else ""
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(size) if column == 0 or column in table.text_columns else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=False))
        ]
        text = "  " + "".join(f"{cell}  " for cell in cells)
        if flows and not has_own_lines:
            lines += _wrap_lines(row[-1], width, text, " " * start)
        else:
            lines.append(truncate(text.rstrip(), width))
            if has_own_lines and number and row[-1]:
                lines += _wrap_lines(f"{label}{row[-1]}", width, "      ")
    lines = [line.rstrip() for line in lines][0 if any(table.headers) else 1 :]
    omitted_count = len(table.rows) - MAX_ROWS
    return [*lines, f"  and {omitted_count:,} more; --json has them all"] if omitted_count > 0 else lines


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
            steps[index] += time_bin.count
    means = [total / count if count else None for total, count in zip(wall_ns, steps, strict=True)]
    highest = max(mean for mean in means if mean is not None)
    bars = "".join(" " if mean is None else BAR_CHARS[min(int(mean / highest * 8), 7)] for mean in means)
    caption = f"step time{histogram.rank_suffix}, mean over each {format_duration(length_ns / cell_count)}"
    caption += f"; the highest bar is {format_duration(highest)}"
    if None in means:
        caption += "; no bar where no step ran"
    axis = format_elapsed(start_ns) + format_elapsed(end_ns).rjust(max(cell_count - 8, 9))
    return [*_wrap_lines(caption, width), "  " + bars, "  " + axis]
