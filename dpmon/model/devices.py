"""What was sampled of devices and of the host, and how much memory each mode used at most. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dpmon.model.members import SECOND, number_in, text_in, time_of, whole_in
from dpmon.model.state import DeviceTrack, ModeChange, Peak
from dpmon.record.codec import Event

__all__ = ["HISTORY_S", "HostPeaks", "SampleSource", "Samples", "Visit", "device_peaks", "visits_of"]

HISTORY_S = 640
"""Seconds of samples that are kept for the charts."""
_DEVICES = 256
_GAP_S = 5
"""A shorter time without a sample is no gap: the value before it stands."""
_HOST = -1
_VISITS = 16
"""Changes of mode back to which peaks are looked for."""
_MINUTE = 60 * SECOND
_LATE_NS = 5 * SECOND
_Values = tuple[float | None, float | None, float | None]


class SampleSource(Protocol):
    """What this needs of dpmon.store.as_of.AsOf."""

    until_ns: int

    def samples(self, span_ns: int, after_id: int = 0) -> list[tuple[int, Event]]:
        """Id and samples of devices and host, in their order."""

    def memory(self, process: int, until_ns: int | None = None) -> Event | None:
        """What the memory of the devices of a process held when it was looked at last."""

    def host_memory(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The most memory that the run's processes had in each minute."""


@dataclass(slots=True)
class _Track:
    """The newest sample of one device and its values by second."""

    data: Mapping[str, Any] = field(default_factory=dict)
    t_ns: int = -1
    values: deque[tuple[int, _Values]] = field(default_factory=lambda: deque(maxlen=HISTORY_S))

    def add(self, t_ns: int, data: Mapping[str, Any], key: str) -> None:
        if t_ns < self.t_ns:
            return
        second, values = t_ns // SECOND, _values(data, key)
        self.data, self.t_ns = data, t_ns
        if self.values and self.values[-1][0] == second:
            self.values.pop()
        self.values.append((second, values))

    def shown(self) -> DeviceTrack:
        """With a value a second."""
        series: list[_Values] = []
        for second, values in self.values:
            missing = second - self.values[0][0] - len(series)
            series += [series[-1] if missing < _GAP_S else (None, None, None)] * missing if series else []
            series.append(values)
        util, mem, power = zip(*series[-HISTORY_S:], strict=True) if series else ((), (), ())
        return DeviceTrack(self.data, self.t_ns, self.values[-1][0] if self.values else -1, util, mem, power)


def _values(data: Mapping[str, Any], key: str) -> _Values:
    """Utilisation and used memory (per cent), power (W)."""
    used, total = number_in(data, "mem_used_bytes"), number_in(data, "mem_total_bytes")
    return number_in(data, key), used / total * 100 if used is not None and total else None, number_in(data, "power_w")


@dataclass(slots=True)
class Samples:
    """Reads the samples of the last minutes, and remembers them: each is read once."""

    _tracks: dict[int, _Track] = field(default_factory=dict)
    _last_id: int = 0
    _until_ns: int = -1
    began: int = 0
    """How often it began anew: the time went back."""
    host: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HISTORY_S))
    """When the run's processes had how many bytes of the host's memory."""

    def read(self, source: SampleSource) -> None:
        """Take in what is new up to the time of `source`."""
        if source.until_ns < self._until_ns:
            self._tracks, self._last_id, self.began = {}, 0, self.began + 1
            self.host.clear()
        self._until_ns = source.until_ns
        for number, event in source.samples(HISTORY_S * SECOND, self._last_id):
            self._last_id = max(self._last_id, number)
            self._add(event)

    def _add(self, event: Event) -> None:
        t_ns = time_of(event.data)
        index = _HOST if event.kind == "host" else whole_in(event.data, "index")
        if t_ns is None or index is None or (index not in self._tracks and len(self._tracks) > _DEVICES):
            return
        self._tracks.setdefault(index, _Track()).add(t_ns, event.data, "cpu_pct" if index == _HOST else "util_pct")
        held = whole_in(event.data, "run_mem_bytes") if index == _HOST else None
        if held is not None and held >= 0:
            self.host.append((t_ns, held))

    def devices(self) -> dict[int, DeviceTrack]:
        """The GPUs by index."""
        return {index: track.shown() for index, track in self._tracks.items() if index != _HOST}

    def of_host(self) -> DeviceTrack:
        """The host; without data if there is no sample."""
        return self._tracks[_HOST].shown() if _HOST in self._tracks else DeviceTrack()


