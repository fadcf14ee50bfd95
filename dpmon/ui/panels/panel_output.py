"""Panel 5: the script's output, as it would look on a terminal."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from dpmon.run.safe_files import open_file
from dpmon.text.cells import span_width
from dpmon.text.formatting import format_count
from dpmon.ui.screen_data import NAMES, ScreenData
from dpmon.ui.styled_rows import Row, crop_row, plain_text, row_width
from dpmon.ui.terminal_emulator import TerminalPage

MAX_ROWS = 5000
"""Most rows to store; a few hundred more are dropped at once."""
_TAIL_BYTES = 1 << 19
"""If more bytes than this are unread, skip to the last ones: nobody has seen the skipped rows."""
_CHUNK_BYTES = 1 << 16
_DROPPED_ROWS = 400


class LogTail:
    """A reader that follows one growing log file, without threads or locks; a missing file counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Size of the file in bytes at the last refresh."""
        self._fd = -1
        self._restart_at(0, 0)

    def _restart_at(self, offset: int, first_serial: int) -> None:
        self._offset = offset
        self._page = TerminalPage()
        self.first = first_serial
        """Serial number of the first stored row."""
        self.whole = not offset
        """Whether the stored rows begin with the first line of the file."""

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def refresh(self) -> None:
        """Read and interpret the bytes appended to the file since the last call."""
        try:
            if self._fd < 0:
                self._fd = open_file(self.path)
            self.size = os.fstat(self._fd).st_size
        except OSError:
            return
        if self.size - self._offset > _TAIL_BYTES:
            offset = self.size - _TAIL_BYTES
            self._restart_at(offset + self._read(offset, _CHUNK_BYTES).find(b"\n") + 1, self.end)
        while self._offset < self.size:
            data = self._read(self._offset, min(_CHUNK_BYTES, self.size - self._offset))
            if not data:
                break
            self._page.feed(data)
            self._offset += len(data)
            self._drop_old_rows()

    def _read(self, start: int, count: int) -> bytes:
        try:
            return os.pread(self._fd, count, start) if self._fd >= 0 else b""
        except OSError:
            return b""

    def _drop_old_rows(self) -> None:
        page = self._page
        if len(page.lines) > MAX_ROWS + _DROPPED_ROWS:
            count = len(page.lines) - MAX_ROWS - 1  # the last line is often empty
            del page.lines[:count]
            page.cursor_row -= count
            self.first += count
            self.whole = False

    @property
    def end(self) -> int:
        """Serial number after the last row; an empty last row does not count."""
        lines = self._page.lines
        return self.first + len(lines) - (not lines[-1])

    def rows(self, start: int, count: int) -> list[Row]:
        """Return up to `count` of the stored rows, from serial number `start`."""
        serials = range(max(start, self.first), min(start + count, self.end))
        return [self._page.lines[serial - self.first].row() for serial in serials]


@dataclass
class OutputView:
    """The output files and the visible part; `top`: serial number of the first visible row, None to follow the end."""

    tails: list[LogTail] = field(default_factory=list)
    which: int = 0
    top: int | None = None
    found_serial: int | None = None
    """Serial number of the row with the last match."""

    @property
    def tail(self) -> LogTail | None:
        """The visible file."""
        return self.tails[self.which % len(self.tails)] if self.tails else None

    def refresh(self) -> None:
        """Read what was appended to the files."""
        for tail in self.tails:
            tail.refresh()
        if self.top is not None and self.tail is not None:
            self.top = max(self.top, self.tail.first)

    def next_file(self) -> None:
        """Show the other file."""
        self.which, self.top, self.found_serial = (self.which + 1) % len(self.tails), None, None

    def scroll(self, by: int, height: int) -> None:
        """Scroll by `by` rows (up is negative); follow the file again at its end."""
        if self.tail is not None:
            self._scroll_to(self.tail, self._top_serial(self.tail, height) + by, height)

    def _scroll_to(self, tail: LogTail, top: int, height: int) -> None:
        top = max(top, tail.first)
        self.top = None if top >= max(tail.end - height, tail.first) else top

    def _top_serial(self, tail: LogTail, height: int) -> int:
        return max(tail.end - height, tail.first) if self.top is None else self.top

    def visible_rows(self, height: int) -> list[Row]:
        """Return the visible rows, as a terminal would show them."""
        return [] if self.tail is None else self.tail.rows(self._top_serial(self.tail, height), max(height, 0))

    def find(self, search_text: str, older: bool, height: int) -> str:
        """Scroll to the next older or newer row with this text, and return the message for the user."""
        tail = self.tail
        if tail is None:
            return "there is no output"
        top = self._top_serial(tail, height)
        if self.found_serial is not None and top <= self.found_serial < top + height:
            start = self.found_serial
        else:
            start = top + height if older else top - 1
        serials = range(min(start, tail.end) - 1, tail.first - 1, -1) if older else range(start + 1, tail.end)
        matches = (one for one in serials if matches_search(plain_text(tail.rows(one, 1)[0]), search_text))
        serial = next(matches, None)
        if serial is None:
            scope_text = "" if tail.whole else f" in the last {format_count(tail.end - tail.first)} lines"
            return f"no {'older' if older else 'newer'} line with {search_text!r}{scope_text}"
        self.found_serial = serial
        self._scroll_to(tail, top if top <= serial < top + height else serial - height // 2, height)
        return line_position(tail, serial)


def line_position(tail: LogTail, serial: int) -> str:
    """Return the position of a row among the stored rows: "line 3 of 120"."""
    total = ("" if tail.whole else "the last ") + format_count(tail.end - tail.first)
    return f"line {format_count(serial - tail.first + 1)} of {total}"


def matches_search(text: str, search_text: str) -> bool:
    """Return whether a visible line has the text; case matters only if `search_text` has capitals."""
    if search_text == search_text.lower():
        text = text.lower()
    return search_text in text


def panel_title(output: OutputView, screen: ScreenData, width: int) -> tuple[Row, Row]:
    """Return the title and the position in the file, for a frame of `width` cells."""
    tail = output.tail
    title: Row = [(NAMES["output"], "title")]
    if len(output.tails) > 1 and tail is not None:
        title.append((f" · {tail.path.name}", "dim"))
    if tail is None or not tail.size:
        return title, []
    if output.top is None:
        if screen.shows_past and not screen.is_over:  # the output's lines have no times
            scope_text = "of the whole run, not only up to this time"
            return title, [(scope_text if width >= len(scope_text) + 28 else "of the whole run", "wait")]
        return title, [("the end" if screen.is_over else "following", "dim")]
    return title, [(line_position(tail, output.top), "wait")]


_TRACEBACK_LINE = re.compile(r'^\s*File "(?P<path>[^"]*/)[^"/]+", line \d+')


def shorten_traceback_path(row: Row, width: int) -> Row:
    """Return the row; a traceback line of more than `width` cells loses a part of the file's directory."""
    text = plain_text(row)
    excess_cells = row_width(row) - width
    match = _TRACEBACK_LINE.match(text) if excess_cells > 0 else None
    if match is None:
        return row
    start, end = (span_width(text[:at]) for at in match.span("path"))
    (_, text_style), *_ = crop_row(row, start, end)
    remaining_row = crop_row(row, min(start + excess_cells + 1, end), row_width(row))
    return [*crop_row(row, 0, start), ("…", text_style), *remaining_row]
