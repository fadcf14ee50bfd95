"""Panel 5: the script's output, as a terminal would finally show it."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dpmon.run.process_notes import READ_BYTES
from dpmon.run.safe_files import open_file
from dpmon.text.cells import span_width
from dpmon.text.formatting import format_count
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.styled_rows import Row, crop_row, merge_spans, plain_text, row_width
from dpmon.ui.terminal_emulator import MAX_CHANGING_ROWS, TerminalPage
from dpmon.ui.terminal_style import TerminalStyle

ROWS = 5000
_CHARACTERS = 4_000_000
"""Most rows to store, and most characters in them."""
_BEGIN = 1 << 18
"""Number of bytes to read from the end of an existing log."""
_BEHIND = 1 << 19
"""If more bytes than this are unread, continue near the end: nobody has seen the rows in between."""
_PIECE = 1 << 16
_SETTLE = MAX_CHANGING_ROWS + 400


class LogTail:
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
            self._freeze_old_rows()

    def _read(self, start: int, count: int) -> bytes:
        try:
            return os.pread(self._fd, count, start) if self._fd >= 0 else b""
        except OSError:
            return b""

    def last_bytes(self) -> bytes:
        """The last bytes of the file, enough for a long traceback."""
        return self._read(max(self.size - READ_BYTES, 0), READ_BYTES)

    def _freeze_old_rows(self) -> None:
        """Freeze the rows that can no longer change, and drop the oldest ones if there are too many."""
        page = self._page
        if len(page.lines) > _SETTLE:
            count = min(len(page.lines) - MAX_CHANGING_ROWS, page.cursor_row)
            settled = [line.row() for line in page.lines[:count]]
            self._settled += settled
            self._characters += sum(map(_length, settled))
            del page.lines[:count]
            page.cursor_row -= count
        while self._settled and (len(self._settled) > ROWS or self._characters > _CHARACTERS):
            self._characters -= _length(self._settled.popleft())
            self.first += 1
            self.whole = False

    @property
    def end(self) -> int:
        """Serial number after the last row; an empty last row does not count."""
        lines = self._page.lines
        return self.first + len(self._settled) + len(lines) - (not lines[-1])

    def rows(self, start: int, count: int) -> list[Row]:
        """Up to `count` of the stored rows from serial number `start` on."""
        settled, first = self._settled, self.first
        serials = range(max(start, first), min(start + count, self.end))
        at = first + len(settled)
        return [settled[n - first] if n < at else self._page.lines[n - at].row() for n in serials]


def _length(row: Row) -> int:
    return sum(len(text) for text, _ in row)


@dataclass
class OutputView:
    """The output files and the view of them; `top`: serial number of the first visible row, None to follow the end."""

    tails: list[LogTail] = field(default_factory=list)
    which: int = 0
    top: int | None = None
    left: int = 0
    hit: int | None = None
    """The row of the last hit."""

    @property
    def tail(self) -> LogTail | None:
        """The visible file."""
        return self.tails[self.which % len(self.tails)] if self.tails else None

    def refresh(self) -> None:
        """Look at the files again."""
        for tail in self.tails:
            tail.refresh()
        if self.top is not None and self.tail is not None:
            self.top = max(self.top, self.tail.first)

    def next_file(self) -> None:
        """Show the other file, if there is one."""
        if len(self.tails) > 1:
            self.which, self.top, self.hit = (self.which + 1) % len(self.tails), None, None

    def scroll(self, by: int, height: int) -> None:
        """Scroll by lines (up is negative); follow again at the end."""
        if self.tail is not None:
            self._go_to(self.tail, self._top(self.tail, height) + by, height)

    def _go_to(self, tail: LogTail, top: int, height: int) -> None:
        top = max(top, tail.first)
        self.top = None if top >= max(tail.end - height, tail.first) else top

    def _top(self, tail: LogTail, height: int) -> int:
        return max(tail.end - height, tail.first) if self.top is None else self.top

    def visible(self, height: int) -> list[Row]:
        """The visible rows, as a terminal would show them."""
        return [] if self.tail is None else self.tail.rows(self._top(self.tail, height), max(height, 0))

    def find(self, needle: str, older: bool, height: int, width: int) -> str:
        """Go to the next older or newer row with the text, and return the message for the user."""
        tail = self.tail
        if tail is None:
            return "there is no output"
        top = self._top(tail, height)
        if self.hit is not None and top <= self.hit < top + height:
            start = self.hit
        else:
            start = top + height if older else top - 1
        serials = range(min(start, tail.end) - 1, tail.first - 1, -1) if older else range(start + 1, tail.end)
        for serial in serials:
            (row,) = tail.rows(serial, 1)
            found = find_matches(plain_text(row), needle)
            if found:
                break
        else:
            within = "" if tail.whole else f" in the last {format_count(tail.end - tail.first)} lines"
            return f"no {'older' if older else 'newer'} line with {needle!r}{within}"
        self.hit = serial
        self._go_to(tail, top if top <= serial < top + height else serial - height // 2, height)
        column, last = span_width(plain_text(row)[: found[0][0]]), width - len(needle) - 1
        if not self.left <= column < self.left + last:
            self.left = max(column - width // 2, 0) if column > last - 1 else 0
        return line_position(tail, serial)


def line_position(tail: LogTail, serial: int) -> str:
    """The place of a row among those that can be shown."""
    total = ("" if tail.whole else "the last ") + format_count(tail.end - tail.first)
    return f"line {format_count(serial - tail.first + 1)} of {total}"


def find_matches(text: str, needle: str) -> list[tuple[int, int]]:
    """Where `needle` stands in a visible line: begin and end; case matters only if it has capitals."""
    flags = 0 if any(char.isupper() for char in needle) else re.IGNORECASE
    return [found.span() for found in re.finditer(re.escape(needle), text, flags)] if needle else []


def highlight_matches(row: Row, needle: str) -> Row:
    """The row with all hits in the style "found"."""
    cells = [(char, style) for part, style in row for char in part]
    for start, end in find_matches(plain_text(row), needle):
        cells[start:end] = [(char, "found") for char, _ in cells[start:end]]
    return merge_spans(cells)


def panel_title(output: OutputView, facts: ScreenData, width: int, look: TerminalStyle) -> tuple[Row, Row]:
    """The panel's title and the position in the file, for a frame of `width` cells."""
    tail = output.tail
    name: Row = [(NAMES["output"], "title")]
    if len(output.tails) > 1 and tail is not None:
        name.append((f" {look.glyphs.middot} {tail.path.name}", "dim"))
    if tail is None or not tail.size:
        return name, []
    shift: Row = [(f"column {output.left + 1}  ", "wait")] if output.left else []
    if output.top is None:
        if facts.shows_past and not facts.is_over:  # the output's lines have no times
            words = "of the whole run, not only up to this time"
            return name, [*shift, (words if width >= len(words) + 28 else "of the whole run", "wait")]
        return name, [*shift, ("the end" if facts.is_over else "following", "dim")]
    return name, [*shift, (line_position(tail, output.top), "wait")]


