"""dpmon's own messages: on stderr, one line each; a closed stderr is no error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dpmon.run.run_directory import ExitInfo, RunError, RunInfo
from dpmon.run.run_registry import short_name
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import text_for_stream

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

UNKNOWN_STATUS = 2
_PREFIX = "dpmon: "
_PROMPT_ROWS = 3
"""Rows to leave free: one for the typed command, two for the next prompt."""


def print_message(text: str) -> None:
    """Print a message of dpmon to stderr in one line, without control characters; ignore a closed stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(text_for_stream(f"{_PREFIX}{sanitize_line(text)}", sys.stderr), file=sys.stderr, flush=True)


def print_unread_warning(run_info: RunInfo, store: Store) -> None:
    """Print a message if records of the run are not in its history yet."""
    if store.unread_warning is not None:
        print_message(f"{short_name(run_info)}: {store.unread_warning}")


def format_error(error: Exception) -> str:
    """Return the text of an error; an unexpected error starts with its type."""
    return str(error) if isinstance(error, (RunError, OSError)) else f"{type(error).__name__}: {error}"


def _message_area() -> tuple[int, int] | None:
    """Return rows and columns for messages on stderr's terminal, without the prompts' rows; None without a terminal."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return (max(rows - _PROMPT_ROWS, 4), max(columns - len(_PREFIX), 20)) if rows and columns else None


def command_status(exit_info: ExitInfo | None) -> int:
    """Return the status of the run's command, or 2 if it is unknown."""
    return UNKNOWN_STATUS if exit_info is None or exit_info.status is None else exit_info.status


def print_closing_summary(
    directory: Path, exit_info: ExitInfo | None, print_line: Callable[[str], None], *, brief: bool = False
) -> int:
    """Print the run's summary with `print_line`; return the status of its command, or 2 if it is unknown.

    `brief`: print only how the run ended, because it had ended before the user attached.
    """
    from dpmon.cli.summary import WIDTH, ending_line, fit_lines, summary_lines
    from dpmon.run.run_directory import load_info

    try:
        area = _message_area() if print_line is print_message else None
        _, width = (None, WIDTH) if area is None else area
        lines = [ending_line(directory, exit_info)] if brief else summary_lines(directory, exit_info, width)
        if area is not None:
            lines = fit_lines(lines, *area, f"dpmon report {short_name(load_info(directory))}")
        for line in lines:
            print_line(line)
    except Exception as error:  # noqa: BLE001 - the summary may be missing, the command's status never is
        reason = format_error(error) if directory.exists() else f"the record {directory} was deleted"
        print_line(f"no summary: {reason} (exit status {'unknown' if exit_info is None else exit_info.status})")
    return command_status(exit_info)
