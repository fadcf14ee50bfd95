"""The longest steps of the time range as rows, and the dialog in which one is chosen."""

from __future__ import annotations

from textual import events

from dpmon.model.slow_steps import SlowSteps
from dpmon.model.uneven import INPUT, WAITING_TEXT
from dpmon.text.cells import cut, right
from dpmon.text.quantities import clock, duration, group
from dpmon.ui.chart import bar
from dpmon.ui.dialogs import Dialog
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, width_of

_LEAST_BAR = 8


def step_rows(found: SlowSteps, width: int, look: Look) -> list[Row]:
    """A heading, and a row of `width` cells for each step: when, how long, and which phase was how much longer."""
    ranks = any(step.rank is not None for step in found.steps)
    head: Row = [("    step     when   length  longer than usual in".ljust(49), "dim"), ("   rank" * ranks, "dim")]
    rows: list[Row] = [head]
    longest = max((step.wall_ns for step in found.steps), default=1)
    for step in found.steps:
        word = WAITING_TEXT if step.phase == INPUT else step.phase or "no single phase"
        more = f" +{duration(step.excess_ns)}" if step.phase is not None else ""
        row: Row = [
            (right(group(step.step), 8), "bold"),
            (right(clock(step.start_ns).removeprefix("00:"), 9), ""),
            (right(duration(step.wall_ns), 9), "bold"),
            ("  " + cut(word + more, 21).ljust(21), "" if step.phase is None else "wait"),
        ]
        if ranks:
            row.append((right("" if step.rank is None else str(step.rank), 7), ""))
        room = width - width_of(row) - 2
        if room >= _LEAST_BAR:
            part = step.excess_ns / longest
            style = f"phase.{step.phase}" if step.phase not in (None, INPUT) else "wait"
            signs = (look.glyphs.bar[1], "dim"), (look.glyphs.bar[0], style)
            row += [("  ", ""), *bar((step.wall_ns / longest - part, part), signs, room, (" ", ""))]
        rows.append(row)
    return rows


class StepList(Dialog):
    """The longest steps; returns the end (ns) of the chosen one, as text, or None."""

    keys = (("arrows", "choose"), ("enter", "go there"), ("esc", "close"))
    corner = "enter goes there"
    wanted = 100

    def __init__(self, title: str, look: Look) -> None:
        super().__init__(title, look)
        self.found: SlowSteps | None = None
        self.at = 0
        self.pinned = 1

    def content(self, width: int, height: int) -> list[Row]:
        """The rows, the chosen one marked."""
        if self.found is None:
            return [[("reading the steps ...", "dim")]]
        if not self.found.steps:
            return [[("no training step has ended in this time", "dim")]]
        head, *rows = step_rows(self.found, width - 2, self.look)
        rows = [[(self.look.glyphs.focus + " " if at == self.at else "  ", "key"), *row] for at, row in enumerate(rows)]
        if not self.found.complete:
            rows.append([(f"  older steps than {clock(self.found.since_ns)} were deleted from the record", "dim")])
        self.top = max(self.at - max(height - 2, 1) + 1, 0)
        return [[("  ", ""), *head], *rows]

    def pressed(self, event: events.Key) -> None:
        """Choose, go there, or give up."""
        moves = {"up": -1, "down": 1, "pageup": -8, "pagedown": 8, "home": -1 << 30, "end": 1 << 30}
        steps = () if self.found is None else self.found.steps
        if event.key == "enter" and steps:
            self.settle(str(steps[self.at].end_ns))
        elif event.key in moves:
            self.at = min(max(self.at + moves[event.key], 0), max(len(steps) - 1, 0))
            self.draw()
        elif event.key in ("escape", "l", "q", "ctrl+c"):
            self.settle(None)
