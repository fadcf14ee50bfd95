"""Totals of GPUs and host over a run: extremes and medians, and means over stretches of time for the plots."""

from __future__ import annotations

from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any

from dpmon.model.evidence import DeviceFacts, HostFacts
from dpmon.model.stats import median
from dpmon.report.pauses import Span
from dpmon.report.story import DevicePoint
from dpmon.store.answers import MinuteRow
from dpmon.store.tables import BEFORE_S

HOST = -1
"""The host's index among devices."""
POINTS = 400
"""Most stretches of time per device."""
MAX_DEVICES = 256
MAX_REASONS = 16
_PROCESSORS = ("cpu_pct", "others", "own", "load", "at")
_HIGHEST = ("mem_used_bytes", "mem_run_bytes", "mem_total_bytes", "temperature_c", "power_w")
"""Figures reported by their highest value."""


@dataclass(slots=True)
class _TotalsTrack:
    name: str | None = None
    uuid: str | None = None
    called: str | None = None
    of_run: bool | None = None
    samples: int = 0
    util: array[float] = field(default_factory=lambda: array("d"))
    util_at: array[float] = field(default_factory=lambda: array("d"))
    """Seconds since the run's start, for each of `util`; nan if unknown."""
    highest: dict[str, float] = field(default_factory=dict)
    throttled: Counter[str] = field(default_factory=Counter)
    throttle_samples: int = 0
    width: float = 1.0
    sums: dict[int, list[float]] = field(default_factory=dict)
    """By stretch: sum and number of utilisations, sum and number of memory values (bytes)."""


class Devices:
    """Collects samples in the order of their time."""

    def __init__(self) -> None:
        self._tracks: dict[int, _TotalsTrack] = {}
        self.paused: Sequence[Span] = ()
        """Pauses of the run, known only at its end. Medians do not cover samples taken during a pause."""
        self.last_ns = 0
        """Time of the last sample."""
        self.gpu_absent: str | None = None
        self._cpus = 0
        self._processors: dict[str, array[float]] = {name: array("d") for name in _PROCESSORS}

    def sample(self, kind: str, data: Mapping[str, Any]) -> None:
        """Add a `device` or `host` record; a value of another type counts as unknown."""
        index = data.get("index") if kind == "device" else HOST
        seconds = _number(data.get("t_s"))
        if type(index) is not int or (index not in self._tracks and len(self._tracks) > MAX_DEVICES):
            return
        if kind == "host" and isinstance(data.get("gpu_absent"), (str, type(None))):
            self.gpu_absent = data.get("gpu_absent")
        track = self._tracks.setdefault(index, _TotalsTrack())
        track.samples += 1
        util = _number(data.get("util_pct" if kind == "device" else "cpu_pct"))
        used = _number(data.get("mem_used_bytes"))
        if util is not None:
            track.util.append(util)
            track.util_at.append(seconds if seconds is not None else nan)
        for key in _HIGHEST:
            value = _number(data.get(key))
            if value is not None:
                track.highest[key] = max(track.highest.get(key, value), value)
        if kind == "device":
            _identify(track, data)
        else:
            self._take_processors(data, seconds)
        if seconds is not None and 0 <= seconds < 1e9:
            self.last_ns = max(self.last_ns, int(seconds * 1e9))
            _place(track, seconds, None if util is None else (util, 1), None if used is None else (used, 1))

    def rollup(self, row: MinuteRow) -> None:
        """Add a figure of a minute with deleted samples, which is kept as an extreme and a mean."""
        index = row.device
        if (
            row.samples <= 0
            or not abs(row.total) < 1e300
            or not BEFORE_S <= row.start_s < 1e9
            or (index not in self._tracks and len(self._tracks) > MAX_DEVICES)
        ):
            return
        track = self._tracks.setdefault(index, _TotalsTrack())
        if row.name in _HIGHEST and abs(row.high) < 1e300:
            track.highest[row.name] = max(track.highest.get(row.name, row.high), row.high)
        if row.start_s == BEFORE_S:  # the minute is no longer known
            return
        if row.name == ("cpu_pct" if index == HOST else "util_pct"):
            _place(track, row.start_s + 30.0, (row.total, row.samples), None)
        elif row.name == "mem_used_bytes":
            _place(track, row.start_s + 30.0, None, (row.total, row.samples))

    def facts(self) -> tuple[DeviceFacts, ...]:
        """Every sampled GPU, without the host."""
        return tuple(self._facts(index) for index in sorted(self._tracks) if index != HOST)

    def host(self) -> DeviceFacts | None:
        """The host as a device."""
        return self._facts(HOST) if HOST in self._tracks else None

    def _take_processors(self, data: Mapping[str, Any], seconds: float | None) -> None:
        """Add the processors' use, in total and by the run."""
        cpus, use, own, load = (_number(data.get(key)) for key in ("cpus", "cpu_pct", "run_cpu_pct", "load_1m"))
        if cpus is None or not 1 <= cpus < 1e6 or use is None or own is None:
            return
        self._cpus = int(cpus)
        known = self._processors
        known["cpu_pct"].append(use)
        known["own"].append(own / 100)
        known["others"].append(max(use * cpus / 100 - own / 100, 0.0))
        known["load"].append(load if load is not None else nan)
        known["at"].append(seconds if seconds is not None else nan)

    def processors(self) -> HostFacts | None:
        """The machine's processors; None if nothing is known."""
        known = self._processors
        use, others, own, load = (self._unpaused(known[name], known["at"]) for name in _PROCESSORS[:4])
        middle = [median(values) for values in (use, others, own, [value for value in load if not isnan(value)])]
        if middle[0] is None or middle[1] is None or middle[2] is None:
            return None
        return HostFacts(len(use), self._cpus, middle[0], middle[1], middle[2], middle[3])

    def _unpaused(self, values: Sequence[float], at: Sequence[float]) -> Sequence[float]:
        """The values that were not sampled during a pause. `at`: their times (s)."""
        begins = [begin for begin, _ in self.paused]
        if not begins:
            return values
        found = []
        for value, seconds in zip(values, at, strict=True):
            place = -1 if isnan(seconds) else bisect(begins, seconds * 1e9) - 1
            if place < 0 or seconds * 1e9 >= self.paused[place][1]:
                found.append(value)
        return found

    def _facts(self, index: int) -> DeviceFacts:
        track = self._tracks[index]
        high = track.highest.get
        util = self._unpaused(track.util, track.util_at)
        return DeviceFacts(
            index, track.name, track.uuid, track.called, track.of_run, track.samples,
            median(util), len(util),
            high("mem_used_bytes"), high("mem_run_bytes"), high("mem_total_bytes"),
            high("temperature_c"), high("power_w"), dict(track.throttled), track.throttle_samples,
        )  # fmt: skip

    def points(self) -> tuple[DevicePoint, ...]:
        """Means over time, device by device."""
        found = []
        for index in sorted(self._tracks):
            track = self._tracks[index]
            for place, (util, utils, used, useds) in sorted(track.sums.items()):
                found.append(
                    DevicePoint(
                        int((place + 0.5) * track.width * 1e9),
                        index,
                        util / utils if utils else None,
                        used / useds if useds else None,
                    )
                )
        return tuple(found)


