"""Folds what is sampled of devices, of the host, and of what the devices' memory holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpmon.model import state as kept
from dpmon.model.members import SECOND, number_in, text_in, time_of, whole_in
from dpmon.model.state import DeviceTrack, ModeChange, Peak, Process, State
from dpmon.past import DevicePast
from dpmon.record.codec import Event

__all__ = ["add_mean", "device_event", "host_event", "keep_peaks"]

_GAP_NS = 5 * SECOND
_LATE_NS = 2 * SECOND
"""A sample that is so much older than the newest step is told by when it was taken, not by when it came."""
_KEYS = ("util_pct", "cpu_pct")
"""What is called utilisation, of a device and of the host."""


def device_event(state: State, event: Event) -> None:
    index = whole_in(event.data, "index")
    if index is None or (index not in state.devices and len(state.devices) >= kept.DEVICES_KEPT):
        state.ignored += 1
        return
    track = state.devices.setdefault(index, DeviceTrack())
    _sample(track, event.data, _KEYS[False])


def host_event(state: State, event: Event) -> None:
    _sample(state.host, event.data, _KEYS[True])
    process = state.focus()
    used = whole_in(event.data, "run_mem_bytes")
    track = process.modes.get(_visit(state, process, time_of(event.data))[0]) if process is not None else None
    if process is not None and track is not None and used is not None and used >= 0:
        before = track.peaks.get(kept.HOST)
        others = [m.peaks[kept.HOST].bytes for m in process.modes.values() if m is not track and kept.HOST in m.peaks]
        # Memory of another mode often stays allocated: only the excess belongs to this mode.
        exact = used > max(others, default=-1) or (before is not None and before.exact and used <= before.bytes)
        most = max(used, before.bytes if before is not None and (before.exact or not exact) else 0)
        track.peaks[kept.HOST] = Peak(most, exact)


def _visit(state: State, process: Process, t_ns: int | None) -> tuple[str, int]:
    """The mode in force when something was sampled, and the first step of that visit to it; "" where it is not known.

    A late reader is given the sums of all steps before the events of the time in which they were taken.
    """
    if t_ns is None or t_ns >= process.seen_ns - _LATE_NS:
        return process.marks_mode, process.visit
    newest: dict[str, ModeChange] = {}  # of each root: one may be split and another beside it not
    for change in reversed(state.mode_changes):
        known = change.process == process.process and change.t_ns is not None
        if known and (change.t_ns or 0) <= t_ns:
            newest.setdefault(change.root, change)
    split = [change for change in newest.values() if change.mode == "dp"]
    found = max(split or newest.values(), key=lambda change: change.t_ns or 0, default=None)
    return (found.mode, found.step or 0) if found is not None else ("", 0)


def add_mean(state: State, past: DevicePast) -> None:
    """The samples of a minute of which the mean alone is known: as many samples, each of them the mean."""
    if past.device >= 0 and past.device not in state.devices and len(state.devices) >= kept.DEVICES_KEPT:
        state.ignored += 1
        return
    track = state.host if past.device < 0 else state.devices.setdefault(past.device, DeviceTrack())
    count = min(max(past.samples, 0), kept.HISTORY_KEPT)
    if not count:
        return
    _skip(track, past.start_s * SECOND)
    track.t_ns = (past.start_s + count - 1) * SECOND
    track.count += count
    for history, value in zip(
        (track.util, track.mem, track.power), _values(past.means, _KEYS[past.device < 0]), strict=True
    ):
        history.extend([value] * count)


def _sample(track: DeviceTrack, data: Mapping[str, Any], key: str) -> None:
    now = time_of(data)
    _skip(track, now)
    track.data, track.t_ns = data, now
    track.count += 1
    for history, value in zip((track.util, track.mem, track.power), _values(data, key), strict=True):
        history.append(value)


def _values(data: Mapping[str, Any], key: str) -> tuple[float | None, float | None, float | None]:
    """Utilisation and used memory (per cent), power (W)."""
    used, total = number_in(data, "mem_used_bytes"), number_in(data, "mem_total_bytes")
    return number_in(data, key), used / total * 100 if used is not None and total else None, number_in(data, "power_w")


def _skip(track: DeviceTrack, now: int | None) -> None:
    """Where nobody sampled for a while (the supervisor was killed) the charts have a gap, a second a sample."""
    if track.t_ns is None or now is None or now - track.t_ns <= _GAP_NS:
        return
    missing = [None] * min((now - track.t_ns) // SECOND - 1, kept.HISTORY_KEPT)
    for history in (track.util, track.mem, track.power):
        history.extend(missing)
    track.count += len(missing)


def keep_peaks(state: State, process: Process, data: Mapping[str, Any]) -> None:
    """What the allocator's peak says of the mode in force: it never falls, so it may be another mode's."""
    mode, visit = _visit(state, process, time_of(data))
    track = process.modes.get(mode)
    if track is None:
        return
    for one in data["devices"][: kept.DEVICES_KEPT]:
        if not isinstance(one, Mapping):
            continue
        name, peak, after = text_in(one, "device"), whole_in(one, "peak_bytes"), whole_in(one, "peak_after_step")
        if name is None or peak is None or peak < 0 or len(track.peaks) >= kept.DEVICES_KEPT:
            continue
        before = track.peaks.get(name)
        if len(process.modes) == 1 or (after is not None and after >= visit):
            most = max(peak, before.bytes if before is not None and before.exact else 0)
            track.peaks[name] = Peak(most, True)
        elif before is None or not before.exact:
            track.peaks[name] = Peak(peak, False)
