"""How a process ended that is no child of ours: what the kernel tells of it through a descriptor of the process."""

from __future__ import annotations

import fcntl
import os
import struct

# ioctl PIDFD_GET_INFO, struct pidfd_info and PIDFD_INFO_EXIT: linux/pidfd.h; the exit is told from Linux 6.15 on.
_INFO = struct.Struct("=QQ11Ii")
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


def open_pidfd(pid: int) -> int | None:
    """A descriptor of the process with this number; None if there is none, or on a kernel without them."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError, OverflowError):
        return None


def wait_status(fd: int) -> int | None:
    """The wait status of a process that has ended and was reaped by its parent; None if the kernel does not tell."""
    data = bytearray(_INFO.size)
    _INFO.pack_into(data, 0, _INFO_EXIT, *(0,) * 13)
    try:
        fcntl.ioctl(fd, _GET_INFO, data, True)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(data)
    return int(status) if mask & _INFO_EXIT else None
