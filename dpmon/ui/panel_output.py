"""Panel 5: the script's output, as a terminal would finally show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dpmon.model.numbers import group
from dpmon.text.cells import span_width
from dpmon.ui.find import Hunt, found_in
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, cropped, plain, width_of
from dpmon.ui.scene import NAMES, Scene
from dpmon.ui.scrollback import Scrollback
from dpmon.ui.tail import Tail


@dataclass
class Output:
    """The output files and the view of them; `top`: serial number of the first visible row, None to follow the end."""

    tails: list[Tail] = field(default_factory=list)
    which: int = 0
    top: int | None = None
    left: int = 0
    hit: int | None = None
    """The row of the last hit."""
    _backs: dict[int, Scrollback] = field(default_factory=dict)

    @property
    def tail(self) -> Tail | None:
        """The visible file."""
        return self.tails[self.which % len(self.tails)] if self.tails else None

    @property
    def back(self) -> Scrollback | None:
        """The rows of the visible file."""
        if not self.tails:
            return None
        which = self.which % len(self.tails)
        if which not in self._backs:
            self._backs[which] = Scrollback(self.tails[which])
            self._backs[which].follow()
        return self._backs[which]

    def refresh(self) -> None:
        """Look at the files again."""
        for tail in self.tails:
            tail.refresh()
        back = self.back
        if back is None:
            return
        epoch, oldest = back.epoch, back.oldest
        back.follow()
        if self.top is None:
            return
        if back.epoch != epoch:
            # The scrollback has skipped part of the output, so the same line has another serial number now.
            self.top = self.top - oldest + back.oldest if back.counted else None
            self.hit = None
        else:
            self.top = max(self.top, back.oldest)

    def next_file(self) -> None:
        """Show the other file, if there is one."""
        if len(self.tails) > 1:
            self.which, self.top, self.hit = (self.which + 1) % len(self.tails), None, None

    def scroll(self, by: int, height: int) -> None:
        """Scroll by lines (up is negative); follow again at the end."""
        back = self.back
        if back is None:
            return
        last_top = max(back.end - height, back.oldest)
        top = max((last_top if self.top is None else self.top) + by, back.oldest)
        self.top = None if top >= last_top else top

    def visible(self, height: int) -> list[Row]:
        """The visible rows, as a terminal would show them."""
        back = self.back
        if back is None or height <= 0:
            return []
        top = self._top(back, height)
        return back.rows(top, min(height, back.end - top))

    def _top(self, back: Scrollback, height: int) -> int:
        return max(back.end - height, back.oldest) if self.top is None else self.top

    # ------------------------------------------------------------------------------------------ finding

    def search(self, needle: str, by: int, height: int) -> Callable[[], str | None] | None:
        """A job for another thread that searches for the next older (`by` 1) or newer (-1) row; None without a file.

        The job returns the message for the user. `show_hit` then goes to the row.
        """
        back = self.back
        if back is None:
            return None
        first, texts = back.texts()
        top = self._top(back, height)
        in_sight = self.hit is not None and top <= self.hit < top + height
        start = self.hit if in_sight and self.hit is not None else top + height if by > 0 else top - 1
        number = first - back.oldest if back.counted else None
        hunt = Hunt(needle, by > 0, start - by, first, texts, back.tail, number)

        def job() -> str | None:
            found = hunt.run()
            if found is None:
                self._next = None
                return f"no {'older' if by > 0 else 'newer'} line with {needle!r}"
            self._next = found
            return f"line {group(found - back.oldest + 1)} of {group(back.end - back.oldest)}"

        self._needle = needle
        return job

    _next: int | None = None
    _needle: str = ""

    def show_hit(self, height: int, width: int) -> None:
        """Scroll to the row and the column of the hit."""
        back, found = self.back, self._next
        if back is None or found is None:
            return
        self.hit, self._next = found, None
        top = self._top(back, height)
        if not top <= found < top + height:
            top = max(found - height // 2, back.oldest)
        last_top = max(back.end - height, back.oldest)
        self.top = None if top >= last_top else top
        row = back.rows(found, 1)
        at = found_in(plain(row[0]), self._needle) if row else -1
        column = span_width(plain(row[0])[:at]) if at >= 0 else 0
        if not self.left <= column < self.left + width - len(self._needle) - 1:
            self.left = max(column - width // 2, 0) if column > width - len(self._needle) - 2 else 0


def title(output: Output, scene: Scene, width: int, look: Look) -> tuple[Row, Row]:
    """The panel's title and the position in the file, for a frame of `width` cells."""
    tail, back = output.tail, output.back
    name: Row = [(NAMES["output"], "title")]
    if len(output.tails) > 1 and tail is not None:
        name.append((f" {look.glyphs.middot} {tail.path.name}", "dim"))
    if tail is None or back is None or not tail.size:
        return name, []
    shift: Row = [(f"column {output.left + 1}  ", "wait")] if output.left else []
    if output.top is None:
        if scene.playing is not None and not scene.over:  # the output's lines have no times
            words = "of the whole run, not only up to this time"
            return name, [*shift, (words if width >= len(words) + 28 else "of the whole run", "wait")]
        return name, [*shift, ("the end" if scene.over else "following", "dim")]
    total = group(back.end - back.oldest) if back.counted else "many"
    return name, [*shift, (f"line {group(output.top - back.oldest + 1)} of {total}", "wait")]


_FRAME = re.compile(r'^\s*File "(?P<path>[^"]*/)[^"/]+", line \d+')


def narrowed(rows: Sequence[Row], width: int, more: str = "…") -> list[Row]:
    """The rows; in rows of a traceback that exceed `width` cells, the directory of the file is shortened.

    A row stays as it is if that would hide a hit of the search.
    """
    short = (_without_directory(row, width, more) for row in rows)
    return [less if _found(less) == _found(row) else row for row, less in zip(rows, short, strict=True)]


def _found(row: Row) -> int:
    """Number of highlighted characters in a row."""
    return sum(len(text) for text, style in row if style == "found")


def _without_directory(row: Row, width: int, more: str) -> Row:
    over = width_of(row) - width
    found = _FRAME.match(plain(row)) if over > 0 else None
    if found is None:
        return row
    start, end = found.span("path")
    gone = min(over + len(more), end - start)
    rest: Row = []
    at = 0
    for text, style in row:
        kept = text[: max(start - at, 0)] + text[max(start + gone - at, 0) :]
        if at <= start < at + len(text):
            kept = kept[: start - at] + more + kept[start - at :]
        rest.append((kept, style))
        at += len(text)
    return rest


def shifted(rows: Sequence[Row], left: int, more: str = "…") -> list[Row]:
    """The rows without their first `left` cells; a sign marks hidden text there."""
    if left <= 0:
        return list(rows)
    first = left + span_width(more)
    return [[(more, "dim"), *cropped(row, first, width)] if (width := width_of(row)) else [] for row in rows]
