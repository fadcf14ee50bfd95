"""Where an export goes: a file that is there whole or not at all, a pipe, or standard output."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["opened", "stdout"]

_DESCRIPTORS = ("/dev/fd/", "/dev/std", "/proc/")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8, "\\n") that takes the name `path` when the block ends well; otherwise nothing has changed.

    What is no regular file (a pipe, a terminal, /dev/fd/3) is written as it is. A link is followed. A new
    file is readable by its owner alone, like the record; one that was there keeps its mode. OSError if it cannot be
    written.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    # What a descriptor leads to is a file that somebody has open: a new one in its place would not reach them.
    if mode is not None and (not stat.S_ISREG(mode) or os.path.abspath(path).startswith(_DESCRIPTORS)):
        # Appending: what was written through that descriptor before stays. To a pipe it is all the same.
        with open(path, "a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file
        return
    if mode is not None:
        path = Path(os.path.realpath(path))
    # The random part keeps two exports to one name apart; the last to end wins, as with any tool.
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:8]}.part")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            if mode is not None:
                os.fchmod(fd, stat.S_IMODE(mode))
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def stdout() -> Iterator[TextIO]:
    """Standard output as UTF-8, whatever the locale."""
    out = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    yield out
    out.flush()
