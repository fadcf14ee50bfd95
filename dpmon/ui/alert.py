"""Alerts the user through the terminal when a run stalls, resumes or ends; only if asked to."""

from __future__ import annotations

from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import ENDED, STALLED, format_state
from dpmon.ui.screen_data import ScreenData

_SEQUENCES = {"bell": "\a", "osc9": "\x1b]9;{}\a", "osc777": "\x1b]777;notify;dpmon;{}\a"}
"""What each value of the setting `alert` sends: a bell, or a notification of the desktop."""
_MAX_CHARS = 200


class Alert:
    """The state of the run at the last frame, to find the changes that deserve an alert."""

    def __init__(self, form: str) -> None:
        self._sequence = _SEQUENCES[form]
        self._last_state: str | None = None

    def bytes_to_send(self, screen: ScreenData) -> str:
        """Return what to send to the terminal after this frame; usually ""."""
        if screen.is_reading:
            return ""
        last_state, self._last_state = self._last_state, screen.run_state.word
        if (
            last_state is None
            or last_state == self._last_state
            or not {last_state, self._last_state} & {STALLED, ENDED}
        ):
            return ""
        stall = screen.shown_stall
        reason = f": {stall.text}" if self._last_state == STALLED and stall is not None else ""
        # The text may have no part that ends the sequence, or begins another field.
        return self._sequence.format(
            sanitize_line(f"{screen.title} {format_state(self._last_state)}{reason}", _MAX_CHARS).replace(";", ",")
        )
