"""The newest calls of a process: each root's last call, and the times of its replicas."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.record_types import Call, CallParts, CallRow, Step
from dpmon.record.schema import device_series, is_device_series, step_kind
from dpmon.store import quantile_sketch
from dpmon.store.quantile_sketch import Counts
from dpmon.store.steps import read_called_steps, resolve_call
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import replica_series, stage_series

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

Root = tuple[str, str | None]
_RowInStep = tuple[Step, CallRow]
CALLS_READ = 64
"""Newest calls of a process that are read for each picture; their times in the range come from tallies."""
STEP_CALLS_READ = 64
PARTS_KEPT = 8
"""Most calls of one root in a step that are shown separately."""
_TIMED = 64
"""Number of newest calls that provide times if no tally has them."""


class TimePercentiles(NamedTuple):
    """Times of one replica or stage in ns: 5th percentile, median, 95th percentile, and the number of calls."""

    low: float
    middle: float
    high: float
    calls: int


@dataclass(frozen=True, slots=True)
class CallTimings:
    """The last call of one root, and its replicas' times in similar calls."""

    last: Call
    times: tuple[TimePercentiles | None, ...] = ()
    """Host times, by replica or stage."""
    device_ns: Mapping[int, float] = field(default_factory=dict)
    """Median device time (ns) by replica or stage, if known."""
    parts: tuple[CallTimings, ...] = ()
    """If a step calls this root several times, the timings of its first call in a step, of its second, and so on."""


class RecentCalls:
    """The newest calls of one process."""

    def __init__(self, store: Store, process: int, limit: int = CALLS_READ) -> None:
        """Read the newest steps that have `limit` calls together."""
        self._store = store
        self._steps = read_called_steps(store, process, limit)
        self._calls: dict[int, Call | None] = {}
        """Full calls by number."""

    def _call(self, step: Step, row: CallRow) -> Call | None:
        """Return the full call; None if a definition is lost."""
        if row.call not in self._calls:
            self._calls[row.call] = resolve_call(self._store, step, row)
        return self._calls[row.call]

    def calls_of(self, step: Step) -> tuple[Call, ...]:
        """Return the calls of the last step, the oldest first; at most the last STEP_CALLS_READ."""
        for recent in (step, *self._steps):  # a brief step has no calls of its own
            if recent.calls and (recent.step, recent.kind) == (step.step, step.kind):
                calls = [self._call(recent, row) for row in recent.calls[-STEP_CALLS_READ:]]
                return tuple(call for call in calls if call is not None)
        return ()

    def timings(self, tallies: Mapping[TallyKey, Tally], mode: str, *, timed: bool = True) -> dict[Root, CallTimings]:
        """Return each root's last call with its times; the root called last first.

        `tallies`: of the time range. `mode`: the mode of the last step. If no tally has the times of a call, as in the
        first step, the newest calls provide them. `timed` False: without times.
        """
        roots: dict[int, Root] = {}
        by_root: dict[Root, list[_RowInStep]] = {}
        for step in self._steps:
            for row in reversed(step.calls):
                if row.layout not in roots and (call := self._call(step, row)) is not None:
                    roots[row.layout] = call.root, call.via
                if row.layout in roots:
                    by_root.setdefault(roots[row.layout], []).append((step, row))
        positions = self._group_by_position(roots) if timed else {}
        timings: dict[Root, CallTimings] = {}
        for root, rows in by_root.items():
            call = self._call(*rows[0])
            if call is not None and not timed:
                timings[root] = CallTimings(call)
            elif call is not None:
                nth = [self._timings_from_calls(nth_rows) for nth_rows in positions.get(root, ())]
                known = tuple(timing for timing in nth if timing is not None)
                times, device_ns = _timings_from_tallies(*rows[0], call, tallies, mode)
                timing = CallTimings(call, times, device_ns) if any(times) else self._timings_from_calls(rows)
                if timing is not None:
                    timings[root] = replace(timing, parts=known if len(known) > 1 else ())
        return timings

    def _group_by_position(self, roots: Mapping[int, Root]) -> dict[Root, list[list[_RowInStep]]]:
        """Return for each root the first calls of all steps, the second calls of all steps, and so on; newest first.

        Roots with one call per step are left out, and calls alone.
        """
        positions: dict[Root, list[list[_RowInStep]]] = defaultdict(lambda: [[] for _ in range(PARTS_KEPT)])
        for step in self._steps:
            counts: Counter[Root] = Counter()
            for row in step.calls if step.step > 0 else ():
                root = roots.get(row.layout)
                if root is not None and counts[root] < PARTS_KEPT:
                    positions[root][counts[root]].append((step, row))
                    counts[root] += 1
        return {root: [*filter(None, by_position)] for root, by_position in positions.items() if by_position[1]}

    def _timings_from_calls(self, rows: Sequence[_RowInStep]) -> CallTimings | None:
        """Return the newest of some calls, with the times of the similar ones among them."""
        last, (newest_step, newest) = self._call(*rows[0]), rows[0]
        if last is None:
            return None
        signature = newest.layout, newest.mode, newest_step.kind
        similar_rows = [row for step, row in rows if (row.layout, row.mode, step.kind) == signature]
        host_ns: dict[int, list[float]] = {}
        device_ns: dict[int, list[float]] = {}
        for row in similar_rows[:_TIMED]:
            if row.failed:
                continue
            for index, (ns, device_ms) in enumerate(_times(row.parts_or_replica)):
                if ns is not None:
                    host_ns.setdefault(index, []).append(ns)
                if device_ms is not None:
                    device_ns.setdefault(index, []).append(device_ms * 1e6)
        count = len(last.replicas) or len(last.stages)
        percentiles = tuple(percentiles_of(host_ns.get(index, ())) for index in range(count))
        return CallTimings(
            last, percentiles, {index: median_ns for index, ns in device_ns.items() if (median_ns := median(ns))}
        )


