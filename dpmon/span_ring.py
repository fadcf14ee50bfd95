"""A memory-mapped ring of spans. Any thread of one process writes and never waits; any number of processes read.

Layout of a ring file (native byte order; a run never leaves its machine)::

    0      magic, version, sizes, pid, process, rank, world size, start           written once
    136    training thread, whether the process has ended, acknowledged serial,
           mode in force, pause acted upon, end of the last loop over a loader,
           the kernel's number of the training thread                             written by the process
    192    requested serial, mode and pause; sampling of device timing;
           serials of the requests to record collectives, to note stacks, and to
           look for what grows in memory; the request to profile steps            written by readers
    256    identity and sequence number of each process group                     written by the process
    512    the start of each thread's current span; from 3584 on, the kind of
           that span                                                              written by the process
    4096   slots of 40 bytes (dpmon.record.span_format)

A slot's number comes from one counter, so threads need no lock. The number is the last word to be written, and the lap
is in the first word. So a reader recognizes an unwritten slot by its number, and a slot that is being overwritten by
its lap.

A file of JSON lines next to the ring holds long or rare data: definitions, which spans refer to by number, and events.
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
"""Maximum number of process groups with a sequence number in the ring."""
NO_NUMBER = (1 << 64) - 1
"""Sequence number of a process group whose backend has none."""
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
    """A file that is not a usable ring: foreign, truncated or of another version."""


class HeaderWord:
    """Indices of the 64-bit words of the header that change while the ring is in use."""

    TRAINING_THREAD, ENDED, ACKNOWLEDGED, MODE, PAUSED, LAST_LOOP_END, TRAINING_TID = range(17, 24)
    """Number of the training thread; 1 once the process has ended; serial of the last mode request acted upon; current
    mode; last pause request acted upon; last end of a loop over a loader (monotonic ns); the kernel's id of the
    training thread (0: unknown)."""
    REQUEST, REQUESTED_MODE, PAUSE, TIMED_ONE_IN, SAMPLE = range(24, 29)
    """Serial of the last mode request; the requested mode; last pause request (odd: pause, even: resume); n if one step
    in n is timed on devices (0: all steps); serial of the last request to record the collectives of a step."""
    STACKS = 29
    """Serial of the last request for stacks."""
    WALK = 30
    """Serial of the last request to look for what grows in memory."""
    PROFILE = 31
    """Serial of the last request to profile << 16 | number of steps to profile."""
    GROUPS = 32
    """For each process group: its identity (crc32 of its name << 32 | number of ranks; 0: no more groups), then the
    number of collectives that this process has started in it. Written by the process."""
    SPAN_START = 64
    """Start of thread 0's current or last span (monotonic ns); the other threads follow."""


def wants_pause(request: int) -> bool:
    """Return whether a word requests a pause: the lower half is odd, and the upper half is the lower's complement.

    The complement excludes random bytes, because nobody would end the pause that they request.
    """
    return request & 1 == 1 and request >> 32 == ~request & 0xFFFFFFFF


class SpanRing:
    """A ring of spans, for the traced process that writes it."""

    __slots__ = ("kinds", "map", "next", "put", "words")

    def __init__(
        self, path: str, *, process: int, rank: int = -1, world: int = -1, start_ns: int = 0, slots: int = SLOTS
    ) -> None:
        """Create `path`, which must not exist. `slots`: how many spans it holds, a power of two.

        Raises OSError if the file cannot be created, ValueError if `slots` is not a power of two.
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
    """Create the file of a ring, allocate it completely, and map it.

    If a page could not be allocated later, SIGBUS would kill the process.
    """
    size = HEADER_BYTES + slots * SLOT_BYTES
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            disable_copy_on_write(fd)
            os.posix_fallocate(fd, 0, size)
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        # The magic comes last: a reader that sees it sees a complete header.
        HEAD.pack_into(mapping, 0, bytes(8), VERSION, HEADER_BYTES, slots, os.getpid(), process, rank, world, start_ns)
        mapping[:8] = MAGIC
    except BaseException:  # an interrupt must not leave an incomplete ring either
        os.unlink(path)
        raise
    return mapping


def _make_span_writer(
    ring: mmap.mmap, slots: int, next_number: Callable[[], int]
) -> Callable[[int, int, int, int], int]:
    """Return the function that writes spans. It is a closure, because it runs on the training's hot path."""
    pack, size = SLOT.pack_into, SLOT_BYTES
    mask, bits = slots - 1, slots.bit_length() - 1

    def put(word0: int, start: int, took: int, sizes: int) -> int:
        number = next_number()
        lap = (number >> bits & 0xFF) << LAP_AT
        pack(ring, HEADER_BYTES + (number & mask) * size, word0 | lap, start, took, sizes, number + 1)
        return number

    return put


def disable_copy_on_write(fd: int) -> None:
    """Switch off copy-on-write for an empty file (chattr +C), if the file system supports it.

    With copy-on-write (btrfs), each write of a page needs new space: on a full disk, SIGBUS would kill the process.
    """
    flags = bytearray(_LONG)
    with contextlib.suppress(OSError):  # other file systems do not support the flag
        fcntl.ioctl(fd, _GET_FLAGS, flags, True)
        flags[:4] = struct.pack("=I", struct.unpack("=I", flags[:4])[0] | _NO_COPY_ON_WRITE)
        fcntl.ioctl(fd, _SET_FLAGS, flags)
