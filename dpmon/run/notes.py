"""The notes of a run: lines of process id, monotonic time in ns, and text, as `dpmon.tracer.inject.note` writes them.

stages.log, endings.log and warnings.log consist of them. Any of these may be damaged, so the numbers are bounded: one
of thousands of digits is an error in Python, and one of hundreds cannot be divided.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dpmon.run.files import read_file, read_tail

__all__ = ["Note", "parse_notes", "read_notes"]

_NOTE = re.compile(r"([0-9]{1,10}) ([0-9]{1,19}) (.+)")


class Note(NamedTuple):
    """What one process wrote down."""

    pid: int
    at_ns: int
    """Monotonic."""
    text: str


def read_notes(path: Path, most_bytes: int, *, newest: bool = False) -> list[Note]:
    """The notes in the first bytes of a file, or in its last (`newest`); none if it cannot be read."""
    try:
        return parse_notes((read_tail if newest else read_file)(path, most_bytes))
    except OSError:
        return []


def parse_notes(data: bytes) -> list[Note]:
    """The notes in `data`, in their order; an unfinished last line and lines that are no notes are left out."""
    lines = data.decode("utf-8", "replace").split("\n")[:-1]
    found = (_NOTE.fullmatch(line) for line in lines)
    return [Note(int(match[1]), int(match[2]), match[3]) for match in found if match is not None]
