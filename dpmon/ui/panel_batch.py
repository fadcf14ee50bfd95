"""Panel 3: where the batch goes: share, median and p95 of each phase, and the history as stacked columns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from dpmon.model.state import PHASES, Column, Process
from dpmon.model.stats import PhaseFigures, Summary, summary
from dpmon.ui.chart import stacked, top_of, window
from dpmon.ui.format import group, ms, percent, short_ms
from dpmon.ui.look import LETTERS, Look
from dpmon.ui.rows import Row, right, width_of
from dpmon.ui.scene import Scene

__all__ = ["batch", "figures", "title"]

_SHORT_NAMES = {
    "replicate": "repl",
    "backward": "back",
    "optimizer": "opt",
    "scatter": "scat",
    "gather": "gath",
    "forward": "forw",
}


def figures(scene: Scene, seen: Mapping[str, Summary]) -> Summary:
    """Of the figures by mode, those of the mode in force."""
    process = scene.process
    return seen.get(process.mode if process is not None else "") or summary([])


def title(scene: Scene, look: Look, numbers: Summary) -> tuple[Row, Row]:
    """The panel's title, and the one number that counts."""
    if not numbers.steps:
        return [("3 Batch", "title")], []
    span = f"last {group(numbers.steps)} steps, {numbers.span_ns / 1e9:.0f} s"
    return (
        [("3 Batch", "title"), (f" {look.glyphs.middot} host times {look.glyphs.middot} {span}", "dim")],
        [
            ("median", "dim"),
            (right(ms(numbers.median_ns), 8), "bold"),
            ("  p95", "dim"),
            (right(ms(numbers.p95_ns), 8), ""),
        ],
    )


def batch(scene: Scene, width: int, height: int, look: Look, numbers: Summary) -> list[Row]:
    """The panel's rows, inside its frame."""
    process = scene.process
    if process is None or not numbers.steps:
        return [[("no step was traced" if scene.over else "no step has ended yet", "dim")]]
    with_tail = height >= 8
    table = _table(numbers, width, look, with_median=height >= 4, with_tail=with_tail)
    room = height - len(table)
    if room < 2:
        return table
    return [*table, *_history(process, width, room, look)]


def _name(phase: str, room: int, look: Look) -> Row:
    """The phase's name; where the history has letters, its letter is marked in it."""
    text = phase if len(phase) < room else _SHORT_NAMES.get(phase, phase)[: room - 1]
    if LETTERS[phase] == ".":
        return [("." if not look.colour or look.glyphs.ascii else " ", f"chip.{phase}"), (text, "")]
    return [(text[0].upper(), f"chip.{phase}"), (text[1:], "")]


def _table(numbers: Summary, width: int, look: Look, *, with_median: bool, with_tail: bool) -> list[Row]:
    label = 7 if width >= 100 else 6 if width >= 70 else 0
    cell = max((width - label) // (len(PHASES) + 1), 4)
    cell = min(cell, 12)

    def head(phase: str) -> Row:
        name = _name(phase, cell, look)
        return [(" " * (cell - width_of(name)), ""), *name]

    def line(word: str, last: str, value: dict[str, str], style: str) -> Row:
        row: Row = [(word.ljust(label)[:label], "dim")]
        for phase in numbers.phases:
            row.append((right(value[phase.name], cell), style if phase.ran else "dim"))
        row.append((right(last, cell), style))
        return row

    def each(show: str) -> dict[str, str]:
        return {p.name: _value(p, show, cell) for p in numbers.phases}

    header: Row = [(" " * label, "")]
    for phase in PHASES:
        header += head(phase)
    header.append((right("step", cell), "dim"))
    rows = [header, line("share", "", each("share"), "bold")]
    if with_median:
        rows.append(line("median", _time(numbers.median_ns, cell), each("median"), ""))
    if with_tail:
        rows.append(line("p95", _time(numbers.p95_ns, cell), each("p95"), "dim"))
    return rows


def _time(ns: float | None, cell: int) -> str:
    return ms(ns) if cell > 8 else short_ms(ns)


def _value(phase: PhaseFigures, show: str, cell: int) -> str:
    if show == "share":
        return percent(phase.share) if cell > 5 else percent(phase.share).replace(" ", "")
    return _time(phase.median_ns if show == "median" else phase.p95_ns, cell)


def _history(process: Process, width: int, height: int, look: Look) -> list[Row]:
    """The stacked columns with their scale at the left and the modes under them."""
    gutter = 8
    room = width - gutter
    shown = window(process.columns, room)
    axis = height >= 3
    bars = height - 1 if axis else height
    top = top_of(shown)
    rows = stacked(shown, room, bars, top, look)
    out: list[Row] = []
    for index, row in enumerate(rows):
        scale = ms(top) if index == 0 else "0" if index == bars - 1 and bars > 1 else ""
        out.append([(right(scale, gutter - 1) + " ", "dim"), *row])
    if axis:
        out.append([(right("mode", gutter - 1) + " ", "dim"), *_modes(shown, room, look)])
    return out


def _modes(columns: list[Column], width: int, look: Look) -> Row:
    """Under the history: which mode each column ran in, by word and colour, with a mark where it changed."""
    row: Row = []
    line = look.glyphs.frame[4]
    for index, (mode, run) in enumerate(groupby(columns, key=lambda column: column.mode)):
        count = sum(1 for _ in run)
        mark = look.glyphs.frame[5] if index else ""
        word = mode if len(mark) + len(mode) <= count else mode[: max(min(1, count - len(mark)), 0)]
        text = (mark + word + " ")[:count]
        row.append((text + line * (count - len(text)), f"mode.{mode}"))
    return [*row, (" " * (width - len(columns)), "")]
