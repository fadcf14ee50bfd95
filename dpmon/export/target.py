"""The target of an export: a file that is replaced in one step, a pipe, or standard output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dpmon.run.destination import is_stream, open_stream, replaced


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8, "\\n") that replaces `path` when the block ends without an error; else nothing changes.

    A stream (a FIFO, a terminal, /dev/fd/3) is written to directly. Like the record, a new file is readable only by its
    owner; an existing file keeps its mode. Raises OSError if `path` cannot be written, or is neither a stream nor a
    plain file.
    """
    if is_stream(path):
        fd = open_stream(path)
        with open(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file
    else:
        with replaced(path) as file:
            yield file


@contextlib.contextmanager
def stdout() -> Iterator[TextIO]:
    """Standard output as UTF-8, whatever the locale."""
    out = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    yield out
    out.flush()
