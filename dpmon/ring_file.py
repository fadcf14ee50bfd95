"""The file of a ring: a header that is written once, words that change, and the data area.

The whole file is allocated on the disk at once, so that later writes to its mapping cannot fail.

The writer maps the file. Readers use pread: if the file is truncated, they get a short read, not a SIGBUS.

Standard library only: this module is imported into the training process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import stat
import struct
from typing import NamedTuple

from dpmon.errors import DpmonError

HEADER_BYTES = 4096
_HEAD = struct.Struct("=8sIIQIiiiq")
_LONG = struct.calcsize("l")
_GET_FLAGS, _SET_FLAGS = 2 << 30 | _LONG << 16 | 0x6601, 1 << 30 | _LONG << 16 | 0x6602
"""ioctl FS_IOC_GETFLAGS and FS_IOC_SETFLAGS (linux/fs.h)."""
_NO_COPY_ON_WRITE = 0x00800000
"""FS_NOCOW_FL."""


class RingError(DpmonError):
    """A file is not a usable ring: foreign, truncated or of another version."""


class Header(NamedTuple):
    """The header of a ring."""

    units: int
    """Capacity of the ring, in units of the format."""
    pid: int
    process: int
    rank: int | None
    world: int | None
    start_ns: int


def read_whole(fd: int, path: str, size: int, at: int) -> bytes:
    """Read `size` bytes of the file `path` at offset `at`. Raises RingError if the file was truncated."""
    data = os.pread(fd, size, at)
    if len(data) < size:
        raise RingError(f"{path}: truncated")
    return data


def read_around(fd: int, path: str, size: int, at: int, room: int) -> bytes:
    """Read `size` bytes at byte `at` of a ring of `room` bytes; reading wraps around. Raises RingError."""
    at %= room
    first = min(size, room - at)
    data = read_whole(fd, path, first, HEADER_BYTES + at)
    return data if size == first else data + read_whole(fd, path, size - first, HEADER_BYTES)


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


class RingFormat(NamedTuple):
    """What distinguishes a kind of ring: its magic bytes, its version and its unit of capacity."""

    magic: bytes
    version: int
    unit: int
    """Bytes per unit."""

    def create(self, path: str, units: int, *, process: int, rank: int, world: int, start_ns: int) -> mmap.mmap:
        """Make the file, which must not exist, and map it. `rank` and `world` are -1 for a process without a rank.

        Raises FileExistsError if the name is taken, and OSError if the disk is full. The whole file is allocated at
        once: a page missing later would kill the process with SIGBUS.
        """
        size = HEADER_BYTES + units * self.unit
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                write_in_place(fd)
                with NoSizeSignal():
                    os.posix_fallocate(fd, 0, size)
                made = mmap.mmap(fd, size)
            finally:
                os.close(fd)
            # The magic comes last: a reader that sees it sees a complete header.
            about = self.version, HEADER_BYTES, units, os.getpid(), process, rank, world, start_ns
            _HEAD.pack_into(made, 0, bytes(8), *about)
            made[:8] = self.magic
        except BaseException:  # an interrupt must not leave an incomplete ring either
            os.unlink(path)
            raise
        return made

    def open(self, path: str, access: int = os.O_RDONLY) -> tuple[int, Header]:
        """Open the file; return the descriptor and the header.

        Raises RingError if it is not a ring of this format and this user, OSError if it cannot be opened.
        """
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise RingError(f"{path}: not a regular file")
            if info.st_uid != os.getuid():
                raise RingError(f"{path}: belongs to another user")
            raw = os.pread(fd, _HEAD.size, 0)
            if len(raw) < _HEAD.size or not raw.startswith(self.magic):
                raise RingError(f"{path}: not a ring")
            _, version, header, units, pid, process, rank, world, start_ns = _HEAD.unpack(raw)
            if version != self.version or header != HEADER_BYTES:
                raise RingError(f"{path}: ring of another version ({version})")
            if units == 0 or header + units * self.unit != info.st_size:
                raise RingError(f"{path}: size does not match its header")
        except BaseException:
            os.close(fd)
            raise
        return fd, Header(units, pid, process, rank if rank >= 0 else None, world if world >= 0 else None, start_ns)
