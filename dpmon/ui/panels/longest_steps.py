"""A table of the longest steps in the time range."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.model.slow_steps import INPUT, WAITING_TEXT, SlowStep, SlowSteps
from dpmon.text.formatting import format_count, format_duration, format_short_elapsed
from dpmon.ui.chart import bar
from dpmon.ui.panel_table import DURATION_CELLS, PanelColumn, draw_table
from dpmon.ui.styled_rows import Row


def _epoch_position(step: SlowStep) -> str:
    """Return the epoch and batch of a step: "e2 1/200"; empty if unknown."""
    if step.epoch is None or step.batch is None:
        return ""
    total_text = "" if step.batches is None else f"/{format_count(step.batches)}"
    return f"e{step.epoch} {format_count(step.batch)}{total_text}"


def _cause(step: SlowStep) -> Row:
    """Return which phase was slow, and by how much."""
    if step.phase is None:
        return [("no single phase", "")]
    return [(f"{WAITING_TEXT if step.phase == INPUT else step.phase} +{format_duration(step.excess_ns)}", "wait")]


def step_rows(slow_steps: SlowSteps, width: int) -> list[Row]:
    """Return a header and one row of `width` cells per step: when, how long, and which phase was slow by how much."""
    steps = slow_steps.steps
    longest = max((step.wall_ns for step in steps), default=1)

    def length_bars(bar_width: int) -> Sequence[str | Row]:
        bars: list[str | Row] = [""]
        for step in steps:
            text_style = f"phase.{step.phase}" if step.phase not in (None, INPUT) else "wait"
            shares = ((step.wall_ns - step.excess_ns) / longest, step.excess_ns / longest)
            bars.append(bar(shares, (("─", "dim"), ("━", text_style)), bar_width, (" ", "")))
        return bars

    columns = [
        PanelColumn("step", [format_count(step.step) for step in steps], "bold", min_width=6),
        PanelColumn("when", [format_short_elapsed(step.start_ns) for step in steps], min_width=5),
        PanelColumn("length", [format_duration(step.wall_ns) for step in steps], "bold", min_width=DURATION_CELLS),
        PanelColumn("slow phase", [_cause(step) for step in steps], is_text=True, min_width=19),
    ]
    if any(step.rank is not None for step in steps):
        ranks = ["" if step.rank is None else str(step.rank) for step in steps]
        columns.append(PanelColumn("rank", ranks))
    positions = list(map(_epoch_position, steps))
    if any(positions):
        columns.append(PanelColumn("epoch, batch", positions, "dim", is_text=True, rank=1))
    columns.append(PanelColumn(cells=[""] * len(steps), rank=2, min_width=8, draw=length_bars, max_width=width))
    return draw_table(columns, width)
