"""The newest calls of a process: each root's last call, and the times of its replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.run_snapshot import CallTimings, TimePercentiles
from dpmon.record.record_types import Call, CallParts, CallRow, Step
from dpmon.record.schema import device_series, is_device_series, step_kind
from dpmon.store import quantile_sketch
from dpmon.store.quantile_sketch import Counts
from dpmon.store.query_results import replica_series, stage_series
from dpmon.store.tally import Tally, TallyKey

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

Root = tuple[str, str | None]
CALLS_READ = 256
STEP_CALLS_READ = 64
PARTS_KEPT = 8
"""Most calls of one root in a step that are shown separately."""
_TIMED = 64
"""Number of newest calls that provide times if no tally has them."""


class _RecentCall(NamedTuple):
    """A call with its step."""

    step: Step
    row: CallRow

    @property
    def signature(self) -> tuple[int, str, int]:
        """What similar calls have in common."""
        return self.row.layout, self.row.mode, self.step.kind


class RecentCalls:
    """The newest calls of one process."""

    def __init__(self, store: Store, process: int, limit: int = CALLS_READ) -> None:
        """Read the newest steps that have `limit` calls together."""
        self._store = store
        self._steps = store.called_steps(process, limit)
        self._calls: dict[int, Call | None] = {}
        """Full calls by number."""

    def _call(self, recent: _RecentCall) -> Call | None:
        """Return the full call; None if a definition is lost."""
        number = recent.row.call
        if number not in self._calls:
            self._calls[number] = self._store.call(*recent)
        return self._calls[number]

    def calls_of(self, step: Step | None) -> tuple[Call, ...]:
        """Return the calls of the last step, the oldest first; at most the last STEP_CALLS_READ."""
        if step is None:
            return ()
        rows = [recent for recent in self._steps if (recent.step, recent.kind) == (step.step, step.kind)][:1]
        calls = [self._call(_RecentCall(recent, row)) for recent in rows for row in recent.calls[-STEP_CALLS_READ:]]
        return tuple(call for call in calls if call is not None)

    def timings(self, tallies: Mapping[TallyKey, Tally], mode: str, *, timed: bool = True) -> dict[Root, CallTimings]:
        """Return each root's last call with its times; the root called last first.

        `tallies`: of the time range. `mode`: the mode of the last step. If no tally has the times of a call, as in the
        first step, the newest calls provide them. `timed` False: without times.
        """
        roots: dict[int, Root] = {}
        by_root: dict[Root, list[_RecentCall]] = {}
        for recent in (_RecentCall(step, row) for step in self._steps for row in reversed(step.calls)):
            layout = recent.row.layout
            if layout not in roots and (call := self._call(recent)) is not None:
                roots[layout] = call.root, call.via
            if layout in roots:
                by_root.setdefault(roots[layout], []).append(recent)
        positions = self._group_by_position(roots)
        timings: dict[Root, CallTimings] = {}
        for root, calls in by_root.items():
            call = self._call(calls[0])
            if call is not None and not timed:
                timings[root] = CallTimings(call)
            elif call is not None:
                nth = [self._timings_from_calls(position) for position in positions.get(root, ())]
                known = tuple(timing for timing in nth if timing is not None)
                times, device_ns = _timings_from_tallies(calls[0], call, tallies, mode)
                timing = CallTimings(call, times, device_ns) if any(times) else self._timings_from_calls(calls)
                if timing is not None:
                    timings[root] = replace(timing, parts=known if len(known) > 1 else ())
        return timings

    def _group_by_position(self, roots: Mapping[int, Root]) -> dict[Root, list[list[_RecentCall]]]:
        """Return for each root the first calls of all steps, the second calls of all steps, and so on; newest first."""
        positions: dict[Root, list[list[_RecentCall]]] = {}
        for step in self._steps:
            counts: Counter[Root] = Counter()
            for row in step.calls:
                root = roots.get(row.layout)
                if root is None or counts[root] == PARTS_KEPT:
                    continue
                parts = positions.setdefault(root, [])
                if counts[root] == len(parts):
                    parts.append([])
                parts[counts[root]].append(_RecentCall(step, row))
                counts[root] += 1
        return {root: parts for root, parts in positions.items() if len(parts) > 1}

    def _timings_from_calls(self, calls: Sequence[_RecentCall]) -> CallTimings | None:
        """Return the newest of `calls`, with the times of the similar ones among them."""
        last = self._call(calls[0])
        if last is None:
            return None
        similar_rows = [recent.row for recent in calls if recent.signature == calls[0].signature]
        return _timings_of_rows(last, similar_rows[:_TIMED])


def _timings_of_rows(last: Call, rows: Iterable[CallRow]) -> CallTimings:
    """Return the last of some similar calls with the times of all of them, except those that failed."""
    host_ns: dict[int, list[float]] = {}
    device_ns: dict[int, list[float]] = {}
    for row in rows:
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
    recent: _RecentCall, call: Call, tallies: Mapping[TallyKey, Tally], mode: str
) -> tuple[tuple[TimePercentiles | None, ...], dict[int, float]]:
    """Return the times of a call's replicas or stages, and their median device times, in the time range."""
    matching, row = _matching_tallies(recent, tallies, mode), recent.row
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


def _matching_tallies(recent: _RecentCall, tallies: Mapping[TallyKey, Tally], mode: str) -> list[Tally]:
    """Return the tallies of steps that may include such a call: a root that cannot be split also runs in dp steps."""
    kind = recent.step.kind
    for name in (mode, recent.row.mode):
        matching = [tally for key, tally in tallies.items() if (key.mode, step_kind(key.kind)) == (name, kind)]
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