def _times(parts: CallParts) -> list[tuple[int | None, float | None]]:
    """Return the host time in ns (None: it did not end) and device time in ms of each replica or stage of a call."""
    host_ns = [ran_ns for *_, ran_ns in parts.replicas or parts.stages]
    return list(zip_longest(host_ns, parts.replica_or_stage_device_ms[: len(host_ns)]))


def percentiles_of(values: Sequence[float]) -> TimePercentiles | None:
    """Return the spread of times, with the nearest ranks as 5th and 95th percentile; None without times."""
    if not values:
        return None
    ordered = sorted(values)
    low, high = (ordered[max(-int(-fraction * len(ordered) // 1), 1) - 1] for fraction in (0.05, 0.95))
    return TimePercentiles(low, median(ordered), high, len(ordered))


# ------------------------------------------------------------------------------------------------ from tallies


def _timings_from_tallies(
    step: Step, row: CallRow, call: Call, tallies: Mapping[TallyKey, Tally], mode: str
) -> tuple[tuple[TimePercentiles | None, ...], dict[int, float]]:
    """Return the times of a call's replicas or stages, and their median device times, in the time range."""
    matching = _matching_tallies(step.kind, (mode, row.mode), tallies)
    series: list[Collection[str]] = []
    if call.replicas:
        names = (replica_series(row.layout, index) for index in range(len(call.replicas)))
        series = [(name, device_series(name)) for name in names]
    else:
        for index, stage in enumerate(row.parts_or_replica.stages):
            any_sizes = stage_series(row.layout, index, stage[0], 0, 0).removesuffix("0 0")
            series.append({name for tally in matching for name in tally.stats if name.startswith(any_sizes)})
    host_sketches = [
        _merge_sketches(matching, [name for name in names if not is_device_series(name)]) for names in series
    ]
    device_sketches = [
        _merge_sketches(matching, [name for name in names if is_device_series(name)]) for names in series
    ]
    device_medians = {index: quantile_sketch.median(counts) for index, counts in enumerate(device_sketches)}
    return tuple(map(_percentiles_of_sketch, host_sketches)), {
        index: median_ns for index, median_ns in device_medians.items() if median_ns is not None
    }


def _matching_tallies(kind: int, modes: Iterable[str], tallies: Mapping[TallyKey, Tally]) -> list[Tally]:
    """Return the tallies of the first mode with steps of this kind: a root that cannot be split also runs in dp steps.

    `modes`: the mode of the last step, then that of the call.
    """
    for mode in modes:
        matching = [tally for key, tally in tallies.items() if (key.mode, step_kind(key.kind)) == (mode, kind)]
        if matching:
            return matching
    return []


def _merge_sketches(tallies: Iterable[Tally], names: Iterable[str]) -> Counts:
    counts: Counts = {}
    for tally in tallies:
        for name in names:
            if name in tally.stats:
                quantile_sketch.merge(counts, tally.stats[name].counts)
    return counts


def _percentiles_of_sketch(counts: Counts) -> TimePercentiles | None:
    low, high = quantile_sketch.quantiles(counts, (0.05, 0.95))
    median_ns = quantile_sketch.median(counts)
    if low is None or median_ns is None or high is None:
        return None
    return TimePercentiles(low, median_ns, high, sum(counts.values()))
