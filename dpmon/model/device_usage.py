"""The samples of GPUs and of the host: the last minutes, the peak memory of each mode, and the whole run."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.device_memory import memory_by_device
from dpmon.model.run_events import ModeChange
from dpmon.record.safe_json import int_member, number_member
from dpmon.record.schema import SECOND
from dpmon.store.device_rollups import DeviceRollup, read_device_minutes
from dpmon.store.events import HOST, DeviceSample, iter_samples, last_sample_ns, read_newest_memory, read_sample
from dpmon.store.node_table import NODE_DEVICES
from dpmon.store.table import LAST_NS

if TYPE_CHECKING:
    from dpmon.model.pauses import Span
    from dpmon.store.store_queries import Store

HISTORY_S = 640
"""Seconds of samples that the charts need."""
_GAP_S = 5
"""Shortest time without a sample that is shown as a gap. In a shorter one, the last value is repeated."""
_MODES_SEARCHED = 16
"""Number of times in a mode that are searched for peaks."""
POINTS = 400
"""Most time buckets per device."""
MIN_THROTTLED_SHARE, MIN_BUSY_PCT = 0.05, 50
"""Smallest share of the samples, because short dips after a burst are usual; smallest median utilization of a GPU whose
clocks matter."""
_HIGHEST = {
    "mem_used_bytes": "mem_used_max",
    "mem_run_bytes": "mem_run_max",
    "run_mem_bytes": "mem_run_max",  # of the host
    "mem_total_bytes": "mem_total",
    "temperature_c": "temperature_max",
    "power_w": "power_max",
}
"""Members of samples that are reported by their highest value, and the fields of DeviceUsage that hold it."""
_FIRST_SUM = {"util_pct": 0, "cpu_pct": 0, "mem_used_bytes": 2}
"""Members of samples that charts of the whole run show, and their first place in DeviceUsage.sums."""

PCIE_LINK = ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")


class DeviceHistory(NamedTuple):
    """The newest sample of a GPU, or of the host, and its histories: one value per second, None if unknown."""

    data: Mapping[str, object] = {}
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
        return _share_pct(number_member(self.data, "mem_used_bytes"), number_member(self.data, "mem_total_bytes"))


def format_pcie_link(data: Mapping[str, object]) -> str:
    """Return the PCIe link of a device record, and its maximum if it is below: "gen 1 x4 of gen 4 x16"."""
    generation, highest, width, widest = (int_member(data, name) for name in PCIE_LINK)
    now, best = f"gen {generation} x{width}", f"gen {highest} x{widest}"
    return now if now == best else f"{now} of {best}"


def _share_pct(used: float | None, total: float | None) -> float | None:
    return used / total * 100 if used is not None and total else None


class DeviceSampleCache:
    """Reads the samples of the last minutes and caches them: each is read once."""

    def __init__(self) -> None:
        self._newest: dict[int, DeviceSample] = {}
        """The newest sample of each device."""
        self._values: dict[int, deque[tuple[float | None, float | None, float | None]]] = {}
        """By device, the utilization, share of memory and power of each second."""
        self._node: int | None = None
        self._until_ns = -1

    def read(self, store: Store, node: int | None = None) -> dict[int, DeviceHistory]:
        """Return the histories up to the time of `store`, by index of the GPU on its node; HOST: the host.

        `node`: the node of several whose devices are returned.
        """
        if store.until_ns < self._until_ns or node != self._node:
            self._newest, self._values = {}, {}
        self._until_ns, self._node = store.until_ns, node
        last_id = max((sample.id for sample in self._newest.values()), default=0)
        since_ns = min(last_sample_ns(store.connection) or 0, store.until_ns) - HISTORY_S * SECOND
        for sample in iter_samples(store, since_ns, after_id=last_id, node=node, for_charts=True):
            self._add(HOST if sample.device < 0 else sample.device % NODE_DEVICES, sample)
        histories = {}
        for index, newest in sorted(self._newest.items()):
            event = read_sample(store, newest.id)
            known = {} if event is None else {name: value for name, value in event.data.items() if value is not None}
            util, mem, power = zip(*self._values[index], strict=True)
            histories[index] = DeviceHistory(known, newest.t_ns // SECOND, util, mem, power)
        return histories

    def _add(self, index: int, sample: DeviceSample) -> None:
        values = self._values.setdefault(index, deque(maxlen=HISTORY_S))
        if (previous := self._newest.get(index)) is not None:
            missing = sample.t_ns // SECOND - previous.t_ns // SECOND - 1
            if sample.t_ns < previous.t_ns:
                return
            if missing < 0:  # a second sample in the same second
                values.pop()
            elif missing:
                last = values[-1] if missing < _GAP_S else (None, None, None)
                values.extend([last] * min(missing, HISTORY_S))
        values.append((sample.use_pct, _share_pct(sample.mem_used_bytes, sample.mem_total_bytes), sample.power_w))
        self._newest[index] = sample


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
    """One GPU, or a host as a device (index below 0), over the run; None for unknown values."""

    index: int
    name: str | None = None
    uuid: str | None = None
    ordinals: set[tuple[int, str]] = field(default_factory=set)
    """The processes of the run that see it, and its name there; empty for a GPU that is divided into MIG instances."""
    called: str | None = None
    """Its name in the run's processes, such as cuda:0."""
    of_run: bool | None = None
    samples: int = 0
    util: array[float] = field(default_factory=lambda: array("d"))
    """Without the samples in pauses."""
    clocks: array[float] = field(default_factory=lambda: array("d"))
    """Clocks of the GPU (MHz), without the samples in pauses; likewise `sm_active`, in per cent."""
    sm_active: array[float] = field(default_factory=lambda: array("d"))
    mem_used_max: float | None = None
    mem_run_max: float | None = None
    mem_total: float | None = None
    temperature_max: float | None = None
    power_max: float | None = None
    throttled: Counter[str] = field(default_factory=Counter)
    """Number of samples in which the GPU was throttled, by reason."""
    throttle_samples: int = 0
    """Number of samples in which the reasons are known."""
    sums: dict[int, list[float]] = field(default_factory=dict)
    """By middle of a bucket (ns): sum and number of utilizations, sum and number of memory values (bytes)."""

    @property
    def util_median(self) -> float | None:
        """The median of `util`."""
        return median(self.util) if self.util else None

    def throttled_share(self, boost_mhz: float | None) -> float:
        """Return the share of this clock (0 to 1) that a busy GPU keeps while it is throttled; 1 if it is not."""
        is_throttled = sum(self.throttled.values()) > MIN_THROTTLED_SHARE * self.throttle_samples
        if boost_mhz is None or not is_throttled or not self.clocks or (self.util_median or 0) < MIN_BUSY_PCT:
            return 1.0
        return min(median(self.clocks) / boost_mhz, 1.0)

    def points(self) -> list[tuple[int, float | None, float | None]]:
        """Return the middle (ns) of each bucket, its mean utilization (per cent) and its mean memory in use (bytes)."""
        return [
            (middle_ns, util / util_count if util_count else None, used / used_count if used_count else None)
            for middle_ns, (util, util_count, used, used_count) in sorted(self.sums.items())
        ]

    def add(self, sample: DeviceSample, bucket_ns: int, *, is_paused: bool) -> None:
        """Add a sample. `bucket_ns`: the middle of its bucket."""
        self.samples += 1
        self.name, self.uuid = sample.name or self.name, sample.uuid or self.uuid
        ordinals = json.loads(sample.ordinals or "[]")
        for ordinal in ordinals[:1]:
            self.called = ordinal["device"]
        if not sample.mig:
            self.ordinals.update((ordinal["process"], ordinal["device"]) for ordinal in ordinals)
        if sample.of_run is not None:
            self.of_run = bool(self.of_run or sample.of_run)
        if sample.throttle is not None:
            self.throttle_samples += 1
            self.throttled.update(json.loads(sample.throttle))
        if sample.use_pct is not None and not is_paused:
            self.util.append(sample.use_pct)
        if sample.sm_clock_mhz is not None and not is_paused:
            self.clocks.append(sample.sm_clock_mhz)
        if sample.sm_active_pct is not None and not is_paused:
            self.sm_active.append(sample.sm_active_pct)
        for name in _HIGHEST:
            self.raise_highest(name, getattr(sample, name))
        for name in _FIRST_SUM:
            self.add_to_bucket(bucket_ns, name, getattr(sample, name))

    def raise_highest(self, name: str, value: float | None) -> None:
        """Raise the highest value of a member of samples."""
        if value is not None:
            previous = getattr(self, _HIGHEST[name])
            setattr(self, _HIGHEST[name], float(value) if previous is None else max(previous, float(value)))

    def add_to_bucket(self, bucket_ns: int, name: str, total: float | None, count: int = 1) -> None:
        """Add the sum of some values of a member of samples to the bucket with this middle, if charts show it."""
        if total is not None and name in _FIRST_SUM:
            sums = self.sums.setdefault(bucket_ns, [0.0, 0, 0.0, 0])
            sums[_FIRST_SUM[name]] += total
            sums[_FIRST_SUM[name] + 1] += count


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


