"""A report as a document: sections of paragraphs, tables, findings and plots, as plain data.

`dpmon.report.sections` makes it, `plain_text` and `html_page` draw it. The text of its parts may come from the script:
whoever draws it has to make it harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dpmon.model.findings.finding import Finding
from dpmon.model.step_history import Bin


class Paragraph(NamedTuple):
    """One text; `soft`: a note about other parts."""

    text: str
    soft: bool = False


class Table(NamedTuple):
    """Rows of cells below a row of names. The first column is text, the others are numbers.

    If it `flows`, the second and the last column are text, too, and the last may be long.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    flows: bool = False


class LabeledSentences(NamedTuple):
    """A list of rows in which the last cell is a sentence, after its labels."""

    rows: Sequence[Sequence[str]]
    most: int
    """Most rows in text."""
    indent: int = 4
    """Column at which further lines of a row begin in text; a single label is padded up to it."""
    head: Sequence[str] = ()
    """The names of the columns, if the rows become a table."""


class Findings(NamedTuple):
    """A numbered list of findings."""

    findings: Sequence[Finding]


class OutputLines(NamedTuple):
    """Lines of the script's output."""

    lines: Sequence[str]


class TextHistogram(NamedTuple):
    """The mean time of a step over the run as a row of bars, for text only; a page has plots."""

    bins: Sequence[Bin]
    bin_ns: int
    whose: str
    """The words " of rank 0" if the run has several processes."""


class PlotSeries(NamedTuple):
    """The values of one color: begin, end and value of each. Bars in rows begin and end at their row.

    `cells` are a row of their own over time, whose color is stronger for a larger value, from 0 to 1.
    """

    name: str
    color: str
    points: Sequence[tuple[float, float, float]]
    kind: Literal["line", "steps", "dots", "bars", "whisker", "cells"]
    """`line` joins all values. `steps` has gaps where values are missing. `bars` stand on those of earlier series."""


Marked = tuple[float, float | None, str]
"""Begin and end (s) and what was then: "paused", "stalled", "evaluation". None: an event, such as another mode."""


class TimeSpan(NamedTuple):
    """The time axis that all plots of a run have, in seconds since its start."""

    begin: float
    end: float
    marks: Sequence[Marked] = ()
    """The most important first: there may not be room for the words of all."""


class Plot(NamedTuple):
    """One plot, for a page only: its title, a line of explanation, its series and its axes."""

    name: str
    title: str
    note: str
    series: Sequence[PlotSeries]
    unit: str
    rows: Sequence[str] = ()
    """The names of the rows, if it has rows."""
    time: TimeSpan | None = None
    """The time axis; None: from the values."""
    top: float | None = None
    """The end of the axis; None: from the values."""


Part = Paragraph | Table | LabeledSentences | Findings | OutputLines | TextHistogram | Plot


class Section(NamedTuple):
    """Parts below a title; `about` continues the title."""

    title: str
    parts: Sequence[Part]
    about: str = ""


class Document(NamedTuple):
    """A report on one run: the script, the run's name, its state in a word and in a sentence, basic facts, sections."""

    script: str
    run: str
    state: str
    outcome: str
    facts: Sequence[str]
    sections: Sequence[Section]
