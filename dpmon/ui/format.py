"""Numbers as people read them: units always, few digits (`dpmon.model.numbers`), the same width while they change."""

from __future__ import annotations

from dpmon.model.numbers import UNKNOWN, count, duration, share, three

__all__ = [
    "UNKNOWN",
    "clock",
    "compact",
    "group",
    "memory",
    "memory_of",
    "ms",
    "percent",
    "rate",
    "short_ms",
    "span_words",
]

group = count
percent = share


def ms(ns: float | None) -> str:
    """A duration in ns with three digits and its unit: "412 µs", "4.12 ms", "1.25 s", at most 7 cells."""
    return duration(ns)


def short_ms(ns: float | None) -> str:
    """As `ms`, without the space before the unit."""
    return duration(ns, "")


def compact(number: float | None) -> str:
    """Three digits and a thousands letter: 412, 12.4k, 3.10M, 0.52."""
    if number is None:
        return UNKNOWN
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale * 0.9995:
            return three(number / scale) + letter
    return three(number)


def rate(number: float | None, unit: str) -> str:
    """A speed with its unit: "412 steps/s"."""
    return f"{compact(number)} {unit}"


def memory(count: float | None) -> str:
    """Bytes with a binary unit and three digits: "71.2 GiB"."""
    if count is None:
        return UNKNOWN
    for scale, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale * 0.9995:
            return f"{three(count / scale)} {unit}"
    return f"{count:.0f} B"


def memory_of(used: float | None, total: float | None) -> str:
    """Used of total in one unit: "71.2 / 141 GiB"."""
    whole = memory(total)
    number, _, unit = memory(used).partition(" ")
    return f"{number} / {whole}" if whole.endswith(" " + unit) else f"{memory(used)} / {whole}"


def clock(ns: int | None) -> str:
    """A time span as hh:mm:ss, with days before it when there are any."""
    if ns is None:
        return UNKNOWN
    seconds = max(ns, 0) // 1_000_000_000
    days, rest = divmod(seconds, 86_400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {text}" if days else text


def span_words(span_s: int) -> str:
    """A time range in words: "last 30 s", "last 2 min", "whole run"."""
    if not span_s:
        return "whole run"
    return f"last {span_s} s" if span_s < 60 else f"last {span_s // 60} min"
