"""What a terminal would show of some lines of output: carriage returns, erasures, bars below each other, colours.

An explicit machine over characters. It knows CR, LF, BS, TAB, erase in line, cursor up, down, left, right and to a
column, and colours (SGR); every other control, and every other sequence whole (OSC, DCS, CSI and so on), vanishes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from dpmon.ui.rows import Row
from dpmon.ui.text import harmless

__all__ = ["COLUMNS", "interpret", "moves_up"]

COLUMNS = 4000
"""Characters of a line that are kept; what is written beyond is dropped, with a sign."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TOKEN = re.compile(
    r"(?P<csi>(?:\x1b\[|\x9b)(?P<args>[0-?]{0,64})[ -/]{0,8}(?P<end>[@-~]))"
    r"|(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}$"
    # Strings of the terminal's own (OSC, DCS, SOS, PM, APC), up to their end or, cut off, to the line's.
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x1b\\|\x9c|\x07|$)"
    r"|\x1b(?:[ -/]{1,8})?[0-~]?"
    r"|(?P<control>[\x00-\x1f\x7f-\x9f])"
    r"|(?P<text>[^\x00-\x1f\x7f-\x9f]+)",
    re.DOTALL,
)


_UP = re.compile(rb"\x1b\[[0-9]*[AF]")


def moves_up(lines: Sequence[bytes]) -> bool:
    """Whether some line draws over lines above it, so that they have to be read together."""
    return any(b"\x1b[" in line and _UP.search(line) is not None for line in lines)


def interpret(lines: Sequence[bytes]) -> list[Row]:
    """The rows that the lines show in the end; styles are "" or "sgr:..." as `dpmon.ui.look` understands it."""
    if moves_up(lines):
        page = _Page()
        for index, line in enumerate(lines):
            page.run(("\n" if index else "") + line.decode("utf-8", "replace"))
        return page.rows()
    return [_alone(line) for line in lines]


def _alone(line: bytes) -> Row:
    text = line.decode("utf-8", "replace")
    if _CONTROL.search(text) is None:
        return [(harmless(text[:COLUMNS]), "")] if text else []
    page = _Page()
    page.run(text)
    return page.rows()[0]


