"""The samples of GPUs and of the host: the last minutes, the peak memory of each mode, and the whole run."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.model.device_memory import memory_by_device
from dpmon.model.run_events import ModeChange
from dpmon.record.safe_json import number_member
from dpmon.record.schema import SECOND
from dpmon.store.device_rollups import DeviceRollup
from dpmon.store.events import ChartSample, read_chart_samples, read_newest_memory, read_sample
from dpmon.store.node_table import NODE_DEVICES
from dpmon.store.table import LAST_NS

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

HISTORY_S = 640
"""Seconds of samples that the charts need."""
_GAP_S = 5
"""Shortest time without a sample that is shown as a gap. In a shorter one, the last value is repeated."""
_HOST = -1
_MODES_SEARCHED = 16
"""Number of times in a mode that are searched for peaks."""
_Values = tuple[float | None, float | None, float | None]
POINTS = 400
"""Most time buckets per device."""
_HIGHEST = {
    "mem_used_bytes": "mem_used_max",
    "mem_run_bytes": "mem_run_max",
    "run_mem_bytes": "mem_run_max",  # of the host
    "mem_total_bytes": "mem_total",
    "temperature_c": "temperature_max",
    "power_w": "power_max",
}
"""Members of records that are reported by their highest value, and the fields of DeviceUsage that hold it."""


class DeviceHistory(NamedTuple):
    """The newest sample of a GPU, or of the host, and its histories: one value per second, None if unknown."""

    data: Mapping[str, object] = {}
    t_ns: int | None = None
    second: int = -1
    """Time of the newest value."""
    util: tuple[float | None, ...] = ()
    """Utilization in per cent."""
    mem: tuple[float | None, ...] = ()
    """Used memory in per cent of the total."""
    power: tuple[float | None, ...] = ()
    """Watts."""

    @property
    def mem_pct(self) -> float | None:
        """Used memory in the newest sample, in per cent of the total."""
        used, total = number_member(self.data, "mem_used_bytes"), number_member(self.data, "mem_total_bytes")
        return used / total * 100 if used is not None and total else None


@dataclass(slots=True)
class _DeviceWindow:
    """The newest sample of one device and its values, one per second."""

    id: int = 0
    t_ns: int = -(1 << 63)
    data: Mapping[str, object] = field(default_factory=dict)
    values: deque[_Values] = field(default_factory=lambda: deque(maxlen=HISTORY_S))

    def add(self, sample: ChartSample) -> None:
        if sample.t_ns < self.t_ns:
            return
        used, total = sample.mem_used, sample.mem_total
        missing = sample.t_ns // SECOND - self.t_ns // SECOND - 1 if self.values else 0
        if missing < 0:  # a second sample in the same second
            self.values.pop()
        elif missing:
            last = self.values[-1] if missing < _GAP_S else (None, None, None)
            self.values.extend([last] * min(missing, HISTORY_S))
        share = used / total * 100 if used is not None and total else None
        self.values.append((sample.util, share, sample.power))
        self.id, self.t_ns = sample.id, sample.t_ns

    def as_history(self) -> DeviceHistory:
        util, mem, power = zip(*self.values, strict=True)
        return DeviceHistory(self.data, self.t_ns, self.t_ns // SECOND, util, mem, power)


@dataclass(slots=True)
class DeviceSampleCache:
    """Reads the samples of the last minutes and caches them: each is read once."""

    _tracks: dict[int, _DeviceWindow] = field(default_factory=dict)
    _last_id: int = 0
    _until_ns: int = -1
    _node: int | None = None

    def read(self, store: Store, node: int | None = None) -> None:
        """Read the new samples up to the time of `store`; `node`: those of a node of several."""
        if store.until_ns < self._until_ns or node != self._node:
            self._tracks, self._last_id = {}, 0
        self._until_ns, self._node = store.until_ns, node
        for sample in read_chart_samples(store, HISTORY_S * SECOND, self._last_id, node):
            self._last_id = max(self._last_id, sample.id)
            self._tracks.setdefault(sample.device, _DeviceWindow()).add(sample)
        for track in self._tracks.values():
            event = read_sample(store, track.id)
            members = {} if event is None else event.data
            track.data = {name: value for name, value in members.items() if value is not None}

    def devices(self) -> dict[int, DeviceHistory]:
        """Return the GPUs by index; on one of several nodes, by their index there."""
        return {index % NODE_DEVICES: track.as_history() for index, track in self._tracks.items() if index != _HOST}

    def host_history(self) -> DeviceHistory:
        """Return the host; without data if it was not sampled."""
        return self._tracks[_HOST].as_history() if _HOST in self._tracks else DeviceHistory()


# ------------------------------------------------------------------------------------------------ memory by mode


def mode_starts(changes: Iterable[ModeChange], process: int) -> list[tuple[str, int]]:
    """Return the modes of a process and their starts (ns), in order.

    A process with several roots is in dp while one of them is.
    """
    by_root: dict[str, str] = {}
    starts: list[tuple[str, int]] = []
    for change in changes:
        if change.process == process and change.t_ns is not None:
            by_root[change.root] = change.mode
            mode = "dp" if "dp" in by_root.values() else change.mode
            if not starts or starts[-1][0] != mode:
                starts.append((mode, change.t_ns))
    return starts


def read_peaks_by_mode(store: Store, process: int, starts: Sequence[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Return torch's peak of allocated memory (bytes) by mode and device, for the modes in which it rose.

    The peak never falls, so that of a mode which needs less than an earlier one is unknown. `starts`: of each mode.
    """
    peaks_by_mode: dict[str, dict[str, int]] = {mode: {} for mode, _ in starts}
    recent = starts[-_MODES_SEARCHED:]
    highest = _read_peaks(store, process, recent[0][1]) if len(recent) < len(starts) else {}
    for (mode, _), end_ns in zip(recent, [*(start_ns for _, start_ns in recent[1:]), LAST_NS], strict=True):
        for device, peak in _read_peaks(store, process, end_ns).items():
            if peak > highest.get(device, 0):
                highest[device] = peaks_by_mode[mode][device] = peak
    return peaks_by_mode


