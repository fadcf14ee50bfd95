"""Where a person wants something to be written: a file that is replaced, or a stream that is written into.

Only a regular file, or nothing, is ever replaced: a device, a FIFO or a link by that name stays what it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dpmon.run.files import not_a_file, open_file

__all__ = ["check_replaceable", "is_stream", "open_stream", "open_truncated", "replaced"]

_DESCRIPTOR = re.compile(r"/dev/(?:std(?:in|out|err)|fd/\d+)|/proc/(?:self|thread-self|\d+)(?:/task/\d+)?/fd/\d+")
_LONGEST_NAME = 100
"""Bytes of the file's name that are part of the temporary one."""


def is_stream(path: Path) -> bool:
    """Whether `path` names an open descriptor (/dev/fd/3, /dev/stdout), a FIFO, a terminal or another such device.

    What is written to these is passed on. A new file in their place would not reach who reads them.
    """
    if _DESCRIPTOR.fullmatch(os.path.abspath(path)):
        return True
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def open_stream(path: Path) -> int:
    """A descriptor that writes into a stream; waits for the reader of a FIFO, as a shell does."""
    # Appending: what was written through that descriptor before stays. To a pipe it is all the same.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY)


def check_replaceable(path: Path) -> int | None:
    """The mode (st_mode) of the regular file at `path`, None if there is nothing; OSError for anything else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a symbolic link; give the file that it points to", str(path))
    if not stat.S_ISREG(mode):
        raise not_a_file(path, mode)
    return mode


def open_truncated(path: Path) -> int:
    """A descriptor of the regular file at `path`, emptied, or of a new one (mode 0600); OSError for anything else."""
    check_replaceable(path)
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, anyone=True)


@contextlib.contextmanager
def replaced(path: Path, mode: int | None = None) -> Iterator[TextIO]:
    """A text file (UTF-8, "\\n") that takes the name `path` when the block ends well; otherwise nothing has changed.

    `mode`: of the file; None: that of the file that was there, 0600 for a new one. OSError if it cannot be written, or
    if there is something else than a regular file.
    """
    before = check_replaceable(path)
    if mode is None and before is not None:
        mode = before & 0o777
    # The random part keeps two writers to one name apart; the last to end wins, as with any tool.
    stem = os.fsdecode(os.fsencode(path.name)[:_LONGEST_NAME])
    temporary = path.with_name(f".{stem}.{uuid.uuid4().hex[:8]}.part")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            yield file
        check_replaceable(path)  # again, as an export takes its time
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
