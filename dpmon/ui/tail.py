"""Reads a log file by line, and only the lines that are needed.

The index holds the number of lines before each 64 KiB of the file, so a gigabyte of log costs 128 kB. Lines are read
when they are drawn.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from pathlib import Path

from dpmon.run.files import open_file
from dpmon.text.traceback_line import READ_BYTES

_BLOCK = 1 << 16
_LONG = 1 << 16
"""Only the beginning and the end of a longer line are read."""
_LONG_PART = 1 << 14
_BUDGET = 32 << 20


class Tail:
    """One log file that others append to. No thread, no lock; a missing file counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Size of the file in bytes at the last refresh."""
        self._fd = -1
        self._before = array("Q", [0])
        self._indexed = 0
        self._newlines = 0

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def refresh(self) -> None:
        """Look at the file again and index a bounded number of new bytes."""
        budget = _BUDGET
        try:
            if self._fd < 0:
                self._fd = open_file(self.path)
            size = os.fstat(self._fd).st_size
        except OSError:
            return
        if size < self._indexed:  # the file was truncated: begin again
            self._before, self._indexed, self._newlines = array("Q", [0]), 0, 0
        self.size = size
        while self._indexed < size and budget > 0:
            # Index whole blocks only, so that the index stays a plain array; count the rest on demand.
            if size - self._indexed < _BLOCK:
                break
            data = self.read(self._indexed, _BLOCK)
            if len(data) < _BLOCK:
                break
            self._newlines += data.count(b"\n")
            self._before.append(self._newlines)
            self._indexed += _BLOCK
            budget -= _BLOCK

    def read(self, start: int, count: int) -> bytes:
        """Up to `count` bytes from offset `start` on; empty if they cannot be read."""
        if self._fd < 0 or count <= 0:
            return b""
        try:
            return os.pread(self._fd, count, start)
        except OSError:
            return b""

    def before(self, offset: int) -> int | None:
        """Number of lines that end at `offset` or earlier; None while the index does not reach it."""
        block = min(offset // _BLOCK, len(self._before) - 1)
        start = block * _BLOCK
        if offset - start > _BLOCK:
            return None
        return self._before[block] + self.read(start, offset - start).count(b"\n")

    def end(self) -> bytes:
        """The last bytes of the file, enough for a long traceback."""
        start = max(self.size - READ_BYTES, 0)
        return self.read(start, self.size - start)

    def at(self, first: int, count: int) -> list[bytes]:
        """Up to `count` lines, starting with number `first` (counted from 0)."""
        found: list[bytes] = []
        offset = self.offset(first)
        while offset is not None and offset < self.size and len(found) < count:
            data = self.read(offset, min(_LONG, self.size - offset))
            if not data:
                break
            parts = data.split(b"\n")
            if len(parts) == 1 and offset + len(data) < self.size:
                following = self.offset(first + len(found) + 1)
                end = self.size if following is None else following - 1
                found.append(self._long(offset, end))
                offset = following
                continue
            if offset + len(data) < self.size or not parts[-1]:
                parts.pop()
            found.extend(_shortened(part) for part in parts)
            offset += sum(len(part) + 1 for part in parts)
        return found[:count]

    def _long(self, start: int, end: int) -> bytes:
        return _joined(self.read(start, _LONG_PART), self.read(max(end - _LONG_PART, start), _LONG_PART), end - start)

    def offset(self, line: int) -> int | None:
        """The offset of a line in bytes; None beyond the indexed part."""
        if line <= 0:
            return 0
        block = bisect_left(self._before, line) - 1
        start = block * _BLOCK
        data = self.read(start, min(_BLOCK, self.size - start))
        at = -1
        for _ in range(line - self._before[block]):
            at = data.find(b"\n", at + 1)
            if at < 0:
                return None
        return start + at + 1


def _shortened(line: bytes) -> bytes:
    return line if len(line) <= _LONG else _joined(line[:_LONG_PART], line[-_LONG_PART:], len(line))


def _joined(head: bytes, tail: bytes, size: int) -> bytes:
    """A short form of an oversized line: its end if the line redraws itself (a progress bar), else its beginning."""
    if b"\r" in tail[:-1]:
        return tail[tail.index(b"\r") :]
    return head + f" ... ({size:,} bytes)".encode()