# ------------------------------------------------------------------------------------------------ memory by mode


class Visit(NamedTuple):
    """A time in which one mode was in force: the step it began with, and when."""

    mode: str
    step: int
    begin_ns: int


def visits_of(changes: Iterable[ModeChange], process: int) -> list[Visit]:
    """Each time that a mode of a process was in force, in order.

    If it has several roots, it is in dp while one of them is.
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


def device_peaks(source: SampleSource, process: int, visits: Sequence[Visit]) -> dict[str, dict[str, Peak]]:
    """By mode and device, the most that torch had allocated: the allocator's peak never falls.

    A peak that came before a mode was in force says only that the mode used no more.
    """
    found: dict[str, dict[str, Peak]] = {}
    for number, visit in list(enumerate(visits))[-_VISITS:]:
        end = visits[number + 1].begin_ns if number + 1 < len(visits) else None
        alone = len({each.mode for each in visits[: number + 1]}) == 1
        event = source.memory(process, end)
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
    """By mode, the most memory of the host that the run's processes had. Each sample is taken in once."""

    _of: tuple[int, int] = (-1, -1)
    """Process, and how often the samples began anew."""
    _peaks: dict[str, Peak] = field(default_factory=dict)
    _until_ns: int = -1

    def read(self, source: SampleSource, samples: Samples, process: int, visits: Sequence[Visit]) -> dict[str, Peak]:
        """The peaks as of the time of the samples, which come after sums of whole minutes."""
        if not samples.host:
            return {}
        if self._of != (process, samples.began):
            self._of, self._peaks, self._until_ns = (process, samples.began), {}, -1
            for start, most in source.host_memory(0, samples.host[0][0] - _MINUTE):
                modes = _modes_between(visits, start, start + _MINUTE)
                for mode in modes:
                    _keep_peak(self._peaks, mode, most, sure=len(modes) == 1)
        newest = samples.host[-1][0]
        for t_ns, held in samples.host:
            # A change of mode is recorded a moment later.
            if self._until_ns < t_ns <= newest - _LATE_NS:
                self._until_ns = t_ns
                _keep_peak(self._peaks, _modes_between(visits, t_ns, t_ns)[-1], held)
        found = dict(self._peaks)
        for t_ns, held in samples.host:
            if t_ns > self._until_ns:
                _keep_peak(found, _modes_between(visits, t_ns, t_ns)[-1], held)
        return found


def _modes_between(visits: Sequence[Visit], begin_ns: int, end_ns: int) -> list[str]:
    """The modes that were in force between two times, at least one."""
    first = max(bisect_right(visits, begin_ns, key=lambda visit: visit.begin_ns) - 1, 0)
    last = max(bisect_right(visits, end_ns, key=lambda visit: visit.begin_ns), 1)
    return list(dict.fromkeys(visit.mode for visit in visits[first:last]))


def _keep_peak(peaks: dict[str, Peak], mode: str, used: int, sure: bool = True) -> None:
    """Memory of another mode often stays allocated: only the excess belongs to this one."""
    before = peaks.get(mode)
    others = [peak.bytes for other, peak in peaks.items() if other != mode]
    exact = sure and used > max(others, default=-1)
    exact = exact or (before is not None and before.exact and used <= before.bytes)
    peaks[mode] = Peak(max(used, before.bytes if before is not None and (before.exact or not exact) else 0), exact)
