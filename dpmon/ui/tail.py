"""The last rows of a log file that grows, as a terminal would show them. Older rows are only in the file.

Rows have serial numbers that never restart, also if the file is truncated or a part of it is skipped.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from dpmon.run.files import open_file
from dpmon.text.traceback_line import READ_BYTES
from dpmon.ui.rows import Row
from dpmon.ui.terminal_text import HEIGHT, TerminalPage

ROWS = 5000
_CHARACTERS = 4_000_000
"""Most rows to store, and most characters in them."""
_BEGIN = 1 << 18
"""Number of bytes to read from the end of an existing log."""
_BEHIND = 1 << 19
"""If more bytes than this are unread, continue near the end: nobody has seen the rows in between."""
_PIECE = 1 << 16
_SETTLE = HEIGHT + 400


class Tail:
    """Follows one log file that others append to. No thread, no lock; a missing file counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Size of the file in bytes at the last refresh."""
        self._fd = -1
        self._begin(0, 0)

    def _begin(self, offset: int, first: int) -> None:
        self._offset = offset
        self._page = TerminalPage()
        self._settled: deque[Row] = deque()
        self._characters = 0
        self.first = first
        """Serial number of the first stored row."""
        self.whole = not offset
        """Whether the stored rows begin with the first line of the file."""

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def refresh(self) -> None:
        """Read and interpret whatever was appended to the file since the last call."""
        try:
            if self._fd < 0:
                self._fd = open_file(self.path)
            self.size = os.fstat(self._fd).st_size
        except OSError:
            return
        if self.size < self._offset:  # the file was truncated
            self._begin(0, self.end)
        if self.size - self._offset > (_BEHIND if self._offset else _BEGIN):
            offset = self.size - _BEGIN
            self._begin(offset + self._read(offset, _PIECE).find(b"\n") + 1, self.end)
        while self._offset < self.size:
            data = self._read(self._offset, min(_PIECE, self.size - self._offset))
            if not data:
                break
            self._page.feed(data)
            self._offset += len(data)
            self._settle()

    def _read(self, start: int, count: int) -> bytes:
        try:
            return os.pread(self._fd, count, start) if self._fd >= 0 else b""
        except OSError:
            return b""

    def last_bytes(self) -> bytes:
        """The last bytes of the file, enough for a long traceback."""
        return self._read(max(self.size - READ_BYTES, 0), READ_BYTES)

    def _settle(self) -> None:
        """Freeze the rows that can no longer change, and drop the oldest ones if there are too many."""
        page = self._page
        if len(page.lines) > _SETTLE:
            count = min(len(page.lines) - HEIGHT, page.line)
            settled = [line.row() for line in page.lines[:count]]
            self._settled += settled
            self._characters += sum(map(_length, settled))
            del page.lines[:count]
            page.line -= count
        while self._settled and (len(self._settled) > ROWS or self._characters > _CHARACTERS):
            self._characters -= _length(self._settled.popleft())
            self.first += 1
            self.whole = False

    @property
    def end(self) -> int:
        """Serial number after the last row; an empty last row does not count."""
        lines = self._page.lines
        return self.first + len(self._settled) + len(lines) - (not len(lines[-1]))

    def rows(self, start: int, count: int) -> list[Row]:
        """Up to `count` of the stored rows from serial number `start` on."""
        settled, first = self._settled, self.first
        serials = range(max(start, first), min(start + count, self.end))
        at = first + len(settled)
        return [settled[n - first] if n < at else self._page.lines[n - at].row() for n in serials]


def _length(row: Row) -> int:
    return sum(len(text) for text, _ in row)
