"""A report as one self-contained page with its tables and plots.

The page's own policy (Content-Security-Policy) forbids every connection and every script. So a hostile name in the
record does no harm, even if its escaping is forgotten here.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from dpmon.cleaning import clean
from dpmon.model.memory import reasons
from dpmon.model.numbers import UNKNOWN
from dpmon.report import sentences, table_rows
from dpmon.report.plots import Plot, plots
from dpmon.report.story import Story
from dpmon.report.svg import drawn
from dpmon.report.text import MAX_ROWS
from dpmon.run.lookup import short_name
from dpmon.text.quantities import clock

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


def page(story: Story) -> str:
    """The page for `story`."""
    title = clean(f"{story.info.script}: dpmon report")
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data:"
    body = "".join(_body(story, plots(story)))
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n",
            _with_contents(body),
            "</body></html>\n",
        )
    )


def _with_contents(body: str) -> str:
    """The body with a number in each heading, and a list of links to them before the first."""
    before, *parts = body.split("<h2>")
    names = [part.partition("</h2>")[0] for part in parts]
    links = " · ".join(f'<a href="#part-{number}">{name}</a>' for number, name in enumerate(names))
    numbered = (f'<h2 id="part-{number}">{part}' for number, part in enumerate(parts))
    return f"{before}<nav>{links}</nav>\n{''.join(numbered)}"


# ------------------------------------------------------------------------------------------------ parts


def _text(text: object) -> str:
    return html.escape(clean(text))


def _body(story: Story, figures: Sequence[Plot]) -> Iterable[str]:
    yield f"<h1>{_text(story.info.script)} <span class=soft>{_text(short_name(story.info))}</span></h1>\n"
    yield f'<p class="outcome {_text(story.state)}">{_text(sentences.ended(story))}</p>\n'
    for fact in sentences.facts(story):
        yield f"<p class=soft>{_text(fact)}</p>\n"
    yield from _findings(story)
    spent = sentences.time_spent(story)
    if spent:
        yield "<h2>Time</h2>\n" + "".join(f"<p>{_text(line)}</p>\n" for line in spent)
    yield from _steps(story)
    by_name = {plot.name: plot for plot in figures}
    for name in ("step-time", "speed", "phases", "modes"):
        yield from _plot(by_name.get(name))
    for title, mode in table_rows.phase_titles(story):
        yield f"<h2>Phases of a step, {_text(title)}</h2>\n"
        head, *rows = table_rows.phase_table(mode)
        yield from _table(head, rows)
        yield "".join(f"<p class=soft>{_text(note)}</p>\n" for note in sentences.phase_notes(mode))
    if story.evidence.compared is not None:
        yield "<h2>dp against single</h2>\n"
        yield "".join(f"<p>{_text(line)}</p>\n" for line in sentences.comparison(story.evidence.compared))
    yield from _sized("Replicas", table_rows.replica_rows(story))
    yield from _plot(by_name.get("replicas"))
    yield from _sized(
        "Ranks", table_rows.rank_rows(story), ("calls", "steps", "step", "samples/s", table_rows.FORWARD_ON_DEVICE)
    )
    yield from _plot(by_name.get("ranks"))
    yield from _communication(story)
    yield from _sized("Stages (parts of the model on several devices)", table_rows.stage_rows(story))
    yield from _devices(story)
    for name in ("use", "memory"):
        yield from _plot(by_name.get(name))
    yield from _memory(story)
    yield from _changes(story)
    yield from _pauses(story)
    if story.warnings:
        yield "<h2>Warnings</h2>\n" + "".join(f"<p>{_text(text)}</p>\n" for text in story.warnings[:MAX_ROWS])
    if story.last_output:
        yield "<h2>Last output</h2>\n<pre>" + "\n".join(map(_text, story.last_output)) + "</pre>\n"
    yield f"<h2>Record</h2>\n<p>{_text(story.directory)}</p>\n"


def _plot(plot: Plot | None) -> Iterable[str]:
    if plot is not None:
        yield f"<h3>{_text(plot.title)}</h3><p class=soft>{_text(plot.note)}</p>"
        yield drawn(plot)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = ()) -> Iterable[str]:
    """A table with text in its first column and in `text_columns`."""
    classes = ["".join(" class=text" if column in text_columns else "") for column in range(len(head))]
    yield "<div class=scroll><table><thead><tr>"
    yield "".join(f"<th{mark}>{_text(cell)}</th>" for cell, mark in zip(head, classes, strict=True))
    yield "</tr></thead><tbody>\n"
    for row in rows:
        cells = []
        for column, (cell, mark) in enumerate(zip(row, classes, strict=True)):
            inner = " class=inner" if column == 0 and cell.startswith("  ") else mark
            cells.append(f"<td{inner}>{_text(cell.strip())}</td>")
        yield f"<tr>{''.join(cells)}</tr>\n"
    yield "</tbody></table></div>\n"


def _findings(story: Story) -> Iterable[str]:
    yield "<h2>Findings</h2>\n"
    if not story.findings:
        yield f"<p>{_text(sentences.findings_note(story))}</p>\n"
        return
    yield "<ol>\n"
    for finding in story.findings:
        yield f"<li><b>{_text(finding.text)}</b><br><span class=soft>Evidence: {_text(finding.ground)}.</span><br>"
        yield f"Try: {_text(finding.advice)}.</li>\n"
    yield "</ol>\n"


def _steps(story: Story) -> Iterable[str]:
    rows = table_rows.steps_table(story)
    if rows:
        yield "<h2>Steps</h2>\n"
        yield from _table(rows[0], rows[1:])


def _sized(
    title: str, rows: Sequence[table_rows.Row], names: Sequence[str] = ("calls", "median", "p95", table_rows.ON_DEVICE)
) -> Iterable[str]:
    if not rows:
        return
    yield f"<h2>{_text(title)}</h2>\n"
    head, *shown = table_rows.row_table(rows, names, "received → returned", MAX_ROWS)
    yield from _table(head, shown, (1, len(head) - 1))
    yield from _more(len(rows))


def _communication(story: Story) -> Iterable[str]:
    times = table_rows.rank_times_table(table_rows.rank_rows(story), MAX_ROWS)
    if times:
        yield from _table(times[0], times[1:])
    rows = table_rows.communication_rows(story)
    if rows:
        yield "<h2>Communication</h2>\n"
        yield from _table(("", ""), rows, (1,))


def _more(count: int) -> Iterable[str]:
    if count > MAX_ROWS:
        yield f"<p class=soft>and {count - MAX_ROWS:,} more; --json has them all</p>\n"


def _devices(story: Story) -> Iterable[str]:
    yield "<h2>Devices</h2>\n"
    if not story.evidence.devices:
        yield f"<p>{_text(f'no GPU: {story.gpu_absent}' if story.gpu_absent else 'no GPU was seen')}</p>\n"
    else:
        head = ("", "use (median)", "memory at most", "this run", "°C at most", "W at most", "")
        yield from _table(head, [table_rows.device_cells(device) for device in story.evidence.devices])


def _memory(story: Story) -> Iterable[str]:
    held = story.evidence.memory[:MAX_ROWS]
    if held:
        yield "<h2>Memory as torch holds it</h2>\n"
        head, *rows = table_rows.memory_table(held)
        yield from _table(head, rows)
        for one in held:
            for names, reason in reasons(one):
                yield f"<p class=soft>{names} of {_text(one.device)}: {_text(reason)}</p>\n"


def _changes(story: Story) -> Iterable[str]:
    asked = [change for change in story.changes if change.requested_by != "start"]
    if asked:
        yield "<h2>Mode changes</h2>\n"
        rows = [
            (
                clock(change.t_ns),
                UNKNOWN if change.step is None else f"{change.step:,}",
                change.mode or "" if change.refused is None else f"refused: {change.refused}",
                str(change.process),
            )
            for change in asked[:MAX_ROWS]
        ]
        yield from _table(("time", "step", "to", "process"), rows, (2,))


def _pauses(story: Story) -> Iterable[str]:
    rows = table_rows.pause_rows(story)
    if rows:
        yield "<h2>Pauses</h2>\n"
        yield from _table(("time", "where", "how long"), rows[:MAX_ROWS], (1, 2))
        yield from _more(len(rows))
        lost = sentences.pauses_lost(story)
        if lost is not None:
            yield f"<p class=soft>{_text(lost)}</p>\n"
