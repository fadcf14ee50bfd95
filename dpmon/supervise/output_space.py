"""Keeps disk space free for the script's output, so that its print() does not fail on a full disk.

The script writes its output straight into a file of the run. dpmon allocates space beyond the end of this file, so that
other data cannot take it. When the disk is full, dpmon deletes the oldest output, and allocates the space again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dpmon.run.run_directory import count_file, deleted_bytes
from dpmon.run.safe_files import open_file

AHEAD = 2 << 20
"""Bytes to allocate beyond the end of a file."""
LITTLE = 1 << 20
"""A file of at most this many bytes is not cut, because this would free too little."""
_KEEP_SIZE = 1


class OutputSpaceReserver:
    """Watches the output files of a run; called from the supervisor's loop, never blocks for long."""

    def __init__(self, paths: Sequence[Path], warn: Callable[[str], None], keep_last: int) -> None:
        """`keep_last`: bytes of the newest output to keep when a file is cut."""
        self._paths = paths
        self._warn = warn
        self._keep_last = keep_last
        self._files: dict[Path, int] = {}
        self._until: dict[Path, int] = {}
        """End of the allocated space, as an offset in the file."""
        self._deleted = 0

    def poll(self) -> None:
        """Allocate space if it is needed; to be called several times a second."""
        for path in self._paths:
            with contextlib.suppress(OSError):  # the file is missing, or its file system cannot allocate
                if path not in self._files:
                    self._files[path] = open_file(path, os.O_RDWR | os.O_APPEND)
                self._extend_file(path, self._files[path])

    def _extend_file(self, path: Path, fd: int) -> None:
        size = os.fstat(fd).st_size
        if self._until.get(path, 0) >= size + AHEAD // 2:
            return
        ahead = AHEAD
        if not _reserve(fd, size, ahead):
            if size <= max(LITTLE, self._keep_last):
                return
            if not self._deleted:
                self._warn("the disk is full: the script's oldest output is deleted to make room for the newest")
            kept = os.pread(fd, self._keep_last, size - self._keep_last)
            begin = kept.find(b"\n") + 1
            rest = memoryview(kept)[begin:]
            late = os.pread(fd, LITTLE, size)  # what the script wrote meanwhile
            os.ftruncate(fd, 0)  # the script appends, so it goes on at the new end
            os.writev(fd, [rest, late])  # at once, before the script writes
            deleted = size - self._keep_last + begin
            self._deleted += deleted
            _add_deleted_bytes(path, deleted)
            size = 0
            while ahead > 0 and not _reserve(fd, size, ahead):  # other data may have taken some of the space
                ahead //= 2
        self._until[path] = size + ahead

    def close(self, *, nobody_writes: bool) -> None:
        """Close the files and, if `nobody_writes`, free the unused space."""
        if self._deleted:
            self._warn(f"{self._deleted:,} bytes of the script's output were deleted, because the disk was full")
        for fd in self._files.values():
            with contextlib.suppress(OSError):
                if nobody_writes:
                    os.ftruncate(fd, os.fstat(fd).st_size)
                os.close(fd)
        self._files.clear()


def _add_deleted_bytes(log: Path, deleted: int) -> None:
    """Add to the count from which a reader knows what it has missed."""
    with contextlib.suppress(OSError):
        fd = open_file(count_file(log), os.O_RDWR | os.O_CREAT)
        with open(fd, "r+b") as file:
            file.write(b"%020d" % (deleted_bytes(log) + deleted))


def _reserve(fd: int, size: int, ahead: int) -> bool:
    """Allocate space beyond the end of a file; False if the disk is full. Raises OSError if that fails otherwise."""
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    if allocate(fd, _KEEP_SIZE, ctypes.c_int64(size), ctypes.c_int64(ahead)) == 0:
        return True
    problem = ctypes.get_errno()
    if problem not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(problem, os.strerror(problem))
    return False
