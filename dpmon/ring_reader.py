"""Reads a ring of records, and asks its process for a mode or a pause (dpmon.ring has its layout)."""

from __future__ import annotations

import os
import stat
import struct

from dpmon.ring import (
    ACK_MODE,
    ACK_PAUSE,
    ACK_SERIAL,
    ACTIVITY,
    BLOCK_BYTES,
    CLAIM,
    FRAME,
    FRAME_BYTES,
    HEAD,
    HEAD_STRUCT,
    HEADER_BYTES,
    HELD,
    LOST,
    MAGIC,
    PAD_LENGTH,
    REQUEST_MODE,
    REQUEST_PAUSE,
    REQUEST_SERIAL,
    STAGE_AT,
    STAGE_MAX,
    STAGE_SIZE,
    VERSION,
    WORDS,
    RingError,
)

__all__ = ["RingReader"]


class RingReader:
    """The reading end: never blocks the writer, never trusts the file."""

    def __init__(self, path: str, *, position: int = 0, sequence: int = 0, live: bool = False) -> None:
        """Open `path` and continue at byte `position`, where record number `sequence` is due.

        With `live`, start at what is still in the ring and do not count what was overwritten before as missed.
        Raises RingError if the file is not a ring of this user, OSError if it cannot be opened.
        """
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise RingError(f"{path}: not a regular file")
            if info.st_uid != os.getuid():
                raise RingError(f"{path}: belongs to another user")
            raw = os.pread(self._fd, HEAD_STRUCT.size, 0)
            if len(raw) < HEAD_STRUCT.size or raw[:8] != MAGIC:
                raise RingError(f"{path}: not a ring")
            _, version, header, capacity, pid, process, rank, world, start = HEAD_STRUCT.unpack(raw)
            if version != VERSION or header != HEADER_BYTES:
                raise RingError(f"{path}: ring of another version ({version})")
            if capacity < 2 * BLOCK_BYTES or capacity % BLOCK_BYTES or header + capacity != info.st_size:
                raise RingError(f"{path}: size does not match its header")
        except BaseException:
            os.close(self._fd)
            raise
        self.path = path
        self.pid, self.process, self.start_ns = pid, process, start
        self.rank = rank if rank >= 0 else None
        self.world = world if world >= 0 else None
        self.capacity = capacity
        self.position = position
        self.sequence = sequence
        self.missed = 0
        """Records that were overwritten, torn or damaged before this reader came to them."""
        self._first = live
        self.ended = False

    def close(self) -> None:
        """Give the descriptor back; the reader is of no further use."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _words(self) -> tuple[int, ...]:
        raw = os.pread(self._fd, WORDS.size, 128)
        if len(raw) < WORDS.size:
            raise RingError(f"{self.path}: truncated")
        return WORDS.unpack(raw)

    def held(self) -> int:
        """Records that the writer holds back; they are lost if its process is gone."""
        return self._words()[HELD - 16]

    def lost(self) -> int:
        """Records that the writer itself could not write."""
        return self._words()[LOST - 16]

    def activity(self) -> tuple[int, int]:
        """What the training thread last began (one of Activity), and when its turn of the loop began.

        Monotonic ns, 0 when there was none yet. A turn begins by waiting for data, so for DATA this is
        since when it waits.
        """
        word = self._words()[ACTIVITY - 16]
        return word & 7, word >> 3

    def request(self, mode: int) -> int:
        """Ask the training process for `mode`; returns the request's serial, to compare with `acknowledged`."""
        serial = (self._words()[REQUEST_SERIAL - 16] + 1) & 0xFFFFFFFFFFFFFFFF
        os.pwrite(self._fd, struct.pack("=Q", mode), REQUEST_MODE * 8)
        os.pwrite(self._fd, struct.pack("=Q", serial), REQUEST_SERIAL * 8)
        return serial

    def acknowledged(self) -> tuple[int, int]:
        """The serial of the last request acted upon and the mode in force (0: none yet)."""
        words = self._words()
        return words[ACK_SERIAL - 16], words[ACK_MODE - 16]

    def request_pause(self, paused: bool) -> int:
        """Ask the training process to pause between two steps, or to go on; returns the request.

        Requests are numbered, the lowest bit says what is asked for: 1 to pause, 0 to go on.
        """
        asked = (((self._words()[REQUEST_PAUSE - 16] >> 1) + 1) << 1 | paused) & 0xFFFFFFFFFFFFFFFF
        os.pwrite(self._fd, struct.pack("=Q", asked), REQUEST_PAUSE * 8)
        return asked

    def pause_requests(self) -> tuple[int, int]:
        """The last request that `request_pause` made, and the last one acted upon; 0 for none."""
        words = self._words()
        return words[REQUEST_PAUSE - 16], words[ACK_PAUSE - 16]

    def has_more(self) -> bool:
        """Whether the writer has written beyond what was read."""
        return self.position < self._words()[HEAD - 16]

    def has_last_words(self) -> bool:
        """Whether a record is staged that was not read."""
        return self._staged() is not None

    def read(self, limit: int = 1 << 20) -> list[bytes]:
        """The next records' payloads, oldest first, from at most `limit` bytes; an empty list when there are none.

        What was overwritten before it could be read is added to `missed`. Raises RingError if the file was truncated.
        """
        words = self._words()
        head, claim = words[HEAD - 16], max(words[CLAIM - 16], words[HEAD - 16])
        if self.position > head:  # damaged header: there is nothing to be trusted
            return []
        self._skip_overwritten(claim)
        start = self.position
        if start >= head:
            return []
        end = min(head, start + max(limit, BLOCK_BYTES))
        if end < head:
            end -= end % BLOCK_BYTES  # frames never cross a block, so a cut there is clean
        data = self._copy(start, end)
        words = self._words()
        safe_from = max(words[CLAIM - 16] - self.capacity, 0)
        return self._parse(data, start, safe_from)

    def last_words(self) -> list[bytes]:
        """The record that a process staged and died before it could write it, once `read` has nothing more."""
        staged = self._staged()
        if staged is None:
            return []
        self.sequence, payload = staged
        return [payload]

    def _staged(self) -> tuple[int, bytes] | None:
        """Number and payload of the staged record, if `read` has not given it."""
        size = self._words()[STAGE_SIZE - 16]
        if not 0 < size <= STAGE_MAX:
            return None
        raw = os.pread(self._fd, size + 16, STAGE_AT)
        if len(raw) < size + 16 or raw[:8] != raw[-8:]:  # killed while it staged: the record was not finished
            return None
        number = int.from_bytes(raw[:8], "little")
        return None if number <= self.sequence else (number, raw[8:-8])

    def _skip_overwritten(self, claim: int) -> None:
        oldest = claim - self.capacity
        if self.position < oldest:
            self.position = -(-oldest // BLOCK_BYTES) * BLOCK_BYTES

    def _copy(self, start: int, end: int) -> bytes:
        at = start % self.capacity
        size = end - start
        first = min(size, self.capacity - at)
        data = os.pread(self._fd, first, HEADER_BYTES + at)
        if size > first:
            data += os.pread(self._fd, size - first, HEADER_BYTES)
        if len(data) < size:
            raise RingError(f"{self.path}: truncated")
        return data

    def _parse(self, data: bytes, start: int, safe_from: int) -> list[bytes]:
        found: list[bytes] = []
        offset, size = 0, len(data)
        if start < safe_from:
            offset = min(-(-safe_from // BLOCK_BYTES) * BLOCK_BYTES - start, size)
        while offset < size:
            room = BLOCK_BYTES - ((start + offset) & (BLOCK_BYTES - 1))
            if min(room, size - offset) < FRAME_BYTES:  # a block's end, or a damaged head
                offset += min(room, size - offset)
                continue
            length, check, sequence = FRAME.unpack_from(data, offset)
            if length == PAD_LENGTH:
                offset += room
                continue
            body = offset + FRAME_BYTES
            payload = data[body : body + length]
            if length > room - FRAME_BYTES or body + length > size or (sequence ^ length) & 0xFFFFFFFF != check:
                offset += room  # damaged: the next block starts with a frame again, its number tells what is missing
                continue
            if sequence < self.sequence:  # already taken from the stage
                offset = body + ((length + 7) & ~7)
                continue
            if not self._first:
                self.missed += sequence - self.sequence
            self._first = False
            self.sequence = sequence + 1
            found.append(payload)
            offset = body + ((length + 7) & ~7)
        self.position = start + offset
        return found
