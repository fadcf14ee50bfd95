"""What one transaction adds to a history: rows, and the steps and times for its tallies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dpmon.record.schema import SECOND
from dpmon.store.loops import LoaderLoop
from dpmon.store.shapes import CallShape
from dpmon.store.steps import STEPS, StepRow
from dpmon.store.sync_passes import SyncStep
from dpmon.store.table import RowT, StoreTable
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import SecondOfSteps
from dpmon.store.time_accounting import ActivityInterval


@dataclass
class WriteBatch:
    """Rows that are written in one transaction."""

    origin_s: int = 0
    """The second of the run's start (dpmon.store.time_buckets)."""
    rows: dict[StoreTable[Any], list[Any]] = field(default_factory=lambda: defaultdict(list))
    """By table."""
    steps_by_tally: dict[tuple[int, TallyKey], SecondOfSteps] = field(
        default_factory=lambda: defaultdict(SecondOfSteps)
    )
    """By second and key of the tally: the steps that ended in that second."""
    activity_ns: dict[tuple[int, int, str, str], int] = field(default_factory=dict)
    """Time (ns) by second, process, mode and activity. Negative values are subtracted."""
    loops: dict[tuple[int, int], LoaderLoop] = field(default_factory=dict)
    """New and changed loader loops, by process and number."""
    late_input_waits: list[tuple[int, int, int]] = field(default_factory=list)
    """Late input waits, which shorten recorded gaps, as (process, start, end)."""
    sync_steps: list[SyncStep] = field(default_factory=list)
    """Steps that wait for the steps of other ranks."""
    shapes: Counter[CallShape] = field(default_factory=Counter)
    """Calls by shape."""

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return sum(map(len, self.rows.values()))

    def second_of(self, time_ns: int) -> int:
        """Return the second of the time buckets for a time (ns since the run's start)."""
        return time_ns // SECOND + self.origin_s

    def add(self, table: StoreTable[RowT], row: RowT) -> None:
        """Add a row."""
        self.rows[table].append(row)

    def add_step(self, key: TallyKey, row: StepRow, series: Iterable[tuple[str, int]]) -> None:
        """Add a step, also to its tally. `series`: values of further series."""
        self.add(STEPS, row)
        second_of_steps = self.steps_by_tally[self.second_of(row.end_ns), key]
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
                key = second + self.origin_s, process, mode, activity
                sums[key] = sums.get(key, 0) + sign * (end_ns - start_ns)
                continue
            for second, ns in interval.split_by_second():
                key = second + self.origin_s, process, mode, activity
                sums[key] = sums.get(key, 0) + ns