def _identify(track: _TotalsTrack, data: Mapping[str, Any]) -> None:
    for key in ("name", "uuid"):
        if isinstance(data.get(key), str):
            setattr(track, key, data[key])
    if isinstance(data.get("of_run"), bool):
        track.of_run = bool(track.of_run) or data["of_run"]
    ordinals = data.get("ordinals")
    if isinstance(ordinals, list) and ordinals and isinstance(ordinals[0], dict):
        device = ordinals[0].get("device")
        track.called = device if isinstance(device, str) else track.called
    throttle = data.get("throttle")
    if isinstance(throttle, list):
        track.throttle_samples += 1
        for reason in throttle[:MAX_REASONS]:
            if isinstance(reason, str) and (reason in track.throttled or len(track.throttled) < MAX_REASONS):
                track.throttled[reason] += 1


def _place(track: _TotalsTrack, seconds: float, util: tuple[float, int] | None, used: tuple[float, int] | None) -> None:
    """Add sums of utilisation and memory, with their numbers of samples, to the stretch of their time."""
    sums = track.sums.setdefault(int(seconds / track.width), [0.0, 0.0, 0.0, 0.0])
    if util is not None:
        sums[0] += util[0]
        sums[1] += util[1]
    if used is not None:
        sums[2] += used[0]
        sums[3] += used[1]
    while len(track.sums) > POINTS:
        before, track.sums = track.sums, {}
        track.width *= 2
        for place, values in before.items():
            into = track.sums.setdefault(place // 2, [0.0, 0.0, 0.0, 0.0])
            into[:] = [a + b for a, b in zip(into, values, strict=True)]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return float(value)
