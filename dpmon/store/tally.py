"""Counts, sums and sketches of the steps that ended in one time range. Pure.

A tally covers one key (dpmon.store.tally_keys), or several. Tallies of parts add up to the tally of the whole, so the
figures between two times come from a merged tally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dpmon.record.schema import STEP
from dpmon.store import quantile_sketch
from dpmon.store.quantile_sketch import Counts


class SeriesStats:
    """The values of one series: their number, their sum, and their sketch, which is unpacked on demand."""

    __slots__ = ("_counts", "_packed", "count", "total")

    def __init__(self, count: int = 0, total: int = 0, sketch: bytes = b"") -> None:
        """`sketch`: packed; empty if it is unknown."""
        self.count = count
        self.total = total
        self._counts: Counts = {}
        self._packed = [sketch] if sketch else []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeriesStats):
            return NotImplemented
        return (self.count, self.total, self.counts) == (other.count, other.total, other.counts)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, values: Sequence[int]) -> SeriesStats:
        """Return the statistics of some values."""
        return cls(len(values), sum(values), quantile_sketch.pack_values(values) if values else b"")

    @property
    def counts(self) -> Counts:
        """The sketch."""
        if self._packed:
            quantile_sketch.unpack(self._counts, b"".join(self._packed))
            self._packed.clear()
        return self._counts

    def merge(self, other: SeriesStats) -> None:
        """Add the values of another series."""
        self.count += other.count
        self.total += other.total
        quantile_sketch.merge(self._counts, other._counts)
        self._packed += other._packed

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


def averaging_unit(steps: int, updates: int) -> tuple[str, int]:
    """Return what averages over steps are of, "update" if an update takes several steps, and how many there are."""
    return ("update", updates) if 0 < updates < steps else ("step", steps)


@dataclass(slots=True)
class Tally:
    """Counts, sums and sketches of some steps."""

    steps: int = 0
    calls: int = 0
    last_step: int | None = None
    low_ns: int | None = None
    """Duration of the shortest step; `high_ns`: duration of the longest step."""
    high_ns: int | None = None
    first_ns: int | None = None
    """Start of the first step; `last_ns`: end of the last step."""
    last_ns: int | None = None
    stats: dict[str, SeriesStats] = field(default_factory=dict)
    """By series."""

    def stat(self, series: str) -> SeriesStats:
        """The values of a series; empty if nothing was counted."""
        return self.stats.get(series) or SeriesStats()

    @property
    def updates(self) -> int:
        """The number of optimizer updates."""
        return self.stat("updates").total

    def merge(self, other: Tally) -> None:
        """Add the steps of another tally."""
        self.steps += other.steps
        self.calls += other.calls
        self.last_step = _choose_known(max, self.last_step, other.last_step)
        self.low_ns = _choose_known(min, self.low_ns, other.low_ns)
        self.high_ns = _choose_known(max, self.high_ns, other.high_ns)
        self.first_ns = _choose_known(min, self.first_ns, other.first_ns)
        self.last_ns = _choose_known(max, self.last_ns, other.last_ns)
        for name, stats in other.stats.items():
            own = self.stats.get(name)
            if own is None:
                own = self.stats[name] = SeriesStats()
            own.merge(stats)

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


def _choose_known(choose: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    """Return the lower or the higher of two values (`choose`: min or max); an unknown one does not count."""
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)
