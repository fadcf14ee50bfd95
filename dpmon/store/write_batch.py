"""What one transaction adds to a history: rows, and the steps and times for its tallies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dpmon.record.history_rows import CollectiveRow
from dpmon.record.schema import SECOND
from dpmon.store.history_schema import RingRow
from dpmon.store.loader_loops import LoaderLoop
from dpmon.store.sync_passes import SyncStep
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import SecondOfSteps
from dpmon.store.time_accounting import ActivityInterval, Gap

GAP_NS = 20_000_000
"""A gap between two steps is recorded if it is at least this long."""
_MAX_INTEGER = (1 << 63) - 1
"""Largest number that fits into a column."""
ShapeKey = tuple[int, str, int, int, int, str, int]
"""Process, mode, kind, layout, whether virtual, sizes and why a device time is missing."""


@dataclass
class WriteBatch:
    """Rows that are written in one transaction."""

    definitions: list[tuple[int, int, str]] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of STEP_COLUMNS."""
    collectives: list[tuple[int, ...]] = field(default_factory=list)
    """Rows of COLLECTIVE_COLUMNS."""
    losses: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of LOSS_COLUMNS."""
    collective_sums: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """Values of COLLECTIVE_SUMS by second, process and definition."""
    events: list[tuple[Any, ...]] = field(default_factory=list)
    characters: int = 0
    """Characters of text in definitions, steps and events."""
    rings: list[RingRow] = field(default_factory=list)
    steps_by_tally: dict[tuple[int, TallyKey], SecondOfSteps] = field(
        default_factory=lambda: defaultdict(SecondOfSteps)
    )
    """By second and key of the tally: the steps that ended in that second."""
    activity_ns: dict[tuple[int, int, str, str], int] = field(default_factory=dict)
    """Time (ns) by second, process, mode and activity. Negative values are subtracted."""
    loops: dict[tuple[int, int], LoaderLoop] = field(default_factory=dict)
    """New and changed loader loops, by process and number."""
    gaps: list[Gap] = field(default_factory=list)
    late_input_waits: list[tuple[int, int, int]] = field(default_factory=list)
    """Late input waits, which shorten recorded gaps, as (process, start, end)."""
    sync_steps: list[SyncStep] = field(default_factory=list)
    """Steps that wait for the steps of other ranks."""
    shapes: Counter[ShapeKey] = field(default_factory=Counter)
    """Calls by shape."""
    devices: dict[tuple[int, int, str], list[float]] = field(default_factory=dict)
    """Count, total and highest value by start of the minute (s), device and name."""

    @property
    def rows(self) -> int:
        """The number of rows with records and definitions."""
        return sum(map(len, (self.definitions, self.steps, self.collectives, self.events, self.losses)))

    def add_event(self, event_id: int, process: int | None, kind: str, t_ns: int | None, text: str) -> None:
        """Add an event; `text`: its JSON."""
        self.events.append((event_id, process, kind, t_ns, text))
        self.characters += len(text)

    def add_collective(self, row_id: int, process: int, collective: CollectiveRow) -> None:
        """Add a collective or a sampled step, also to the sums of its second."""
        self.collectives.append((row_id, process, *collective))
        values = 1, collective.quantity
        key = max(collective.start // SECOND, 0), process, collective.definition
        sums = self.collective_sums.get(key)
        if sums is None:
            self.collective_sums[key] = list(values)
        else:
            sums[:] = [min(total + value, _MAX_INTEGER) for total, value in zip(sums, values, strict=True)]

    def add_step(self, key: TallyKey, end_ns: int, row: tuple[Any, ...], series: Iterable[tuple[str, int]]) -> None:
        """Add a step, also to its tally. `row`: values of STEP_COLUMNS. `series`: values of further series."""
        self.steps.append(row)
        second_of_steps = self.steps_by_tally[end_ns // SECOND, key]
        second_of_steps.rows.append(row)
        second_of_steps.series += series

    def add_activity_time(self, process: int, intervals: Iterable[ActivityInterval]) -> None:
        """Add the time of a process's activities."""
        sums = self.activity_ns
        for interval in intervals:
            activity, mode, start_ns, end_ns, sign = interval
            if sign < 0 and activity == "between":
                self.late_input_waits.append((process, start_ns, end_ns))
            second = start_ns // SECOND
            if end_ns <= (second + 1) * SECOND:  # the usual case
                key = second, process, mode, activity
                sums[key] = sums.get(key, 0) + sign * (end_ns - start_ns)
                continue
            for second, ns in interval.split_by_second():
                key = second, process, mode, activity
                sums[key] = sums.get(key, 0) + ns

    def add_device_value(self, t_ns: int, device: int, name: str, value: float) -> None:
        """Add one value of a device sample."""
        key = t_ns // 60_000_000_000 * 60, device, name
        count, total, high = self.devices.get(key, (0, 0.0, value))
        self.devices[key] = [count + 1, total + value, max(high, value)]
