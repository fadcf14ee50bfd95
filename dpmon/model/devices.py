"""The samples of devices and of the host, and the peak memory of each mode. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.model.members import SECOND, text_in, whole_in
from dpmon.model.memory import Peak
from dpmon.model.state import DeviceTrack, ModeChange
from dpmon.store.answers import ChartSample

if TYPE_CHECKING:
    from dpmon.store.store_at import StoreAt

HISTORY_S = 640
"""Seconds of samples that the charts need."""
_DEVICES = 256
_GAP_S = 5
"""Shortest time without a sample that is shown as a gap. In a shorter one, the last value is repeated."""
_HOST = -1
_VISITS = 16
"""Number of changes of mode to search for peaks."""
_MINUTE = 60 * SECOND
_LATE_NS = 5 * SECOND
_Values = tuple[float | None, float | None, float | None]


@dataclass(slots=True)
class _SampleTrack:
    """The newest sample of one device and its values, one per second."""

    id: int = 0
    t_ns: int = -(1 << 63)
    data: Mapping[str, Any] = field(default_factory=dict)
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

    def shown(self) -> DeviceTrack:
        util, mem, power = zip(*self.values, strict=True)
        return DeviceTrack(self.data, self.t_ns, self.t_ns // SECOND, util, mem, power)


@dataclass(slots=True)
class Samples:
    """Reads the samples of the last minutes and caches them: each is read once."""

    _tracks: dict[int, _SampleTrack] = field(default_factory=dict)
    _last_id: int = 0
    _until_ns: int = -1
    began: int = 0
    """Counts how often the time went back, so that the samples were read again."""
    host: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HISTORY_S))
    """Host memory of the run's processes: time in ns, and bytes."""

    def read(self, rows: StoreAt) -> None:
        """Read the new samples up to the time of `rows`."""
        if rows.until_ns < self._until_ns:
            self._tracks, self._last_id, self.began = {}, 0, self.began + 1
            self.host.clear()
        self._until_ns = rows.until_ns
        for sample in rows.samples(HISTORY_S * SECOND, self._last_id):
            self._last_id = max(self._last_id, sample.id)
            if sample.device in self._tracks or len(self._tracks) <= _DEVICES:
                self._tracks.setdefault(sample.device, _SampleTrack()).add(sample)
            if sample.device == _HOST and sample.run_mem is not None and sample.run_mem >= 0:
                self.host.append((sample.t_ns, int(sample.run_mem)))
        for track in self._tracks.values():
            event = rows.sample(track.id)
            track.data = event.data if event is not None else {}

    def devices(self) -> dict[int, DeviceTrack]:
        """The GPUs by index."""
        return {index: track.shown() for index, track in self._tracks.items() if index != _HOST}

    def of_host(self) -> DeviceTrack:
        """The host; without data if it was not sampled."""
        return self._tracks[_HOST].shown() if _HOST in self._tracks else DeviceTrack()


# ------------------------------------------------------------------------------------------------ memory by mode


class Visit(NamedTuple):
    """A time in one mode: its first step, and its start."""

    mode: str
    step: int
    begin_ns: int


def visits_of(changes: Iterable[ModeChange], process: int) -> list[Visit]:
    """The times in each mode of a process, in order.

    A process with several roots is in dp while one of them is.
    """
    by_root: dict[str, str] = {}
    found: list[Visit] = []
    for change in changes:
        if change.process == process and change.t_ns is not None:
            by_root[change.root] = change.mode
            mode = "dp" if "dp" in by_root.values() else change.mode
            if not found or found[-1].mode != mode:
                found.append(Visit(mode, change.step or 0, change.t_ns))
    return found


