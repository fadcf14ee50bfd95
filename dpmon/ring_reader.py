"""Reads a ring of records (its layout: dpmon.ring)."""

from __future__ import annotations

import os

from dpmon.ring import BLOCK_BYTES, CLAIM, FORMAT, FRAME, FRAME_BYTES, HEAD, LOST, PAD_LENGTH, WORDS
from dpmon.ring_file import RingError, read_around, read_whole


class RingReader:
    """Reads a ring. Never blocks the writer, and never trusts the file."""

    def __init__(self, path: str, *, position: int = 0, sequence: int = 0, live: bool = False) -> None:
        """Open `path` and continue at byte `position` with record number `sequence`.

        With `live`, start at the oldest record in the ring, and do not count earlier records as missed. Raises
        RingError if the file is not a ring of this user, OSError if it cannot be opened.
        """
        self._fd, about = FORMAT.open(path)
        if about.units < 2 * BLOCK_BYTES or about.units % BLOCK_BYTES:
            self.close()
            raise RingError(f"{path}: size does not match its header")
        self.path = path
        self.capacity, self.pid, self.process, self.rank, self.world, self.start_ns = about
        self.position = position
        self.sequence = sequence
        self.missed = 0
        """Number of records that were overwritten, torn or damaged before they were read."""
        self._first = live

    def close(self) -> None:
        """Close the file; the reader cannot be used any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _words(self) -> tuple[int, ...]:
        return WORDS.unpack(read_whole(self._fd, self.path, WORDS.size, 128))

    def lost(self) -> int:
        """Return the number of records that the writer could not write."""
        return self._words()[LOST - 16]

    def has_more(self) -> bool:
        """Whether the ring holds unread records."""
        return self.position < self._words()[HEAD - 16]

    def read(self, limit: int = 1 << 20) -> list[bytes]:
        """Return the payloads of the next records, oldest first; empty if there are none.

        Reads at most `limit` bytes, but at least a block. Records that were overwritten before they were read are added
        to `missed`. Raises RingError if the file was truncated.
        """
        words = self._words()
        head, claim = words[HEAD - 16], max(words[CLAIM - 16], words[HEAD - 16])
        if self.position > head:  # the header is damaged
            return []
        self._skip_overwritten(claim)
        start = self.position
        if start >= head:
            return []
        end = min(head, start + max(limit, BLOCK_BYTES))
        if end < head:
            end -= end % BLOCK_BYTES  # frames never cross a block's end
        data = read_around(self._fd, self.path, end - start, start, self.capacity)
        words = self._words()
        safe_from = max(words[CLAIM - 16] - self.capacity, 0)
        return self._parse(data, start, safe_from)

    def _skip_overwritten(self, claim: int) -> None:
        oldest = claim - self.capacity
        if self.position < oldest:
            self.position = -(-oldest // BLOCK_BYTES) * BLOCK_BYTES

    def _parse(self, data: bytes, start: int, safe_from: int) -> list[bytes]:
        found: list[bytes] = []
        offset, size = 0, len(data)
        if start < safe_from:
            offset = min(-(-safe_from // BLOCK_BYTES) * BLOCK_BYTES - start, size)
        while offset < size:
            room = BLOCK_BYTES - ((start + offset) & (BLOCK_BYTES - 1))
            if min(room, size - offset) < FRAME_BYTES:  # the end of a block, or a damaged head
                offset += min(room, size - offset)
                continue
            length, check, sequence = FRAME.unpack_from(data, offset)
            if length == PAD_LENGTH:
                offset += room
                continue
            body = offset + FRAME_BYTES
            payload = data[body : body + length]
            fits = length <= room - FRAME_BYTES and body + length <= size
            if not fits or (sequence ^ length) & 0xFFFFFFFF != check or sequence < self.sequence:
                # Damaged: the next block starts with a frame, and its number shows how many records are missing.
                offset += room
                continue
            if not self._first:
                self.missed += sequence - self.sequence
            self._first = False
            self.sequence = sequence + 1
            found.append(payload)
            offset = body + ((length + 7) & ~7)
        self.position = start + offset
        return found
