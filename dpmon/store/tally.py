"""Counts, sums and sketches of the steps that ended in one time bucket.

A tally covers one process, mode, kind of step and batch size, and a time bucket of one of WIDTHS. Tallies of parts
add up to the tally of the whole, so the figures between two times come from a merged tally.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from dpmon.record.schema import PHASES, QUANTITIES, REST, STEP
from dpmon.store import quantile_sketch
from dpmon.store.quantile_sketch import Counts, Packed
from dpmon.store.tally_encoding import clamp_to_column, decode_entries, packed_entry

NO_SAMPLES, OTHER_SIZES = -1, -2
"""Batch sizes in a key for an unknown number of samples, and for all sizes beyond BATCH_SIZES of ring_intake."""
WIDTHS = (1, 10, 60, 600, 3600, 14_400, 86_400)
"""Possible lengths of a tally's time bucket (s)."""
_TIMED = (*(phase.name for phase in PHASES), REST)
"""The times of a step in a row, which follow its quantities."""


class TallyKey(NamedTuple):
    """Identifies a tally, apart from its time."""

    process: int
    mode: str
    kind: int
    """Flags of dpmon.record.schema."""
    batch: int
    """Samples per step, NO_SAMPLES or OTHER_SIZES."""


class SeriesStats:
    """The values of one series: their number, their sum, and their sketch, which is unpacked on demand."""

    __slots__ = ("_counts", "_packed", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self._counts: Counts = {}
        self._packed: list[Packed] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeriesStats):
            return NotImplemented
        return (self.count, self.total, self.counts) == (other.count, other.total, other.counts)

    __hash__ = None  # type: ignore[assignment]

    @property
    def counts(self) -> Counts:
        """The sketch."""
        if self._packed:
            quantile_sketch.unpack(self._counts, self._packed)
            self._packed.clear()
        return self._counts

    def add(self, values: Sequence[int]) -> None:
        """Add values."""
        self.count += len(values)
        self.total = clamp_to_column(self.total + sum(values))
        quantile_sketch.add_values(self.counts, values)

    def merge(self, other: SeriesStats) -> None:
        """Add the values of another series."""
        self.count += other.count
        self.total = clamp_to_column(self.total + other.total)
        quantile_sketch.merge(self._counts, other._counts)
        self._packed += other._packed

    def add_packed(self, count: int, total: int, packed: Packed | None) -> None:
        """Add values, given their number, their sum and their sketch (None: unknown)."""
        self.count += count
        self.total = clamp_to_column(self.total + total)
        if packed is not None:
            self._packed.append(packed)

    def with_values(self, count: int, total: int, packed: Packed, sign: int) -> SeriesStats:
        """Return the series after values came (`sign` 1) or went (-1); this one remains as it is."""
        found = SeriesStats()
        found.count, found.total = self.count + sign * count, clamp_to_column(self.total + sign * total)
        found._counts = self.counts.copy()
        quantile_sketch.unpack(found._counts, [packed], sign)
        if sign < 0:
            found._counts = {number: left for number, left in found._counts.items() if left}
        return found

    @property
    def mean(self) -> float | None:
        """The mean value; None without values."""
        return self.total / self.count if self.count else None

    @property
    def median(self) -> float | None:
        """The median, at most 0.4% off; None without values."""
        return quantile_sketch.median(self.counts)

    def quantile(self, fraction: float) -> float | None:
        """Return the quantile at `fraction` (0 to 1), at most 0.4% off; None without values."""
        return quantile_sketch.quantile(self.counts, fraction)


@dataclass(slots=True)
class QuantitySum:
    """The sum of one quantity over the steps with a known value."""

    count: int = 0
    total: int = 0

    def merge(self, other: QuantitySum) -> None:
        """Add the count and the total of another sum."""
        self.count += other.count
        self.total = clamp_to_column(self.total + other.total)


def averaging_unit(steps: int, updates: int) -> tuple[str, int]:
    """Return what averages over steps are of, "update" if an update takes several steps, and how many there are."""
    return ("update", updates) if 0 < updates < steps else ("step", steps)


