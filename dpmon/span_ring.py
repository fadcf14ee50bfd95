"""A memory-mapped ring of spans. Any thread of one process writes and never waits; any number of processes read.

Layout of a ring file (native byte order; a run never leaves its machine)::

    0      magic, version, sizes, pid, process, rank, world size, start           written once
    136    training thread, whether the process has ended, acknowledged serial,
           mode in force, pause acted upon, end of the last loop over a loader,
           the kernel's number of the training thread                             written by the process
    192    requested serial, mode and pause; sampling of device timing;
           serials of the requests to record collectives and to note stacks       written by readers
    256    identity and sequence number of each process group                     written by the process
    512    for each thread, the start of its current span; from 3584 on, the
           kind of that span                                                      written by the process
    4096   slots of 40 bytes (dpmon.record.span_format)

A slot's number comes from one counter, so threads need no lock. The number is the last word to be written, and the lap
is in the first word. So a reader recognizes an unwritten slot by its number, and a slot that is being overwritten by
its lap.

A file of JSON lines beside the ring holds long or rare data: definitions, which spans refer to by number, and events.
Lines are never overwritten.

The writer maps the ring, so a span costs no system call and survives the death of its process. The whole file is
allocated on the disk at once, so that later writes to its mapping cannot fail. Readers use pread: if the file is
truncated, they get a short read, not a SIGBUS. The numbering of slots needs the GIL.

Standard library only: this module is imported into the training process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Callable
from itertools import count

from dpmon.errors import DpmonError
from dpmon.record.span_format import LAP_AT

HEADER_BYTES = 4096
SLOT = struct.Struct("=5Q")
SLOT_BYTES = SLOT.size
SLOTS, MAX_SLOTS = 32 << 10, 1 << 20
"""1.25 MiB: about 7,000 usual steps. A larger ring would add more touched pages to the training's memory."""
THREADS = 384
MAX_GROUPS = 8
"""Most process groups with a sequence number in the ring."""
NO_NUMBER = (1 << 64) - 1
"""Sequence number of a process group whose backend has none."""
OF_NCCL = 1 << 31
"""This bit of the number of ranks marks a process group that has the backend NCCL."""
KINDS_AT = 3584
"""Offset of the kind of thread 0's current span (one byte; 0: none); the other threads follow."""
MAGIC, VERSION = b"DPMSPANS", 1
HEAD = struct.Struct("=8sIIQIiiiq")
_LONG = struct.calcsize("l")
_GET_FLAGS, _SET_FLAGS = 2 << 30 | _LONG << 16 | 0x6601, 1 << 30 | _LONG << 16 | 0x6602
"""ioctl FS_IOC_GETFLAGS and FS_IOC_SETFLAGS (linux/fs.h)."""
_NO_COPY_ON_WRITE = 0x00800000
"""FS_NOCOW_FL."""


class RingError(DpmonError):
    """A file is not a usable ring: foreign, truncated or of another version."""


class HeaderWord:
    """Indices of the 64-bit words of the header that change while the ring is in use."""

    TRAINING_THREAD, ENDED, ANSWERED, MODE, PAUSED, LOOP_OVER, TRAINING_TID = range(17, 24)
    """Training thread; 1 at the process's end; last mode request acted upon; mode in force; last pause acted upon; the
    last end of a loop over a loader (monotonic ns); the kernel's number of the training thread (0: unknown)."""
    REQUEST, WANTED, PAUSE, ONE_IN, SAMPLE = range(24, 29)
    """Serial of the last mode request; the requested mode; last pause request (odd: pause, even: resume); device timing
    of one step in this many (0: all steps); serial of the last request to record the collectives of a step."""
    STACKS, PTRACER = 29, 30
    """Serial of the last request for stacks; the process that may look into this one (its pid; 0: none)."""
    GROUPS = 32
    """For each process group: its identity (crc32 of its name << 32 | number of ranks; 0: no more groups), then the
    number of collectives that this process has started in it. Written by the process."""
    SPAN_START = 64
    """Start of thread 0's current or last span (monotonic ns); the other threads follow."""


def wants_pause(word: int) -> bool:
    """Return whether a word requests a pause: its lower half is odd, and its upper half is the complement of the lower.

    Random bytes are no request, because nobody would end that pause.
    """
    return word & 1 == 1 and word >> 32 == ~word & 0xFFFFFFFF


class SpanRing:
    """Writes spans, in the traced process."""

    __slots__ = ("kinds", "map", "next", "put", "words")

    def __init__(
        self, path: str, *, process: int, rank: int = -1, world: int = -1, start_ns: int = 0, slots: int = SLOTS
    ) -> None:
        """Create `path`, which must not exist, with room for `slots` spans, a power of two.

        Raises OSError if the file cannot be made, ValueError for another number of slots.
        """
        if slots & (slots - 1):
            raise ValueError(f"the number of slots must be a power of two: {slots}")
        self.map = _create_and_map(path, slots, process, rank, world, start_ns)
        try:
            self.words = memoryview(self.map)[:HEADER_BYTES].cast("Q")
            self.kinds = memoryview(self.map)[KINDS_AT : KINDS_AT + THREADS]
            self.next = count().__next__
            """Returns the number of the next slot."""
            self.put = _make_span_writer(self.map, slots, self.next)
            """Writes a span from its words w0 (without the lap) to w3; returns its number."""
        except BaseException:  # an interrupt must not leave a ring without a writer
            os.unlink(path)
            raise


def _create_and_map(path: str, slots: int, process: int, rank: int, world: int, start_ns: int) -> mmap.mmap:
    """Make the file of a ring and map it. A page missing later would kill the process with SIGBUS."""
    size = HEADER_BYTES + slots * SLOT_BYTES
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            disable_copy_on_write(fd)
            with IgnoreFileSizeSignal():
                os.posix_fallocate(fd, 0, size)
            made = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        # The magic comes last: a reader that sees it sees a complete header.
        HEAD.pack_into(made, 0, bytes(8), VERSION, HEADER_BYTES, slots, os.getpid(), process, rank, world, start_ns)
        made[:8] = MAGIC
    except BaseException:  # an interrupt must not leave an incomplete ring either
        os.unlink(path)
        raise
    return made


def _make_span_writer(ring: mmap.mmap, slots: int, take: Callable[[], int]) -> Callable[[int, int, int, int], int]:
    """Make the function that writes spans. A closure, because this is the hot path of the training."""
    pack, size = SLOT.pack_into, SLOT_BYTES
    mask, bits = slots - 1, slots.bit_length() - 1

    def put(head: int, start: int, took: int, sizes: int) -> int:
        number = take()
        lap = (number >> bits & 0xFF) << LAP_AT
        pack(ring, HEADER_BYTES + (number & mask) * size, head | lap, start, took, sizes, number + 1)
        return number

    return put


class IgnoreFileSizeSignal:
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


def disable_copy_on_write(fd: int) -> None:
    """Switch copy-on-write off for an empty file (chattr +C), if the file system supports it.

    On btrfs each write of a page needs new space, so on a full disk SIGBUS would kill the process.
    """
    flags = bytearray(_LONG)
    with contextlib.suppress(OSError):  # other file systems do not support the flag
        fcntl.ioctl(fd, _GET_FLAGS, flags, True)
        flags[:4] = struct.pack("=I", struct.unpack("=I", flags[:4])[0] | _NO_COPY_ON_WRITE)
        fcntl.ioctl(fd, _SET_FLAGS, flags)
