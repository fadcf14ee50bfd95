"""dpmon's own messages: on stderr, one line each; a missing reader causes no error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dpmon.run.run_directory import ExitInfo, RunError
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import encode_for_stream

UNKNOWN_STATUS = 2
_HEAD = "dpmon: "
_PROMPTS = 3
"""Rows to leave free: one for the typed command, two for the next prompt."""


def print_message(text: str) -> None:
    """Print a message of dpmon to stderr in one line, without control characters; ignore a closed stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(encode_for_stream(f"{_HEAD}{sanitize_line(text)}", sys.stderr), file=sys.stderr, flush=True)


def format_error(error: Exception) -> str:
    """The text of an error; an unexpected one starts with its type."""
    return str(error) if isinstance(error, (RunError, OSError)) else f"{type(error).__name__}: {error}"


def print_closing_summary(
    directory: Path, how: ExitInfo | None, say: Callable[[str], None] | None, *, brief: bool = False
) -> int:
    """Print the run's summary with `say` (None: nothing); return the command's status, or 2 if it is unknown.

    `brief`: print only how the run ended, because it was over before the user looked.
    """
    if say is not None:
        _print_summary(directory, how, say, brief)
    return UNKNOWN_STATUS if how is None or how.status is None else how.status


def _message_area() -> tuple[int, int] | None:
    """Rows and columns for messages on stderr's terminal, without the rows of the prompts; None without a terminal."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return (max(rows - _PROMPTS, 4), max(columns - len(_HEAD), 20)) if rows and columns else None


def _print_summary(directory: Path, how: ExitInfo | None, say: Callable[[str], None], brief: bool) -> None:
    from dpmon.cli.summary import WIDTH, ending_line, fit_lines, summary_lines
    from dpmon.run.run_directory import load_info
    from dpmon.run.run_registry import short_name

    try:
        room = _message_area() if say is print_message else None
        width = WIDTH if room is None else room[1]
        lines = [ending_line(directory, how)] if brief else summary_lines(directory, how, width)
        if room is not None:
            lines = fit_lines(lines, *room, f"dpmon report {short_name(load_info(directory))}")
        for line in lines:
            say(line)
    except Exception as error:  # noqa: BLE001 - the summary may be missing, the command's status never is
        if directory.exists():
            say(f"no summary: {format_error(error)}")
        else:
            status = "unknown" if how is None or how.status is None else how.status
            say(f"no summary: the record {directory} was deleted (exit status {status})")
