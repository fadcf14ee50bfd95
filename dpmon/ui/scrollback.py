"""The last few thousand rows of a growing log, interpreted as a terminal would, and updated as the log grows.

Rows have serial numbers; the first row that was interpreted has number 0. Rows before the stored ones are read from the
file, by line.
"""

from __future__ import annotations

from collections import deque

from dpmon.ui.rows import Row, plain
from dpmon.ui.tail import Tail
from dpmon.ui.terminal_text import HEIGHT, TerminalPage, interpret

ROWS = 5000
_CHARACTERS = 4_000_000
"""Most rows to store, and most characters in them."""
_BEGIN = 1 << 18
"""Number of bytes to read from the end of an existing log."""
_BEHIND = 1 << 19
"""If more bytes than this are unread, continue near the end: nobody has seen the rows in between."""
_PIECE = 1 << 16
_SETTLE = HEIGHT + 400
_LEAD = 50
"""Lines to read before an old row, because they may have left a colour on."""


class Scrollback:
    """Follows one file; call `follow` after each `Tail.refresh`."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.epoch = 0
        """Counts how often serial numbers started again from 0."""
        self._begin(0)

    def _begin(self, offset: int) -> None:
        self.epoch += 1
        self._offset = offset
        self._start = offset
        self._base: int | None = 0 if not offset else None
        self._page = TerminalPage()
        self._settled: deque[tuple[int, Row, int]] = deque()
        self._characters = 0
        self.first = 0
        """Serial number of the first stored row."""

    def follow(self) -> None:
        """Read and interpret whatever was appended to the file since the last call."""
        size = self.tail.size
        if size < self._offset:  # the file was truncated
            self._begin(0)
        if size - self._offset > (_BEHIND if self._offset else _BEGIN):
            self._jump(size - _BEGIN)
        while self._offset < size:
            data = self.tail.read(self._offset, min(_PIECE, size - self._offset))
            if not data:
                break
            self._page.feed(data)
            self._offset += len(data)
            self._settle()
        if self._base is None:
            self._base = self.tail.before(self._start)

    def _jump(self, offset: int) -> None:
        """Continue after the first end of a line from `offset` on; serial numbers start again from 0."""
        data = self.tail.read(offset, _PIECE)
        at = data.find(b"\n")
        self._begin(offset + at + 1 if at >= 0 else offset)

    def _settle(self) -> None:
        """Freeze the rows that can no longer change, and drop the oldest ones if there are too many."""
        page = self._page
        if len(page.lines) > _SETTLE:
            count = min(len(page.lines) - HEIGHT, page.line)
            for line in page.lines[:count]:
                row = line.row()
                length = sum(len(text) for text, _ in row)
                self._settled.append((line.number, row, length))
                self._characters += length
            del page.lines[:count]
            page.line -= count
        while self._settled and (len(self._settled) > ROWS or self._characters > _CHARACTERS):
            self._characters -= self._settled.popleft()[2]
            self.first += 1

    # ------------------------------------------------------------------------------------------ rows

    @property
    def end(self) -> int:
        """Serial number after the last row; an empty last row does not count."""
        lines = self._page.lines
        return self.first + len(self._settled) + len(lines) - (not len(lines[-1]))

    @property
    def oldest(self) -> int:
        """Serial number of the file's first line; until the older lines are counted, of the first stored row."""
        number = self._first_number()
        return self.first if number is None else self.first - number

    def _first_number(self) -> int | None:
        """The number of the file's line at the start of the first stored row."""
        if self._base is None:
            return None
        return self._base + (self._settled[0][0] if self._settled else self._page.lines[0].number)

    @property
    def counted(self) -> bool:
        """Whether the number of lines before the stored rows is known."""
        return self._base is not None

    def rows(self, start: int, count: int) -> list[Row]:
        """Up to `count` rows from serial number `start` on; older ones are read from the file."""
        found: list[Row] = []
        if start < self.first:
            found = self._old(start, min(self.first - start, count))
            start, count = start + len(found), count - len(found)
        return found + [self._kept(serial) for serial in range(start, min(start + count, self.end))]

    def _kept(self, serial: int) -> Row:
        at = serial - self.first
        return self._settled[at][1] if at < len(self._settled) else self._page.lines[at - len(self._settled)].row()

    def _old(self, start: int, count: int) -> list[Row]:
        number = self._first_number()
        if number is None:
            return []
        line = number - (self.first - start)
        lead = min(_LEAD, line)
        lines = self.tail.at(line - lead, count + lead)
        rows = interpret(lines)
        if len(rows) < len(lines):  # they overwrite each other: show them as written
            rows = [interpret([each])[0] for each in lines]
        return (rows[lead : lead + count] + [[]] * count)[:count]

    def texts(self) -> tuple[int, list[str]]:
        """Serial number of the first stored row, and the text of each: for a search on another thread."""
        return self.first, [plain(self._kept(serial)) for serial in range(self.first, self.end)]
