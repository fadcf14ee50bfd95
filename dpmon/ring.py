"""A memory-mapped ring of records for a supervisor's samples: one process writes, any number of processes read.

Layout of a ring file (header in native byte order, frames little-endian)::

    0      magic, version, sizes, pid, process, rank, world size, start           written once (dpmon.ring_file)
    128    head, claim, lost                                                      written by the writer
    4096   the data area: a whole number of blocks; a frame never crosses a block's end

A frame is ``length u32, check u32, sequence u64, payload``, padded to eight bytes. The check combines length and
sequence number, so that a reader recognises a position that is not the start of a frame. Offsets grow without limit and
are taken modulo the capacity. The writer moves *claim* to the end of a block before it writes there, and *head* after
each frame, so the bytes in ``[claim - capacity, head)`` are complete. A reader that the writer has overtaken jumps
to the start of the next block, and the sequence numbers show how many records it missed.

The writer maps the file, so that a record survives the death of its process and a full disk.
"""

from __future__ import annotations

import struct
from threading import Lock

from dpmon.ring_file import HEADER_BYTES, RingFormat

FORMAT = RingFormat(b"DPMONRNG", version=1, unit=1)
BLOCK_BYTES = 1 << 16
DEFAULT_CAPACITY = 1 << 22
FRAME = struct.Struct("<IIQ")
FRAME_BYTES = FRAME.size
PAD_LENGTH = 0xFFFFFFFF
MAX_PAYLOAD = BLOCK_BYTES - FRAME_BYTES
HEAD, CLAIM, LOST = 16, 17, 18
"""Indices of the 64-bit words that change while the ring is in use."""
WORDS = struct.Struct("=3Q")  # bytes 128..152: words 16..18


class Ring:
    """Writes a ring; `write` is safe from any thread of the process that made it."""

    def __init__(
        self,
        path: str,
        *,
        process: int,
        rank: int = -1,
        world: int = -1,
        start_ns: int = 0,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        """Create `path`, with `capacity` bytes for records (blocks of 64 KiB). Raises OSError."""
        if capacity < 2 * BLOCK_BYTES or capacity % BLOCK_BYTES:
            raise ValueError(f"capacity must be a multiple of {BLOCK_BYTES} bytes, at least two: {capacity}")
        about = {"process": process, "rank": rank, "world": world, "start_ns": start_ns}
        self._map = FORMAT.create(path, capacity, **about)
        self.capacity = capacity
        self._lock = Lock()
        self._sequence = 0
        self.head = 0
        """Bytes written since the ring was made (without wrapping)."""
        self._block_end = 0
        """End of the current block, as an offset like head; 0 before the first block."""
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")

    def write(self, payload: bytes) -> bool:
        """Append a record. Return False, and count it as lost, if it is too large."""
        with self._lock:
            if len(payload) > MAX_PAYLOAD:
                self._words[LOST] += 1
                return False
            need = (FRAME_BYTES + len(payload) + 7) & ~7
            if self.head + need > self._block_end:
                self._next_block()
            at = HEADER_BYTES + self.head % self.capacity
            self._map[at + FRAME_BYTES : at + FRAME_BYTES + len(payload)] = payload
            check = (self._sequence ^ len(payload)) & 0xFFFFFFFF
            FRAME.pack_into(self._map, at, len(payload), check, self._sequence)
            self._sequence += 1
            self.head += need
            self._words[HEAD] = self.head
        return True

    def _next_block(self) -> None:
        """Claim the next block, and end the current block with a pad."""
        head, start = self.head, self._block_end
        self._words[CLAIM] = start + BLOCK_BYTES
        if start - head >= FRAME_BYTES:
            FRAME.pack_into(self._map, HEADER_BYTES + head % self.capacity, PAD_LENGTH, 0, 0)
        self.head = start  # set before the block's end: an exception in between must not leave them in different blocks
        self._block_end = start + BLOCK_BYTES
