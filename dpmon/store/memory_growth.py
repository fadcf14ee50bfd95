"""Whether the memory of a run (on the host, and on each GPU) grows from step to step, when it is full, and what grows.

Memory rises for reasons that are no leak. The estimate resists each of them:

- first steps, caches that fill up, larger batches: only the settled part of the run counts. It begins after the warm-up
  steps and after the last batch that was larger than all before; of the rest, the first quarter is left out.
- evaluations, checkpoints, garbage that waits for its collection: the settled part is divided into blocks of equally
  many steps. The value of a block is the lowest of its samples, or of a later block: only what stays counts.
- single jumps (a segment of an allocator, workers that start again): the growth is the trimmed mean of the
  differences between blocks, which one or two large ones do not change. Its 95% interval is Yuen's, from the spread of
  the differences, which are independent even if memory changes by random steps; the residuals of a line are not.
- a cache by shape, and all that levels off: each third of the settled part must grow at 60% of the mean rate or more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.record.schema import SECOND, STEP, WARM_UP_STEPS, step_kind
from dpmon.store.events import IS_SAMPLE, read_events, read_newest_memory
from dpmon.store.table import LAST_NS
from dpmon.store.tally_tables import read_tally_rows
from dpmon.store.time_buckets import WIDTHS

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

HOST_NAME = "host"
NEWEST_S = 3600
"""Growth is estimated over the newest hour."""
MIN_POINTS, MIN_STEPS = 9, 30
"""Fewest samples and steps of the settled part."""
MIN_THIRD_SHARE = 0.6
MIN_ADDED_BYTES, MIN_ADDED_SHARE = 64 << 20, 0.1
"""Growth matters from these bytes on, and from this share of the memory before it (or of the memory left, if that is
less). Smaller growth may be a long warm-up."""
HORIZON_S = 24 * 3600
"""Growth matters if it reaches the limit within a day: dpmon does not know how many steps will follow."""
_T_975 = {9: 2.571, 15: 2.262}
"""Student's t (97.5%) by number of blocks, for their trimmed differences."""
_MIN_LARGER = 1.02
_MAX_PROCESSES, _MAX_GPUS = 16, 64
_MIN_BUCKETS = 60
"""Fewest time buckets whose steps are counted; in between, steps are interpolated."""
Samples = Sequence[tuple[float, float]]
"""Times (ns since the run's start), or steps so far, and bytes; in order."""


class Growth(NamedTuple):
    """The growth over the settled part, in bytes per step, with its 95% interval."""

    step_bytes: float
    low_bytes: float
    high_bytes: float
    lasts: bool
    """Whether each third of the settled part grows."""
    added_bytes: float
    """Growth over the whole settled part."""
    steps: float
    """Number of steps in the settled part."""


