"""A memory-mapped ring of spans: any thread of one process writes and never waits, any number of readers only read.

Layout of a ring file (native byte order; a run never leaves its machine)::

    0      magic, version, sizes, pid, process, rank, world size, start           written once (dpmon.ring_file)
    128    lost, thread that trains, whether the process has ended,
           acknowledged serial, mode in force, pause acted upon                   written by the process
    192    serial, mode and pause that are asked for, one step in how many is
           timed on its devices                                                   written by readers
    512    for each thread, when it began what it is in; from 3584 on, what
           that is                                                                written by the process
    4096   slots of 40 bytes (dpmon.record.spans)

A slot's number comes from one counter, so that threads need no lock; it is written last, and the lap stands in the
first word. So a reader knows a slot that is not there yet by its number, and one that is being overwritten by its lap.
What is long or rare is in files of JSON lines beside the ring: definitions, to which spans refer by number, and events.
Nothing of them is ever overwritten.

The writer maps the ring, so that a span costs no system call and survives the death of its process. The numbering of
slots is for builds with the GIL.
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
"""1.25 MiB: about 7,000 usual steps. Touched pages count as the training's memory, so not more."""
THREADS = 384
KINDS_AT = 3584
"""Offset of the byte of thread 0 that holds the kind of the span that it is in, 0 for none; the others follow."""


class Word:
    """Indices of the 64-bit words of the header that change while the ring is in use."""

    LOST, TRAINS, ENDED, ANSWERED, MODE, PAUSED = range(16, 22)
    """Spans that could not be written; thread that trains; 1 at the process's end; last request acted upon; mode in
    force; last request for a pause acted upon."""
    REQUEST, WANTED, PAUSE, ONE_IN = range(24, 28)
    """Serial of the last request for a mode; that mode; request for a pause (odd) or its end (even); steps of which one
    is timed on its devices (0: all are)."""
    UNDER_WAY = 64
    """Of thread 0; the others follow. When the span began that it is in, or was in last (monotonic ns)."""


class SpanRing:
    """The writing end, made in the process that is traced."""

    __slots__ = ("kinds", "map", "next", "put", "words")

    def __init__(
        self, path: str, *, process: int, rank: int = -1, world: int = -1, start_ns: int = 0, slots: int = SLOTS
    ) -> None:
        """Create `path`, which must not exist, with room for `slots` spans, a power of two.

        Raises as RingFormat.create.
        """
        if slots & (slots - 1):
            raise ValueError(f"the number of slots must be a power of two: {slots}")
        self.map = FORMAT.create(path, slots, process=process, rank=rank, world=world, start_ns=start_ns)
        try:
            self.words = memoryview(self.map)[:HEADER_BYTES].cast("Q")
            self.kinds = memoryview(self.map)[KINDS_AT : KINDS_AT + THREADS]
            self.next = count().__next__
            """Gives the number of the next slot."""
            self.put = _putter(self.map, slots, self.next)
            """Writes a span of which the words w0 (without the lap) to w3 are given, and returns its number."""
        except BaseException:  # an interrupt must not leave a ring that nobody writes
            os.unlink(path)
            raise


def _putter(ring: mmap.mmap, slots: int, take: Callable[[], int]) -> Callable[[int, int, int, int], int]:
    """What writes into a ring. A closure, because this is the hot path of the training."""
    pack, size = SLOT.pack_into, SLOT_BYTES
    mask, bits = slots - 1, slots.bit_length() - 1

    def put(head: int, start: int, took: int, sizes: int) -> int:
        number = take()
        lap = (number >> bits & 0xFF) << LAP_AT
        pack(ring, HEADER_BYTES + (number & mask) * size, head | lap, start, took, sizes, number + 1)
        return number

    return put
