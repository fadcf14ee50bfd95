"""The notes of a run: lines of process id, monotonic time in ns, and text (see `dpmon.tracer.note_files`).

stages.log, endings.log and warnings.log consist of them. The supervisor writes statuses.log in the same form. A note
may be damaged, so the length of its numbers is limited: Python refuses to read numbers of thousands of digits, and
cannot divide numbers of hundreds of digits. The exception that ended the script may also be in its output.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from dpmon.record.safe_json import load_json
from dpmon.run.safe_files import open_file, read_file, read_tail
from dpmon.sanitize import strip_control_chars

_MAX_WARNINGS = 1 << 16
"""Most bytes of warnings.log to read at once."""
_NOTE = re.compile(r"([0-9]{1,10}) ([0-9]{1,19}) (.+)")
_MAX_ENDINGS = 1 << 18
_MOST = 120
"""Longest message in a sentence."""
_PLACE_IN_C = re.compile(r"^\[[^\[\]\s]*:[0-9]+\] ")
"""As at the start of gloo's messages: "[/gloo/transport/tcp/pair.cc:537] "."""


class Note(NamedTuple):
    """One note of a process. `pid` is 0 for a note of dpmon itself."""

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


def add_note(directory: Path, text: str, file: str = "warnings.log", pid: int = 0) -> None:
    """Add a note about process `pid` (0: dpmon itself). The supervisor records those in warnings.log."""
    with contextlib.suppress(OSError):
        fd = open_file(directory / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, f"{pid} {time.monotonic_ns()} {strip_control_chars(text)[:4096]}\n".encode())
        finally:
            os.close(fd)


class WarningsLog:
    """Warnings of training processes that have no ring, or had none yet."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "warnings.log"
        self._at = 0
        self.passed_on: set[str] = set()
        """Texts that an earlier supervisor has already passed on."""

    def read_new(self) -> list[str]:
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
        return [note.text for note in parse_notes(whole) if note.text not in self.passed_on]


class UncaughtException(NamedTuple):
    """An exception that one process did not catch."""

    pid: int
    at_ns: int
    """Monotonic time in ns."""
    kind: str
    """The name of its class."""
    message: str = ""
    rank: int | None = None
    file: str | None = None
    """`file` and `line`: where the script raised it, or called the code that raised it."""
    line: int | None = None

    @property
    def text(self) -> str:
        """The last line of its traceback."""
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def sentence(self, cwd: str) -> str:
        """Rank, exception and line of the script: "rank 1: RuntimeError: no such token (train.py:12)".

        Of the exception's message, the first line without a place in C++ code, cut if it is long.
        """
        who = "" if self.rank is None else f"rank {self.rank}: "
        message = _PLACE_IN_C.sub("", self.message.strip().partition("\n")[0])
        text = f"{self.kind}: {textwrap.shorten(message, _MOST, placeholder=' ...')}" if message else self.kind
        return who + text + (f" ({relative_location(cwd, self.file, self.line or 0)})" if self.file is not None else "")


def relative_location(directory: str, file: str, line: int) -> str:
    """File and line as seen from `directory`: "src/train.py:88"; of a file elsewhere only the name."""
    inside = directory and file.startswith(directory.rstrip(os.sep) + os.sep)
    return f"{os.path.relpath(file, directory) if inside else os.path.basename(file)}:{line}"


def trim_launcher_lines(lines: list[str], raised: UncaughtException | None, command: int | None) -> list[str]:
    """The output up to the exception that ended the run, without the lines that a launcher prints after it.

    `command`: the process id of the command. If the command itself raised the exception, all lines are returned.
    """
    if raised is None or raised.pid == command:
        return lines
    end = max((i for i, line in enumerate(lines) if line.rstrip().endswith(raised.text)), default=len(lines) - 1)
    return lines[: end + 1]


def read_uncaught_exceptions(directory: Path) -> list[UncaughtException]:
    """The exceptions of all processes, in the order of their notes."""
    found = []
    for pid, at_ns, text in read_notes(directory / "endings.log", _MAX_ENDINGS):
        kind, _, rest = text.partition(" ")
        found.append(_parse_uncaught(pid, at_ns, kind, rest or "{}"))
    return found


def _parse_uncaught(pid: int, at_ns: int, kind: str, rest: str) -> UncaughtException:
    try:
        more = load_json(rest)
    except ValueError:
        more = {}
    if not isinstance(more, dict):
        more = {}
    message, rank, file, line = (more.get(name) for name in ("message", "rank", "file", "line"))
    return UncaughtException(
        pid,
        at_ns,
        kind,
        message if isinstance(message, str) else "",
        rank if type(rank) is int else None,
        file if isinstance(file, str) and type(line) is int else None,
        line if type(line) is int else None,
    )


# ------------------------------------------------------------------------------------------------ in the output

READ_BYTES = 1 << 17
"""Number of bytes to read from the end of an output, enough for a long traceback."""
_ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
"""A terminal sequence, such as a color."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Fault|Timeout)\b(?:: .*)?$")
_ANY_NAME = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")


def traceback_line(end: bytes) -> str | None:
    """The line that names the exception, from the last traceback or the last lines of `end`; None without one.

    `end`: the end of a script's output.
    """
    lines = _ESCAPE.sub(b"", end).decode("utf-8", "replace").replace("\r", "\n").split("\n")
    header = max((i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=None)
    if header is not None:
        after = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
        if after is not None and _ANY_NAME.match(after):
            return after.strip()
    return next((line.strip() for line in reversed(lines[-50:]) if _RAISED.match(line)), None)


def clean_traceback_line(end: bytes, most: int = 300) -> str | None:
    """The line found by `traceback_line`, cut to `most` characters and safe for a terminal."""
    line = traceback_line(end)
    return None if line is None else strip_control_chars(line)[:most]
