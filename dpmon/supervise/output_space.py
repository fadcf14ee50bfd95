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

RESERVED_BYTES = 2 << 20
"""How much space is allocated beyond the end of a file."""
KEPT_BYTES = 1 << 20
"""How much of the newest output is kept when older output is deleted."""
_FALLOC_FL_KEEP_SIZE = 1


class OutputSpaceReserver:
    """Reserved disk space of a run's output files. Called in the supervisor's loop, so it never blocks for long."""

    def __init__(self, paths: Sequence[Path], warn: Callable[[str], None]) -> None:
        self._paths = paths
        self._warn = warn
        self._fds: dict[Path, int] = {}
        self._reserved_end: dict[Path, int] = {}
        """End of the allocated space, as an offset in the file."""
        self._total_removed = 0

    def poll(self) -> None:
        """Allocate space if it is needed. Must be called several times per second."""
        for path in self._paths:
            with contextlib.suppress(OSError):  # the file does not exist, or its file system cannot allocate space
                if path not in self._fds:
                    self._fds[path] = open_file(path, os.O_RDWR | os.O_APPEND)
                self._extend_file(path, self._fds[path])

    def _extend_file(self, path: Path, fd: int) -> None:
        size = os.fstat(fd).st_size
        if self._reserved_end.get(path, 0) >= size + RESERVED_BYTES // 2:
            return
        reserved_bytes = RESERVED_BYTES
        if not _reserve(fd, size, reserved_bytes):
            if size <= KEPT_BYTES:
                return
            if not self._total_removed:
                self._warn("the disk is full: the script's oldest output is deleted to make room for the newest")
            newest_output = os.pread(fd, KEPT_BYTES, size - KEPT_BYTES)
            line_start = newest_output.find(b"\n") + 1
            whole_lines = memoryview(newest_output)[line_start:]
            late_output = os.pread(fd, KEPT_BYTES, size)  # what the script wrote meanwhile
            os.ftruncate(fd, 0)  # the script appends, so it continues at the new end
            os.writev(fd, [whole_lines, late_output])  # at once, before the script writes
            removed_bytes = size - KEPT_BYTES + line_start
            self._total_removed += removed_bytes
            _add_deleted_bytes(path, removed_bytes)
            size = 0
            while reserved_bytes > 0 and not _reserve(fd, size, reserved_bytes):
                # Other data has taken some of the space. Half as much would only cover the kept output.
                reserved_bytes -= RESERVED_BYTES // 32
        self._reserved_end[path] = size + reserved_bytes

    def close(self, *, nobody_writes: bool) -> None:
        """Close the files and, if `nobody_writes`, free the unused space."""
        if self._total_removed:
            self._warn(f"{self._total_removed:,} bytes of the script's output were deleted, because the disk was full")
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                if nobody_writes:
                    os.ftruncate(fd, os.fstat(fd).st_size)
                os.close(fd)
        self._fds.clear()


def _add_deleted_bytes(log: Path, new_bytes: int) -> None:
    """Add to the count of deleted bytes that tells a reader how much it has missed."""
    with contextlib.suppress(OSError):
        fd = open_file(count_file(log), os.O_RDWR | os.O_CREAT)
        with open(fd, "r+b") as file:
            file.write(b"%020d" % (deleted_bytes(log) + new_bytes))


def _reserve(fd: int, offset: int, length: int) -> bool:
    """Allocate space from `offset` on. Return False if the disk is full. Raises OSError if it fails otherwise."""
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    if allocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0:
        return True
    error_number = ctypes.get_errno()
    if error_number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(error_number, os.strerror(error_number))
    return False
