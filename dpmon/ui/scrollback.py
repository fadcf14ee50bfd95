"""The last thousands of rows of a growing log, as a terminal would have them, kept up with as it grows.

Rows have serial numbers: 0 is the first that was made. What is older than the kept rows is in the file, line by line.
"""

from __future__ import annotations

from collections import deque

from dpmon.ui.rows import Row, plain
from dpmon.ui.tail import Tail
from dpmon.ui.terminal_text import HEIGHT, Page, interpret

ROWS = 5000
_CHARACTERS = 4_000_000
"""Kept rows and the characters in them, at most."""
_BEGIN = 1 << 18
"""A log that is there already is read from so far before its end."""
_BEHIND = 1 << 19
"""Whoever is further behind than this goes on near the end: nobody has seen what is between."""
_PIECE = 1 << 16
_SETTLE = HEIGHT + 400
_LEAD = 50
"""Lines before an old one that are read with it, for the colours they leave on."""


class Scrollback:
    """Follows one file; `follow` after each `Tail.refresh`."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.epoch = 0
        """Counts how often serial numbers began anew."""
        self._begin(0)

    def _begin(self, offset: int) -> None:
        self.epoch += 1
        self._offset = offset
        self._start = offset
        self._base: int | None = 0 if not offset else None
        self._page = Page()
        self._settled: deque[tuple[int, Row, int]] = deque()
        self._characters = 0
        self.first = 0
        """Serial number of the first row that is kept."""

    def follow(self) -> None:
        """Take in what was added to the file since the last time."""
        size = self.tail.size
        if size < self._offset:  # truncated under us
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
        """Begin anew after the next end of a line; rows keep their place in the file, if that is known."""
        data = self.tail.read(offset, _PIECE)
        at = data.find(b"\n")
        self._begin(offset + at + 1 if at >= 0 else offset)

    def _settle(self) -> None:
        """Rows that nothing can draw over any more are kept as they are; the oldest go where there are too many."""
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
        """Serial number after the last row; an empty last one is none."""
        lines = self._page.lines
        return self.first + len(self._settled) + len(lines) - (not len(lines[-1]))

    @property
    def oldest(self) -> int:
        """Serial number of the file's first line; of the first row that is kept, while older ones are not counted."""
        number = self._first_number()
        return self.first if number is None else self.first - number

    def _first_number(self) -> int | None:
        """The line of the file with which the first row that is kept began."""
        if self._base is None:
            return None
        return self._base + (self._settled[0][0] if self._settled else self._page.lines[0].number)

    @property
    def counted(self) -> bool:
        """Whether it is known how many lines there are before the rows that are kept."""
        return self._base is not None

    def rows(self, start: int, count: int) -> list[Row]:
        """`count` rows from serial number `start` on, as far as there are any; older ones are read from the file."""
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
        if len(rows) < len(lines):  # drawn over each other: as they were written
            rows = [interpret([each])[0] for each in lines]
        return (rows[lead : lead + count] + [[]] * count)[:count]

    def texts(self) -> tuple[int, list[str]]:
        """Serial number of the first row that is kept, and the text of each: for a search on another thread."""
        return self.first, [plain(self._kept(serial)) for serial in range(self.first, self.end)]