def _read_peaks(store: Store, process: int, until_ns: int) -> dict[str, int]:
    """Return torch's peak of allocated memory (bytes) until a time, by device."""
    event = read_newest_memory(store, [process], until_ns).get(process)
    rows = memory_by_device([] if event is None else [event.data])
    return {row.device: row.peak for row in rows if row.peak is not None}


# ------------------------------------------------------------------------------------------------ over the whole run


@dataclass(slots=True)
class DeviceUsage:
    """One GPU, or the host as a device (index below 0), over the run; None for unknown values."""

    index: int
    name: str | None = None
    uuid: str | None = None
    called: str | None = None
    """Its name in the run's processes, such as cuda:0."""
    of_run: bool | None = None
    samples: int = 0
    util: array[float] = field(default_factory=lambda: array("d"))
    """Without the samples in pauses."""
    clocks: array[float] = field(default_factory=lambda: array("d"))
    """Clocks of the GPU (MHz), without the samples in pauses."""
    mem_used_max: float | None = None
    mem_run_max: float | None = None
    mem_total: float | None = None
    temperature_max: float | None = None
    power_max: float | None = None
    throttled: Counter[str] = field(default_factory=Counter)
    """Number of samples in which the GPU was throttled, by reason."""
    throttle_samples: int = 0
    """Number of samples in which the reasons are known."""
    width: float = 1.0
    sums: dict[int, list[float]] = field(default_factory=dict)
    """By interval of `width` seconds: sum and number of utilizations, sum and number of memory values (bytes)."""

    @property
    def util_median(self) -> float | None:
        """The median of `util`."""
        return median(self.util) if self.util else None

    def points(self) -> list[tuple[int, float | None, float | None]]:
        """Return the middle (ns) of each bucket, its mean utilization (per cent) and its mean memory in use (bytes)."""
        return [
            (
                int((index + 0.5) * self.width * 1e9),
                util / util_count if util_count else None,
                used / used_count if used_count else None,
            )
            for index, (util, util_count, used, used_count) in sorted(self.sums.items())
        ]

    def identify(self, data: Mapping[str, Any]) -> None:
        """Update the names of a GPU, and the reasons why it was throttled."""
        self.name, self.uuid = data.get("name") or self.name, data.get("uuid") or self.uuid
        if (of_run := data.get("of_run")) is not None:
            self.of_run = bool(self.of_run) or of_run
        if ordinals := data.get("ordinals"):
            self.called = ordinals[0]["device"]
        if (throttle := data.get("throttle")) is not None:
            self.throttle_samples += 1
            self.throttled.update(throttle)

    def update_maximum(self, key: str, value: float) -> None:
        """Raise the highest value of a metric, which is named as in the records."""
        name = _HIGHEST[key]
        previous = getattr(self, name)
        setattr(self, name, value if previous is None else max(previous, value))

    def add_to_bucket(self, seconds: float, util: tuple[float, int], used: tuple[float, int]) -> None:
        """Add sums of utilization and memory, with their numbers of samples, to the bucket of their time."""
        added = (*util, *used)
        sums = self.sums.setdefault(int(seconds / self.width), [0.0, 0.0, 0.0, 0.0])
        sums[:] = [a + b for a, b in zip(sums, added, strict=True)]
        while len(self.sums) > POINTS:
            narrow_sums, self.sums = self.sums, {}
            self.width *= 2
            for index, values in narrow_sums.items():
                sums_of_bucket = self.sums.setdefault(index // 2, [0.0, 0.0, 0.0, 0.0])
                sums_of_bucket[:] = [a + b for a, b in zip(sums_of_bucket, values, strict=True)]


class HostUsage(NamedTuple):
    """The CPU use of one node over the run: medians of `samples`; None for unknown values."""

    samples: int
    cpus: int
    cpu_pct: float
    """Use of all CPU cores in per cent."""
    others: float
    """CPU cores that other processes keep busy."""
    own: float
    """CPU cores that the run's processes keep busy."""
    load: float | None
    """Threads that ran or wanted to run."""
    machines: int = 1
    """Number of nodes that were sampled; the other values are those of one of them."""


class DeviceUsageBuilder:
    """Builds extremes, medians, and means per time bucket, from samples in order of time."""

    def __init__(self, paused: Sequence[tuple[int, int]] = ()) -> None:
        """`paused`: times (ns) that no median covers, in order."""
        self._paused = paused
        self.tracks: dict[int, DeviceUsage] = {}
        """Every sampled device by its index; the host has -1, those of several machines -1, -2, ..."""
        self.last_ns = 0
        """Time of the last sample."""
        self.gpu_absent: str | None = None
        """Why there are no GPUs."""
        self._cpus = 0
        self._use, self._others, self._own, self._load = (array("d") for _ in range(4))
        """One value per host sample outside pauses."""
        self._at, self._spent = array("q"), array("d")
        """Times of samples (ns), and the CPU time (ns) that the run has used by then, since the first one."""

    def _track(self, index: int) -> DeviceUsage:
        if index not in self.tracks:
            self.tracks[index] = DeviceUsage(index)
        return self.tracks[index]

    def _in_pause(self, t_ns: int) -> bool:
        index = bisect_right(self._paused, t_ns, key=lambda span: span[0]) - 1
        return index >= 0 and t_ns < self._paused[index][1]

    def add_sample(self, kind: str, data: Mapping[str, Any]) -> None:
        """Add a `device` or `host` record."""
        track = self._track(data["index"] if kind == "device" else _HOST - (data.get("node") or 0))
        track.samples += 1
        t_ns, used = int(data["t_s"] * SECOND), data.get("mem_used_bytes")
        util, paused = data.get("util_pct" if kind == "device" else "cpu_pct"), self._in_pause(t_ns)
        if util is not None and not paused:
            track.util.append(util)
        if (clock := data.get("sm_clock_mhz")) is not None and not paused:
            track.clocks.append(clock)
        for key in _HIGHEST:
            if (value := data.get(key)) is not None:
                track.update_maximum(key, float(value))
        if kind == "device":
            track.identify(data)
        else:
            self.gpu_absent = data.get("gpu_absent")
            if not paused:
                self._take_processors(data)
            run_cpu_pct = data.get("run_cpu_pct")
            is_newer = not self._at or t_ns > self._at[-1]
            # A record with a node is of one of several nodes.
            if run_cpu_pct is not None and is_newer and data.get("node") is None:
                self._spent.append(self._spent[-1] + run_cpu_pct / 100 * (t_ns - self._at[-1]) if self._at else 0.0)
                self._at.append(t_ns)
        self.last_ns = max(self.last_ns, t_ns)
        track.add_to_bucket(t_ns / 1e9, _sum_of(util), _sum_of(used))

    def add_rollup(self, row: DeviceRollup) -> None:
        """Add one metric of a minute of deleted samples: its highest value, sum and number."""
        index, track = row.device, self._track(row.device)
        if row.name in _HIGHEST:
            track.update_maximum(row.name, row.high)
        if row.start_s < 0:  # old minutes are summed up without their times
            return
        if row.name == ("cpu_pct" if index <= _HOST else "util_pct"):
            track.add_to_bucket(row.start_s + 30.0, (row.total, row.count), (0.0, 0))
        elif row.name == "mem_used_bytes":
            track.add_to_bucket(row.start_s + 30.0, (0.0, 0), (row.total, row.count))

    def _take_processors(self, data: Mapping[str, Any]) -> None:
        """Add the CPU use, in total and by the run."""
        cpus, use, run_pct, load = (data.get(key) for key in ("cpus", "cpu_pct", "run_cpu_pct", "load_1m"))
        if cpus is None or use is None or run_pct is None:
            return
        self._cpus = cpus
        self._use.append(use)
        self._others.append(max(use * cpus / 100 - run_pct / 100, 0.0))
        self._own.append(run_pct / 100)
        if load is not None:
            self._load.append(load)

    def cpu_time_until(self, t_ns: int) -> float | None:
        """Return the CPU time (ns) of the run's processes from the first sample to a time; None outside the samples."""
        index = bisect_right(self._at, t_ns)
        if not 0 < index < len(self._at):
            return None
        (begin, before), (end, after) = ((self._at[at], self._spent[at]) for at in (index - 1, index))
        return before + (after - before) * (t_ns - begin) / max(end - begin, 1)

    def gpus(self) -> tuple[DeviceUsage, ...]:
        """Return every sampled GPU, without the host."""
        return tuple(track for index, track in sorted(self.tracks.items()) if index > _HOST)

    @property
    def hosts(self) -> tuple[DeviceUsage, ...]:
        """The host as a device (index -1); of several machines, that of each (-1, -2, ...)."""
        return tuple(track for index, track in sorted(self.tracks.items(), reverse=True) if index <= _HOST)

    def processors(self) -> HostUsage | None:
        """Return the machine's processors; None if nothing is known."""
        if not self._use:
            return None
        load = median(self._load) if self._load else None
        medians = median(self._use), median(self._others), median(self._own)
        return HostUsage(len(self._use), self._cpus, *medians, load, len(self.hosts))


def _sum_of(value: float | None) -> tuple[float, int]:
    """Return the sum and number of the known values of one sample."""
    return (0.0, 0) if value is None else (value, 1)
