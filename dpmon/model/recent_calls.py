"""The newest calls of a process: each root's last call, and the times of its replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

from dpmon.model.run_snapshot import CallTimings, TimePercentiles
from dpmon.record.history_rows import CallParts, CallRow
from dpmon.record.record_types import Call
from dpmon.record.schema import device_series, is_device_series, step_kind
from dpmon.store import quantile_sketch
from dpmon.store.quantile_sketch import Counts
from dpmon.store.query_results import replica_series, stage_series
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import TallyKey

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

Root = tuple[str, str | None]
CALLS_READ = 256
STEP_CALLS_READ = 64
PARTS_KEPT = 8
"""Most calls of one root in a step that are shown separately."""
_TIMED = 64
"""Number of newest calls that provide times if no tally has them."""


@dataclass(slots=True)
class CallCache:
    """Decodes the calls of one process and caches them."""

    rows: Store
    process: int
    _read: dict[int, Call | None] = field(default_factory=dict)

    def call(self, row: CallRow) -> Call | None:
        """Return the full call; None if a definition is lost."""
        if row.call not in self._read:
            self._read[row.call] = self.rows.call(self.process, row)
        return self._read[row.call]

    def last_step_calls(self) -> tuple[Call, ...]:
        """Return the calls of the last step, oldest first."""
        recent = self.rows.last_calls(self.process, STEP_CALLS_READ)
        return tuple(call for row in reversed(recent) if (call := self.call(row)) is not None)


def build_call_timings(
    calls: CallCache,
    tallies: Mapping[TallyKey, Tally],
    mode: str,
    *,
    limit: int = CALLS_READ,
    timed: bool = True,
) -> dict[Root, CallTimings]:
    """Return each root's last call with its times, among the `limit` newest calls; the root called last first.

    `tallies`: of the time range. `mode`: the mode of the last step. If no tally has the times of a call, as in the
    first step, the newest calls provide them. `timed` False: without times.
    """
    recent = calls.rows.call_rows(calls.process, limit)
    roots: dict[int, Root] = {}
    for row in recent:
        if row.layout not in roots and (call := calls.call(row)) is not None:
            roots[row.layout] = call.root, call.via
    readable = [row for row in recent if row.layout in roots]
    by_root: dict[Root, list[CallRow]] = {}
    for row in readable:
        by_root.setdefault(roots[row.layout], []).append(row)
    parts = _group_by_position(readable, roots, is_oldest_complete=len(recent) < limit)
    timings: dict[Root, CallTimings] = {}
    for root, root_rows in by_root.items():
        call = calls.call(root_rows[0])
        if call is not None and not timed:
            timings[root] = CallTimings(call)
        elif call is not None:
            positions = parts.get(root, ())
            nth = [_timings_from_calls(calls, rows) for rows in positions] if len(positions) > 1 else []
            known = tuple(timing for timing in nth if timing is not None)
            times, device_ns = _timings_from_tallies(root_rows[0], call, tallies, mode)
            timing = CallTimings(call, times, device_ns) if any(times) else _timings_from_calls(calls, root_rows)
            if timing is not None:
                timings[root] = replace(timing, parts=known if len(known) > 1 else ())
    return timings


def _group_by_position(
    recent: Sequence[CallRow], roots: Mapping[int, Root], *, is_oldest_complete: bool
) -> dict[Root, list[list[CallRow]]]:
    """Return for each root the first calls of all steps, the second calls of all steps, and so on; newest first.

    `is_oldest_complete`: the oldest step is complete, so it counts.
    """
    steps: dict[tuple[int, int], list[CallRow]] = {}
    for row in reversed(recent):
        steps.setdefault((row.kind, row.step), []).append(row)
    positions: dict[Root, list[list[CallRow]]] = {}
    for index, step_rows in enumerate(steps.values()):
        if index or is_oldest_complete:
            counts: dict[Root, int] = {}
            for row in step_rows:
                root = roots[row.layout]
                nth = counts[root] = counts.get(root, 0) + 1
                if nth <= PARTS_KEPT:
                    parts = positions.setdefault(root, [])
                    if nth > len(parts):
                        parts.append([])
                    parts[nth - 1].insert(0, row)
    return positions


def _timings_from_calls(calls: CallCache, recent: Sequence[CallRow]) -> CallTimings | None:
    """Return the newest of `recent`, with the times of the similar ones among them."""
    last = calls.call(recent[0])
    if last is None:
        return None
    newest = recent[0]
    signature = newest.layout, newest.mode, newest.kind
    similar_rows = [row for row in recent if (row.layout, row.mode, row.kind) == signature]
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
    row: CallRow, call: Call, tallies: Mapping[TallyKey, Tally], mode: str
) -> tuple[tuple[TimePercentiles | None, ...], dict[int, float]]:
    """Return the times of a call's replicas or stages, and their median device times, in the time range."""
    matching = _matching_tallies(row, tallies, mode)
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


def _matching_tallies(row: CallRow, tallies: Mapping[TallyKey, Tally], mode: str) -> list[Tally]:
    """Return the tallies of steps that may include such a call: a root that cannot be split also runs in dp steps."""
    for name in (mode, row.mode):
        matching = [tally for key, tally in tallies.items() if (key.mode, step_kind(key.kind)) == (name, row.kind)]
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
