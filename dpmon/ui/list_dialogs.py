"""The dialogs in which one of the longest steps, or runs to compare, are chosen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from textual import events

from dpmon.model.slow_steps import SlowSteps
from dpmon.run.lifecycle import run_state
from dpmon.run.run_registry import list_runs, short_name
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import truncate
from dpmon.text.formatting import format_clock, node_count_prefix
from dpmon.ui.dialogs import Dialog
from dpmon.ui.panels.longest_steps import step_rows
from dpmon.ui.styled_rows import Row
from dpmon.ui.terminal_style import TerminalStyle


class _List(Dialog):
    """A list with a heading, in which arrows choose an entry; sub-classes provide its rows."""

    preferred_width = 100
    closing_keys: Sequence[str] = ()
    """The keys that close it, besides esc, q and ctrl+c."""

    def __init__(self, title: str, look: TerminalStyle) -> None:
        super().__init__(title, look)
        self.chosen_index = 0
        """The chosen entry."""
        self.pinned_rows = 1

    def __len__(self) -> int:
        """Number of entries."""
        raise NotImplementedError

    def build_list_rows(self, head: Row, rows: Sequence[Row], height: int) -> list[Row]:
        """The heading and the rows, the chosen one marked and in view."""
        self.first_row = max(self.chosen_index - max(height - 2, 1) + 1, 0)
        marks = [self.style.glyphs.focus + " " if at == self.chosen_index else "  " for at in range(len(rows))]
        return [[("  ", ""), *head], *([(mark, "key"), *row] for mark, row in zip(marks, rows, strict=True))]

    def choose_current(self) -> None:
        """Act on the chosen entry."""
        raise NotImplementedError

    def respond_to_key(self, event: events.Key) -> None:
        """Choose, act, or give up."""
        moves = {"up": -1, "down": 1, "pageup": -8, "pagedown": 8, "home": -1 << 30, "end": 1 << 30}
        if event.key == "enter" and len(self):
            self.choose_current()
        elif event.key in moves:
            self.chosen_index = min(max(self.chosen_index + moves[event.key], 0), max(len(self) - 1, 0))
            self.draw()
        elif event.key in ("escape", "q", "ctrl+c", *self.closing_keys):
            self.close_once(None)


class StepList(_List):
    """The longest steps; returns the end (ns) of the chosen one, as text, or None."""

    keys = (("arrows", "choose"), ("enter", "go there"), ("esc", "close"))
    corner = "enter goes there"
    closing_keys = ("l",)
    slow_steps: SlowSteps | None = None

    def __len__(self) -> int:
        """Number of steps."""
        return 0 if self.slow_steps is None else len(self.slow_steps.steps)

    def build_rows(self, width: int, height: int) -> list[Row]:
        """The rows, the chosen one marked."""
        if self.slow_steps is None:
            return [[("reading the steps ...", "dim")]]
        if not self.slow_steps.steps:
            return [[("no training step has ended in this time", "dim")]]
        head, *rows = step_rows(self.slow_steps, width - 2, self.style)
        shown = self.build_list_rows(head, rows, height)
        if self.slow_steps.since_ns is not None:
            shown.append([(f"  the list has no steps before {format_clock(self.slow_steps.since_ns)}", "dim")])
        return shown

    def choose_current(self) -> None:
        """Go to the end of the step."""
        if self.slow_steps is not None:
            self.close_once(str(self.slow_steps.steps[self.chosen_index].end_ns))


class RunEntry(NamedTuple):
    """A run to choose."""

    directory: Path
    name: str
    state: str
    started_unix: float
    command: str


class RunList(_List):
    """All runs, each on side A, on side B or on none; returns "compare" or None."""

    keys = (("arrows", "choose"), ("a b", "mark"), ("enter", "compare"), ("esc", "close"))
    corner = "a b mark several  enter compares"
    closing_keys = ("C",)
    entries: Sequence[RunEntry] | None = None

    def __init__(self, own: Path, look: TerminalStyle) -> None:
        """`own`: the run on the screen, which is on side B at first."""
        super().__init__("Compare this run (B) with ...", look)
        self.own_directory = own
        self.sides: dict[Path, str] = {own: "B"}

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.entries or ())

    def read(self) -> None:
        """Read the runs, the run on the screen first, then the newest."""
        found: list[RunEntry] = []
        for place, info in reversed(list_runs()):
            script = [Path(info.script).name] if info.python is not None else []
            command = sanitize_line(node_count_prefix(info.nodes) + " ".join([*script, *info.arguments]), 300)
            state = run_state(place, info)[0]
            found.append(RunEntry(place, sanitize_line(short_name(info), 60), state, info.started_unix, command))
        self.entries = sorted(found, key=lambda one: one.directory.name != self.own_directory.name)

    def runs_on_side(self, name: str) -> list[Path]:
        """The runs on a side, the oldest first."""
        return [one.directory for one in reversed(self.entries or ()) if self.sides.get(one.directory) == name]

    def build_rows(self, width: int, height: int) -> list[Row]:
        """A row for each run."""
        if self.entries is None:
            return [[("reading the runs ...", "dim")]]
        names = max([4, *(len(one.name) for one in self.entries)])
        states = max([5, *(len(one.state) for one in self.entries)])
        rows: list[Row] = []
        for one in self.entries:
            began = time.strftime("%m-%d %H:%M", time.localtime(one.started_unix))
            text = f" {one.name.ljust(names)}  {one.state.ljust(states)}  {began}  {one.command}"
            rows.append([(self.sides.get(one.directory, " "), "key"), (truncate(text, width - 3), "")])
        head = f"  {'name'.ljust(names)}  {'state'.ljust(states)}  {'started'.ljust(11)}  command"
        return self.build_list_rows([(truncate(head, width - 2), "dim")], rows, height)

    def choose_current(self) -> None:
        """Compare; without a run on side A, the chosen one is there."""
        chosen = self.entries[self.chosen_index].directory if self.entries else Path()
        if not self.runs_on_side("A") and chosen not in self.sides:
            self.sides[chosen] = "A"
        if self.runs_on_side("A") and self.runs_on_side("B"):
            self.close_once("compare")
        else:
            self.corner = "each side needs a run: a, b"
            self.draw()

    def respond_to_key(self, event: events.Key) -> None:
        """Mark the chosen run, or remove its mark; else as in every list."""
        side = {"a": "A", "b": "B"}.get(event.key)
        if side is None or not self.entries:
            super().respond_to_key(event)
            return
        self.corner = RunList.corner
        one = self.entries[self.chosen_index].directory
        if self.sides.get(one) == side:
            del self.sides[one]
        else:
            self.sides[one] = side
        self.draw()
