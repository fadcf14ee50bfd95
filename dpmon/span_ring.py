"""A memory-mapped ring of spans. Any thread of one process writes and never waits; any number of processes read.

Layout of a ring file (native byte order; a run never leaves its machine)::

    0      magic, version, sizes, pid, process, rank, world size, start           written once (dpmon.ring_file)
    136    training thread, whether the process has ended,
           acknowledged serial, mode in force, pause acted upon                   written by the process
    192    requested serial, mode and pause; sampling of device timing;
           serial of the request to record collectives                            written by readers
    512    for each thread, the start of its current span; from 3584 on, the
           kind of that span                                                      written by the process
    4096   slots of 40 bytes (dpmon.record.spans)

A slot's number comes from one counter, so threads need no lock. The number is the last word to be written, and the lap
is in the first word. So a reader recognises an unwritten slot by its number, and a slot that is being overwritten by
its lap.

A file of JSON lines beside the ring holds long or rare data: definitions, which spans refer to by number, and events.
Lines are never overwritten.

The writer maps the ring, so a span costs no system call and survives the death of its process. The numbering of slots
needs the GIL.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from itertools import count

from dpmon.record.spans import LAP_AT
from dpmon.ring_file import HEADER_BYTES, RingFormat

SLOT = struct.Struct("=5Q")
SLOT_BYTES = SLOT.size
FORMAT = RingFormat(b"DPMSPANS", version=1, unit=SLOT_BYTES)
SLOTS = 32 << 10
"""1.25 MiB: about 7,000 usual steps. A larger ring would add more touched pages to the training's memory."""
THREADS = 384
KINDS_AT = 3584
"""Offset of the kind of thread 0's current span (one byte; 0: none); the other threads follow."""


class Word:
    """Indices of the 64-bit words of the header that change while the ring is in use."""

    TRAINING_THREAD, ENDED, ANSWERED, MODE, PAUSED = range(17, 22)
    """Training thread; 1 at the process's end; last mode request acted upon; mode in force; last pause acted upon."""
    REQUEST, WANTED, PAUSE, ONE_IN, SAMPLE = range(24, 29)
    """Serial of the last mode request; the requested mode; last pause request (odd: pause, even: resume); device timing
    of one step in this many (0: all steps); serial of the last request to record the collectives of a step."""
    SPAN_START = 64
    """Start of thread 0's current or last span (monotonic ns); the other threads follow."""


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
        self.map = FORMAT.create(path, slots, process=process, rank=rank, world=world, start_ns=start_ns)
        try:
            self.words = memoryview(self.map)[:HEADER_BYTES].cast("Q")
            self.kinds = memoryview(self.map)[KINDS_AT : KINDS_AT + THREADS]
            self.next = count().__next__
            """Returns the number of the next slot."""
            self.put = _putter(self.map, slots, self.next)
            """Writes a span from its words w0 (without the lap) to w3; returns its number."""
        except BaseException:  # an interrupt must not leave a ring without a writer
            os.unlink(path)
            raise


def _putter(ring: mmap.mmap, slots: int, take: Callable[[], int]) -> Callable[[int, int, int, int], int]:
    """Make the function that writes spans. A closure, because this is the hot path of the training."""
    pack, size = SLOT.pack_into, SLOT_BYTES
    mask, bits = slots - 1, slots.bit_length() - 1

    def put(head: int, start: int, took: int, sizes: int) -> int:
        number = take()
        lap = (number >> bits & 0xFF) << LAP_AT
        pack(ring, HEADER_BYTES + (number & mask) * size, head | lap, start, took, sizes, number + 1)
        return number

    return put
