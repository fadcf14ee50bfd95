"""Alerts the user through the terminal when a run stalls, goes on after a stall, or ends; only if asked to."""

from __future__ import annotations

from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import ENDED, STALLED
from dpmon.ui.screen_data import ScreenData

_FORMS = {"bell": "\a", "osc9": "\x1b]9;{}\a", "osc777": "\x1b]777;notify;dpmon;{}\a"}
"""What each value of the setting `alert` sends: a bell, or a notification of the desktop."""
_MOST = 200


class Alert:
    """Compares the state of a run with its state in the picture before."""

    def __init__(self, form: str) -> None:
        self._form = _FORMS[form]
        self._before: str | None = None

    def bytes_to_send(self, facts: ScreenData) -> str:
        """What to send to the terminal after this picture; mostly nothing."""
        if facts.reading:
            return ""
        before, self._before = self._before, facts.run_state.word
        if before is None or before == self._before or not {before, self._before} & {STALLED, ENDED}:
            return ""
        stall = facts.shown_stall
        why = f": {stall.text}" if self._before == STALLED and stall is not None else ""
        # The text may have no part that ends the sequence, or begins another field.
        return self._form.format(sanitize_line(f"{facts.title} {self._before}{why}", _MOST).replace(";", ","))
