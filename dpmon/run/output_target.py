"""Writes to paths that the user specifies, and to standard output.

A regular file is replaced, a stream is written to directly. A device, a FIFO or a link at the path is never replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dpmon.run.safe_files import not_regular_file_error, open_file

_DESCRIPTOR = re.compile(r"/dev/(?:std(?:in|out|err)|fd/\d+)|/proc/(?:self|thread-self|\d+)(?:/task/\d+)?/fd/\d+")


def is_stream(path: Path) -> bool:
    """Return whether `path` is an open descriptor (/dev/fd/3, /dev/stdout), a FIFO, a terminal or a similar device.

    Its reader would not see a new file in its place.
    """
    if _DESCRIPTOR.fullmatch(os.path.abspath(path)):
        return True
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def open_stream(path: Path) -> int:
    """Return a descriptor that writes into a stream. Waits for the reader of a FIFO, as a shell does."""
    # O_APPEND keeps earlier output of that descriptor. For a pipe it makes no difference.
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY)


def check_replaceable(path: Path) -> int | None:
    """Return the mode (st_mode) of the regular file at `path`; None without one. Raises OSError for anything else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a symbolic link; give the file that it points to", str(path))
    if not stat.S_ISREG(mode):
        raise not_regular_file_error(path, mode)
    return mode


def open_truncated(path: Path) -> int:
    """Truncate or create (mode 0600) a regular file. Return its descriptor. Raises OSError for anything else."""
    check_replaceable(path)
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


@contextlib.contextmanager
def replace_file(path: Path, mode: int | None = None) -> Iterator[TextIO]:
    """Open a text file (UTF-8, "\\n") that replaces `path` if the block ends without an error; else nothing changes.

    `mode`: the file's mode; None: the mode of the existing file, or 0600 for a new one. Raises OSError if the file
    cannot be written, or if `path` is not a regular file.
    """
    old_mode = check_replaceable(path)
    if mode is None and old_mode is not None:
        mode = old_mode & 0o777
    # Two writers to the same path have different names; the last to finish wins, as with any tool.
    temporary = path.with_name(f".dpmon-{uuid.uuid4().hex[:8]}.part")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            yield file
        check_replaceable(path)  # again, because an export takes time
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[TextIO]:
    """Open a text file (UTF-8, "\\n") that replaces `path` if the block ends without an error; else nothing changes.

    A stream (a FIFO, a terminal, /dev/fd/3) is written to directly. Like the run's own files, a new file is readable
    only by its owner; an existing file keeps its mode. Raises OSError if `path` cannot be written, or is neither a
    stream nor a regular file.
    """
    if is_stream(path):
        fd = open_stream(path)
        with open(fd, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file
    else:
        with replace_file(path) as file:
            yield file


@contextlib.contextmanager
def utf8_stdout() -> Iterator[TextIO]:
    """Open standard output as UTF-8, whatever the locale."""
    out = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    yield out
    out.flush()
