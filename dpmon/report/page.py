"""Draws a report as one self-contained page with tables and plots.

The page's own policy (Content-Security-Policy) forbids every connection and every script. So a hostile name in the
record does no harm, even if its escaping is forgotten here.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from dpmon.report.document import Document, Entries, Findings, Paragraph, Part, Plot, Section, Table, Verbatim
from dpmon.report.sections import MAX_ROWS
from dpmon.report.svg import drawn, escaped

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
svg .grid { stroke: #d0d7de; } svg .line { fill: none; stroke-width: 1.5; } svg .span { fill: #999; opacity: .25; }
.legend { font-size: .85rem; } .legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
@media print { h3, svg { break-inside: avoid; } }
"""


def page(report: Document) -> str:
    """The page of a report."""
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data:"
    script, run = escaped(report.script), escaped(report.run)
    names = [escaped(section.title + section.about) for section in report.sections]
    links = " · ".join(f'<a href="#part-{number}">{name}</a>' for number, name in enumerate(names))
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{script}: dpmon report</title>\n<style>{_STYLE}</style></head>\n<body>\n",
            f"<h1>{script} <span class=soft>{run}</span></h1>\n",
            f'<p class="outcome {escaped(report.state)}">{escaped(report.outcome)}</p>\n',
            *(_paragraph(fact, soft=True) for fact in report.facts),
            f"<nav>{links}</nav>\n",
            *(_section(section, number) for number, section in enumerate(report.sections)),
            "</body></html>\n",
        )
    )


def _section(section: Section, number: int) -> str:
    return f'<h2 id="part-{number}">{escaped(section.title + section.about)}</h2>\n' + "".join(
        map(_part, section.parts)
    )


def _part(part: Part) -> str:
    if isinstance(part, Paragraph):
        return _paragraph(part.text, soft=part.soft)
    if isinstance(part, Table):
        return _table(part.head, part.rows, (1, len(part.head) - 1) if part.flows else ())
    if isinstance(part, Entries):
        if part.head:
            return _table(part.head, part.rows, range(1, len(part.head)))
        return "".join(_paragraph(" ".join(row)) for row in part.rows[:MAX_ROWS])
    if isinstance(part, Findings):
        return "".join(_findings(part))
    if isinstance(part, Verbatim):
        return "<pre>" + "\n".join(map(escaped, part.lines)) + "</pre>\n"
    if isinstance(part, Plot):
        return f"<h3>{escaped(part.title)}</h3><p class=soft>{escaped(part.note)}</p>{drawn(part)}"
    return ""


def _paragraph(text: str, *, soft: bool = False) -> str:
    return f"<p{' class=soft' * soft}>{escaped(text)}</p>\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int]) -> str:
    """The first rows of a table with text in its first column and in `text_columns`, and the number of the others."""
    marks = [" class=text" * (column in text_columns) for column in range(len(head))]
    names = "".join(f"<th{mark}>{escaped(cell)}</th>" for cell, mark in zip(head, marks, strict=True))
    lines = [f"<div class=scroll><table><thead><tr>{names}</tr></thead><tbody>\n"]
    for row in rows[:MAX_ROWS]:
        inner = " class=inner" if row[0].startswith("  ") else marks[0]
        cells = (f"<td{mark}>{escaped(cell.strip())}</td>" for cell, mark in zip(row, (inner, *marks[1:]), strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    lines.append("</tbody></table></div>\n")
    if len(rows) > MAX_ROWS:
        lines.append(_paragraph(f"and {len(rows) - MAX_ROWS:,} more; --json has them all", soft=True))
    return "".join(lines)


def _findings(part: Findings) -> Iterable[str]:
    yield "<ol>\n"
    for finding in part.findings:
        yield f"<li><b>{escaped(finding.text)}</b><br><span class=soft>Evidence: {escaped(finding.ground)}.</span><br>"
        yield f"Try: {escaped(finding.advice)}.</li>\n"
    yield "</ol>\n"