_FRAME = re.compile(r'^\s*File "(?P<path>[^"]*/)[^"/]+", line \d+')


def shorten_traceback_path(row: Row, width: int, more: str = "…") -> Row:
    """The row; if it belongs to a traceback and exceeds `width` cells, without a part of the file's directory.

    A row stays as it is if that would hide a hit of the search.
    """
    text = plain_text(row)
    over = row_width(row) - width
    found = _FRAME.match(text) if over > 0 else None
    if found is None:
        return row
    start, end = (span_width(text[:at]) for at in found.span("path"))
    (_, style), *_ = crop_row(row, start, end)
    rest = crop_row(row, min(start + over + len(more), end), row_width(row))
    less: Row = [*crop_row(row, 0, start), (more, style), *rest]
    return less if _count_highlighted(less) == _count_highlighted(row) else row


def _count_highlighted(row: Row) -> int:
    """Number of highlighted characters in a row."""
    return sum(len(text) for text, style in row if style == "found")


def scroll_sideways(rows: Sequence[Row], left: int, more: str = "…") -> list[Row]:
    """The rows without their first `left` cells; a sign marks hidden text there."""
    if left <= 0:
        return list(rows)
    first = left + span_width(more)
    return [[(more, "dim"), *crop_row(row, first, width)] if (width := row_width(row)) else [] for row in rows]
