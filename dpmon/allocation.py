"""Helps to allocate a whole file on the disk at once, so that later writes to its mapping cannot fail.

Standard library only: this module is imported into the training process.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import struct

_LONG = struct.calcsize("l")
_GET_FLAGS, _SET_FLAGS = 2 << 30 | _LONG << 16 | 0x6601, 1 << 30 | _LONG << 16 | 0x6602
"""ioctl FS_IOC_GETFLAGS and FS_IOC_SETFLAGS (linux/fs.h)."""
_NO_COPY_ON_WRITE = 0x00800000
"""FS_NOCOW_FL."""


class NoSizeSignal:
    """A context in which growing a file beyond RLIMIT_FSIZE only raises OSError.

    Otherwise the kernel also sends SIGXFSZ to the thread that writes. Python ignores this signal, but a script may have
    changed that: the signal would then kill the script, or run its handler.
    """

    def __enter__(self) -> None:
        # The old mask is read first, so that it can be restored if the script's signal handler raises now.
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})

    def __exit__(self, *error: object) -> None:
        if signal.SIGXFSZ not in self._before:
            with contextlib.suppress(OSError):
                signal.sigtimedwait({signal.SIGXFSZ}, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def write_in_place(fd: int) -> None:
    """Switch copy-on-write off for an empty file (chattr +C), if the file system supports it.

    On btrfs each write of a page needs new space, so on a full disk SIGBUS would kill the process.
    """
    flags = bytearray(_LONG)
    with contextlib.suppress(OSError):  # other file systems do not support the flag
        fcntl.ioctl(fd, _GET_FLAGS, flags, True)
        flags[:4] = struct.pack("=I", struct.unpack("=I", flags[:4])[0] | _NO_COPY_ON_WRITE)
        fcntl.ioctl(fd, _SET_FLAGS, flags)