class SeriesNames:
    """Assigns the numbers under which series are stored. `unwritten`: names that are not written yet."""

    def __init__(self, names: Iterable[tuple[int, str]] = ()) -> None:
        self.by_number = {number: name for number, name in names if 0 <= number <= 0xFFFF}
        self._numbers = {name: number for number, name in self.by_number.items()}
        self._next = max(self.by_number, default=-1) + 1
        self.unwritten: list[tuple[int, str]] = []

    def number(self, name: str) -> int | None:
        """Return the number of a series, assigned if necessary; None if there are too many series."""
        found = self._numbers.get(name)
        if found is None:
            if self._next > 0xFFFF:
                return None
            found, self._next = self._next, self._next + 1
            self._numbers[name] = found
            self.by_number[found] = name
            self.unwritten.append((found, name))
        return found


@dataclass(slots=True)
class Tally:
    """Counts, sums and sketches of the steps in one time bucket."""

    steps: int = 0
    calls: int = 0
    last_step: int | None = None
    low_ns: int | None = None
    """Duration of the shortest step; `high_ns`: duration of the longest step."""
    high_ns: int | None = None
    first_ns: int | None = None
    """Start of the first step; `last_ns`: end of the last step."""
    last_ns: int | None = None
    sums: dict[str, QuantitySum] = field(default_factory=dict)
    """By quantity."""
    stats: dict[str, SeriesStats] = field(default_factory=dict)
    """By series."""

    def stat(self, series: str) -> SeriesStats:
        """The values of a series; empty if nothing was counted."""
        return self.stats.get(series) or SeriesStats()

    def sum(self, quantity: str) -> QuantitySum:
        """The sum of a quantity; an empty one if no step has a value."""
        return self.sums.get(quantity) or QuantitySum()

    @property
    def updates(self) -> int:
        """The number of optimizer updates."""
        return self.sum("updates").total

    def add(self, rows: Sequence[tuple[Any, ...]], series: Iterable[tuple[str, int]] = ()) -> None:
        """Add steps. `rows`: of STEP_COLUMNS. `series`: values of further series, also of steps that were added."""
        if rows:
            _, _, numbers, _, starts, walls, _, calls, *columns = zip(*rows, strict=True)
            ends = map(int.__add__, starts, walls)
            self._add_plain_columns(len(rows), sum(calls), max(numbers), min(walls), max(walls), min(starts), max(ends))
            self._count(STEP, walls)
            for quantity, column in zip(QUANTITIES, columns, strict=False):
                known = [value for value in column if value is not None]
                if known:
                    self.sums.setdefault(quantity.name, QuantitySum()).merge(QuantitySum(len(known), sum(known)))
            for name, column in zip(_TIMED, columns[len(QUANTITIES) :], strict=False):
                self._count(name, [took for took in column if took is not None])
        named: dict[str, list[int]] = defaultdict(list)
        for name, value in series:
            named[name].append(value)
        for name, values in named.items():
            self._count(name, values)

    def _count(self, series: str, values: Sequence[int]) -> None:
        if values:
            found = self.stats.get(series)
            if found is None:
                found = self.stats[series] = SeriesStats()
            found.add(values)

    def merge(self, other: Tally) -> None:
        """Add the steps of another tally."""
        self._add_plain_columns(*_plain_in(other))
        for name, total in other.sums.items():
            self.sums.setdefault(name, QuantitySum()).merge(total)
        for name, stat in other.stats.items():
            mine = self.stats.get(name)
            if mine is None:
                mine = self.stats[name] = SeriesStats()
            mine.merge(stat)

    def _add_plain_columns(self, steps: int, calls: int, last_step: int | None, *times: int | None) -> None:
        """Add the values of the columns in PLAIN, in that order."""
        self.steps += steps
        self.calls += calls
        self.last_step = _choose_known(max, self.last_step, last_step)
        low, high, first, last = times
        self.low_ns, self.high_ns = _choose_known(min, self.low_ns, low), _choose_known(max, self.high_ns, high)
        self.first_ns, self.last_ns = _choose_known(min, self.first_ns, first), _choose_known(max, self.last_ns, last)

    def quantile(self, series: str, fraction: float) -> float | None:
        """Return a quantile of a series (ns), at most 0.4% off; for STEP, limited to `low_ns` and `high_ns`."""
        return self._clamp(series, self.stat(series).quantile(fraction))

    def median(self, series: str) -> float | None:
        """Return the median of a series (ns), at most 0.4% off; None without values."""
        return self._clamp(series, self.stat(series).median)

    def _clamp(self, series: str, value: float | None) -> float | None:
        if value is None or series != STEP or self.low_ns is None or self.high_ns is None:
            return value
        return min(max(value, self.low_ns), self.high_ns)

    # ------------------------------------------------------------------------------------------ rows

    def row(self, names: SeriesNames) -> tuple[Any, ...]:
        """Return the values of COLUMNS for the database."""
        sums = [self.sums.get(quantity.name) for quantity in QUANTITIES]
        counted = ((None, 0) if known is None else (known.total, known.count) for known in sums)
        return (*_plain_in(self), *chain.from_iterable(counted), b"".join(self._entries(names)))

    def _entries(self, names: SeriesNames) -> Iterator[bytes]:
        for name, stat in self.stats.items():
            number = names.number(name)
            if number is not None:
                data = quantile_sketch.pack(stat.counts)
                yield packed_entry(number, stat.count, stat.total, data)

    @classmethod
    def from_row(cls, row: Sequence[Any], names: Mapping[int, str], *, sketches: bool = True) -> Tally:
        """Make the tally in a row of COLUMNS.

        `names`: name by number of the series to read. Without `sketches`, only counts and sums are read.
        """
        found = cls()
        found.add_row(row, names, sketches=sketches)
        return found

    def add_row(self, row: Sequence[Any], names: Mapping[int, str], *, sketches: bool = True) -> None:
        """Add the tally in a row; parameters as in `from_row`."""
        steps, calls, last_step, low, high, first, last, *summed, data = row
        entries = decode_entries(data, names, sketches=sketches)
        self._add_plain_columns(steps, calls, last_step, low, high, first, last)
        for quantity, total, count in zip(QUANTITIES, summed[::2], summed[1::2], strict=True):
            if total is not None and count:
                self.sums.setdefault(quantity.name, QuantitySum()).merge(QuantitySum(count, total))
        for name, count, total, packed in entries:
            found = self.stats.get(name)
            if found is None:
                found = self.stats[name] = SeriesStats()
            found.add_packed(count, total, packed)