class MemoryTrend(NamedTuple):
    """The memory of the run's processes on a host, or of the tensors of one process on a GPU, and its growth."""

    device: str
    """HOST_NAME, or torch's name of the GPU."""
    process: int | None
    """The process that uses the GPU; None for a host."""
    growth: Growth
    steps_per_s: float
    used_bytes: float
    """Memory in use at the newest sample."""
    node: int | None = None
    """The number of the host's node; None on one machine, and for a GPU."""
    limit: str | None = None
    """What limits it: host, cgroup, RLIMIT_AS, RLIMIT_DATA or GPU; None if unknown."""
    limit_bytes: float | None = None
    room_bytes: float | None = None
    """Bytes left until the limit at the newest sample."""

    @property
    def is_growing(self) -> bool:
        """Whether the interval excludes zero, and the growth lasts."""
        return self.growth.lasts and self.growth.low_bytes > 0

    @property
    def steps_left(self) -> int | None:
        """Steps until the limit at this rate; None if it does not grow, or if the limit is unknown."""
        if not self.is_growing or self.room_bytes is None:
            return None
        return int(self.room_bytes / self.growth.step_bytes)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the limit at this rate; None like `steps_left`."""
        return None if self.steps_left is None else self.steps_left / self.steps_per_s

    @property
    def matters(self) -> bool:
        """Whether it grows, has grown much, and reaches the limit within HORIZON_S at this rate."""
        if self.seconds_left is None or self.room_bytes is None or self.seconds_left > HORIZON_S:
            return False
        base_bytes = min(self.used_bytes - self.growth.added_bytes, self.room_bytes)
        return self.growth.added_bytes >= max(MIN_ADDED_BYTES, MIN_ADDED_SHARE * base_bytes)


def estimate_growth(points: Samples) -> Growth | None:
    """Return the growth over points (steps so far, bytes) of the settled part; None if they are too few."""
    if len(points) < MIN_POINTS or points[-1][0] - points[0][0] < MIN_STEPS:
        return None
    blocks = 15 if len(points) >= 30 else 9
    first_step, last_step = points[0][0], points[-1][0]
    block_steps = (last_step - first_step) / blocks
    ends = [bisect_left(points, (first_step + index * block_steps, 0.0)) for index in range(1, blocks)]
    lows: list[float] = []
    for begin, end in pairwise((0, *ends, len(points))):  # a block without samples has the value before it
        lows.append(min(used for _, used in points[min(begin, end - 1) : end]))
    for index in reversed(range(blocks - 1)):
        lows[index] = min(lows[index], lows[index + 1])
    differences = sorted(after - before for before, after in pairwise(lows))
    cut = len(differences) // 6
    middle = differences[cut:-cut]
    winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
    margin = _T_975[blocks] * stdev(winsorized) * sqrt(len(winsorized)) / len(middle)
    rate, added = fmean(middle), lows[-1] - lows[0]
    thirds = [after - before for before, after in pairwise((lows[0], *lows[blocks // 3 - 1 :: blocks // 3]))]
    lasts = added > 0 and min(thirds) >= MIN_THIRD_SHARE * added / 3
    low, high = (rate - margin) / block_steps, (rate + margin) / block_steps
    return Growth(rate / block_steps, low, high, lasts, added, last_step - first_step)


def read_memory_trends(store: Store) -> list[MemoryTrend]:
    """Return the trend of host memory (of each node), then of each GPU of each process, as far as they are known."""
    rings = [ring for ring in store.rings.values() if ring.process >= 0 and ring.last_steps[store.main_kind]]
    processes = sorted([ring.process for ring in rings], key=store.last_id, reverse=True)[:_MAX_PROCESSES]
    if not processes:
        return []
    steps = _StepCount(store, processes[0])
    trends = _read_host_trends(store, steps)
    for process, event in sorted(read_newest_memory(store, processes).items()):
        devices = [device for device in event.data["devices"] if device.get("allocated_bytes") is not None]
        trends += [_read_gpu_trend(store, steps, process, device) for device in devices]
    return [trend for trend in trends if trend is not None]


class _StepCount:
    """How many steps of the main kind of a process had ended at each time."""

    def __init__(self, store: Store, process: int) -> None:
        end_s = min(store.newest_s + 1, store.until_ns // SECOND)
        widest = max((width for width in WIDTHS if width * _MIN_BUCKETS <= end_s), default=1)
        self._ends: list[tuple[int, int]] = [(0, 0)]
        """Times (ns), and the steps that had ended by then."""
        rows = read_tally_rows(store, 0, end_s, process=process, series=(STEP,), sketches=False, widest=widest)
        for _, _, key, tally in rows:
            if step_kind(key.kind) == store.main_kind:
                end_ns, steps = self._ends[-1]
                self._ends.append((max(end_ns, tally.last_ns or 0), steps + tally.steps))
        self.end_ns, _ = self._ends[-1]
        """The end of the last step. Later, the process may have freed all memory."""
        self.newest_ns = max(self.end_ns - NEWEST_S * SECOND, 0)
        """When the newest hour began."""
        warm_ns = next((end_ns for end_ns, count in self._ends if count > WARM_UP_STEPS), LAST_NS)
        self._settled_ns = max(warm_ns, _last_larger_batch_ns(store, process))

    def _steps_at(self, t_ns: float) -> float:
        index = min(max(bisect_left(self._ends, (t_ns, 0)), 1), len(self._ends) - 1)
        (begin_ns, before), (end_ns, after) = self._ends[index - 1 : index + 1]
        return before + (after - before) * min((t_ns - begin_ns) / max(end_ns - begin_ns, 1), 1)

    def trend(self, device: str, process: int | None, samples: Samples) -> MemoryTrend | None:
        """Return the trend of the settled part of some samples, without its limit; None if they are too few."""
        settled = [(self._steps_at(t_ns), used, t_ns) for t_ns, used in samples if t_ns >= self._settled_ns]
        if not settled:
            return None
        (first_step, _, _), (last_step, used, end_ns) = settled[0], settled[-1]
        settled = [point for point in settled if point[0] >= first_step + (last_step - first_step) / 4]
        growth = estimate_growth([(step, used) for step, used, _ in settled])
        if growth is None:
            return None
        return MemoryTrend(device, process, growth, growth.steps * SECOND / (end_ns - settled[0][2]), used)


def _last_larger_batch_ns(store: Store, process: int) -> int:
    """Return when a tensor that enters or leaves a model was larger than all before, as far as it is known.

    Definitions have no time, but the transaction that wrote them also wrote the tally of their step.
    """
    query = (
        "SELECT seq, (SELECT total(json_extract(size.value, '$[3]')) FROM json_each(definitions.value) AS size)"
        " FROM definitions WHERE process = ? AND value LIKE '[%' ORDER BY number"
    )
    largest, last_seq = 0.0, 0
    for seq, byte_count in store.query(query, (process,)):
        if byte_count > _MIN_LARGER * largest:
            largest, last_seq = byte_count, seq
    rows = store.query("SELECT min(start_s) FROM tallies WHERE width = 1 AND seq >= ?", (last_seq,))
    return next(((start_s - store.origin_s + 1) * SECOND for (start_s,) in rows if start_s is not None), 0)


def _read_host_trends(store: Store, steps: _StepCount) -> list[MemoryTrend | None]:
    names = "run_mem_bytes", "mem_limit", "mem_limit_bytes", "mem_room_bytes"
    values = ", ".join(f"json_extract(json, '$.{name}')" for name in names)
    condition = f"kind = 'host' AND {IS_SAMPLE} AND t_ns BETWEEN ? AND ? ORDER BY t_ns"
    query = f"SELECT process, t_ns, {values} FROM events WHERE {condition}"
    samples: dict[int | None, list[tuple[float, float]]] = {}
    limits: dict[int | None, Sequence[Any]] = {}
    for source, t_ns, used, *limit in store.query(query, (steps.newest_ns, steps.end_ns)):
        if used is not None:
            samples.setdefault(source, []).append((t_ns, used))
            limits[source] = limit
    trends: list[MemoryTrend | None] = []
    for source, (limit, limit_bytes, room_bytes) in limits.items():
        trend = steps.trend(HOST_NAME, None, samples[source])
        if trend is not None:
            node = None if source is None else -1 - source
            trends.append(trend._replace(node=node, limit=limit, limit_bytes=limit_bytes, room_bytes=room_bytes))
    return trends


def _read_gpu_trend(store: Store, steps: _StepCount, process: int, device: Mapping[str, Any]) -> MemoryTrend | None:
    """Return the trend of the tensors of a process on a GPU. `device`: its entry in the newest `memory` record."""
    query = (
        "SELECT t_ns, json_extract(part.value, '$.allocated_bytes') AS used FROM events,"
        " json_each(events.json, '$.devices') AS part WHERE kind = 'memory' AND process = ? AND t_ns BETWEEN ? AND ?"
        " AND json_extract(part.value, '$.device') = ? AND used IS NOT NULL ORDER BY t_ns"
    )
    name = device["device"]
    samples = store.query(query, (process, steps.newest_ns, steps.end_ns, name))
    trend = steps.trend(name, process, samples)
    if trend is None or store.is_mirror:  # in a mirror, the samples of GPUs have the process numbers of their node
        return trend
    for gpu in read_events(store, "device", limit=_MAX_GPUS):
        total, in_use = gpu.data.get("mem_total_bytes"), gpu.data.get("mem_used_bytes")
        is_same = {"process": process, "device": name} in (gpu.data.get("ordinals") or ())
        if is_same and total is not None and in_use is not None:
            # The allocator gives its cache to new tensors before it asks the driver for more.
            cached = (device["reserved_bytes"] or device["allocated_bytes"]) - device["allocated_bytes"]
            room = total - in_use - (gpu.data.get("mem_reserved_bytes") or 0) + cached
            trend = trend._replace(limit="GPU", limit_bytes=total, room_bytes=max(room, 0))
    return trend
