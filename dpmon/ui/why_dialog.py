"""What costs time or is wrong, and what each rank does: now, asked for every few seconds, or in a past stall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import format_state
from dpmon.stalls.stall_report import StallReport, request_and_wait
from dpmon.stalls.why_text import format_report
from dpmon.text.cells import truncate, wrap_text
from dpmon.text.formatting import format_elapsed
from dpmon.ui.dialogs import TextPages
from dpmon.ui.screen_data import ScreenData, no_progress_text
from dpmon.ui.styled_rows import Row
from dpmon.ui.terminal_style import TerminalStyle

REQUEST_INTERVAL_S, MAX_CAUSE_CHARS = 5.0, 2_000
"""Seconds from a reply to the next request; maximum length of the text about one cause."""


class WhyDialog(TextPages):
    """The location of each rank, and its stack."""

    def __init__(
        self,
        screen_data: Callable[[], ScreenData],
        directory: Path,
        recorded: StallReport | None,
        style: TerminalStyle,
    ) -> None:
        """Show the present, or the recorded stall `recorded`."""
        stall = screen_data().shown_stall
        title_suffix = (
            "" if recorded is None or stall is None else f", as detected at {format_elapsed(stall.noticed_ns)}"
        )
        super().__init__(f"Why{title_suffix}", self._rows, style)
        self._screen_data, self._directory, self._recorded = screen_data, directory, recorded
        self._reply: StallReport | str = recorded or "asking the training processes ..."

    def _rows(self, width: int) -> list[Row]:
        """Return in full what the message on the screen says, and the reply below it."""
        causes = self._screen_data().causes if self._recorded is None else []
        texts = [sanitize_line(cause.whole_text, MAX_CAUSE_CHARS) for cause in causes]
        return [[(line, "")] for text in texts for line in (*wrap_text(text, width), "")] + self._reply_rows(width)

    def _reply_rows(self, width: int) -> list[Row]:
        reply = self._reply
        if isinstance(reply, str):
            return [[(reply, "dim")]]
        screen = self._screen_data()
        is_same_stall = self._recorded is None and screen.shown_stall is not None and reply.text is not None
        # The time in the first line continues, as on the screen, while the reply ages.
        report = replace(reply, t_s=screen.now_ns / 1e9) if is_same_stall else reply
        (first_line, style), *other_lines = format_report(report, width=width)
        if reply.text is None and self._recorded is None:
            first_line = no_progress_text(screen) or f"{first_line}: {format_state(screen.run_state.word)}"
        return [
            *([(line, style)] for line in wrap_text(first_line, width)),
            *([(truncate(text, width), line_style)] for text, line_style in other_lines),
        ]

    def request_reply(self) -> str | None:
        """Request a reply from the training processes; may take seconds."""
        self._reply = request_and_wait(self._directory) or "the supervisor does not answer"
        return None

    def show_reply(self, problem: str | None) -> None:
        """Show the reply, or why there is none."""
        self._reply = self._reply if problem is None else problem
        if not self.is_closed:
            self.title_text = f"Why (as of {format_elapsed(self._screen_data().now_ns)})"
            self.draw()
