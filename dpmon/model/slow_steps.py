"""The longest training steps in a time range, and what was long in each.

A step that is long because it waits for a line of input does not count as slow. The supervisor measures starts and ends
of these waits to a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import PHASES, REST
from dpmon.store.loops import find_epoch
from dpmon.store.steps import StepRow, find_first_step_ns, read_longest_training_steps

if TYPE_CHECKING:
    from dpmon.store.step_stats import StepStats
    from dpmon.store.store_queries import Store

INPUT = "input"
"""Named in place of a phase if waits for input took most of the time."""
WAITING_TEXT = "waiting for input"
_SHOWN = {**{phase.name: phase.display_name for phase in PHASES}, REST: "forward"}


class SlowStep(NamedTuple):
    """A long step. Of the steps of a sync pass, it is the one that `blame_weight_ns` chooses."""

    process: int
    rank: int | None
    step: int
    start_ns: int
    wall_ns: int
    phase: str | None
    """Screen name of the phase that exceeds its median most; INPUT if waits for input explain most of it."""
    excess_ns: float
    """How much longer that phase was than its median."""
    epoch: int | None = None
    """Number of its epoch; None if unknown."""
    batch: int | None = None
    """Batches used up to its end; None if unknown."""
    batches: int | None = None
    """Batches of the loader; None if unknown."""

    @property
    def end_ns(self) -> int:
        """Its end."""
        return self.start_ns + self.wall_ns


class SlowSteps(NamedTuple):
    """The longest steps of a time range, the longest first."""

    steps: tuple[SlowStep, ...] = ()
    since_ns: int | None = None
    """The start of the oldest step that was read, if older steps of the range were deleted or left out."""


def read_slow_steps(
    store: Store,
    processes: Sequence[int],
    start_ns: int,
    stats: StepStats,
    waits: Sequence[tuple[int | None, int, int]],
    limit: int,
    max_ids: int | None = None,
) -> SlowSteps:
    """Return at most `limit` steps of processes that train together, from `start_ns` to the time of `store`.

    Only training steps in the mode of `stats`, without warm-up steps. `waits`: process, start and end (ns) of each wait
    for input. `max_ids`: number of the newest ids to search; None: all.
    """
    last_id = max(map(store.last_id, processes), default=0)
    first_id = max(map(store.as_of(start_ns).last_id, processes[:1]), default=0)
    searched_id = first_id if max_ids is None else max(first_id, last_id - max_ids)
    rows = read_longest_training_steps(store, limit, processes, stats.mode, searched_id, last_id, start_ns)
    medians = {phase.name: phase.median_ns or 0.0 for phase in stats.phases if phase.ran}
    oldest_ns = None
    if searched_id > first_id or store.pruned:
        oldest_ns = find_first_step_ns(store, processes, searched_id)
    since_ns = oldest_ns if oldest_ns is not None and oldest_ns > start_ns else None
    return SlowSteps(tuple(_slow_step(store, row, medians, waits) for row in rows), since_ns)


def _slow_step(
    store: Store, row: StepRow, medians: dict[str, float], waits: Sequence[tuple[int | None, int, int]]
) -> SlowStep:
    known = row.known
    times = {phase.name: known[phase.name] for phase in PHASES if phase.name in known}
    if "forward" in times:
        times[REST] = times.pop("forward") - sum(times.get(phase.name, 0) for phase in PHASES if phase.of_call)
    excess = {name: time_ns - medians.get(name, 0.0) for name, time_ns in times.items()}
    name = max(excess, key=lambda each: excess[each], default=None)
    excess_ns = 0.0 if name is None else excess[name]
    process_waits = [(start, end) for process, start, end in waits if process == row.process]
    waited_ns = overlap_ns(process_waits, row.start_ns, row.start_ns + row.wall_ns)
    if waited_ns and 2 * waited_ns > excess_ns:
        name, excess_ns = INPUT, float(waited_ns)
    phase = None if name is None or excess_ns <= 0 else _SHOWN.get(name, name)
    rank, (epoch, batches) = store.ranks.get(row.process), find_epoch(store, row.process, row.loop)
    batch = row.loop_batch if epoch is not None else None
    return SlowStep(row.process, rank, row.step, row.start_ns, row.wall_ns, phase, excess_ns, epoch, batch, batches)


def overlap_ns(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """Return how much of the time from `start_ns` to `end_ns` (ns) lies in `spans`, which do not overlap."""
    return sum(max(min(end, end_ns) - max(start, start_ns), 0) for start, end in spans)
