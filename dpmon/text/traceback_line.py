"""Finds the line of a script's output that names the exception which ended the script."""

from __future__ import annotations

import re

from dpmon.cleaning import harmless

READ_BYTES = 1 << 17
"""Number of bytes to read from the end of an output, enough for a long traceback."""
ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
"""A terminal sequence, such as a colour."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Fault|Timeout)\b(?:: .*)?$")
_ANY_NAME = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")


def traceback_line(end: bytes) -> str | None:
    """The line that names the exception, from the last traceback or the last lines of `end`; None without one.

    `end`: the end of a script's output.
    """
    lines = ESCAPE.sub(b"", end).decode("utf-8", "replace").replace("\r", "\n").split("\n")
    header = max((i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=None)
    if header is not None:
        after = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
        if after is not None and _ANY_NAME.match(after):
            return after.strip()
    return next((line.strip() for line in reversed(lines[-50:]) if _RAISED.match(line)), None)


def clean_traceback_line(end: bytes, most: int = 300) -> str | None:
    """The line found by `traceback_line`, cut to `most` characters and safe for a terminal."""
    line = traceback_line(end)
    return None if line is None else harmless(line)[:most]
