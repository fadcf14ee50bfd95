"""Draws a report as one self-contained page with tables, and plots as SVG, in which each value is a tooltip.

The page's own policy (Content-Security-Policy) forbids every connection and every script. So a hostile name in the
record does no harm, even if its escaping is forgotten here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence

from dpmon.record.schema import SECOND
from dpmon.report.document import (
    Document,
    Findings,
    LabeledSentences,
    OutputLines,
    Paragraph,
    Part,
    Plot,
    PlotSeries,
    Section,
    Table,
)
from dpmon.report.sections import MAX_ROWS
from dpmon.sanitize import sanitize_line
from dpmon.text.formatting import format_clock, format_percent, format_three_digits, short_clock

WIDTH, HEIGHT, ROW = 960.0, 300.0, 34.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 14.0, 16.0, 42.0
_CELLS, _MARKS, _MEAN, _LETTER = 16.0, 16.0, 46.0, 6.5
_PALEST = 0.2
_HOVERED = 2000
"""Most values of lines with a tooltip in a plot: of more, only every second one has it, or every third, ..."""
"""The height of a row of cells and of the words of marks, the width of a row's mean, and about that of a letter."""
_USUAL, _CUT, _FEWEST, _FEWEST_ROWS = 0.95, 4.0, 4, 10
"""An axis ends at 1.5 times the quantile _USUAL of its values if the largest value is more than _CUT times this
quantile: one long step, such as an interrupted one, must not flatten the rest. This needs _FEWEST values (the mean and
the longest step of two stretches). A plot with rows needs _FEWEST_ROWS, because it must show one slow rank among a
few."""
_TICKS = 6
_TIME = "time since the run's start"
_TIMES = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
"""Seconds between two times on an axis; of a longer run, some days."""
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 0 auto; max-width: 1100px;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #d0d7de; padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
.outcome { font-size: 1.1rem; }
.finished { color: #116329; } .failed, .killed, .interrupted, .ended, .lost { color: #a40e26; }
.soft { color: #57606a; }
ol { padding-left: 1.4rem; } li { margin: 0 0 .8rem; } li b { font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; }
th { font-weight: 500; color: #57606a; }
th:first-child, td:first-child, .text { text-align: left; }
.inner { padding-left: 1.4rem; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; }
nav { margin: 1rem 0; } nav a { white-space: nowrap; }
svg { font: 12px system-ui, sans-serif; fill: #57606a; display: block; }
svg .grid { stroke: #d0d7de; } svg .line { fill: none; stroke-width: 1.5; }
svg .event { stroke: #57606a; stroke-dasharray: 2 3; } svg .paused, svg .evaluation { fill: #8f5f00; opacity: .15; }
svg .stalled { fill: #c01c28; opacity: .2; } svg .none { fill: #eef1f4; }
svg .strong { font-weight: 600; fill: #24292f; }
.legend { font-size: .85rem; } .legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
@media print { h3, svg { break-inside: avoid; } }
"""


def render_page(report: Document) -> str:
    """The page of a report."""
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data:"
    script, run = escape_html(report.script), escape_html(report.run)
    names = [escape_html(section.title + section.about) for section in report.sections]
    links = " · ".join(f'<a href="#part-{number}">{name}</a>' for number, name in enumerate(names))
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{script}: dpmon report</title>\n<style>{_STYLE}</style></head>\n<body>\n",
            f"<h1>{script} <span class=soft>{run}</span></h1>\n",
            f'<p class="outcome {escape_html(report.state)}">{escape_html(report.outcome)}</p>\n',
            *(_paragraph(fact, soft=True) for fact in report.facts),
            f"<nav>{links}</nav>\n",
            *(_section(section, number) for number, section in enumerate(report.sections)),
            "</body></html>\n",
        )
    )


def _section(section: Section, number: int) -> str:
    return f'<h2 id="part-{number}">{escape_html(section.title + section.about)}</h2>\n' + "".join(
        map(_part, section.parts)
    )


def _part(part: Part) -> str:
    if isinstance(part, Paragraph):
        return _paragraph(part.text, soft=part.soft)
    if isinstance(part, Table):
        return _table(part.head, part.rows, (1, len(part.head) - 1) if part.flows else ())
    if isinstance(part, LabeledSentences):
        if part.head:
            return _table(part.head, part.rows, range(1, len(part.head)))
        return "".join(_paragraph(" ".join(row)) for row in part.rows[:MAX_ROWS])
    if isinstance(part, Findings):
        return "".join(_findings(part))
    if isinstance(part, OutputLines):
        return "<pre>" + "\n".join(map(escape_html, part.lines)) + "</pre>\n"
    if isinstance(part, Plot):
        return f"<h3>{escape_html(part.title)}</h3><p class=soft>{escape_html(part.note)}</p>{render_plot(part)}"
    return ""


def _paragraph(text: str, *, soft: bool = False) -> str:
    return f"<p{' class=soft' * soft}>{escape_html(text)}</p>\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int]) -> str:
    """The first rows of a table with text in its first column and in `text_columns`, and the number of the others."""
    marks = [" class=text" * (column in text_columns) for column in range(len(head))]
    names = "".join(f"<th{mark}>{escape_html(cell)}</th>" for cell, mark in zip(head, marks, strict=True))
    lines = [f"<div class=scroll><table><thead><tr>{names}</tr></thead><tbody>\n"]
    for row in rows[:MAX_ROWS]:
        inner = " class=inner" if row[0].startswith("  ") else marks[0]
        cells = (
            f"<td{mark}>{escape_html(cell.strip())}</td>" for cell, mark in zip(row, (inner, *marks[1:]), strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    lines.append("</tbody></table></div>\n")
    if len(rows) > MAX_ROWS:
        lines.append(_paragraph(f"and {len(rows) - MAX_ROWS:,} more; --json has them all", soft=True))
    return "".join(lines)


def _findings(part: Findings) -> Iterable[str]:
    yield "<ol>\n"
    for finding in part.findings:
        yield f"<li><b>{escape_html(finding.text)}</b><br>"
        yield f"<span class=soft>Evidence: {escape_html(finding.ground)}.</span><br>"
        yield f"{escape_html(finding.advice_text[0].upper() + finding.advice_text[1:])}.</li>\n"
    yield "</ol>\n"


# ------------------------------------------------------------------------------------------------ plots


def render_plot(plot: Plot) -> str:
    """The legend and the drawing of a plot, as HTML."""
    legend = "".join(
        f'<span><i style="background:{one.color}"></i>{escape_html(one.name)}</span>'
        for one in plot.series
        if one.name and one.kind != "cells"
    )
    return f"<p class=legend>{legend}</p>\n{_Canvas(plot).text()}\n"


def escape_html(text: str) -> str:
    """`text`, which may come from the script, as harmless HTML."""
    return html.escape(sanitize_line(text))


class _Canvas:
    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.cells = any(one.kind == "cells" for one in plot.series)
        self.across = bool(plot.rows) and not self.cells
        self.marks = () if plot.time is None else plot.time.marks
        self.above = _TOP + (_MARKS if self.marks else 0.0)
        self.left = min(_LEFT + _LETTER * max(map(len, plot.rows)), WIDTH / 3) if self.across else _LEFT
        rows = (_CELLS if self.cells else ROW) * len(plot.rows)
        self.height = self.above + _BOTTOM + rows if plot.rows else HEIGHT
        self.room = WIDTH - self.left - (_MEAN if self.cells else _RIGHT)
        values = list(_values_to_cover(plot))
        self.largest = max(values, default=0.0)
        usual = sorted(values)[int(_USUAL * (len(values) - 1))] if values else 0.0
        many = len(values) >= (_FEWEST_ROWS if plot.rows else _FEWEST)
        self.cut = plot.top is None and many and usual > 0 and self.largest > _CUT * usual
        lowest = min([0.0, *values])
        self.step, self.top = _scale(plot.top or max(1.5 * usual if self.cut else self.largest, -lowest))
        self.low = math.floor(lowest / self.step) * self.step
        xs = [x for one in plot.series for begin, end, _ in one.points for x in (begin, end)]
        self.begin, self.end = (min(xs), max(xs)) if xs and not plot.rows else (0.0, 1.0)
        if plot.time is not None and plot.time.begin < plot.time.end:
            self.begin, self.end = plot.time.begin, plot.time.end

    def text(self) -> str:
        """The SVG element."""
        size = f'viewBox="0 0 {WIDTH:g} {self.height:g}" width="100%" role="img"'
        area = f'x="{self.left:g}" y="{self.above:g}" width="{self.room:g}" height="{self._tall:g}"'
        name = f"area-{self.plot.name}"
        rows = (
            self._rows_of_cells() if self.cells else self._horizontal_bars() if self.across else self._vertical_series()
        )
        axes = self._axis_across() if self.across else (*self._axis_up(), *self._time_axis())
        marks, words = ("", "") if self.across else map("".join, zip(("", ""), *self._marks(), strict=True))
        return (
            f'<svg {size} aria-label="{escape_html(self.plot.title)}"><clipPath id="{name}"><rect {area}/></clipPath>'
            f'{"".join(axes)}<g clip-path="url(#{name})">{"".join(rows)}{marks}</g>{words}{self._cut_note()}</svg>'
        )

    @property
    def _tall(self) -> float:
        return self.height - self.above - _BOTTOM

    def _cut_note(self) -> str:
        if not self.cut:
            return ""
        count = sum(value > self.top for value in _values_to_cover(self.plot))
        text = f"{count} higher, up to {format_three_digits(self.largest)}: cut"
        return f'<text x="{WIDTH - _RIGHT:g}" y="12" text-anchor="end">{escape_html(text)}</text>'

    def _x(self, x: float) -> float:
        span = self.end - self.begin
        return self.left + (x - self.begin) / span * self.room if span else self.left

    def _y(self, y: float) -> float:
        part = (y - self.low) / (self.top - self.low)
        return self.height - _BOTTOM - part * self._tall

    def _ticks(self) -> list[float]:
        return [number * self.step for number in range(round(self.low / self.step), round(self.top / self.step) + 1)]

    def _names(self, tall: float) -> Iterator[str]:
        """The names of the rows."""
        for row, name in enumerate(self.plot.rows):
            place = f'x="{self.left - 6:g}" y="{self.above + (row + 0.5) * tall + 4:g}" text-anchor="end"'
            yield f"<text {place}>{escape_html(name)}</text>"

    def _axis_across(self) -> Iterator[str]:
        bottom = self.height - _BOTTOM
        for value in self._ticks():
            x = self.left + value / self.top * self.room
            yield f'<path class=grid d="M{x:.1f} {self.above}V{bottom}"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 15:g}" text-anchor="middle">{format_three_digits(value)}</text>'
        yield f'<text x="{self.left:g}" y="{self.height - 6:g}">{escape_html(self.plot.unit)}</text>'
        yield from self._names(ROW)

    def _axis_up(self) -> Iterator[str]:
        if self.cells:
            yield from self._names(_CELLS)
            for row, one in enumerate(self.plot.series):
                length = sum(end - begin for begin, end, _ in one.points)
                mean = sum((end - begin) * share for begin, end, share in one.points) / length if length else 0.0
                place = f'x="{WIDTH}" y="{self.above + (row + 0.5) * _CELLS + 4:g}" text-anchor="end"'
                yield f"<text {place}>{format_percent(mean)}</text>"
            return
        for value in self._ticks():
            y = self._y(value)
            yield f'<path class=grid d="M{self.left} {y:.1f}H{WIDTH - _RIGHT}"/>'
            yield f'<text x="{self.left - 6:g}" y="{y + 4:.1f}" text-anchor="end">{format_three_digits(value)}</text>'
        middle = (self.height - _BOTTOM + self.above) / 2
        unit = escape_html(self.plot.unit)
        yield f'<text transform="translate(12 {middle:g}) rotate(-90)" text-anchor="middle">{unit}</text>'

    def _time_axis(self) -> Iterator[str]:
        bottom, span = self.height - _BOTTOM, self.end - self.begin
        yield f'<text x="{self.left + self.room / 2:g}" y="{self.height - 6:g}" text-anchor="middle">{_TIME}</text>'
        days = math.ceil(span / _TICKS / _TIMES[-1]) * _TIMES[-1]
        step = next((step for step in _TIMES if step * _TICKS >= span), days)
        for number in range(math.ceil(self.begin / step), math.floor(self.end / step) + 1):
            x = self._x(number * step)
            yield f'<path class=grid d="M{x:.1f} {bottom}v4"/>'
            at = short_clock(number * step * SECOND)
            yield f'<text x="{x:.1f}" y="{bottom + 15:g}" text-anchor="middle">{at}</text>'

    def _marks(self) -> Iterator[tuple[str, str]]:
        """Each mark of the time, and its word above the plot, where no other word is."""
        bottom, used = self.height - _BOTTOM, [(-math.inf, self.left - 5)]

        def word(x: float, text: str) -> str:
            end = x + len(text) * _LETTER
            if end > WIDTH or any(begin < end + 4 and x < until + 4 for begin, until in used):
                return ""
            used.append((x, end))
            return f'<text class=strong x="{x:.1f}" y="{self.above - 4:g}">{escape_html(text)}</text>'

        for since, until, what in self.marks:
            x = self._x(since)
            if until is None:
                title = f"<title>{escape_html(what)}</title>"
                line = f'<path class=event d="M{x:.1f} {self.above:g}V{bottom:g}">{title}</path>'
            else:
                size = f'width="{self._x(until) - x:.1f}" height="{self._tall:g}"'
                place = f'x="{x:.1f}" y="{self.above:g}" {size}'
                line = f"<rect class={what} {place}><title>{what}</title></rect>"
            yield line, word(x, what)

    def _rows_of_cells(self) -> Iterator[str]:
        """A row for each series."""
        for row, one in enumerate(self.plot.series):
            yield f'<g fill="{one.color}" transform="translate(0 {self.above + row * _CELLS + 1:g})">'
            for begin, end, share in one.points:
                x, wide = self._x(begin), self._x(end) - self._x(begin)
                color = f'fill-opacity="{min(share + _PALEST, 1):.1f}"' if share else 'class="none"'
                text = f"{100 * share:.0f}% until {format_clock(int(end * SECOND))}"
                place = f'x="{x:.1f}" width="{wide:.1f}" height="{_CELLS - 2:g}"'
                yield f"<rect {place} {color}><title>{text}</title></rect>"
            yield "</g>"

    def _vertical_series(self) -> Iterator[str]:
        """Lines, dots, and bars over a stretch each, stacked in the order of the series."""
        below: dict[float, float] = {}
        each = sum(len(one.points) for one in self.plot.series if one.kind != "bars") // _HOVERED + 1
        for one in self.plot.series:
            if one.kind == "bars":
                for begin, end, y in one.points:
                    below[begin] = below.get(begin, 0.0) + y
                    tall = y / self.top * self._tall
                    yield self._bar(self._x(begin), self._y(below[begin]), self._x(end) - self._x(begin), tall, one, y)
                continue
            dots = one.kind == "dots"
            if not dots:
                yield f'<path class=line stroke="{one.color}" d="{self._line(one)}"/>'
            for x, _, y in one.points if dots else one.points[::each]:
                look = f'cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="{2 if dots else 3}" fill="{one.color}"'
                faint = ' opacity=".4"' if dots else ' opacity="0"'
                title = f"{escape_html(one.name)}: {format_three_digits(y)} at {x:g} s"
                yield f"<circle {look}{faint}><title>{title}</title></circle>"

    def _horizontal_bars(self) -> Iterator[str]:
        """A row of stacked bars for each name; a whisker begins at the axis."""
        ends: dict[float, float] = {}
        for one in self.plot.series:
            for row, _, y in one.points:
                top, wide = _TOP + row * ROW + 5, y / self.top * self.room
                if one.kind == "whisker":
                    yield f'<path class=grid d="M{self.left:.1f} {top + 12:.1f}H{self.left + wide:.1f}"/>'
                else:
                    x = self.left + ends.get(row, 0.0) / self.top * self.room
                    yield self._bar(x, top, wide, ROW - 10, one, y)
                    ends[row] = ends.get(row, 0.0) + y

    def _bar(self, x: float, y: float, wide: float, tall: float, one: PlotSeries, value: float) -> str:
        if not value:
            return ""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.5):.1f}" height="{tall:.1f}" fill="{one.color}"'
        title = f"{escape_html(one.name)}: {format_three_digits(value)} {escape_html(self.plot.unit)}"
        return f"<rect {place}><title>{title}</title></rect>"

    def _line(self, one: PlotSeries) -> str:
        """The path of a line. In a series of steps, there may be gaps."""
        path, before = [], None
        for begin, end, y in one.points:
            joined = before is not None and (one.kind == "line" or before >= begin)
            path.append(f"{'L' if joined else 'M'}{self._x(begin):.1f} {self._y(y):.1f}")
            if end > begin:
                path.append(f"H{self._x(end):.1f}")
            before = end
        return "".join(path)


def _values_to_cover(plot: Plot) -> Iterator[float]:
    """The values that the value axis has to cover."""
    stacks: dict[float, float] = {}
    for one in plot.series:
        for x, _, y in one.points:
            if one.kind == "bars":
                stacks[x] = stacks.get(x, 0.0) + y
            else:
                yield y
    yield from stacks.values()


def _scale(top: float) -> tuple[float, float]:
    """A round step between ticks, and the round end of an axis from 0 that has to reach `top`."""
    if not top > 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(top / _TICKS))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power * _TICKS >= top)
    return step, math.ceil(top / step - 1e-9) * step
