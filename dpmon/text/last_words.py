"""The last words of a script's output: the line that names the exception that ended it."""

from __future__ import annotations

import re

from dpmon.text.cleaning import harmless

READ_BYTES = 1 << 17
"""Number of bytes at the end of an output that contain the last words."""
ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
"""A terminal sequence, such as a colour."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Fault|Timeout)\b(?:: .*)?$")
_ANY_NAME = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")


def last_line_of_traceback(end: bytes) -> str | None:
    """The line of the script's last traceback that names the exception; None if `end` has no such line.

    `end`: the end of the output.
    """
    lines = ESCAPE.sub(b"", end).decode("utf-8", "replace").replace("\r", "\n").split("\n")
    header = max((i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=None)
    if header is not None:
        after = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
        if after is not None and _ANY_NAME.match(after):
            return after.strip()
    return next((line.strip() for line in reversed(lines[-50:]) if _RAISED.match(line)), None)


def last_words(end: bytes, most: int = 300) -> str | None:
    """What `last_line_of_traceback` finds, in at most `most` characters and safe for a terminal."""
    found = last_line_of_traceback(end)
    return None if found is None else harmless(found)[:most]
