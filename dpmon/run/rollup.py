"""What is kept of steps and calls for good: sums and histograms a second and a minute, for each process and mode.

A histogram has sixteen buckets to a power of two, so a median or a p95 read from it is within 3 % of the true one,
whatever the spread. In the database it is a row of entries of seven bytes: the series' place in SERIES (u8), the
bucket (u16, see `bucket`), how many values fell into it (u32); least significant byte first.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpmon.rates import Gap, Pace, Tally
from dpmon.record.codec import is_evaluation
from dpmon.record.wire import CALL_PHASES, MODES

__all__ = ["SERIES", "WHOLE", "WIDTHS", "Gathered", "Rollup", "bucket", "bucket_middle"]

SERIES = ("step", "data", "forward", "backward", "optimizer", "other", *CALL_PHASES, "copy")
"""Durations of which sums and histograms are kept: of the whole step, of its phases, of the phases of its calls.

Their places are in histories: what is new comes last.
"""
WIDTHS = (1, 60)
"""Seconds that one row covers."""
WHOLE = 0
"""The width of a row of all that was before the first minute that is left: when in that time is not known any more."""
_CALLS_AT = SERIES.index(CALL_PHASES[0])
_FIRST_KEPT = SERIES.index("copy")
"""The sums from here on follow the histogram in a row: the first versions had no column for them."""
_COLUMNS = (*enumerate(range(5), start=1), (SERIES.index("copy"), 6))
"""Of a row of steps, after its samples: the series, and the place of the column. Between them is `device`."""
_BACKWARD_AT, _OPTIMIZER_AT, _BETWEEN_AT = 2, 3, 8
"""Positions of columns, as above."""
_SECOND = 1_000_000_000
_MAX_INT = (1 << 63) - 1
_ENTRY = struct.Struct("<BHI")
_SHIFT = 16


def bucket(ns: int) -> int:
    """The bucket of a duration: 0 to 31 for as many ns, then sixteen to a power of two."""
    if ns < 32:
        return max(ns, 0)
    size = ns.bit_length()
    return size << 4 | ns >> (size - 5) & 15


def bucket_middle(number: int) -> float:
    """The middle of a bucket in ns."""
    if number < 32:
        return float(number)
    shift = max((number >> 4) - 5, 0)
    return float((16 + (number & 15)) << shift) + ((1 << shift) - 1) / 2


_LAST_BUCKET = bucket(_MAX_INT)


class Gathered:
    """What is to be added to one second of one process and mode."""

    __slots__ = ("calls", "steps")

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        """Rows of the table `steps`."""
        self.calls: list[Sequence[int]] = []
        """For each of CALL_PHASES its start (negative: it did not run) and how long it took, ns."""


@dataclass(slots=True)
class Rollup:
    """The steps and calls of one process in one mode that ended within one second, or one minute."""

    start_s: int
    """Since the run's start."""
    process: int
    mode: str
    steps: int = 0
    calls: int = 0
    samples: int = 0
    unknown: int = 0
    """Steps that did not know their samples."""
    last_step: int | None = None
    low_ns: int | None = None
    """The shortest step, and the longest."""
    high_ns: int | None = None
    sums: list[int | None] = field(default_factory=lambda: [None] * len(SERIES))
    """ns, in the order of SERIES; None: did not run."""
    pace: Pace = field(default_factory=Pace)
    counts: dict[int, int] = field(default_factory=dict)
    """Values by series (shifted left by 16) and bucket."""

    def add(self, gathered: Gathered) -> None:
        """Add what was gathered for this second, process and mode."""
        steps, calls = gathered.steps, gathered.calls
        self.calls += len(calls)
        if steps:
            _, _, numbers, _, starts, walls, samples, *phases = zip(*steps, strict=True)
            known = [count for count in samples if count is not None]
            low, high = min(walls), max(walls)
            self.steps += len(steps)
            self.samples = min(self.samples + sum(known), _MAX_INT)
            self.unknown += len(steps) - len(known)
            self.last_step = numbers[-1]
            self.low_ns = low if self.low_ns is None else min(self.low_ns, low)
            self.high_ns = high if self.high_ns is None else max(self.high_ns, high)
            self._count(0, walls)
            no = (None,) * len(steps)
            between = phases[_BETWEEN_AT] if len(phases) > _BETWEEN_AT else no
            trained = phases[_BACKWARD_AT], phases[_OPTIMIZER_AT]
            for start, wall, count, back, stepped, gap in zip(starts, walls, samples, *trained, between, strict=True):
                self.pace.step(start, wall, count, is_evaluation(back, stepped), Gap(abs(gap or 0), (gap or 0) < 0))
            for series, place in _COLUMNS:
                if place < len(phases):
                    self._count(series, [took for took in phases[place] if took is not None])
        if calls:
            columns = list(zip(*calls, strict=True))
            for index in range(len(CALL_PHASES)):
                pairs = zip(columns[2 * index], columns[2 * index + 1], strict=True)
                self._count(_CALLS_AT + index, [took for start, took in pairs if start >= 0])

    def _count(self, series: int, values: Sequence[int]) -> None:
        if not values:
            return
        before = self.sums[series] or 0
        self.sums[series] = max(min(before + sum(values), _MAX_INT), -_MAX_INT)
        base, counts = series << _SHIFT, self.counts
        # As `bucket`, in place: this is done for every number of every record.
        found = Counter(
            [
                (size := ns.bit_length()) << 4 | ns >> (size - 5) & 15 if ns > 31 else ns if ns > 0 else 0
                for ns in values
            ]
        )
        for number, count in found.items():
            key = base | number
            counts[key] = counts.get(key, 0) + count

    def merge(self, other: Rollup) -> None:
        """Add what `other` has counted, later than this."""
        self.steps += other.steps
        self.calls += other.calls
        self.samples = min(self.samples + other.samples, _MAX_INT)
        self.unknown += other.unknown
        self.last_step = self.last_step if other.last_step is None else other.last_step
        if other.low_ns is not None and other.high_ns is not None:
            self.low_ns = other.low_ns if self.low_ns is None else min(self.low_ns, other.low_ns)
            self.high_ns = other.high_ns if self.high_ns is None else max(self.high_ns, other.high_ns)
        for index, value in enumerate(other.sums):
            if value is not None:
                self.sums[index] = max(min((self.sums[index] or 0) + value, _MAX_INT), -_MAX_INT)
        for key, count in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count
        self.pace.add(other.pace)

    # ------------------------------------------------------------------------------------------ figures

    def ran(self, series: str) -> int:
        """How many values of `series` (one of SERIES) were counted."""
        return sum(count for _, count in self._buckets(series))

    def quantile(self, series: str, fraction: float) -> float | None:
        """The value in ns that `fraction` of all do not exceed (nearest rank), within 3 %; None of nothing."""
        found = sorted(self._buckets(series))
        total = sum(count for _, count in found)
        rank = max(1, -int(-fraction * total // 1))
        for number, count in found:
            rank -= count
            if rank <= 0:
                value = bucket_middle(number)
                if series == "step" and self.low_ns is not None and self.high_ns is not None:
                    value = min(max(value, self.low_ns), self.high_ns)
                return value
        return None

    def _buckets(self, series: str) -> Iterator[tuple[int, int]]:
        which = SERIES.index(series)
        return ((key & 0xFFFF, count) for key, count in self.counts.items() if key >> _SHIFT == which)

    # ------------------------------------------------------------------------------------------ rows

    def row(self, width: int) -> tuple[object, ...]:
        """The columns of the table `rollups`."""
        data = b"".join(
            _ENTRY.pack(key >> _SHIFT, key & 0xFFFF, min(count, 0xFFFFFFFF))
            for key, count in sorted(self.counts.items())
        )
        return (
            width, self.start_s, self.process, self.mode, self.steps, self.calls, self.samples, self.unknown,
            self.last_step, self.low_ns, self.high_ns, *self.sums[:_FIRST_KEPT], data, *self.sums[_FIRST_KEPT:],
            self.pace.text(),
        )  # fmt: skip

    @classmethod
    def of_row(cls, row: Sequence[object]) -> Rollup:
        """What `row` has written; ValueError if it is damaged (a database holds whatever was put into it)."""
        width, start, process, mode, steps, calls, samples, unknown, last, low, high, *rest = row
        if len(rest) <= _FIRST_KEPT:
            raise ValueError("damaged row in rollups")
        sums, data = [*rest[:_FIRST_KEPT], *rest[_FIRST_KEPT + 1 : len(SERIES) + 1]], rest[_FIRST_KEPT]
        sums += [None] * (len(SERIES) - len(sums))  # a history of an earlier version
        text = rest[len(SERIES) + 1] if len(rest) > len(SERIES) + 1 else None
        whole = (start, process, steps, calls, samples, unknown)
        if not all(type(value) is int for value in whole) or mode not in MODES or not isinstance(data, bytes):
            raise ValueError("damaged row in rollups")
        if len(sums) != len(SERIES) or not all(
            value is None or type(value) is int for value in (last, low, high, *sums)
        ):
            raise ValueError("damaged row in rollups")
        if len(data) % _ENTRY.size:
            raise ValueError("damaged row in rollups")
        counts = {series << _SHIFT | number: count for series, number, count in _ENTRY.iter_unpack(data)}
        if any(key & 0xFFFF > _LAST_BUCKET for key in counts):
            raise ValueError("damaged row in rollups")
        found = cls(*whole[:2], str(mode), *whole[2:], last, low, high, sums, counts=counts)  # type: ignore[arg-type]
        found.pace = _pace_of(found, width, text)
        return found


def _pace_of(rollup: Rollup, width: object, text: object) -> Pace:
    """The Pace as written. Rows of an earlier version have no time between steps; it is taken as zero."""
    begin = rollup.start_s * _SECOND if width else None
    end = (rollup.start_s + width) * _SECOND if isinstance(width, int) and width else None
    if isinstance(text, str):
        return Pace.of_text(text, begin, end)
    if text is not None:
        raise ValueError("damaged row in rollups")
    spent = rollup.sums[0] or 0
    return Pace(Tally(rollup.steps, rollup.samples, rollup.unknown, spent, spent, begin, end))
