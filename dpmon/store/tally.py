"""Counts, sums and sketches of the steps that ended in one stretch of time.

A tally belongs to one process (or ALL), mode, kind of step and batch size, and to a stretch of 1, 10, 60 or 3,600 s.
Tallies of parts add up to the tally of the whole, so every figure of a run between two times is read from a merged
tally.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpmon.record.schema import PHASES, QUANTITIES, REST, STEP, device_series
from dpmon.store import quantiles
from dpmon.store.quantiles import Counts

__all__ = ["ALL", "NO_SAMPLES", "OTHER_SIZES", "WIDTHS", "Key", "SeriesNames", "Stat", "StepFacts", "Sum", "Tally"]

ALL = -1
"""The process number of the tallies of all processes together."""
NO_SAMPLES, OTHER_SIZES = -1, -2
"""Batch sizes in a key: the samples are unknown; a size beyond the first of a process."""
WIDTHS = (1, 10, 60, 3600)
"""Seconds that a tally covers."""
_ENTRY = struct.Struct("<HIqI")
"""Number of the series, values, their sum, bytes of the sketch that follows."""
_MAX = (1 << 63) - 1


class Key(NamedTuple):
    """What a tally is of, beside its time."""

    process: int
    mode: str
    kind: int
    """A number of dpmon.record.schema.KINDS."""
    batch: int
    """Samples a step, or one of NO_SAMPLES and OTHER_SIZES."""


class StepFacts(NamedTuple):
    """A step as a tally takes it; times in ns, None for what did not run or is not known."""

    number: int
    wall: int
    quantities: Sequence[int | None]
    """In the order of QUANTITIES."""
    phases: Sequence[int | None]
    """In the order of PHASES."""
    rest: int | None
    calls: int
    device: Mapping[str, int]
    """Device times by phase."""
    parts: Sequence[tuple[str, int]]
    """Durations of replicas and stages in its calls, by the name of their series."""


@dataclass(slots=True)
class Stat:
    """One series: how many values, their sum, and their sketch."""

    count: int = 0
    total: int = 0
    counts: Counts = field(default_factory=dict)

    def add(self, values: Sequence[int]) -> None:
        """Add values."""
        self.count += len(values)
        self.total = _bounded(self.total + sum(values))
        quantiles.add_values(self.counts, values)

    def merge(self, other: Stat) -> None:
        """Add all of another."""
        self.count += other.count
        self.total = _bounded(self.total + other.total)
        quantiles.merge(self.counts, other.counts)

    @property
    def mean(self) -> float | None:
        """The mean value; None without values."""
        return self.total / self.count if self.count else None

    @property
    def median(self) -> float | None:
        """The median, at most 0.4 % off; None without values."""
        return quantiles.median(self.counts)

    def quantile(self, fraction: float) -> float | None:
        """The smallest value that `fraction` of all do not exceed, at most 0.4 % off; None without values."""
        return quantiles.quantile(self.counts, fraction)


@dataclass(slots=True)
class Sum:
    """The sum of one quantity over the steps that know it."""

    count: int = 0
    total: int = 0

    def merge(self, other: Sum) -> None:
        """Add all of another."""
        self.count += other.count
        self.total = _bounded(self.total + other.total)


class SeriesNames:
    """The numbers under which series are stored. `fresh` holds names that were not written yet."""

    def __init__(self, names: Iterable[tuple[int, str]] = ()) -> None:
        self.by_number = {number: name for number, name in names if type(number) is int and isinstance(name, str)}
        self._numbers = {name: number for number, name in self.by_number.items()}
        self.fresh: list[tuple[int, str]] = []

    def number(self, name: str) -> int | None:
        """The number of a series, a new one if it has none; None when there are too many."""
        found = self._numbers.get(name)
        if found is None:
            found = max(self.by_number, default=-1) + 1
            if found > 0xFFFF:
                return None
            self._numbers[name] = found
            self.by_number[found] = name
            self.fresh.append((found, name))
        return found


@dataclass(slots=True)
class Tally:
    """See the module."""

    steps: int = 0
    calls: int = 0
    last_step: int | None = None
    low_ns: int | None = None
    """The shortest step, and the longest."""
    high_ns: int | None = None
    first_ns: int | None = None
    """When its first step began, and when its last one ended."""
    last_ns: int | None = None
    sums: dict[str, Sum] = field(default_factory=dict)
    """By quantity."""
    stats: dict[str, Stat] = field(default_factory=dict)
    """By series."""

    def stat(self, series: str) -> Stat:
        """One series; an empty one if nothing was counted."""
        return self.stats.get(series) or Stat()

    def sum(self, quantity: str) -> Sum:
        """One quantity; an empty one if no step knew it."""
        return self.sums.get(quantity) or Sum()

    def add(self, steps: Sequence[StepFacts], first_ns: int, last_ns: int) -> None:
        """Add steps, the first of which began at `first_ns` and the last of which ended at `last_ns`."""
        self._reach(first_ns, last_ns)
        numbers, walls, quantities, phases, rests, calls, devices, parts = zip(*steps, strict=True)
        self.steps += len(steps)
        self.calls += sum(calls)
        self.last_step = numbers[-1]
        self._extremes(min(walls), max(walls))
        self._count(STEP, walls)
        for quantity, column in zip(QUANTITIES, zip(*quantities, strict=True), strict=True):
            known = [value for value in column if value is not None]
            if known:
                self.sums.setdefault(quantity.name, Sum()).merge(Sum(len(known), sum(known)))
        for phase, column in zip(PHASES, zip(*phases, strict=True), strict=True):
            self._count(phase.name, [took for took in column if took is not None])
        self._count(REST, [took for took in rests if took is not None])
        for times in devices:
            for name, took in times.items():
                self._count(device_series(name), (took,))
        named: dict[str, list[int]] = {}
        for each in parts:
            for name, took in each:
                named.setdefault(name, []).append(took)
        for name, values in named.items():
            self._count(name, values)

    def _count(self, series: str, values: Sequence[int]) -> None:
        if values:
            found = self.stats.get(series)
            if found is None:
                found = self.stats[series] = Stat()
            found.add(values)

    def _extremes(self, low: int, high: int) -> None:
        self.low_ns = low if self.low_ns is None else min(self.low_ns, low)
        self.high_ns = high if self.high_ns is None else max(self.high_ns, high)

    def _reach(self, first: int | None, last: int | None) -> None:
        if first is not None and last is not None:
            self.first_ns = first if self.first_ns is None else min(self.first_ns, first)
            self.last_ns = last if self.last_ns is None else max(self.last_ns, last)

    def merge(self, other: Tally) -> None:
        """Add all of another."""
        self.steps += other.steps
        self.calls += other.calls
        if other.last_step is not None:
            self.last_step = other.last_step if self.last_step is None else max(self.last_step, other.last_step)
        if other.low_ns is not None and other.high_ns is not None:
            self._extremes(other.low_ns, other.high_ns)
        self._reach(other.first_ns, other.last_ns)
        for name, total in other.sums.items():
            self.sums.setdefault(name, Sum()).merge(total)
        for name, stat in other.stats.items():
            mine = self.stats.get(name)
            if mine is None:
                mine = self.stats[name] = Stat()
            mine.merge(stat)

    def quantile(self, series: str, fraction: float) -> float | None:
        """A quantile of a series in ns, at most 0.4 % off; of steps never outside the shortest and the longest."""
        return self._within(series, self.stat(series).quantile(fraction))

    def median(self, series: str) -> float | None:
        """The median of a series in ns, at most 0.4 % off; None without values."""
        return self._within(series, self.stat(series).median)

    def _within(self, series: str, value: float | None) -> float | None:
        if value is None or series != STEP or self.low_ns is None or self.high_ns is None:
            return value
        return min(max(value, self.low_ns), self.high_ns)

    # ------------------------------------------------------------------------------------------ rows

    def row(self, names: SeriesNames) -> dict[str, Any]:
        """The columns of the table `tallies` beside its key."""
        return {
            **{name: getattr(self, name) for name in PLAIN},
            **{f"{q.name}_sum": self.sums[q.name].total if q.name in self.sums else None for q in QUANTITIES},
            **{f"{q.name}_n": self.sums[q.name].count if q.name in self.sums else 0 for q in QUANTITIES},
            "sketches": b"".join(self._entries(names)),
        }

    def _entries(self, names: SeriesNames) -> Iterator[bytes]:
        for name, stat in self.stats.items():
            number = names.number(name)
            if number is not None:
                data = quantiles.pack(stat.counts)
                yield _ENTRY.pack(number, stat.count, stat.total, len(data)) + data

    @classmethod
    def of_row(
        cls,
        row: Mapping[str, Any],
        names: Mapping[int, str],
        *,
        sketches: bool = True,
        series: Collection[str] | None = None,
    ) -> Tally:
        """The tally in a row; ValueError if it is damaged. Without `sketches` counts and sums only.

        `series`: read these only.
        """
        found = cls(*(_whole(row[name], optional=name not in ("steps", "calls")) for name in PLAIN))  # type: ignore[arg-type]
        if found.steps < 0 or found.calls < 0:
            raise ValueError("a damaged tally")
        for quantity in QUANTITIES:
            total, count = (_whole(row[f"{quantity.name}_{part}"], optional=True) for part in ("sum", "n"))
            if total is not None and count:
                found.sums[quantity.name] = Sum(count, total)
        data = row["sketches"]
        if not isinstance(data, bytes):
            raise ValueError("a damaged tally")
        at = 0
        try:
            while at < len(data):
                number, count, total, size = _ENTRY.unpack_from(data, at)
                at += _ENTRY.size + size
                if at > len(data):
                    raise ValueError("a damaged tally")
                name = names.get(number)
                if name is not None and (series is None or name in series):
                    stat = found.stats[name] = Stat(count, total)
                    if sketches:
                        quantiles.unpack(stat.counts, data[at - size : at])
        except struct.error:
            raise ValueError("a damaged tally") from None
        return found


PLAIN = ("steps", "calls", "last_step", "low_ns", "high_ns", "first_ns", "last_ns")
"""Members of Tally with a column of the same name."""


def _whole(value: object, *, optional: bool) -> int | None:
    # SQLite holds whatever was written into a column, of any type.
    if type(value) is int or (optional and value is None):
        return value
    raise ValueError("a damaged tally")


def _bounded(value: int) -> int:
    return max(min(value, _MAX), -_MAX)
