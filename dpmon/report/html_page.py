"""Renders a report as one self-contained page with tables, and plots as SVG in which each value has a tooltip.

The page's Content-Security-Policy forbids every connection and every script, so a hostile name in the record does no
harm even if escaping it is forgotten here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import chain

from dpmon.model.findings.finding import Finding
from dpmon.record.schema import SECOND
from dpmon.report.document import (
    MAX_ROWS,
    Document,
    Findings,
    OutputLines,
    Paragraph,
    Part,
    Plot,
    PlotSeries,
    Section,
    Table,
)
from dpmon.sanitize import sanitize_line
from dpmon.text.formatting import format_elapsed, format_percent, format_short_elapsed, format_three_digits

WIDTH, HEIGHT = 960.0, 300.0
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 70.0, 14.0, 16.0, 42.0
_CELL_ROW, _MARK_ROW, _MEAN_WIDTH, _LETTER_WIDTH = 16.0, 16.0, 46.0, 6.5
"""The height of a row of cells and of the labels of marks, the width of a row's mean, and about that of a letter."""
_MIN_OPACITY = 0.2
_MAX_TOOLTIPS = 2000
"""Most tooltips on the lines of a plot: with more values, only every second, third, ... value has one."""
_TYPICAL_QUANTILE, _CUT_RATIO, _MIN_VALUES = 0.95, 4.0, 4
"""An axis ends at 1.5 times the quantile _TYPICAL_QUANTILE of its values if the largest value is more than _CUT_RATIO
times this quantile: one long step, such as an interrupted one, must not flatten the rest. This needs _MIN_VALUES values
(the mean and the longest step of two time buckets)."""
_MAX_TICKS = 6
_TIME_TITLE = "time since the run's start"
_TICK_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
"""Seconds between two times on an axis; whole days for a longer run."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 0 auto; max-width: 1100px;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #d0d7de; padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
.outcome { font-size: 1.1rem; }
.finished { color: #116329; } .failed, .killed, .interrupted, .ended, .lost { color: #a40e26; }
.soft { color: #57606a; }
ol { padding-left: 1.4rem; } li { margin: 0 0 .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; }
th { font-weight: 500; color: #57606a; }
th:first-child, td:first-child, .text { text-align: left; }
td.text:last-child { white-space: normal; }
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


def render_page(document: Document) -> str:
    """Return the page of a report."""
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data:"
    script, run = escape_html(document.script), escape_html(document.run)
    titles = [escape_html(section.title + section.subtitle) for section in document.sections]
    links = " · ".join(f'<a href="#part-{number}">{name}</a>' for number, name in enumerate(titles))
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{script}: dpmon report</title>\n<style>{_STYLE}</style></head>\n<body>\n",
            f"<h1>{script} <span class=soft>{run}</span></h1>\n",
            f'<p class="outcome {escape_html(document.state)}">{escape_html(document.outcome)}</p>\n',
            *(_render_paragraph(fact, soft=True) for fact in (*document.setup, *document.facts)),
            f"<nav>{links}</nav>\n",
            *(_render_section(section, number) for number, section in enumerate(document.sections)),
            "</body></html>\n",
        )
    )


def _render_section(section: Section, number: int) -> str:
    title = escape_html(section.title + section.subtitle)
    return f'<h2 id="part-{number}">{title}</h2>\n' + "".join(map(_render_part, section.parts))


def _render_part(part: Part) -> str:
    if isinstance(part, Paragraph):
        return _render_paragraph(part.text, soft=part.is_note)
    if isinstance(part, Table):
        return _render_table(part.headers, part.rows, part.text_columns)
    if isinstance(part, Findings):
        return "<ol>\n" + "".join(map(_render_finding, part.findings)) + "</ol>\n"
    if isinstance(part, OutputLines):
        return "<pre>" + "\n".join(map(escape_html, part.lines)) + "</pre>\n"
    if isinstance(part, Plot):
        return f"<h3>{escape_html(part.title)}</h3><p class=soft>{escape_html(part.note)}</p>{render_plot(part)}"
    return ""


def _render_paragraph(text: str, *, soft: bool = False) -> str:
    return f"<p{' class=soft' * soft}>{escape_html(text)}</p>\n"


def _render_table(headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int]) -> str:
    """Return the first rows of a table whose first column and `text_columns` are text, and how many are omitted."""

    def table_row(cells: Sequence[str], tag: str) -> str:
        texts = []
        for column, cell in enumerate(cells):
            css_class = " class=text" * (column in text_columns)
            if cell.startswith("  "):  # a phase within another one
                css_class = " class=inner"
            texts.append(f"<{tag}{css_class}>{escape_html(cell.strip())}</{tag}>")
        return f"<tr>{''.join(texts)}</tr>"

    body = "".join(f"{table_row(row, 'td')}\n" for row in rows[:MAX_ROWS])
    head = f"<div class=scroll><table><thead>{table_row(headers, 'th')}</thead><tbody>\n"
    omitted = _render_paragraph(f"and {len(rows) - MAX_ROWS:,} more; --json has them all", soft=True)
    return f"{head}{body}</tbody></table></div>\n{omitted if len(rows) > MAX_ROWS else ''}"


def _render_finding(finding: Finding) -> str:
    text, ground, advice = map(escape_html, (finding.text, finding.ground, finding.advice_text))
    advice = advice[:1].upper() + advice[1:]
    return f"<li><b>{text}</b><br><span class=soft>Evidence: {ground}.</span><br>{advice}.</li>\n"


# ------------------------------------------------------------------------------------------------ plots


def render_plot(plot: Plot) -> str:
    """Return the legend and the drawing of a plot as HTML."""
    legend = "".join(
        f'<span><i style="background:{series.color}"></i>{escape_html(series.name)}</span>'
        for series in plot.series
        if series.name and series.kind != "cells"
    )
    return f"<p class=legend>{legend}</p>\n{_Canvas(plot).render()}\n"


def escape_html(text: str) -> str:
    """Return text, which may come from the script, as harmless HTML."""
    return html.escape(sanitize_line(text))


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape_html(text)}</text>'


def _titled(element: str, attributes: str, title: str) -> str:
    """Return an element with a tooltip."""
    return f"<{element} {attributes}><title>{escape_html(title)}</title></{element}>"


class _Canvas:
    """The drawing of one plot."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.has_cells = any(series.kind == "cells" for series in plot.series)
        self.start_s, self.end_s, self.marks = plot.time_span
        self.top = _TOP_MARGIN + (_MARK_ROW if self.marks else 0.0)
        self.height = self.top + _BOTTOM_MARGIN + _CELL_ROW * len(plot.series) if self.has_cells else HEIGHT
        self.width = WIDTH - _LEFT_MARGIN - (_MEAN_WIDTH if self.has_cells else _RIGHT_MARGIN)
        values = list(_values_to_cover(plot))
        self.largest = max(values, default=0.0)
        typical = sorted(values)[int(_TYPICAL_QUANTILE * (len(values) - 1))] if values else 0.0
        has_outlier = typical > 0 and self.largest > _CUT_RATIO * typical
        self.is_cut = plot.axis_end is None and len(values) >= _MIN_VALUES and has_outlier
        lowest = min([0.0, *values])
        highest = 1.5 * typical if self.is_cut else self.largest
        self.tick_step, self.axis_top = _choose_scale(plot.axis_end or max(highest, -lowest))
        self.axis_low = math.floor(lowest / self.tick_step) * self.tick_step

    def render(self) -> str:
        """Return the SVG element."""
        size = f'viewBox="0 0 {WIDTH:g} {self.height:g}" width="100%" role="img"'
        area = f'x="{_LEFT_MARGIN:g}" y="{self.top:g}" width="{self.width:g}" height="{self._plot_height:g}"'
        name = f"area-{self.plot.name}"
        rows = self._rows_of_cells() if self.has_cells else self._series()
        axes = chain(self._value_axis(), self._time_axis())
        marks, labels = map("".join, zip(("", ""), *self._render_marks(), strict=True))
        return (
            f'<svg {size} aria-label="{escape_html(self.plot.title)}"><clipPath id="{name}"><rect {area}/></clipPath>'
            f'{"".join(axes)}<g clip-path="url(#{name})">{"".join(rows)}{marks}</g>{labels}{self._cut_note()}</svg>'
        )

    @property
    def _plot_height(self) -> float:
        return self.height - self.top - _BOTTOM_MARGIN

    def _cut_note(self) -> str:
        if not self.is_cut:
            return ""
        count = sum(value > self.axis_top for value in _values_to_cover(self.plot))
        text = f"{count} higher, up to {format_three_digits(self.largest)}: cut"
        return _text(WIDTH - _RIGHT_MARGIN, 12, text, "end")

    def _to_x(self, x: float) -> float:
        span = self.end_s - self.start_s
        return _LEFT_MARGIN + (x - self.start_s) / span * self.width if span else _LEFT_MARGIN

    def _to_y(self, y: float) -> float:
        part = (y - self.axis_low) / (self.axis_top - self.axis_low)
        return self.height - _BOTTOM_MARGIN - part * self._plot_height

    def _value_axis(self) -> Iterator[str]:
        if self.has_cells:
            for row, series in enumerate(self.plot.series):
                length = sum(end - start for start, end, _ in series.points)
                mean = sum((end - start) * share for start, end, share in series.points) / max(length, 1)
                y_px = self.top + (row + 0.5) * _CELL_ROW + 4
                yield _text(_LEFT_MARGIN - 6, y_px, series.name, "end")
                yield _text(WIDTH, y_px, format_percent(mean), "end")
            return
        first, last = round(self.axis_low / self.tick_step), round(self.axis_top / self.tick_step)
        for value in (number * self.tick_step for number in range(first, last + 1)):
            y_px = self._to_y(value)
            yield f'<path class=grid d="M{_LEFT_MARGIN} {y_px:.1f}H{WIDTH - _RIGHT_MARGIN}"/>'
            yield _text(_LEFT_MARGIN - 6, y_px + 4, format_three_digits(value), "end")
        middle = (self.height - _BOTTOM_MARGIN + self.top) / 2
        unit = escape_html(self.plot.unit)
        yield f'<text transform="translate(12 {middle:g}) rotate(-90)" text-anchor="middle">{unit}</text>'

    def _time_axis(self) -> Iterator[str]:
        bottom, range_s = self.height - _BOTTOM_MARGIN, self.end_s - self.start_s
        yield _text(_LEFT_MARGIN + self.width / 2, self.height - 6, _TIME_TITLE)
        days = math.ceil(range_s / _MAX_TICKS / _TICK_STEPS_S[-1]) * _TICK_STEPS_S[-1]
        step = next((step for step in _TICK_STEPS_S if step * _MAX_TICKS >= range_s), days)
        for number in range(math.ceil(self.start_s / step), math.floor(self.end_s / step) + 1):
            x_px = self._to_x(number * step)
            yield f'<path class=grid d="M{x_px:.1f} {bottom}v4"/>'
            yield _text(x_px, bottom + 15, format_short_elapsed(number * step * SECOND))

    def _render_marks(self) -> Iterator[tuple[str, str]]:
        """Yield each mark on the time axis, and its label above the plot unless it would overlap another one."""
        bottom, used_ranges = self.height - _BOTTOM_MARGIN, [(-math.inf, _LEFT_MARGIN - 5)]

        def label(x: float, text: str) -> str:
            end = x + len(text) * _LETTER_WIDTH
            if end > WIDTH or any(used_start < end + 4 and x < used_end + 4 for used_start, used_end in used_ranges):
                return ""
            used_ranges.append((x, end))
            return f'<text class=strong x="{x:.1f}" y="{self.top - 4:g}">{escape_html(text)}</text>'

        for start, end, text in self.marks:
            x_px = self._to_x(start)
            if end is None:
                line = _titled("path", f'class=event d="M{x_px:.1f} {self.top:g}V{bottom:g}"', text)
            else:
                size = f'width="{self._to_x(end) - x_px:.1f}" height="{self._plot_height:g}"'
                line = _titled("rect", f'class={text} x="{x_px:.1f}" y="{self.top:g}" {size}', text)
            yield line, label(x_px, text)

    def _rows_of_cells(self) -> Iterator[str]:
        """Yield a row for each series."""
        for row, series in enumerate(self.plot.series):
            yield f'<g fill="{series.color}" transform="translate(0 {self.top + row * _CELL_ROW + 1:g})">'
            for start, end, share in series.points:
                x, width = self._to_x(start), self._to_x(end) - self._to_x(start)
                color = f'fill-opacity="{min(share + _MIN_OPACITY, 1):.1f}"' if share else 'class="none"'
                text = f"{100 * share:.0f}% until {format_elapsed(int(end * SECOND))}"
                yield _titled("rect", f'x="{x:.1f}" width="{width:.1f}" height="{_CELL_ROW - 2:g}" {color}', text)
            yield "</g>"

    def _series(self) -> Iterator[str]:
        """Yield lines, dots, and bars that are stacked in the order of the series."""
        stack_tops: dict[float, float] = {}
        point_count = sum(len(series.points) for series in self.plot.series if series.kind != "bars")
        hover_stride = point_count // _MAX_TOOLTIPS + 1
        for series in self.plot.series:
            if series.kind == "bars":
                yield from self._bars(series, stack_tops)
                continue
            is_dots = series.kind == "dots"
            if not is_dots:
                yield f'<path class=line stroke="{series.color}" d="{self._line_path(series)}"/>'
            for x, _, y in series.points if is_dots else series.points[::hover_stride]:
                position = f'cx="{self._to_x(x):.1f}" cy="{self._to_y(y):.1f}"'
                attributes = 'r="2" opacity=".4"' if is_dots else 'r="3" opacity="0"'
                title = f"{series.name}: {format_three_digits(y)} at {x:g} s"
                yield _titled("circle", f'{position} fill="{series.color}" {attributes}', title)

    def _bars(self, series: PlotSeries, stack_tops: dict[float, float]) -> Iterator[str]:
        """Yield the bars of a series on top of those of earlier ones, by their start."""
        for start, end, value in series.points:
            if value:
                stack_tops[start] = stack_tops.get(start, 0.0) + value
                x, width = self._to_x(start), max(self._to_x(end) - self._to_x(start), 0.5)
                y, height = self._to_y(stack_tops[start]), value / self.axis_top * self._plot_height
                size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{series.color}"'
                yield _titled("rect", size, f"{series.name}: {format_three_digits(value)} {self.plot.unit}")

    def _line_path(self, series: PlotSeries) -> str:
        """Return the path of a line. A series of steps may have gaps."""
        path, previous_end = [], None
        for start, end, y in series.points:
            is_joined = previous_end is not None and (series.kind == "line" or previous_end >= start)
            path.append(f"{'L' if is_joined else 'M'}{self._to_x(start):.1f} {self._to_y(y):.1f}")
            if end > start:
                path.append(f"H{self._to_x(end):.1f}")
            previous_end = end
        return "".join(path)


def _values_to_cover(plot: Plot) -> Iterator[float]:
    """Yield the values that the value axis has to cover."""
    stacks: dict[float, float] = {}
    for series in plot.series:
        for x, _, y in series.points:
            if series.kind == "bars":
                stacks[x] = stacks.get(x, 0.0) + y
            else:
                yield y
    yield from stacks.values()


def _choose_scale(top: float) -> tuple[float, float]:
    """Return a round step between ticks, and the round end of an axis from 0 that has to reach `top`."""
    if not top > 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(top / _MAX_TICKS))
    step = next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power * _MAX_TICKS >= top)
    return step, math.ceil(top / step - 1e-9) * step
