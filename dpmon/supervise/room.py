"""Keeps disk space free for the script's output, so that its print() does not fail on a full disk.

The script writes its output straight into a file of the run. dpmon allocates space beyond the end of this file, so that
other data cannot take it. When the disk is full, dpmon deletes the oldest output to make room for the newest.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dpmon.run.files import open_file

AHEAD = 16 << 20
AHEAD_LITTLE = 2 << 20
PLENTY = 1 << 30
"""With less free space than this on the disk, less is allocated ahead."""
LOOK_S = 1.0
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PAGE = 4096


class OutputRoom:
    """Watches the output files of a run; called from the supervisor's loop, never blocks for long."""

    def __init__(self, paths: Sequence[Path], warn: Callable[[str], None], keep_last: int = 1 << 20) -> None:
        """`keep_last`: bytes of the newest output that are never deleted."""
        self._paths = paths
        self._warn = warn
        self._keep_last = keep_last
        self._files: dict[Path, int] = {}
        self._until: dict[Path, int] = {}
        """End of the allocated space, as an offset in the file."""
        self._deleted_until: dict[Path, int] = {}
        self._look_at = 0.0
        self._warned = False
        self._allocate = _fallocate()

    def look(self, now: float) -> None:
        """Allocate space if it is due, at most once a second. `now`: monotonic s."""
        if self._allocate is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for path in self._paths:
            try:
                fd = self._files.get(path)
                if fd is None:
                    fd = self._files[path] = open_file(path, os.O_WRONLY)
                self._look_at_file(path, fd)
            except OSError:  # the file is missing, or its file system cannot allocate
                continue

    def _look_at_file(self, path: Path, fd: int) -> None:
        size = os.fstat(fd).st_size
        disk = os.fstatvfs(fd)
        ahead = AHEAD if disk.f_bavail * disk.f_frsize > PLENTY else AHEAD_LITTLE
        if self._until.get(path, 0) >= size + ahead // 2:
            return
        if self._reserve(fd, size, ahead):
            self._until[path] = size + ahead
            return
        self._delete_output(path, fd, size)
        for sixteenths in (16, 12, 8, 6, 4, 3, 2, 1):  # the history may have taken some of it
            if self._reserve(fd, size, ahead * sixteenths // 16):
                # `_until` stays as it is, so the next call tries again.
                break
        if not self._warned:
            self._warned = True
            self._warn("the disk is full: the script's oldest output is deleted to make room for the newest")

    def _delete_output(self, path: Path, fd: int, size: int) -> None:
        begin = self._deleted_until.get(path, 0)
        end = (size - self._keep_last) // _PAGE * _PAGE
        if end > begin and self._call(fd, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin) == 0:
            self._deleted_until[path] = end

    def _reserve(self, fd: int, size: int, ahead: int) -> bool:
        """Allocate space; False if the disk is full. Raises OSError if it fails for another reason."""
        problem = self._call(fd, _KEEP_SIZE, size, ahead)
        if problem not in (0, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(problem, os.strerror(problem))
        return problem == 0

    def _call(self, fd: int, mode: int, offset: int, length: int) -> int:
        assert self._allocate is not None
        while self._allocate(fd, mode, offset, length) != 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                return number
        return 0

    def close(self, *, nobody_writes: bool) -> None:
        """Close the files and, if `nobody_writes`, free the unused space."""
        for fd in self._files.values():
            with contextlib.suppress(OSError):
                if nobody_writes:
                    os.ftruncate(fd, os.fstat(fd).st_size)
                os.close(fd)
        self._files.clear()


def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The C library's fallocate; None without one."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found
