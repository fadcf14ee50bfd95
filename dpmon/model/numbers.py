"""The rules for writing numbers on the screen, in the summary and in reports. Pure.

Three digits and the unit that makes them 1 to 999; counts in full, with a comma every three digits.
"""

from __future__ import annotations

UNKNOWN = "–"
_UNITS = ((1e3, "µs"), (1e6, "ms"), (1e9, "s"))


def three(value: float) -> str:
    """Three digits of a number below 1000: "1.25", "12.5", "125"."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def duration(ns: float | None, gap: str = " ") -> str:
    """A duration in ns: "23.0 µs", "412 µs", "4.12 ms", "1.25 s"; at most 7 cells below 1000 s."""
    if ns is None:
        return UNKNOWN
    scale, unit = next((each for each in _UNITS if ns < 999.5 * each[0]), _UNITS[-1])
    return three(ns / scale) + gap + unit


def minutes(seconds: float) -> str:
    """A duration of a minute or more: "3 min 20 s", "2 h 05 min"."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest:02d} s" if whole < 60 else f"{whole // 60} h {whole % 60:02d} min"


def group(number: int | None) -> str:
    """A count with its digits in groups of three: 12340 -> "12,340"."""
    return UNKNOWN if number is None else f"{number:,}"


def percent(part: float | None) -> str:
    """A share (0 to 1) in whole per cent; a positive one that rounds to 0 is "<1 %"."""
    if part is None:
        return UNKNOWN
    return "<1 %" if 0 < part < 0.005 else f"{part * 100:.0f} %"


def times(value: float, sign: str = "×") -> str:
    """A ratio: "0.61×", "12.5×"."""
    return (f"{value:.2f}" if value < 9.995 else f"{value:.1f}") + sign


def calls_so_far(calls: int) -> str:
    """The words for a run whose calls are not divided into steps yet."""
    return f"{count_of(calls, 'call')} so far; the end of a step is not known yet"


def count_of(count: int, word: str) -> str:
    """A count with its noun: "1 row", "2 rows"."""
    return f"{group(count)} {word}{'' if count == 1 else 's'}"