class _Page:
    """Rows of characters with their styles, and a cursor in them."""

    def __init__(self) -> None:
        self.chars: list[list[str]] = [[]]
        self.styles: list[list[str]] = [[]]
        self.line = 0
        self.at = 0
        self.sgr = _Sgr()
        self.style = ""

    def run(self, text: str) -> None:
        """Take in some more text; a sequence that is cut off at its end is dropped."""
        for token in _TOKEN.finditer(text):
            if token["text"] is not None:
                self._put(harmless(token["text"]))
            elif token["csi"] is not None:
                self._sequence(token["args"], token["end"])
            elif token["control"] is not None:
                self._control(token["control"])

    def rows(self) -> list[Row]:
        """What is there now, without blanks at the ends of rows."""
        found: list[Row] = []
        for chars, styles in zip(self.chars, self.styles, strict=True):
            row: Row = []
            for style, group in groupby(zip(styles, chars, strict=True), key=lambda pair: pair[0]):
                row.append(("".join(char for _, char in group), style))
            if row and not row[-1][1]:
                row[-1] = (row[-1][0].rstrip(), "")
            found.append(row)
        return found

    def _put(self, text: str) -> None:
        text = text[: max(COLUMNS - self.at, 0)]
        end = self.at + len(text)
        self._reach(self.at)
        self.chars[self.line][self.at : end] = text
        self.styles[self.line][self.at : end] = [self.style] * len(text)
        self.at = end

    def _reach(self, column: int) -> None:
        missing = column - len(self.chars[self.line])
        if missing > 0:
            self.chars[self.line] += " " * missing
            self.styles[self.line] += [""] * missing

    def _go(self, line: int) -> None:
        self.line = max(line, 0)
        while len(self.chars) <= self.line:
            self.chars.append([])
            self.styles.append([])

    def _control(self, char: str) -> None:
        if char == "\r":
            self.at = 0
        elif char == "\n":
            self._go(self.line + 1)
            self.at = 0
        elif char == "\b":
            self.at = max(self.at - 1, 0)
        elif char == "\t":
            self.at = min((self.at // 8 + 1) * 8, COLUMNS)

    def _sequence(self, args: str, end: str) -> None:
        if end == "m":
            self.style = self.sgr.change(args)
            return
        number = int(args[:5]) if args.isdecimal() else 0
        by = max(number, 1)
        if end == "K":
            self._erase(number)
        elif end == "C":
            self.at = min(self.at + by, COLUMNS)
        elif end == "D":
            self.at = max(self.at - by, 0)
        elif end in "G`":
            self.at = min(by - 1, COLUMNS)
        elif end in "AF":
            self._go(self.line - by)
        elif end in "BE":
            # Down never makes lines, as at the bottom of a terminal.
            self._go(min(self.line + by, len(self.chars) - 1))
        if end in "EF":
            self.at = 0

    def _erase(self, what: int) -> None:
        chars, styles = self.chars[self.line], self.styles[self.line]
        if what in (0, 2) and len(chars) > self.at:
            del chars[self.at :], styles[self.at :]
        if what in (1, 2):
            stop = min(self.at + 1, len(chars))
            chars[:stop] = " " * stop
            styles[:stop] = [""] * stop


_ATTRIBUTES = {1: "b", 2: "d", 3: "i", 4: "u", 7: "r", 9: "s"}
_OFF = {22: "bd", 23: "i", 24: "u", 27: "r", 29: "s"}


class _Sgr:
    """Colours and attributes in force, as a style name "sgr:<fg>:<bg>:<attributes>" (colours as Rich names them)."""

    def __init__(self) -> None:
        self.fg = self.bg = self.attributes = ""

    def change(self, args: str) -> str:
        numbers = _numbers(args)
        index = 0
        while index < len(numbers):
            index = self._one(numbers, index)
        if not (self.fg or self.bg or self.attributes):
            return ""
        return f"sgr:{self.fg}:{self.bg}:{self.attributes}"

    def _one(self, numbers: tuple[int, ...], index: int) -> int:
        code = numbers[index]
        if code == 0:
            self.fg = self.bg = self.attributes = ""
        elif code in _ATTRIBUTES:
            letter = _ATTRIBUTES[code]
            self.attributes = "".join(sorted(set(self.attributes + letter)))
        elif code in _OFF:
            self.attributes = "".join(a for a in self.attributes if a not in _OFF[code])
        elif code in (38, 48):
            colour, used = _extended(numbers[index + 1 : index + 5])
            if colour is not None:
                self._colour(code == 38, colour)
            return index + 1 + used
        elif 30 <= code <= 37 or 90 <= code <= 97:
            self._colour(True, f"color({code - 30 if code < 40 else code - 82})")
        elif 40 <= code <= 47 or 100 <= code <= 107:
            self._colour(False, f"color({code - 40 if code < 50 else code - 92})")
        elif code == 39:
            self.fg = ""
        elif code == 49:
            self.bg = ""
        return index + 1

    def _colour(self, front: bool, colour: str) -> None:
        if front:
            self.fg = colour
        else:
            self.bg = colour


@lru_cache(maxsize=256)
def _numbers(args: str) -> tuple[int, ...]:
    parts = args.replace(":", ";").split(";")[:32]
    return tuple(int(part[:5]) if part.isdecimal() else 0 for part in parts)


def _extended(rest: tuple[int, ...]) -> tuple[str | None, int]:
    """An indexed or a true colour after 38 or 48, and how many numbers it took."""
    if len(rest) >= 2 and rest[0] == 5:
        return (f"color({rest[1]})" if rest[1] < 256 else None), 2
    if len(rest) >= 4 and rest[0] == 2:
        fits = all(n < 256 for n in rest[1:4])
        return (f"#{rest[1]:02x}{rest[2]:02x}{rest[3]:02x}" if fits else None), 4
    return None, len(rest)
