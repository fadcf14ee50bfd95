"""The steps of a process over time: columns of equal duration for the screen, intervals in a report."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.bucket_answers import BucketAnswers
from dpmon.model.pauses import Span
from dpmon.record.schema import PHASES, REST, SECOND, STEP, STEP_KINDS, TRAINING, step_kind
from dpmon.store.activity_times import read_times
from dpmon.store.tally import Tally
from dpmon.store.tally_tables import read_tally_rows
from dpmon.store.time_buckets import WIDTHS

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

COLUMNS = 640
"""Most columns to read."""
_WIDTHS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400)
"""Possible durations (s) of a column in a picture of the whole run, and of an interval in a report."""
_SERIES = tuple(REST if phase.name == "forward" else phase.name for phase in PHASES)


@dataclass(frozen=True, slots=True)
class Column:
    """The steps of one mode and kind that ended in a time bucket, or in several adjacent ones. Sums in ns."""

    second: int
    """Start of the bucket. In a report, earlier if a step that ended in it was already running and no other ended."""
    mode: str
    count: int = 0
    """Number of steps; 0 if there were none."""
    wall_ns: int = 0
    begin_ns: int = 0
    """Start of its first step."""
    phases: tuple[int, ...] = (0,) * len(PHASES)
    """Sums in the order of PHASES; `forward` is the part outside the phases of its calls."""
    other_kind: str = ""
    """Word for the kind of the steps if it is not the main kind of the run."""
    stalled: bool = False
    """Whether the run was stalled in this bucket, so that no step ended."""
    kind: int = TRAINING
    """A key of STEP_KINDS."""
    end_ns: int = 0
    """End of the bucket, or of a wider stored one in it."""
    longest_ns: int = 0
    samples: int | None = None
    """None if a step has no sample count."""
    elapsed_ns: int = 0
    """In a report, the time (ns) within steps of this kind and between steps in this bucket."""

    @property
    def start_ns(self) -> int:
        """The start of the bucket."""
        return self.second * SECOND


def column_width_s(range_s: int, length_s: int) -> int:
    """Return the seconds per column. `range_s`: the time range; 0: the whole run, which has lasted `length_s`."""
    if range_s:
        return 1
    return next((width for width in _WIDTHS if length_s <= width * COLUMNS), _WIDTHS[-1])


# ------------------------------------------------------------------------------------------------ reading


def read_columns(
    store: Store, answers: BucketAnswers, process: int, start_s: int, end_s: int, width: int
) -> tuple[Column, ...]:
    """Return the columns of a process from `start_s` to `end_s` (the second after the newest step), oldest first."""

    def read(start_s: int, end_s: int) -> dict[int, list[Column]]:
        columns: dict[int, list[Column]] = {}
        for column in _read_columns(store, process, start_s, end_s, width):
            columns.setdefault(column.second, []).append(column)
        return columns

    question = "columns", process, store.main_kind
    return tuple(chain(*answers.read(store, question, width, start_s, end_s, read).values()))


def subtract_input_waits(columns: Sequence[Column], waits: Iterable[Span], width: int) -> tuple[Column, ...]:
    """Return the columns without the waits for input in their steps: such a step begins at the end of its wait."""
    shortened = list(columns)
    for start_ns, end_ns in waits:
        middle_ns = (start_ns + end_ns) // 2  # the recorded ends are those of a poll, so they may lie in other steps
        first = bisect_right(columns, middle_ns // SECOND - width, key=attrgetter("second"))
        for index, column in enumerate(shortened[first : first + 2], first):
            column_end_ns, phases = column.begin_ns + column.wall_ns, list(column.phases)
            if column.begin_ns <= middle_ns < column_end_ns:
                largest = phases.index(max(phases))
                wait_ns = min(min(end_ns, column_end_ns) - max(start_ns, column.begin_ns), phases[largest])
                phases[largest] -= wait_ns
                wall_ns = column.wall_ns - wait_ns
                shortened[index] = replace(column, wall_ns=wall_ns, begin_ns=end_ns, phases=tuple(phases))
    return tuple(shortened)


def _read_columns(store: Store, process: int, start_s: int, end_s: int, width: int) -> list[Column]:
    """Return the steps of a process by start of the bucket of `width` seconds, mode and kind."""
    tallies: dict[tuple[int, str, int], Tally] = {}
    ends_s: dict[int, int] = {}
    rows = read_tally_rows(store, start_s, end_s, process=process, sketches=False, widest=_widest_fitting_width(width))
    for row_start_s, row_width_s, key, tally in rows:
        if (row_start_s >= start_s or start_s <= 0) and tally.steps:  # the first bucket may begin before the run
            second = store.bucket_start(max(row_start_s, start_s), width)
            tallies.setdefault((second, key.mode, step_kind(key.kind)), Tally()).merge(tally)
            ends_s[second] = max(ends_s.get(second, second + width), row_start_s + row_width_s)
    return [
        Column(
            second,
            mode,
            tally.steps,
            tally.stat(STEP).total,
            second * SECOND if tally.first_ns is None else tally.first_ns,
            tuple(tally.stat(name).total for name in _SERIES),
            store.other_kind(kind),
            kind=kind,
            end_ns=ends_s[second] * SECOND,
            longest_ns=tally.high_ns or 0,
            samples=samples.total if (samples := tally.stat("samples")).count == tally.steps else None,
        )
        for (second, mode, kind), tally in sorted(tallies.items())
    ]


def _widest_fitting_width(width: int) -> int:
    """Return the widest stored tallies that fit into intervals of `width` seconds."""
    return max(stored for stored in WIDTHS if width % stored == 0)


# ------------------------------------------------------------------------------------------------ of a whole run

BINS = 400
"""Approximate maximum number of intervals of a run."""


class BinnedSteps(NamedTuple):
    """The steps of a run over time."""

    width_ns: int = 0
    """Width of an interval. An interval is wider if a step in it takes longer."""
    bins: tuple[Column, ...] = ()
    """In order of time."""


def bin_steps(
    store: Store, first_ns: int, last_ns: int, median_ns: float, shown: Mapping[tuple[str, int], int]
) -> BinnedSteps:
    """Return the intervals with steps.

    `shown`: by mode and kind, the process that provides the steps. `median_ns`: the median step; no interval is
    narrower. An interval begins earlier if a step of its kind was already running and no other step of this kind ended.
    All other time without steps is a gap.
    """
    span_ns = max(last_ns - first_ns, 0)
    min_width_s = max(span_ns / BINS, min(median_ns, span_ns)) / SECOND
    width_s = next((width for width in _WIDTHS if width >= min_width_s), _WIDTHS[-1])
    end_s = store.bucket_start(last_ns // SECOND, width_s) + width_s
    bins = []
    for process in sorted(set(shown.values())):
        columns = _read_columns(store, process, store.bucket_start(0, width_s), end_s, width_s)
        known = {(column.second, column.mode, column.kind) for column in columns}
        within, between = _elapsed_by_bin(store, process, end_s, width_s)
        for column in columns:
            start_s, mode, kind = column.second, column.mode, column.kind
            if shown.get((mode, kind)) != process:
                continue
            elapsed = within[start_s, mode, kind] + between[start_s, mode, kind]
            while (previous := (start_s - width_s, mode, kind)) not in known and within[previous] > 0:
                start_s -= width_s
                elapsed += within[previous]
            start_s = max(start_s, first_ns // SECOND)  # a wide tally in place of deleted ones may begin earlier
            bins.append(replace(column, second=start_s, elapsed_ns=elapsed))
    bins.sort(key=attrgetter("end_ns", "mode", "kind"))
    return BinnedSteps(width_s * SECOND, tuple(bins))


def _elapsed_by_bin(
    store: Store, process: int, end_s: int, seconds: int
) -> tuple[Counter[tuple[int, str, int]], Counter[tuple[int, str, int]]]:
    """Return the time (ns) of a process within steps, and between those of the main kind, by interval."""
    within: Counter[tuple[int, str, int]] = Counter()
    between: Counter[tuple[int, str, int]] = Counter()
    width = _widest_fitting_width(seconds)
    for row in read_times(store, 0, end_s, widest=width, process=process):
        start = store.bucket_start(row.start_s, seconds)
        between_ns = sum(row.spent[name] for name in store.between_activities)
        between[start, row.mode, store.main_kind] += max(between_ns, 0)
        for kind, name in STEP_KINDS.items():
            within[start, row.mode, kind] += max(row.spent[name], 0)
    return within, between
