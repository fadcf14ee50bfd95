"""The newest calls of a process: each root's last call, and the times of its replicas."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from dpmon.model.layouts import PartTimes
from dpmon.record.record_types import Call, CallRow, Replica, Stage, Step
from dpmon.record.schema import is_device_series, step_kind
from dpmon.sanitize import sanitize_line
from dpmon.store.steps import read_called_steps, resolve_call
from dpmon.store.tally import SeriesStats, Tally
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


@dataclass(frozen=True, slots=True)
class TimedPart(PartTimes):
    """A replica or a stage of a call, with its times in similar calls."""

    part: Replica | Stage
    time: SeriesStats = field(default_factory=SeriesStats)
    on_device: SeriesStats = field(default_factory=SeriesStats)
    reasons: Counter[str] = field(default_factory=Counter)
    """Empty: a panel gives the reasons of the call."""

    @property
    def number(self) -> int:
        """The number of the replica or the stage."""
        return self.part.stage if isinstance(self.part, Stage) else self.part.replica

    @property
    def device(self) -> str:
        """Its device; clean."""
        return sanitize_line(self.part.device, 20)


@dataclass(frozen=True, slots=True)
class CallTimings:
    """The last call of one root, and its replicas' times in similar calls."""

    last: Call
    timed: tuple[TimedPart, ...] = ()
    """The replicas, or the stages of a model that is split over several devices."""
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
            (step, row), *_ = rows
            call = self._call(step, row)
            if call is not None and not timed:
                timings[root] = CallTimings(call)
            elif call is not None:
                timed_parts = _parts_from_tallies(row, call, _tallies_of_kind(step.kind, (mode, row.mode), tallies))
                if not any(part.time.count for part in timed_parts):
                    timed_parts = _parts_from_calls(call, rows)
                nth = [
                    CallTimings(nth_call, _parts_from_calls(nth_call, nth_rows))
                    for nth_rows in positions.get(root, ())
                    if (nth_call := self._call(*nth_rows[0])) is not None
                ]
                timings[root] = CallTimings(call, timed_parts, tuple(nth) if len(nth) > 1 else ())
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


def _parts_from_calls(call: Call, rows: Sequence[_RowInStep]) -> tuple[TimedPart, ...]:
    """Return the parts of the newest of some calls, with the times of the similar ones among them."""
    (newest_step, newest), *_ = rows
    signature = newest.layout, newest.mode, newest_step.kind
    similar_rows = [row for step, row in rows if (row.layout, row.mode, step.kind) == signature]
    host_ns: defaultdict[int, list[int]] = defaultdict(list)
    device_ns: defaultdict[int, list[int]] = defaultdict(list)
    for row in similar_rows[:_TIMED]:
        parts = row.parts_or_replica
        times = [] if row.failed else [ran_ns for *_, ran_ns in parts.replicas or parts.stages]
        for index, (ran_ns, device_ms) in enumerate(zip_longest(times, parts.replica_or_stage_device_ms[: len(times)])):
            if ran_ns is not None:  # a stage that ended
                host_ns[index].append(ran_ns)
            if device_ms is not None:
                device_ns[index].append(round(device_ms * 1e6))
    parts_of_call: Sequence[Replica | Stage] = call.replicas or call.stages
    return tuple(
        TimedPart(part, SeriesStats.of(host_ns[index]), SeriesStats.of(device_ns[index]))
        for index, part in enumerate(parts_of_call)
    )


def _parts_from_tallies(row: CallRow, call: Call, tallies: Sequence[Tally]) -> tuple[TimedPart, ...]:
    """Return the parts of a call with their times in some tallies."""
    timed_parts: list[TimedPart] = []
    for index, replica in enumerate(call.replicas):
        timed_parts.append(TimedPart(replica))
        timed_parts[-1].add_times(tallies, replica_series(row.layout, index))
    for index, (stage, (number, *_)) in enumerate(zip(call.stages, row.parts_or_replica.stages, strict=True)):
        any_sizes = stage_series(row.layout, index, number, 0, 0).removesuffix("0 0")
        names = {name for tally in tallies for name in tally.stats if name.startswith(any_sizes)}
        timed_parts.append(TimedPart(stage))
        timed_parts[-1].add_times(tallies, *(name for name in names if not is_device_series(name)))
    return tuple(timed_parts)


def _tallies_of_kind(kind: int, modes: Iterable[str], tallies: Mapping[TallyKey, Tally]) -> list[Tally]:
    """Return the tallies of the first mode with steps of this kind: a root that cannot be split also runs in dp steps.

    `modes`: the mode of the last step, then that of the call.
    """
    for mode in modes:
        matching = [tally for key, tally in tallies.items() if (key.mode, step_kind(key.kind)) == (mode, kind)]
        if matching:
            return matching
    return []
