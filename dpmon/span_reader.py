"""Reads a ring of spans and the lines beside it, and asks its process for a mode or a pause (dpmon.span_ring)."""

from __future__ import annotations

import os
import stat
import struct
from typing import Any

from dpmon.record.plainjson import load_json
from dpmon.record.spans import LAP_AT, Span, unpacked
from dpmon.ring import RingError
from dpmon.span_ring import HEAD_STRUCT, HEADER_BYTES, MAGIC, SLOT, THREADS, VERSION, Word

__all__ = ["SpanReader", "lines_path"]

HOLE_NS = 100_000_000
"""A slot that was handed out is waited for this long if later ones are there: an interrupt may never let it be written."""
MAX_LINES = 1 << 22
"""Bytes of lines that are read at once."""
_WORDS = struct.Struct("=512Q")
_FIRST = 64
_MOST = 4096


def lines_path(ring: str) -> str:
    """The file of JSON lines that belongs to a ring."""
    return f"{ring.removesuffix('.ring')}.jsonl"


class SpanReader:
    """The reading end: never blocks the writer, never trusts the file."""

    def __init__(self, path: str, *, position: int = 0) -> None:
        """Open `path` and go on at span number `position`.

        Raises RingError if the file is not a ring of this user, OSError if it cannot be opened.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            self._check_owner(self._fd)
            raw = os.pread(self._fd, HEAD_STRUCT.size, 0)
            if len(raw) < HEAD_STRUCT.size or raw[:8] != MAGIC:
                raise RingError(f"{path}: not a ring of spans")
            _, version, header, slots, pid, process, rank, world, start_ns = HEAD_STRUCT.unpack(raw)
            if version != VERSION or header != HEADER_BYTES or not 0 < slots < 1 << 32 or process < 0:
                raise RingError(f"{path}: of another version, or damaged")
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise
        self.slots: int = slots
        self.pid: int = pid
        self.process: int = process
        self.rank: int | None = rank if rank >= 0 else None
        self.world: int | None = world if world >= 0 else None
        self.start_ns: int = start_ns
        self.position = position
        """Number of the span that is due."""
        self.missed = 0
        """Spans that were overwritten before they were read, or never written."""
        self.lines_position = 0
        """Bytes of lines that were read."""
        self._lines_fd = -1
        self._hole = (-1, 0)
        """A slot that was not there although later ones were, and when it was first missing (monotonic ns)."""

    def _check_owner(self, fd: int) -> None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise RingError(f"{self.path}: not a regular file")
        if info.st_uid != os.getuid():
            raise RingError(f"{self.path}: belongs to another user")

    def close(self) -> None:
        """Close the files; the reader is of no further use."""
        for fd in (self._fd, self._lines_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lines_fd = -1

    # ------------------------------------------------------------------------------------------ control block

    def words(self) -> tuple[int, ...]:
        """The header's words. Raises RingError if the file was truncated."""
        raw = os.pread(self._fd, _WORDS.size, 0)
        if len(raw) < _WORDS.size:
            raise RingError(f"{self.path}: truncated")
        return _WORDS.unpack(raw)

    def _word(self, index: int) -> int:
        raw = os.pread(self._fd, 8, 8 * index)
        if len(raw) < 8:
            raise RingError(f"{self.path}: truncated")
        return int.from_bytes(raw, "little")

    def _set(self, index: int, value: int) -> None:
        os.pwrite(self._fd, struct.pack("=Q", value & 0xFFFFFFFFFFFFFFFF), 8 * index)

    def lost(self) -> int:
        """Spans that the writer itself could not write."""
        return self._word(Word.LOST)

    def ended(self) -> bool:
        """Whether the process has said that it ends."""
        return self._word(Word.ENDED) != 0

    def under_way(self, thread: int | None = None) -> tuple[int, int]:
        """Kind of the span that a thread (None: the one that trains) is in, 0 for none, and since when (monotonic ns).

        The time is 0 for a thread that has begun nothing.
        """
        if thread is None:
            thread = self._word(Word.TRAINS)
        word = self._word(Word.UNDER_WAY + min(thread, THREADS - 1))
        return word & 0xFF, word >> 8

    def request(self, mode: int) -> int:
        """Ask the training process for `mode`; returns the request's serial, to compare with `acknowledged`."""
        serial = (self._word(Word.REQUEST) + 1) & 0xFFFFFFFFFFFFFFFF
        self._set(Word.WANTED, mode)
        self._set(Word.REQUEST, serial)
        return serial

    def acknowledged(self) -> tuple[int, int]:
        """The serial of the last request acted upon and the mode in force (0: none yet)."""
        return self._word(Word.ANSWERED), self._word(Word.MODE)

    def request_pause(self, paused: bool) -> int:
        """Ask the training process to pause between two steps, or to go on; returns the request.

        Requests are numbered, the lowest bit says what is asked for: 1 to pause, 0 to go on.
        """
        asked = (((self._word(Word.PAUSE) >> 1) + 1) << 1 | paused) & 0xFFFFFFFFFFFFFFFF
        self._set(Word.PAUSE, asked)
        return asked

    def pause_requests(self) -> tuple[int, int]:
        """The last request that `request_pause` made, and the last one acted upon; 0 for none."""
        return self._word(Word.PAUSE), self._word(Word.PAUSED)

    # ------------------------------------------------------------------------------------------ spans

    def has_more(self) -> bool:
        """Whether a span is there that was not read."""
        return bool(self._slots(self.position, 1))

    def read(self, now_ns: int, limit: int = 1 << 14) -> list[Span]:
        """The next spans, at most `limit`, in the order of their numbers; `now_ns`: monotonic.

        What was overwritten before it could be read, and what was never written, is added to `missed`. Raises RingError
        if the file was truncated.
        """
        found: list[Span] = []
        count = _FIRST
        while len(found) < limit:
            wanted = min(count, limit - len(found), self.slots - self.position % self.slots)
            count = min(2 * count, _MOST)
            part = self._slots(self.position, wanted)
            found += part
            self.position += len(part)
            if len(part) < wanted and not (self._lapped() or self._over_a_hole(now_ns)):
                break
        return found

    def _slots(self, number: int, count: int) -> list[Span]:
        """The spans from `number` on that are there, at most `count`, which lie in a row."""
        at = HEADER_BYTES + number % self.slots * SLOT.size
        # A slot that bears its number in the first copy is whole in the second.
        there = _whole(os.pread(self._fd, count * SLOT.size, at), number)
        if not there:
            return []
        found = []
        for place, words in enumerate(SLOT.iter_unpack(os.pread(self._fd, there * SLOT.size, at)), number):
            head, start, took, sizes, mark = words
            if mark != place + 1 or head >> LAP_AT & 0xFF != place // self.slots & 0xFF:
                break  # it is being overwritten
            found.append(unpacked(place, head, start, took, sizes))
        return found

    def _mark(self, number: int) -> int:
        """The number that is written in the slot of span `number`, -1 for an empty one."""
        raw = os.pread(self._fd, SLOT.size, HEADER_BYTES + number % self.slots * SLOT.size)
        if len(raw) < SLOT.size:
            raise RingError(f"{self.path}: truncated")
        return int.from_bytes(raw[-8:], "little") - 1

    def _lapped(self) -> bool:
        """Go on further ahead if the writer has overtaken this reader."""
        mark = self._mark(self.position)
        if mark <= self.position:
            return False
        ahead = max(mark - self.slots // 2, self.position + 1)
        self.missed += ahead - self.position
        self.position = ahead
        return True

    def _over_a_hole(self, now_ns: int) -> bool:
        """Pass over a slot that was handed out and is not written, if the next one has been there for some time."""
        if self._mark(self.position + 1) != self.position + 1:
            return False
        number, since = self._hole
        if number != self.position:
            self._hole = self.position, now_ns
            return False
        if now_ns - since < HOLE_NS:
            return False
        self.position += 1
        self.missed += 1
        return True

    # ------------------------------------------------------------------------------------------ lines

    def lines(self) -> list[dict[str, Any]]:
        """The lines that were written since the last time; damaged ones are passed over. Call `read` before.

        A span refers only to what was written before it: so all that `read` has given can be looked up then.
        """
        if self._lines_fd < 0:
            try:
                self._lines_fd = os.open(
                    lines_path(self.path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                )
                self._check_owner(self._lines_fd)
            except OSError:
                return []
        found = []
        data = os.pread(self._lines_fd, MAX_LINES, self.lines_position)
        whole = data.rfind(b"\n") + 1
        self.lines_position += whole
        for line in data[:whole].splitlines():
            try:
                value = load_json(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                found.append(value)
        return found


def _whole(data: bytes, number: int) -> int:
    """How many of the slots in `data`, of which the first is that of span `number`, bear their number."""
    found = 0
    for *_, mark in SLOT.iter_unpack(data[: len(data) // SLOT.size * SLOT.size]):
        if mark != number + found + 1:
            break
        found += 1
    return found