def device_peaks(rows: StoreAt, process: int, visits: Sequence[Visit]) -> dict[str, dict[str, Peak]]:
    """torch's peak of allocated memory, by mode and device.

    The peak never falls, so a peak from before a mode is only an upper bound for that mode.
    """
    found: dict[str, dict[str, Peak]] = {}
    for number, visit in list(enumerate(visits))[-_VISITS:]:
        end = visits[number + 1].begin_ns if number + 1 < len(visits) else None
        alone = len({each.mode for each in visits[: number + 1]}) == 1
        event = rows.memory(process, end)
        listed = event.data.get("devices") if event is not None else None
        peaks = found.setdefault(visit.mode, {})
        for one in listed[:_DEVICES] if isinstance(listed, list) else ():
            if not isinstance(one, Mapping):
                continue
            name, peak, after = text_in(one, "device"), whole_in(one, "peak_bytes"), whole_in(one, "peak_after_step")
            if name is None or peak is None or peak < 0:
                continue
            before = peaks.get(name)
            if alone or (after is not None and after >= visit.step):
                peaks[name] = Peak(max(peak, before.bytes if before is not None and before.exact else 0), True)
            elif before is None or not before.exact:
                peaks[name] = Peak(peak, False)
    return found


@dataclass(slots=True)
class HostPeaks:
    """The peak host memory of the run's processes by mode. Counts each sample once."""

    _of: tuple[int, int] = (-1, -1)
    """Process, and how often the time of the samples went back."""
    _peaks: dict[str, Peak] = field(default_factory=dict)
    _until_ns: int = -1

    def read(self, rows: StoreAt, samples: Samples, process: int, visits: Sequence[Visit]) -> dict[str, Peak]:
        """The peaks up to the newest of the samples. Before the oldest sample, one peak per minute is known."""
        if not samples.host:
            return {}
        if self._of != (process, samples.began):
            self._of, self._peaks, self._until_ns = (process, samples.began), {}, -1
            self._add_minutes(rows.host_memory(0, samples.host[0][0] - _MINUTE), visits)
        newest = samples.host[-1][0]
        for t_ns, held in samples.host:
            # Wait: the record of a change of mode arrives a moment after the change.
            if self._until_ns < t_ns <= newest - _LATE_NS:
                self._until_ns = t_ns
                _keep_peak(self._peaks, _modes_between(visits, t_ns, t_ns)[-1], held)
        found = dict(self._peaks)
        for t_ns, held in samples.host:
            if t_ns > self._until_ns:
                _keep_peak(found, _modes_between(visits, t_ns, t_ns)[-1], held)
        return found

    def _add_minutes(self, minutes: Sequence[tuple[int, int]], visits: Sequence[Visit]) -> None:
        """Add minutes. A minute with several modes counts only for modes that have no minute to themselves."""
        mixed: list[tuple[str, int]] = []
        for start, most in minutes:
            modes = _modes_between(visits, start, start + _MINUTE)
            if len(modes) == 1:
                _keep_peak(self._peaks, modes[0], most)
            else:
                mixed += ((mode, most) for mode in modes)
        for mode, most in mixed:
            if mode not in self._peaks or not self._peaks[mode].exact:
                _keep_peak(self._peaks, mode, most, sure=False)


def _modes_between(visits: Sequence[Visit], begin_ns: int, end_ns: int) -> list[str]:
    """The modes between two times, at least one."""
    first = max(bisect_right(visits, begin_ns, key=lambda visit: visit.begin_ns) - 1, 0)
    last = max(bisect_right(visits, end_ns, key=lambda visit: visit.begin_ns), 1)
    return list(dict.fromkeys(visit.mode for visit in visits[first:last]))


def _keep_peak(peaks: dict[str, Peak], mode: str, used: int, sure: bool = True) -> None:
    """Raise a mode's peak. It is exact only if it exceeds the others': memory of other modes often stays allocated."""
    before = peaks.get(mode)
    others = [peak.bytes for other, peak in peaks.items() if other != mode]
    exact = sure and used > max(others, default=-1)
    exact = exact or (before is not None and before.exact and used <= before.bytes)
    peaks[mode] = Peak(max(used, before.bytes if before is not None and (before.exact or not exact) else 0), exact)
