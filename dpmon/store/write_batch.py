"""One write to a history: rows, and the steps and times for its tallies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dpmon.record.history_rows import CollectiveRow
from dpmon.record.schema import SECOND
from dpmon.store.history_schema import RingRow
from dpmon.store.loader_loops import LoaderLoop
from dpmon.store.sync_passes import RankStepWait
from dpmon.store.tally import TallyKey
from dpmon.store.time_accounting import ActivityInterval, Gap

GAP_NS = 20_000_000
"""Shortest gap between two steps that gets a row."""
_MOST = (1 << 63) - 1
"""Largest number in a column."""
ShapeKey = tuple[int, str, int, int, int, str, int]
"""Process, mode, kind, layout, whether virtual, sizes and why a device time is missing."""


@dataclass(slots=True)
class SecondOfSteps:
    """What a batch adds to the tally of one second."""

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of STEP_COLUMNS."""
    series: list[tuple[str, int]] = field(default_factory=list)
    """Values of further series of these steps, and those of earlier steps that are known only now."""


@dataclass
class WriteBatch:
    """Rows that are written together."""

    now_s: int = 0
    """The time when they are written (s since the run's start)."""
    definitions: list[tuple[int, int, str]] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of CALL_COLUMNS."""
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of STEP_COLUMNS."""
    collectives: list[tuple[int, ...]] = field(default_factory=list)
    """Rows of COLLECTIVE_COLUMNS."""
    losses: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of LOSS_COLUMNS."""
    communicated: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """Values of COLLECTIVE_SUMS by second, process and definition."""
    events: list[tuple[Any, ...]] = field(default_factory=list)
    characters: int = 0
    """Characters of text in definitions, calls, steps and events."""
    rings: list[RingRow] = field(default_factory=list)
    tallied: dict[tuple[int, TallyKey], SecondOfSteps] = field(default_factory=lambda: defaultdict(SecondOfSteps))
    """Steps by the second they ended in and their tally."""
    spent: dict[tuple[int, int, str, str], int] = field(default_factory=dict)
    """Time (ns) by second, process, mode and activity; negative values subtract."""
    loops: dict[tuple[int, int], LoaderLoop] = field(default_factory=dict)
    """New and changed loops over loaders, by process and number."""
    gaps: list[Gap] = field(default_factory=list)
    waited: list[tuple[int, int, int]] = field(default_factory=list)
    """Late waits for input, which shorten recorded gaps: process, begin, end."""
    joined: list[RankStepWait] = field(default_factory=list)
    """Steps of this or an earlier batch with newly known waits for other ranks."""
    shapes: Counter[ShapeKey] = field(default_factory=Counter)
    """Calls by shape."""
    devices: dict[tuple[int, int, str], list[float]] = field(default_factory=dict)
    """Count, total and highest value by minute (its first second), device and name."""

    @property
    def rows(self) -> int:
        """The number of rows of records."""
        return sum(map(len, (self.definitions, self.calls, self.steps, self.collectives, self.events, self.losses)))

    def add_event(self, number: int, process: int | None, kind: str, t_ns: int | None, text: str) -> None:
        """Add an event; `text`: its JSON."""
        self.events.append((number, process, kind, t_ns, text))
        self.characters += len(text)

    def add_collective(self, number: int, process: int, collected: CollectiveRow) -> None:
        """Add a collective or a sample, and add it to the sums of its second."""
        self.collectives.append((number, process, *collected))
        ended, timed = collected.took >= 0, collected.took >= 0 and collected.definition > 0
        ran = max(collected.took - max(collected.queued, 0), 0) if timed else 0
        values = 1, collected.quantity, int(ended), collected.quantity if timed else 0, ran
        key = max(collected.start // SECOND, 0), process, collected.definition
        found = self.communicated.get(key)
        if found is None:
            self.communicated[key] = list(values)
        else:
            found[:] = [min(total + value, _MOST) for total, value in zip(found, values, strict=True)]

    def add_step(self, key: TallyKey, end_ns: int, row: tuple[Any, ...], series: Iterable[tuple[str, int]]) -> None:
        """Add a step, also to its tally. `row`: of STEP_COLUMNS; `series`: values of further series."""
        self.steps.append(row)
        ended = self.tallied[end_ns // SECOND, key]
        ended.rows.append(row)
        ended.series += series

    def add_waits(self, joined: Iterable[RankStepWait]) -> None:
        """Add the waits of steps of this or an earlier batch."""
        for one in joined:
            self.joined.append(one)
            self.tallied[one.step.second, one.step.key].series += one.tally_values.items()

    def add_activity_time(self, process: int, spent: Iterable[ActivityInterval]) -> None:
        """Add time of a process's activities."""
        sums = self.spent
        for part in spent:
            activity, mode, begin, end, sign = part
            if sign < 0 and activity == "between":
                self.waited.append((process, begin, end))
            second = begin // SECOND
            if end <= (second + 1) * SECOND:  # the usual case
                key = second, process, mode, activity
                sums[key] = sums.get(key, 0) + sign * (end - begin)
                continue
            for second, ns in part.split_by_second():
                key = second, process, mode, activity
                sums[key] = sums.get(key, 0) + ns

    def add_device_value(self, t_ns: int, device: int, name: str, value: float) -> None:
        """Add one value of a sample."""
        key = t_ns // 60_000_000_000 * 60, device, name
        found = self.devices.get(key)
        if found is None:
            self.devices[key] = [1, value, value]
        else:
            found[0] += 1
            found[1] += value
            found[2] = max(found[2], value)
