"""Finds text in the script's output, on any thread: in the rows in memory, and in the file before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dpmon.text.traceback_line import ESCAPE
from dpmon.ui.rows import Row, merged, plain
from dpmon.ui.tail import Tail
from dpmon.ui.terminal_text import interpret

_PIECE = 1 << 20


def _folded(text: str, needle: str) -> str:
    """`text` for comparison: case matters only if `needle` has capitals."""
    if any(char.isupper() for char in needle):
        return text
    lower = text.lower()
    return lower if len(lower) == len(text) else text


def found_in(text: str, needle: str) -> int:
    """The position of `needle` in a visible line; -1 if it is not there."""
    return _folded(text, needle).find(needle) if needle else -1


def marked(row: Row, needle: str) -> Row:
    """The row with all hits in the style "found"."""
    text = plain(row)
    at = found_in(text, needle)
    if at < 0:
        return row
    folded = _folded(text, needle)
    inside = [False] * len(text)
    while at >= 0:
        inside[at : at + len(needle)] = [True] * len(needle)
        at = folded.find(needle, at + len(needle))
    cells = ((char, style) for part, style in row for char in part)
    return merged((char, "found" if hit else style) for (char, style), hit in zip(cells, inside, strict=True))


@dataclass(frozen=True)
class Hunt:
    """One search: text, direction and start. It uses none of the screen's state, so it can run on another thread."""

    needle: str
    older: bool
    start: int
    """Serial number of the first row to search."""
    first: int
    """Serial number of `texts[0]`; older rows are in the file."""
    texts: list[str]
    tail: Tail
    number: int | None
    """Number of the line in the file that `texts[0]` shows; None while older lines cannot be searched."""

    def run(self) -> int | None:
        """Serial number of the nearest hit in this direction; None without one."""
        return next(self._hits(), None)

    def _hits(self) -> Iterator[int]:
        kept = self._kept()
        old = self._old()
        if self.older:
            yield from kept
            yield from old
        else:
            yield from old
            yield from kept

    def _kept(self) -> Iterator[int]:
        last = self.first + len(self.texts) - 1
        serials = (
            range(min(self.start, last), self.first - 1, -1)
            if self.older
            else range(max(self.start, self.first), last + 1)
        )
        for serial in serials:
            if found_in(self.texts[serial - self.first], self.needle) >= 0:
                yield serial

    def _old(self) -> Iterator[int]:
        """Hits in the lines of the file before the stored rows."""
        if self.number is None or not self.number:
            return
        line = self.number - (self.first - self.start)
        pieces = self._backwards(min(line + 1, self.number)) if self.older else self._forwards(max(line, 0))
        for begins, data in pieces:
            lines = self._candidates(data)
            for at, raw in reversed(lines) if self.older else lines:
                number = begins + at
                inside = number < self.number and (number <= line if self.older else number >= line)
                if inside and found_in(plain(interpret([raw])[0]), self.needle) >= 0:
                    yield self.first - (self.number - number)

    def _candidates(self, data: bytes) -> list[tuple[int, bytes]]:
        """Lines of a piece that may contain the text, each with its index in the piece."""
        bare = ESCAPE.sub(b"", data) if b"\x1b" in data else data
        if found_in(bare.decode("utf-8", "replace"), self.needle) < 0:
            return []
        raw = data.split(b"\n")
        return [
            (at, raw[at])
            for at, line in enumerate(bare.split(b"\n"))
            if found_in(line.decode("utf-8", "replace"), self.needle) >= 0
        ]

    def _backwards(self, line: int) -> Iterator[tuple[int, bytes]]:
        """Pieces of whole lines before `line`, the last one first, each with the number of its first line."""
        end = self.tail.offset(line)
        while end:
            start = max(end - _PIECE, 0)
            data = self.tail.read(start, end - start)
            if start:
                head = data.find(b"\n") + 1
                # A line longer than a piece is searched piece by piece.
                start, data = start + head, data[head:]
                if not data:
                    start, data = end - _PIECE, self.tail.read(end - _PIECE, _PIECE)
            number = self.tail.before(start)
            if number is None:
                return
            yield number, data.removesuffix(b"\n")
            end = start

    def _forwards(self, line: int) -> Iterator[tuple[int, bytes]]:
        """Pieces of whole lines from `line` on."""
        start = self.tail.offset(line)
        number: int | None = line
        last = self.tail.offset(self.number or 0)
        while start is not None and number is not None and last is not None and start < last:
            data = self.tail.read(start, min(_PIECE, last - start))
            if not data:
                return
            whole = data.rfind(b"\n") + 1 or len(data)
            yield number, data[:whole].removesuffix(b"\n")
            start += whole
            number = self.tail.before(start)
