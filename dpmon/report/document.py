"""A report as a document: sections of paragraphs, tables, findings and plots, as plain data.

`dpmon.report.sections` makes it, `text` and `page` draw it. The text of its parts may come from the script: whoever
draws it has to make it harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dpmon.model.finding import Finding
from dpmon.model.history import Bin


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


class Entries(NamedTuple):
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


class Verbatim(NamedTuple):
    """Lines of the script's output."""

    lines: Sequence[str]


class Bars(NamedTuple):
    """The mean time of a step over the run as a row of bars, for text only; a page has plots."""

    bins: Sequence[Bin]
    bin_ns: int
    whose: str
    """The words " of rank 0" if the run has several processes."""


class Values(NamedTuple):
    """The values of one colour: begin, end and value of each. In a plot of rows, they begin and end at their row."""

    name: str
    colour: str
    points: Sequence[tuple[float, float, float]]
    kind: Literal["line", "steps", "dots", "bars", "whisker"]
    """`line` joins all values. `steps` has gaps where values are missing. `bars` stand on those of earlier series."""


Marked = tuple[float, float, str]
"""Begin and end in seconds, and what the training was then: paused, stalled."""


class Plot(NamedTuple):
    """One plot, for a page only: its title, a line of explanation, its series and its axes."""

    name: str
    title: str
    note: str
    series: Sequence[Values]
    unit: str
    rows: Sequence[str] = ()
    """The names of the rows of a plot that is not over time."""
    spans: Sequence[Marked] = ()
    """Times to mark."""
    top: float | None = None
    """The end of the axis; None: from the values."""


Part = Paragraph | Table | Entries | Findings | Verbatim | Bars | Plot


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
