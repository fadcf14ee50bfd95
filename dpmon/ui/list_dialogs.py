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
from dpmon.stalls.run_state import format_state
from dpmon.text.cells import truncate
from dpmon.text.formatting import format_elapsed, node_count_prefix
from dpmon.ui.dialogs import Dialog
from dpmon.ui.panels.longest_steps import step_rows
from dpmon.ui.styled_rows import Row
from dpmon.ui.terminal_style import TerminalStyle


class _List(Dialog):
    """A list with a heading, in which arrows choose an entry; subclasses provide its rows."""

    preferred_width = 100
    closing_keys: Sequence[str] = ()
    """The keys that close it, besides esc, q and ctrl+c."""

    def __init__(self, title: str, style: TerminalStyle) -> None:
        super().__init__(title, style)
        self.chosen_index = 0
        """The chosen entry."""
        self.pinned_rows = 1

    def __len__(self) -> int:
        """Return the number of entries."""
        raise NotImplementedError

    def build_list_rows(self, heading: Row, rows: Sequence[Row], height: int) -> list[Row]:
        """Return the heading and the rows, with the chosen row marked and in view."""
        self.first_row = max(self.chosen_index - max(height - 2, 1) + 1, 0)
        marks = [self.style.glyphs.focus + " " if index == self.chosen_index else "  " for index in range(len(rows))]
        return [[("  ", ""), *heading], *([(mark, "key"), *row] for mark, row in zip(marks, rows, strict=True))]

    def choose_current(self) -> None:
        """Act on the chosen entry."""
        raise NotImplementedError

    def respond_to_key(self, event: events.Key) -> None:
        """Choose, act, or cancel."""
        moves = {"up": -1, "down": 1, "pageup": -8, "pagedown": 8, "home": -1 << 30, "end": 1 << 30}
        if event.key == "enter" and len(self):
            self.choose_current()
        elif event.key in moves:
            self.chosen_index = min(max(self.chosen_index + moves[event.key], 0), max(len(self) - 1, 0))
            self.draw()
        elif event.key in ("escape", "q", "ctrl+c", *self.closing_keys):
            self.close_once(None)


class StepList(_List):
    """The longest steps. Its result is the end (ns) of the chosen one, as text, or None."""

    keys = (("arrows", "choose"), ("enter", "go there"), ("esc", "close"))
    corner = "enter goes there"
    closing_keys = ("l",)
    slow_steps: SlowSteps | None = None

    def __len__(self) -> int:
        """Return the number of steps."""
        return 0 if self.slow_steps is None else len(self.slow_steps.steps)

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Return a row for each step, with the chosen one marked."""
        if self.slow_steps is None:
            return [[("reading the steps ...", "dim")]]
        if not self.slow_steps.steps:
            return [[("no training step has finished in this time", "dim")]]
        heading, *rows = step_rows(self.slow_steps, width - 2, self.style)
        list_rows = self.build_list_rows(heading, rows, height)
        if self.slow_steps.since_ns is not None:
            list_rows.append([(f"  the list has no steps before {format_elapsed(self.slow_steps.since_ns)}", "dim")])
        return list_rows

    def choose_current(self) -> None:
        """Close with the end of the chosen step."""
        if self.slow_steps is not None:
            self.close_once(str(self.slow_steps.steps[self.chosen_index].end_ns))


class RunEntry(NamedTuple):
    """A run of the list."""

    directory: Path
    name: str
    state: str
    started_unix: float
    command: str


class RunList(_List):
    """All runs, each on side A, on side B or on neither. Its result is "compare" or None."""

    keys = (("arrows", "choose"), ("a b", "mark"), ("enter", "compare"), ("esc", "close"))
    corner = "a b mark several  enter compares"
    closing_keys = ("C",)
    entries: Sequence[RunEntry] | None = None

    def __init__(self, own_directory: Path, style: TerminalStyle) -> None:
        """Put the run on the screen, in `own_directory`, on side B."""
        super().__init__("Compare this run (B) with ...", style)
        self.own_directory = own_directory
        self.sides: dict[Path, str] = {own_directory: "B"}

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.entries or ())

    def read(self) -> None:
        """Read all runs: the run on the screen first, then the newest, which is chosen."""
        entries: list[RunEntry] = []
        for directory, run_info in reversed(list_runs()):
            script = [Path(run_info.script).name] if run_info.python is not None else []
            command = sanitize_line(node_count_prefix(run_info.nodes) + " ".join([*script, *run_info.arguments]), 300)
            state, *_ = run_state(directory, run_info)
            entries.append(
                RunEntry(directory, sanitize_line(short_name(run_info), 60), state, run_info.started_unix, command)
            )
        self.entries = sorted(entries, key=lambda one: one.directory.name != self.own_directory.name)
        others = (index for index, entry in enumerate(self.entries) if entry.directory not in self.sides)
        self.chosen_index = next(others, 0)

    def runs_on_side(self, side: str) -> list[Path]:
        """Return the directories of the runs on a side, the oldest first."""
        return [entry.directory for entry in reversed(self.entries or ()) if self.sides.get(entry.directory) == side]

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Return a row for each run."""
        if self.entries is None:
            return [[("reading the runs ...", "dim")]]
        name_width = max([4, *(len(entry.name) for entry in self.entries)])
        state_width = max([5, *(len(format_state(entry.state)) for entry in self.entries)])
        rows: list[Row] = []
        for entry in self.entries:
            start_time = time.strftime("%m-%d %H:%M", time.localtime(entry.started_unix))
            state = format_state(entry.state).ljust(state_width)
            text = f" {entry.name.ljust(name_width)}  {state}  {start_time}  {entry.command}"
            rows.append([(self.sides.get(entry.directory, " "), "key"), (truncate(text, width - 3), "")])
        heading = f"  {'name'.ljust(name_width)}  {'state'.ljust(state_width)}  {'started'.ljust(11)}  command"
        return self.build_list_rows([(truncate(heading, width - 2), "dim")], rows, height)

    def choose_current(self) -> None:
        """Compare the two sides; if side A is empty, put the chosen run there."""
        directory = self.entries[self.chosen_index].directory if self.entries else Path()
        if not self.runs_on_side("A") and directory not in self.sides:
            self.sides[directory] = "A"
        if self.runs_on_side("A") and self.runs_on_side("B"):
            self.close_once("compare")
        else:
            self.corner = "each side needs a run: a, b"
            self.draw()

    def respond_to_key(self, event: events.Key) -> None:
        """Mark the chosen run, or remove its mark; handle other keys as every list does."""
        side = {"a": "A", "b": "B"}.get(event.key)
        if side is None or not self.entries:
            super().respond_to_key(event)
            return
        self.corner = RunList.corner
        directory = self.entries[self.chosen_index].directory
        if self.sides.get(directory) == side:
            del self.sides[directory]
        else:
            self.sides[directory] = side
        self.draw()
