"""Keeps disk space free for the script's output, so that its print() does not fail on a full disk.

The script writes its output straight into a file of the run. dpmon allocates space beyond the end of this file, so that
other data cannot take it. When the disk is full, dpmon frees the space of the oldest output, which becomes a hole in
the file, and allocates it again. The size of the file does not change, so that all its readers keep their positions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dpmon.run.safe_files import open_file

RESERVED_BYTES = 2 << 20
"""How much space is allocated beyond the end of a file."""
KEPT_BYTES = 1 << 20
"""How much of the newest output is kept when older output is deleted."""
_BLOCK_BYTES = 1 << 16
"""A multiple of the block size of all file systems: only whole blocks become a hole."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Modes of fallocate(2)."""


class OutputSpaceReserver:
    """Reserved disk space of a run's output files. Called in the supervisor's loop, so it never blocks for long."""

    def __init__(self, paths: Sequence[Path], warn: Callable[[str], None]) -> None:
        self._paths = paths
        self._warn = warn
        self._fds: dict[Path, int] = {}
        self._reserved_end = dict.fromkeys(paths, 0)
        """End of the allocated space, as an offset in the file."""
        self._deleted_bytes = dict.fromkeys(paths, 0)

    def poll(self) -> None:
        """Allocate space if it is needed. Must be called several times per second."""
        for path in self._paths:
            with contextlib.suppress(OSError):  # the file does not exist, or its file system cannot allocate space
                if path not in self._fds:
                    self._fds[path] = open_file(path, os.O_RDWR)
                self._extend_reserve(path, self._fds[path])

    def _extend_reserve(self, path: Path, fd: int) -> None:
        size, length = os.fstat(fd).st_size, RESERVED_BYTES
        if self._reserved_end[path] >= size + RESERVED_BYTES // 2:
            return
        if not _allocate(fd, size, length):
            self._delete_oldest(path, fd, size - KEPT_BYTES)
            while length > 0 and not _allocate(fd, size, length):  # other data has taken some of the space
                length -= _BLOCK_BYTES
        self._reserved_end[path] = size + length

    def _delete_oldest(self, path: Path, fd: int, end: int) -> None:
        if end - self._deleted_bytes[path] < _BLOCK_BYTES:
            return
        if not any(self._deleted_bytes.values()):
            self._warn("the disk is full: the script's oldest output is deleted to make room for the newest")
        self._deleted_bytes[path] = delete_beginning(fd, end)

    def close(self, *, nobody_writes: bool) -> None:
        """Close the files and, if `nobody_writes`, free the unused space."""
        if deleted_bytes := sum(self._deleted_bytes.values()):
            self._warn(f"{deleted_bytes:,} bytes of the script's output were deleted, because the disk was full")
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                if nobody_writes:
                    os.ftruncate(fd, os.fstat(fd).st_size)
                os.close(fd)
        self._fds.clear()


def delete_beginning(fd: int, end: int) -> int:
    """Free the space of a file's bytes before `end`, in whole blocks. Return their number. Raises OSError.

    The size does not change; SEEK_DATA of lseek(2) skips the bytes.
    """
    length = end // _BLOCK_BYTES * _BLOCK_BYTES
    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, length)
    return length


def _allocate(fd: int, offset: int, length: int) -> bool:
    """Allocate space from `offset` on. Return False if the disk is full. Raises OSError if it fails otherwise."""
    try:
        _fallocate(fd, _KEEP_SIZE, offset, length)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return False
        raise
    return True


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if ctypes.CDLL(None, use_errno=True).fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
