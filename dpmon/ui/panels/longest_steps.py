"""The longest steps of the time range as rows."""

from __future__ import annotations

from dpmon.model.slow_steps import INPUT, WAITING_TEXT, SlowStep, SlowSteps
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import format_count, format_duration, short_clock
from dpmon.ui.chart import bar
from dpmon.ui.styled_rows import Row, row_width
from dpmon.ui.terminal_style import TerminalStyle

_LEAST_BAR = 8


def _place(step: SlowStep) -> str:
    """Epoch and batch of a step in short: "e2 1/200"; empty if unknown."""
    if step.epoch is None or step.batch is None:
        return ""
    whole = "" if step.batches is None else f"/{format_count(step.batches)}"
    return f"e{step.epoch} {format_count(step.batch)}{whole}"


def step_rows(found: SlowSteps, width: int, look: TerminalStyle) -> list[Row]:
    """A heading, and a row of `width` cells for each step: when, how long, and which phase was how much longer."""
    ranks = any(step.rank is not None for step in found.steps)
    places = [_place(step) for step in found.steps]
    size = max(map(len, places), default=0)
    size = size if 49 + 7 * ranks + 2 + size <= width else 0
    head: Row = [("    step     when   length  longer than usual in".ljust(49), "dim"), ("   rank" * ranks, "dim")]
    head += [("  " + ("epoch, batch" if size >= 12 else "batch").ljust(size), "dim")] if size else []
    rows: list[Row] = [head]
    longest = max((step.wall_ns for step in found.steps), default=1)
    for step, place in zip(found.steps, places, strict=True):
        word = WAITING_TEXT if step.phase == INPUT else step.phase or "no single phase"
        more = f" +{format_duration(step.excess_ns)}" if step.phase is not None else ""
        row: Row = [
            (align_right(format_count(step.step), 8), "bold"),
            (align_right(short_clock(step.start_ns), 9), ""),
            (align_right(format_duration(step.wall_ns), 9), "bold"),
            ("  " + truncate(word + more, 21).ljust(21), "" if step.phase is None else "wait"),
        ]
        if ranks:
            row.append((align_right("" if step.rank is None else str(step.rank), 7), ""))
        if size:
            row.append(("  " + place.ljust(size), "dim"))
        room = width - row_width(row) - 2
        if room >= _LEAST_BAR:
            part = step.excess_ns / longest
            style = f"phase.{step.phase}" if step.phase not in (None, INPUT) else "wait"
            signs = (look.glyphs.bar[1], "dim"), (look.glyphs.bar[0], style)
            row += [("  ", ""), *bar((step.wall_ns / longest - part, part), signs, room, (" ", ""))]
        rows.append(row)
    return rows
