"""What dpmon itself says: on stderr, a line at a time, never failing for want of a listener."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from dpmon.run.rundir import ExitInfo, RunError

__all__ = ["closing", "speak"]

UNKNOWN_STATUS = 2


def speak(text: str) -> None:
    """One line of dpmon's own on stderr; a closed stderr is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        print(f"dpmon: {text}", file=sys.stderr, flush=True)


def closing(directory: Path, how: ExitInfo | None, say: Callable[[str], None] | None, *, brief: bool = False) -> int:
    """Say what the run did and how it ended (`say` None: nothing); dpmon's status: the command's own, 2 if unknown.

    `brief`: only how it ended, of a run that was over before somebody looked at it.
    """
    if say is not None:
        _sum_up(directory, how, say, brief)
    return UNKNOWN_STATUS if how is None or how.status is None else how.status


def _sum_up(directory: Path, how: ExitInfo | None, say: Callable[[str], None], brief: bool) -> None:
    from dpmon.cli.summary import ending_line, summary_lines

    try:
        for line in [ending_line(directory, how)] if brief else summary_lines(directory, how):
            say(line)
    except (RunError, OSError) as error:
        say(f"no summary: {error}")
