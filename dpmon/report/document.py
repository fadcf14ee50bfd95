"""A report as a document: sections of paragraphs, tables, findings and plots, as plain data.

`dpmon.report.sections` builds it, `plain_text` and `html_page` render it. The text of its parts may come from the
script: renderers have to sanitize it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dpmon.model.findings.finding import Finding
from dpmon.model.step_history import Column

MAX_ROWS = 40
"""Most rows of a table, in text and on a page."""


class Paragraph(NamedTuple):
    """One paragraph of text; `is_note`: a note about other parts."""

    text: str
    is_note: bool = False


class Table(NamedTuple):
    """Rows of cells below a header. The first column and `text_columns` are text, the others are numbers.

    If the last column is text, it may be long: it is wrapped.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = ()


class Findings(NamedTuple):
    """A numbered list of findings."""

    findings: Sequence[Finding]


class OutputLines(NamedTuple):
    """Lines of the script's output."""

    lines: Sequence[str]


class TextHistogram(NamedTuple):
    """The mean step time over the run as a row of bars, for text only; a page has plots."""

    bins: Sequence[Column]
    bin_ns: int
    rank_suffix: str
    """The words " of rank 0" if the run has several processes."""


class PlotSeries(NamedTuple):
    """The values of one color, each with start, end and value.

    `cells` are a row over time whose color is stronger for a larger value, from 0 to 1.
    """

    name: str
    color: str
    points: Sequence[tuple[float, float, float]]
    kind: Literal["line", "steps", "dots", "bars", "cells"]
    """`line` joins all values. `steps` has gaps where values are missing. `bars` are stacked on earlier series."""


PlotMark = tuple[float, float | None, str]
"""Start and end (s) and the label: "paused", "stalled", "evaluation". End None: an event, such as a mode switch."""


class TimeSpan(NamedTuple):
    """The time axis shared by all plots of a run, in seconds since its start."""

    start_s: float
    end_s: float
    marks: Sequence[PlotMark] = ()
    """The most important first: there may not be room for all labels."""


class Plot(NamedTuple):
    """One plot, for a page only: its title, a line of explanation, its series and its axes."""

    name: str
    title: str
    note: str
    series: Sequence[PlotSeries]
    unit: str
    time_span: TimeSpan = TimeSpan(0.0, 1.0)
    axis_end: float | None = None
    """The end of the value axis; None: derived from the values."""


Part = Paragraph | Table | Findings | OutputLines | TextHistogram | Plot


class Section(NamedTuple):
    """Parts below a title, which `subtitle` continues."""

    title: str
    parts: Sequence[Part]
    subtitle: str = ""


class Document(NamedTuple):
    """A report on one run: script, run name, state in a word and in a sentence, set-up, basic facts, sections."""

    script: str
    run: str
    state: str
    outcome: str
    facts: Sequence[str]
    sections: Sequence[Section]
    setup: Sequence[str] = ()
    """When, where and with what it ran; the summary at the end of a run leaves it out."""