class SampledDevices:
    """The GPUs and hosts of a run, from all its samples."""

    def __init__(self, store: Store, paused: Sequence[Span] = (), since_ns: int = 0) -> None:
        """`paused`: times (ns) that no median covers, in order. `since_ns`: start of the samples."""
        self._by_index: dict[int, DeviceUsage] = {}
        self.last_ns = 0
        """Time of the last sample."""
        self.gpu_absent: str | None = None
        """Why there are no GPUs."""
        self._cpus = 0
        self._use, self._others, self._own, self._load = (array("d") for _ in range(4))
        """One value per host sample outside pauses."""
        self._at, self._spent = array("q"), array("d")
        """Times of samples (ns), and the CPU time (ns) that the run has used by then, since the first one."""
        self._bucket_ns = SECOND
        while self._bucket_ns * POINTS < (last_sample_ns(store.connection) or 0):
            self._bucket_ns *= 2
        for row in read_device_minutes(store):
            self._add_rollup(row)
        for sample in iter_samples(store, since_ns):
            index = bisect_right(paused, sample.t_ns, key=lambda span: span[0]) - 1
            is_paused = index >= 0 and sample.t_ns < paused[index][1]
            self._usage(sample.device).add(sample, self._bucket_of(sample.t_ns), is_paused=is_paused)
            self.last_ns = max(self.last_ns, sample.t_ns)
            if sample.device < 0:
                self._add_host(sample, is_paused=is_paused)

    def _usage(self, index: int) -> DeviceUsage:
        if index not in self._by_index:
            self._by_index[index] = DeviceUsage(index)
        return self._by_index[index]

    def _bucket_of(self, t_ns: int) -> int:
        """Return the middle of the bucket of a time."""
        return t_ns // self._bucket_ns * self._bucket_ns + self._bucket_ns // 2

    def _add_rollup(self, row: DeviceRollup) -> None:
        """Add one member of the deleted samples of a minute: its highest value, sum and number."""
        usage = self._usage(row.device)
        if row.name in _HIGHEST:
            usage.raise_highest(row.name, row.high)
        if row.start_s >= 0:  # old minutes are summed up without their times
            usage.add_to_bucket(self._bucket_of((row.start_s + 30) * SECOND), row.name, row.total, row.count)

    def _add_host(self, sample: DeviceSample, *, is_paused: bool) -> None:
        """Add the CPU use, in total and by the run."""
        self.gpu_absent = sample.gpu_absent
        if sample.run_cpu_pct is None:
            return
        own = sample.run_cpu_pct / 100
        if sample.cpus is not None and sample.cpu_pct is not None and not is_paused:
            self._cpus = sample.cpus
            self._use.append(sample.cpu_pct)
            self._own.append(own)
            self._others.append(max(sample.cpu_pct * sample.cpus / 100 - own, 0.0))
            if sample.load_1m is not None:
                self._load.append(sample.load_1m)
        if sample.node is None and (not self._at or sample.t_ns > self._at[-1]):
            self._spent.append(self._spent[-1] + own * (sample.t_ns - self._at[-1]) if self._at else 0.0)
            self._at.append(sample.t_ns)

    def cpu_time_until(self, t_ns: int) -> float | None:
        """Return the CPU time (ns) of the run's processes from the first sample to a time; None outside the samples."""
        index = bisect_right(self._at, t_ns)
        if not 0 < index < len(self._at):
            return None
        (begin, before), (end, after) = ((self._at[at], self._spent[at]) for at in (index - 1, index))
        return before + (after - before) * (t_ns - begin) / max(end - begin, 1)

    @property
    def gpus(self) -> tuple[DeviceUsage, ...]:
        """Every sampled GPU."""
        return tuple(usage for index, usage in sorted(self._by_index.items()) if index >= 0)

    @property
    def hosts(self) -> tuple[DeviceUsage, ...]:
        """The host as a device (index -1); of several nodes, that of each (-1, -2, ...)."""
        return tuple(usage for index, usage in sorted(self._by_index.items(), reverse=True) if index < 0)

    @property
    def host(self) -> HostUsage | None:
        """The CPU use of the host; None if nothing is known."""
        if not self._use:
            return None
        load = median(self._load) if self._load else None
        medians = median(self._use), median(self._others), median(self._own)
        return HostUsage(len(self._use), self._cpus, *medians, load, len(self.hosts))
