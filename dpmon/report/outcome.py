"""How a run ended, in the words of the screen, lists, status and reports. Cheap to import: no store."""

from __future__ import annotations

from dpmon.run.lifecycle import outcome_word
from dpmon.run.run_directory import ExitInfo
from dpmon.text.formatting import format_run_time

LOST, NO_RECORD = "lost", "its end was not recorded"
"""The word for a run whose supervisor was killed before the command ended, and the reason."""


def exit_words(exit_info: ExitInfo | None) -> tuple[str, str]:
    """Return how a run ended and what belongs to it: "failed" and "with exit status 1"; None: it was not recorded.

    The screen shows these words, and `exit_sentence` begins with them; the first one is the state in lists.
    """
    if exit_info is None:
        return LOST, ""
    word = outcome_word(exit_info)
    if exit_info.stopped:
        return f"{word} by you", ""
    if exit_info.status is None:
        return word, "with unknown exit status"
    if exit_info.signal is not None:
        return f"{word} by {exit_info.signal}", ""
    return word, f"with exit status {exit_info.status}" if exit_info.status else ""


def exit_cause(exit_info: ExitInfo | None) -> str | None:
    """Return why a run ended in this way; None if it is unknown, or if it needs no reason."""
    if exit_info is None:
        return NO_RECORD
    if exit_info.stopped:
        return None
    if exit_info.status is None:
        return exit_info.unknown or "it was not recorded"
    return exit_info.error or exit_info.cause


def exit_sentence(exit_info: ExitInfo | None) -> str:
    """Return how a run ended, how long it took and the cause of a failure, if it is known."""
    text, cause = " ".join(filter(None, exit_words(exit_info))), exit_cause(exit_info)
    if exit_info is not None:
        text += f" {'in' if text == 'finished' else 'after'} {format_run_time(exit_info.seconds)}"
    return text if cause is None else f"{text}: {cause}"
