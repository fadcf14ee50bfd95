"""What each rank does, and its stack: now, asked for every few seconds, or as it was in a stall."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpmon.stalls.why_reply import request_and_wait
from dpmon.stalls.why_text import format_reply
from dpmon.text.cells import truncate, wrap_text
from dpmon.text.formatting import format_clock
from dpmon.ui.dialogs import TextPages
from dpmon.ui.screen_data import ScreenData, no_progress_text
from dpmon.ui.styled_rows import Row
from dpmon.ui.terminal_style import TerminalStyle

_REQUEST_INTERVAL_S = 5.0


class WhyDialog(TextPages):
    """The ranks by where they stand, and their stacks."""

    def __init__(
        self, facts: Callable[[], ScreenData], directory: Path, recorded: Mapping[str, Any] | None, look: TerminalStyle
    ) -> None:
        """`recorded`: the record of a stall to show, instead of the present."""
        stall = facts().shown_stall
        noticed = "" if recorded is None or stall is None else f", as noticed at {format_clock(stall.noticed_ns)}"
        super().__init__(f"Why{noticed}", self._reply_rows, look)
        self._screen_data, self._directory, self._recorded = facts, directory, recorded
        self._is_requesting, self._reply_monotonic_s = recorded is None, time.monotonic()
        self._reply: Mapping[str, Any] | str = recorded or "asking the training processes ..."

    def _reply_rows(self, width: int) -> list[Row]:
        found = self._reply
        if isinstance(found, str):
            return [[(found, "dim")]]
        now = self._screen_data()
        alike = self._recorded is None and now.shown_stall is not None and found.get("text") is not None
        # The time in the first line goes on, as on the screen, while the answer grows old.
        (first, style), *rest = format_reply({**found, "t_s": now.now_ns / 1e9} if alike else found, width=width)
        if found.get("text") is None and self._recorded is None:
            first = no_progress_text(now) or f"{first}: {now.run_state.word}"
        return [
            *([(line, style)] for line in wrap_text(first, width)),
            *([(truncate(text, width), s)] for text, s in rest),
        ]

    def request_reply(self) -> str | None:
        """Ask the training processes; may take seconds."""
        self._reply = request_and_wait(self._directory) or "the supervisor does not answer"
        return None

    def show_reply(self, problem: str | None) -> None:
        """Show the answer, or why there is none."""
        self._is_requesting, self._reply_monotonic_s = False, time.monotonic()
        self._reply = self._reply if problem is None else problem
        if not self.is_closed:
            self.draw()

    def refresh_age(self) -> bool:
        """Draw the age of the answer; return whether it is time to ask again."""
        age_s = time.monotonic() - self._reply_monotonic_s
        self.title_text = f"Why (as of {age_s:.0f} s ago)"
        self.draw()
        due = not self._is_requesting and age_s >= _REQUEST_INTERVAL_S and not self._screen_data().is_over
        self._is_requesting = self._is_requesting or due
        return due
