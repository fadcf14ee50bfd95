"""The notes of a run: lines of process id, monotonic time in ns, and text (see `dpmon.tracer.note_files`).

stages.log, endings.log and warnings.log consist of notes. The supervisor writes statuses.log in the same form. The
exception that ended the script may also be in the script's output.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dpmon.record.safe_json import load_json
from dpmon.run.safe_files import open_file, read_file, read_new_lines, read_tail
from dpmon.sanitize import strip_control_chars

_MAX_BYTES = 1 << 18
"""Maximum bytes of notes to read at once."""
_NOTE = re.compile(r"([0-9]{1,10}) ([0-9]{1,19}) (.+)")
_PLACE_IN_C = re.compile(r"^\[(?:enforce fail at )?[^\[\]\s]*:[0-9]+\] (?:err == 0\. )?")
"""The prefix of messages of gloo, "[/gloo/transport/tcp/pair.cc:537] ", and of torch's allocator for CPUs."""

_INSTALLED_PREFIX = re.compile(r"\A.*(/(site|dist)-packages/|/lib/python3\.\d+/)")


class Note(NamedTuple):
    """A note of a process. `pid` is 0 for a note of dpmon itself."""

    pid: int
    at_ns: int
    """Monotonic time in ns."""
    text: str


def read_notes(path: Path, *, newest: bool = False) -> list[Note]:
    """Return the notes in a file; empty if it cannot be read. Of a large file, the first ones, or the `newest`."""
    read = read_tail if newest else read_file
    try:
        return parse_notes(read(path, _MAX_BYTES))
    except OSError:
        return []


def parse_notes(data: bytes) -> list[Note]:
    """Return the notes in `data`, in order, without invalid lines and an unfinished last line."""
    lines = data.decode("utf-8", "replace").split("\n")[:-1]
    groups = [match.groups() for match in map(_NOTE.fullmatch, lines) if match is not None]
    return [Note(int(pid), int(at_ns), text) for pid, at_ns, text in groups]


def add_note(directory: Path, text: str, file: str = "warnings.log", pid: int = 0) -> None:
    """Add a note about process `pid` (0: dpmon itself). Notes in warnings.log become records of the run."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with contextlib.suppress(OSError), open(open_file(directory / file, flags), "ab") as log:
        log.write(f"{pid} {time.monotonic_ns()} {strip_control_chars(text)[:4096]}\n".encode())


class NoteReader:
    """A reader of the notes that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Note]:
        """Return the notes added since the last call."""
        lines = read_new_lines(self._path, self._offset, _MAX_BYTES)
        self._offset += len(lines)
        return parse_notes(lines)


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
    frames: Sequence[tuple[str, str, int]] = ()
    """Function, file and line of the innermost calls of its traceback, innermost first."""
    worker: str | None = None
    """How a worker of a loader was killed, which explains the exception."""

    @property
    def text(self) -> str:
        """The last line of its traceback."""
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def sentence(self, cwd: str) -> str:
        """Return rank, exception and line of the script: "rank 1: RuntimeError: no such token (train.py:12)".

        Only the first line of the exception's message is shown, without a place in C++ code, and truncated if long.
        """
        first_line, _, _ = self.message.strip().partition("\n")
        message = textwrap.shorten(_PLACE_IN_C.sub("", first_line), 120, placeholder=" ...")
        rank_prefix = "" if self.rank is None else f"rank {self.rank}: "
        text = f"{self.kind}: {message}" if message else self.kind
        suffix = "" if self.file is None else f" ({relative_location(cwd, self.file, self.line or 0)})"
        return "; ".join(filter(None, (f"{rank_prefix}{text}{suffix}", self.worker)))


def relative_location(directory: str, file: str, line: int) -> str:
    """Return file and line as seen from `directory`: "src/train.py:88"; only the name of a file that is elsewhere.

    An installed file is named from its package on: "package/train.py:88".
    """
    if (installed_path := shorten_installed_path(file)) != file:
        return f"{installed_path}:{line}"
    if directory and file.startswith(directory.rstrip(os.sep) + os.sep):
        return f"{os.path.relpath(file, directory)}:{line}"
    return f"{os.path.basename(file)}:{line}"


def shorten_installed_path(file: str) -> str:
    """Return the path of a file without the directory of installed packages or of Python's own modules."""
    return _INSTALLED_PREFIX.sub("", file)


def trim_launcher_lines(lines: list[str], exception: UncaughtException | None, command_pid: int | None) -> list[str]:
    """Return the output up to the exception that ended the run, without the lines that a launcher prints after it.

    `command_pid`: the process id of the command. If the command itself raised the exception, all lines are returned.
    """
    if exception is None or exception.pid == command_pid:
        return lines
    end = max((i for i, line in enumerate(lines) if line.rstrip().endswith(exception.text)), default=len(lines) - 1)
    return lines[: end + 1]


def read_uncaught_exceptions(directory: Path) -> list[UncaughtException]:
    """Return the exceptions of all processes, in the order of their notes."""
    exceptions = []
    for pid, at_ns, text in read_notes(directory / "endings.log"):
        class_name, _, details = text.partition(" ")
        try:
            exceptions.append(UncaughtException(pid, at_ns, class_name, **load_json(details)))
        except (ValueError, TypeError):  # a note that did not fit on a full disk
            exceptions.append(UncaughtException(pid, at_ns, class_name))
    return exceptions


# ------------------------------------------------------------------------------------------------ in the output

READ_BYTES = 1 << 17
"""Number of bytes to read from the end of an output, enough for a long traceback."""
_TERMINAL_SEQUENCE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
"""A terminal sequence, such as a color."""
_EXCEPTION_LINE = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Fault|Timeout)\b(?:: .*)?$"
)
_NAME_LINE = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")


def traceback_line(output_tail: bytes) -> str | None:
    """Return the line that names the exception in the end of a script's output; None if there is none.

    It comes from the last traceback, or from the last lines, and is truncated and safe for a terminal.
    """
    text = _TERMINAL_SEQUENCE.sub(b"", output_tail).decode("utf-8", "replace")
    lines = [strip_control_chars(line) for line in text.replace("\r", "\n").split("\n")]
    header = max((index for index, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=None)
    if header is not None:
        exception_line = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
        if exception_line is not None and _NAME_LINE.match(exception_line):
            return exception_line.strip()[:300]
    return next((line.strip()[:300] for line in reversed(lines[-50:]) if _EXCEPTION_LINE.match(line)), None)
