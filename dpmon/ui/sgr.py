"""Colours and attributes of a script's output (SGR), as a style name for `dpmon.ui.themes`."""

from __future__ import annotations

from functools import lru_cache

_ATTRIBUTES = {1: "b", 2: "d", 3: "i", 4: "u", 7: "r", 9: "s"}
_OFF = {22: "bd", 23: "i", 24: "u", 27: "r", 29: "s"}


class Sgr:
    """The current style, as a name "sgr:<fg>:<bg>:<attributes>" (colours as Rich names them)."""

    def __init__(self) -> None:
        self.fg = self.bg = self.attributes = ""

    def change(self, args: str) -> str:
        """Apply the parameters of one sequence; returns the style from now on, "" for none."""
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
            self.attributes = "".join(sorted({*self.attributes, _ATTRIBUTES[code]}))
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
