"""The dialog in which one of the longest steps is chosen."""

from __future__ import annotations

from textual import events

from dpmon.model.slow_steps import SlowSteps
from dpmon.text.quantities import clock
from dpmon.ui.dialogs import Dialog
from dpmon.ui.look import Look
from dpmon.ui.panels.longest_steps import step_rows
from dpmon.ui.rows import Row


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
        if self.found.since_ns is not None:
            rows.append([(f"  the list has no steps before {clock(self.found.since_ns)}", "dim")])
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