PLAIN = ("steps", "calls", "last_step", "low_ns", "high_ns", "first_ns", "last_ns")
"""Members of Tally with a column of the same name."""
COLUMNS = (*PLAIN, *(f"{quantity.name}_{part}" for quantity in QUANTITIES for part in ("sum", "n")), "sketches")
"""The columns of the table `tallies` without its key; all but the last are whole numbers."""
TALLY = ("start_s", "process", "mode", "kind", "batch", *COLUMNS)
TALLY_AT = len(TALLY) - len(COLUMNS)
"""Index of the first of the COLUMNS in a row of TALLY."""
_plain_in = attrgetter(*PLAIN)


def _choose_known(choose: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    """Return the lower or the higher of two values (`choose`: min or max); an unknown one does not count."""
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)


class IncrementalTallies:
    """A merger of tally rows that keeps its last result, so that it reads only new, changed or deleted rows."""

    def __init__(self) -> None:
        self._sketches: dict[tuple[int, int, TallyKey], bytes] = {}
        """By width, start and key of a row."""
        self._stats: dict[TallyKey, dict[str, SeriesStats]] = {}

    def read(self, rows: Iterable[tuple[int, tuple[Any, ...]]], names: Mapping[int, str]) -> dict[TallyKey, Tally]:
        """Return one tally per key of (width, row of TALLY)."""
        found: dict[TallyKey, Tally] = {}
        before, self._sketches = self._sketches, {}
        gone = dict(before)
        try:
            for width, row in rows:
                key, sketches = TallyKey(*row[1:TALLY_AT]), row[-1]
                place = width, row[0], key
                self._sketches[place] = sketches
                if before.get(place) == sketches:
                    del gone[place]
                else:
                    self._change(key, sketches, names, 1)
                found.setdefault(key, Tally()).add_row((*row[TALLY_AT:-1], b""), names)
            for (_, _, key), sketches in gone.items():
                self._change(key, sketches, names, -1)
        except Exception:
            self._sketches, self._stats = {}, {}
            raise
        for key, tally in found.items():
            tally.stats = {name: stat for name, stat in self._stats[key].items() if stat.count}
        return found

    def _change(self, key: TallyKey, sketches: bytes, names: Mapping[int, str], sign: int) -> None:
        stats = self._stats.setdefault(key, {})
        for name, count, total, packed in decode_entries(sketches, names, sketches=True):
            if packed is not None:
                stats[name] = stats.get(name, _NO_VALUES).with_values(count, total, packed, sign)


_NO_VALUES = SeriesStats()
