"""The dialog in which one of the longest steps is chosen."""

from __future__ import annotations

from textual import events

from dpmon.model.slow_steps import SlowSteps
from dpmon.text.formatting import format_elapsed
from dpmon.ui.dialogs import Dialog
from dpmon.ui.panels.longest_steps import step_rows
from dpmon.ui.styled_rows import Row
from dpmon.ui.terminal_style import TerminalStyle


class StepList(Dialog):
    """A list of the longest steps. Its result is the end (ns) of the chosen step, as text, or None."""

    preferred_width = 100
    keys = (("arrows", "choose"), ("enter", "go there"), ("esc", "close"))
    corner = "enter goes there"
    slow_steps: SlowSteps | None = None

    def __init__(self, title: str, style: TerminalStyle) -> None:
        super().__init__(title, style)
        self.chosen_index = 0
        """The chosen step."""
        self.pinned_rows = 1

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Return a heading and a row for each step, with the chosen one marked and in view."""
        if self.slow_steps is None:
            return [[("reading the steps ...", "dim")]]
        if not self.slow_steps.steps:
            return [[("no training step has finished in this time", "dim")]]
        heading, *rows = step_rows(self.slow_steps, width - 2)
        self.first_row = max(self.chosen_index - max(height - 2, 1) + 1, 0)
        marks = ["▸ " if index == self.chosen_index else "  " for index in range(len(rows))]
        list_rows: list[Row] = [[("  ", ""), *heading]]
        list_rows += [[(mark, "key"), *row] for mark, row in zip(marks, rows, strict=True)]
        if self.slow_steps.since_ns is not None:
            list_rows.append([(f"  the list has no steps before {format_elapsed(self.slow_steps.since_ns)}", "dim")])
        return list_rows

    def respond_to_key(self, event: events.Key) -> None:
        """Choose a step, close with the end of the chosen one, or cancel."""
        steps = [] if self.slow_steps is None else self.slow_steps.steps
        moves = {"up": -1, "down": 1, "pageup": -8, "pagedown": 8, "home": -1 << 30, "end": 1 << 30}
        if event.key == "enter" and steps:
            self.close_once(str(steps[self.chosen_index].end_ns))
        elif event.key in moves:
            self.chosen_index = min(max(self.chosen_index + moves[event.key], 0), max(len(steps) - 1, 0))
            self.draw()
        elif event.key in ("escape", "q", "ctrl+c", "l"):
            self.close_once(None)
