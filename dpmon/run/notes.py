"""The notes of a run: lines of process id, monotonic time in ns, and text, as `dpmon.tracer.append.note` writes them.

stages.log, endings.log and warnings.log consist of them. The supervisor writes statuses.log in the same form. A note
may be damaged, so the length of its numbers is limited: Python refuses to read numbers of thousands of digits, and
cannot divide numbers of hundreds of digits.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from dpmon.run.files import open_file, read_file, read_tail

_MAX_WARNINGS = 1 << 16
"""Most bytes of warnings.log to read at once."""
_NOTE = re.compile(r"([0-9]{1,10}) ([0-9]{1,19}) (.+)")


class Note(NamedTuple):
    """One note of a process."""

    pid: int
    at_ns: int
    """Monotonic time in ns."""
    text: str


def read_notes(path: Path, most_bytes: int, *, newest: bool = False) -> list[Note]:
    """The notes in the first `most_bytes` of a file, or with `newest` in the last; empty if it cannot be read."""
    try:
        return parse_notes((read_tail if newest else read_file)(path, most_bytes))
    except OSError:
        return []


def parse_notes(data: bytes) -> list[Note]:
    """The notes in `data`, in order, without invalid lines and an unfinished last line."""
    lines = data.decode("utf-8", "replace").split("\n")[:-1]
    found = (_NOTE.fullmatch(line) for line in lines)
    return [Note(int(match[1]), int(match[2]), match[3]) for match in found if match is not None]


class WarningsLog:
    """Warnings of training processes that have no ring, or had none yet."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "warnings.log"
        self._at = 0
        self.passed_on: Counter[str] = Counter()
        """Texts that an earlier supervisor has already passed on, and how often."""

    def new(self) -> list[str]:
        """The texts of the lines added since the last call."""
        try:
            with open(open_file(self._path), "rb") as file:
                file.seek(self._at)
                data = file.read(_MAX_WARNINGS)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        # The tracer never writes so long a line. Skip it and read the lines after it.
        self._at += len(whole) or (len(data) if len(data) == _MAX_WARNINGS else 0)
        return [note.text for note in parse_notes(whole) if not self._known(note.text)]

    def _known(self, text: str) -> bool:
        if self.passed_on[text] <= 0:
            return False
        self.passed_on[text] -= 1
        return True
