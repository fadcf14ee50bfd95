"""A table of the longest steps in the time range."""

from __future__ import annotations

from dpmon.model.slow_steps import INPUT, WAITING_TEXT, SlowStep, SlowSteps
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import format_count, format_duration, format_short_elapsed
from dpmon.ui.chart import bar
from dpmon.ui.styled_rows import Row, row_width
from dpmon.ui.terminal_style import TerminalStyle

_MIN_BAR_CELLS = 8


def _epoch_position(step: SlowStep) -> str:
    """Return the epoch and batch of a step: "e2 1/200"; empty if unknown."""
    if step.epoch is None or step.batch is None:
        return ""
    total_text = "" if step.batches is None else f"/{format_count(step.batches)}"
    return f"e{step.epoch} {format_count(step.batch)}{total_text}"


def step_rows(slow_steps: SlowSteps, width: int, style: TerminalStyle) -> list[Row]:
    """Return a header and one row of `width` cells per step: when, how long, and which phase was slow by how much."""
    has_ranks = any(step.rank is not None for step in slow_steps.steps)
    places = [_epoch_position(step) for step in slow_steps.steps]
    place_width = max(map(len, places), default=0)
    if 49 + 7 * has_ranks + 2 + place_width > width:
        place_width = 0
    header: Row = [("    step     when   length  slow phase".ljust(49), "dim"), ("   rank" * has_ranks, "dim")]
    if place_width:
        header.append(("  " + ("epoch, batch" if place_width >= 12 else "batch").ljust(place_width), "dim"))
    rows: list[Row] = [header]
    longest = max((step.wall_ns for step in slow_steps.steps), default=1)
    for step, place in zip(slow_steps.steps, places, strict=True):
        cause = WAITING_TEXT if step.phase == INPUT else step.phase or "no single phase"
        excess_text = f" +{format_duration(step.excess_ns)}" if step.phase is not None else ""
        row: Row = [
            (align_right(format_count(step.step), 8), "bold"),
            (align_right(format_short_elapsed(step.start_ns), 9), ""),
            (align_right(format_duration(step.wall_ns), 9), "bold"),
            ("  " + truncate(cause + excess_text, 21).ljust(21), "" if step.phase is None else "wait"),
        ]
        if has_ranks:
            row.append((align_right("" if step.rank is None else str(step.rank), 7), ""))
        if place_width:
            row.append(("  " + place.ljust(place_width), "dim"))
        bar_width = width - row_width(row) - 2
        if bar_width >= _MIN_BAR_CELLS:
            excess_share = step.excess_ns / longest
            text_style = f"phase.{step.phase}" if step.phase not in (None, INPUT) else "wait"
            full, empty = style.glyphs.bar
            shares = (step.wall_ns / longest - excess_share, excess_share)
            row += [("  ", ""), *bar(shares, ((empty, "dim"), (full, text_style)), bar_width, (" ", ""))]
        rows.append(row)
    return rows
