"""Asks the kernel for the exit status of a process that is not our child, through a pidfd."""

from __future__ import annotations

import fcntl
import os
import struct

# ioctl PIDFD_GET_INFO, struct pidfd_info and PIDFD_INFO_EXIT: linux/pidfd.h; Linux 6.15 and later provide the exit.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


def open_pidfd(pid: int) -> int | None:
    """A descriptor of the process with this number; None if it does not exist, or on an older kernel."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError, OverflowError):
        return None


def wait_status(fd: int) -> int | None:
    """The wait status of a process that its parent has reaped; None if the kernel does not provide it."""
    data = bytearray(_INFO.size)
    _INFO.pack_into(data, 0, _INFO_EXIT, *(0,) * 13)
    try:
        fcntl.ioctl(fd, _GET_INFO, data, True)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(data)
    return int(status) if mask & _INFO_EXIT else None
