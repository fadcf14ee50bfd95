"""fold(state, record): the only place where the state changes.

Pure in what it depends on: no clock, no I/O; the same records in the same order give the same state. The state that
is given is used up: its buffers are changed in place and it is returned, since a screen folds thousands of records a
second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from dpmon.model import state as kept
from dpmon.model.history import add_settled, add_step
from dpmon.model.phases import add_call, with_calls
from dpmon.model.state import (
    NOT_RUN,
    CallTrack,
    DeviceTrack,
    Mark,
    ModeChange,
    ModeTrack,
    PauseChange,
    Peak,
    Process,
    State,
    StepSample,
    WarningText,
)
from dpmon.records import CALL_PHASES, MODES, STEP_PHASES, Call, Event, Record, Step

__all__ = ["fold", "process_of", "refined"]

_SECOND = 1_000_000_000
_GAP_NS = 5 * _SECOND


def fold(state: State, record: Record) -> State:
    """The state after `record`; what makes no sense is counted in `ignored` and changes nothing else."""
    if isinstance(record, Call):
        _call(state, record)
    elif isinstance(record, Step):
        _step(state, record)
    else:
        handler = _EVENTS.get(record.kind)
        if handler is None:
            state.ignored += 1
        else:
            handler(state, record)
    return state


def process_of(state: State, number: int, rank: int | None) -> Process | None:
    """The process of this number, made if it is new; None when there are too many."""
    process = state.processes.get(number)
    if process is None:
        if len(state.processes) >= kept.PROCESSES_KEPT:
            state.ignored += 1
            return None
        process = state.processes[number] = Process(number, rank)
    if rank is not None:
        process.rank = rank
    return process


def _saw(state: State, process: Process, end_ns: int) -> None:
    process.seen_ns = max(process.seen_ns, end_ns)
    state.newest_ns = max(state.newest_ns, end_ns)


# ------------------------------------------------------------------------------------------------ calls


def _call(state: State, call: Call) -> None:
    if call.wall_ns < 0 or call.start_ns < 0:
        state.ignored += 1
        return
    process = process_of(state, call.process, call.rank)
    if process is None:
        return
    _saw(state, process, call.start_ns + call.wall_ns)
    process.call_count += 1
    key = (call.root, call.via)
    track = process.calls.get(key)
    if track is None:
        if len(process.calls) >= kept.ROOTS_KEPT:
            del process.calls[next(iter(process.calls))]
        track = process.calls[key] = CallTrack(call)
    _part(process, track, key, call)
    _time_replicas(track, call)
    if call.stages or track.stage_ns:
        _time_stages(track, call)
    track.last = call
    track.count += 1
    process.newest = key
    process.calls_kept.append(call)
    process.mode, process.virtual = call.mode or process.mode, call.virtual
    if call.devices:
        process.devices = call.devices
        used = process.modes.get(call.mode)
        if used is not None and used.devices is not call.devices:
            used.devices, used.virtual = call.devices, call.virtual
    if call.phases:
        found = map(call.phases.get, CALL_PHASES)
        add_call(process.open_steps, call.step, [NOT_RUN if phase is None else phase.host_ns for phase in found])


def _part(process: Process, track: CallTrack, key: tuple[str, str | None], call: Call) -> None:
    """Count the call within its step; where a step has several of one root, each has a track of its own."""
    newest = process.calls_kept[-1] if process.calls_kept else None
    if newest is None or newest.step != call.step or len(process.calls_in_step) >= kept.ROOTS_KEPT:
        process.calls_in_step.clear()
    nth = process.calls_in_step[key] = process.calls_in_step.get(key, 0) + 1
    if nth == 2 and not track.parts:
        track.parts.append(CallTrack(track.last, 1))
    if (nth > 1 or track.parts) and nth <= kept.PARTS_KEPT:
        if nth > len(track.parts):
            track.parts.append(CallTrack(call))
        part = track.parts[nth - 1]
        _time_replicas(part, call)
        if call.stages or part.stage_ns:
            _time_stages(part, call)
        part.last = call
        part.count += 1


def _time_replicas(track: CallTrack, call: Call) -> None:
    before = track.last
    wanted = min(len(call.replicas), kept.REPLICAS_TIMED)
    if before.mode != call.mode or before.devices != call.devices or len(track.replica_ns) > wanted:
        track.replica_ns.clear()
    while len(track.replica_ns) < wanted:
        track.replica_ns.append(deque(maxlen=kept.CALLS_TIMED))
    if call.failed:
        return
    for times, replica in zip(track.replica_ns, call.replicas, strict=False):
        if replica.host_ns >= 0:
            times.append(replica.host_ns)


def _time_stages(track: CallTrack, call: Call) -> None:
    seen = {(stage.stage, stage.device, stage.parts): stage.host_ns for stage in call.stages[: kept.REPLICAS_TIMED]}
    track.stage_ns = {key: track.stage_ns.get(key) or deque(maxlen=kept.CALLS_TIMED) for key in seen}
    if call.failed:
        return
    for key, took in seen.items():
        if took is not None and took >= 0:
            track.stage_ns[key].append(took)


# ------------------------------------------------------------------------------------------------ steps


def _step(state: State, step: Step) -> None:
    if step.wall_ns < 0 or step.start_ns < 0:
        state.ignored += 1
        return
    process = process_of(state, step.process, step.rank)
    if process is None:
        return
    end = step.start_ns + step.wall_ns
    _saw(state, process, end)
    if process.paused_since_ns is not None and step.start_ns >= process.paused_since_ns:
        process.paused_since_ns = None  # it goes on, though the record that says so was missed
        process.marks.clear()
    phases = refined(step, process.open_steps.pop(step.step, None))
    sample = StepSample(step.step, end, step.wall_ns, step.samples, phases)
    process.step_count += 1
    process.last_step = sample
    mode = step.mode or process.mode
    process.mode = process.mode or mode
    track = process.modes.get(mode)
    if track is None:
        track = process.modes[mode] = ModeTrack(mode)
    track.steps.append(sample)
    track.count += 1
    track.wall_ns += sample.wall_ns
    track.samples += sample.samples or 0
    track.unknown += sample.samples is None
    if process.marks_mode != mode:
        process.marks.clear()
        process.marks_mode = mode
        process.visit = step.step
    _mark(process, sample)
    process.turn = step
    add_settled(process, track, sample)
    add_step(process, sample, mode)


def refined(step: Step, of_calls: list[int] | None) -> tuple[int, ...]:
    """The step's phases with the calls' phases taken out of its forward, in the order of PHASES."""
    return with_calls([step.phases.get(name, NOT_RUN) for name in STEP_PHASES], of_calls)


def _mark(process: Process, sample: StepSample) -> None:
    """Keep the way marks a second apart at least, the newest always at the end."""
    marks = process.marks
    last = marks[-1] if marks else Mark(0, 0, 0, 0, 0)
    knows = sample.samples is not None
    mark = Mark(
        sample.end_ns,
        sample.step,
        last.counted + 1,
        last.samples + (sample.samples or 0),
        last.knowing + knows,
    )
    if len(marks) > 1 and sample.end_ns - marks[-2].end_ns < _SECOND:
        marks[-1] = mark
    else:
        marks.append(mark)


# ------------------------------------------------------------------------------------------------ events


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    return value if isinstance(value, str) else None


def _time(data: Mapping[str, Any]) -> int | None:
    seconds = _number(data, "t_s")
    # NaN and infinity are JSON to Python.
    return int(seconds * _SECOND) if seconds is not None and abs(seconds) < 1e9 else None


def _process_event(state: State, event: Event) -> None:
    number = _whole(event.data, "process")
    if number is None:
        state.ignored += 1
        return
    process = process_of(state, number, _whole(event.data, "rank"))
    if process is not None:
        process.info = event.data


def _mode_event(state: State, event: Event) -> None:
    data = event.data
    number, mode = _whole(data, "process"), _text(data, "mode")
    if number is None or mode not in MODES:
        state.ignored += 1
        return
    process = process_of(state, number, _whole(data, "rank"))
    if process is None:
        return
    listed = data.get("devices")
    devices = tuple(str(name) for name in listed[:4096]) if isinstance(listed, list) else ()
    change = ModeChange(
        number,
        _time(data),
        _whole(data, "step"),
        mode,
        _text(data, "requested_by") or "",
        devices,
        data.get("virtual") is True,
        _text(data, "reason"),
        _text(data, "refused"),
    )
    state.mode_changes.append(change)
    state.mode_change_count += 1
    process.mode = mode
    if change.refused is None:
        process.virtual, process.mode_reason = change.virtual, change.reason
        process.devices = devices or process.devices


def _pause_event(state: State, event: Event) -> None:
    data = event.data
    number, paused, refused = _whole(data, "process"), data.get("paused"), _text(data, "refused")
    if number is None or not isinstance(paused, bool):
        state.ignored += 1
        return
    process = process_of(state, number, _whole(data, "rank"))
    if process is None:
        return
    at, seconds = _time(data), _number(data, "paused_s")
    took = int(seconds * _SECOND) if seconds is not None and 0 <= seconds < 1e9 else None
    state.pauses.append(PauseChange(number, at, _whole(data, "step"), paused, took, _text(data, "reason"), refused))
    state.pause_count += 1
    if refused is not None:
        return
    process.paused_since_ns = at if paused else None
    if not paused:
        process.paused_ns += took or 0
        process.marks.clear()  # a speed never counts the time of a pause


def _memory_event(state: State, event: Event) -> None:
    number = _whole(event.data, "process")
    process = process_of(state, number, _whole(event.data, "rank")) if number is not None else None
    if process is None or not isinstance(event.data.get("devices"), list):
        state.ignored += process is not None or number is None
        return
    process.memory = event.data
    _peaks(process, event.data["devices"])


def _peaks(process: Process, devices: list[Any]) -> None:
    """What the allocator's peak says of the mode in force: it never falls, so it may be another mode's."""
    track = process.modes.get(process.marks_mode)
    if track is None:
        return
    for one in devices[: kept.DEVICES_KEPT]:
        if not isinstance(one, Mapping):
            continue
        name, peak, after = _text(one, "device"), _whole(one, "peak_bytes"), _whole(one, "peak_after_step")
        if name is None or peak is None or peak < 0 or len(track.peaks) >= kept.DEVICES_KEPT:
            continue
        before = track.peaks.get(name)
        if len(process.modes) == 1 or (after is not None and after >= process.visit):
            most = max(peak, before.bytes if before is not None and before.exact else 0)
            track.peaks[name] = Peak(most, True)
        elif before is None or not before.exact:
            track.peaks[name] = Peak(peak, False)


def _warning_event(state: State, event: Event) -> None:
    text = _text(event.data, "text")
    if text is None:
        state.ignored += 1
        return
    state.warnings.append(WarningText(_whole(event.data, "process"), _time(event.data), text))
    state.warning_count += 1


def _device_event(state: State, event: Event) -> None:
    index = _whole(event.data, "index")
    if index is None or (index not in state.devices and len(state.devices) >= kept.DEVICES_KEPT):
        state.ignored += 1
        return
    track = state.devices.setdefault(index, DeviceTrack())
    _sample(track, event.data, "util_pct")


def _host_event(state: State, event: Event) -> None:
    _sample(state.host, event.data, "cpu_pct")
    process = state.focus()
    used = _whole(event.data, "run_mem_bytes")
    track = process.modes.get(process.marks_mode) if process is not None else None
    if process is not None and track is not None and used is not None and used >= 0:
        before = track.peaks.get(kept.HOST)
        others = [m.peaks[kept.HOST].bytes for m in process.modes.values() if m is not track and kept.HOST in m.peaks]
        # What was resident in another mode often stays so: only what goes beyond it is this mode's own.
        exact = used > max(others, default=-1) or (before is not None and before.exact and used <= before.bytes)
        most = max(used, before.bytes if before is not None and (before.exact or not exact) else 0)
        track.peaks[kept.HOST] = Peak(most, exact)


def _sample(track: DeviceTrack, data: Mapping[str, Any], key: str) -> None:
    before, track.data = track.t_ns, data
    track.t_ns = _time(data)
    if before is not None and track.t_ns is not None and track.t_ns - before > _GAP_NS:
        # Nobody sampled for a while (the supervisor was killed): the charts have a gap there, a second a sample.
        missing = [None] * min((track.t_ns - before) // _SECOND - 1, kept.HISTORY_KEPT)
        for history in (track.util, track.mem, track.power):
            history.extend(missing)
        track.count += len(missing)
    track.count += 1
    track.util.append(_number(data, key))
    used, total = _number(data, "mem_used_bytes"), _number(data, "mem_total_bytes")
    track.mem.append(used / total * 100 if used is not None and total else None)
    track.power.append(_number(data, "power_w"))


def _dropped_event(state: State, event: Event) -> None:
    state.dropped = max(state.dropped, _whole(event.data, "count") or 0)


def _exit_event(state: State, event: Event) -> None:
    state.exit = event.data


_EVENTS = {
    "process": _process_event,
    "mode": _mode_event,
    "pause": _pause_event,
    "warning": _warning_event,
    "device": _device_event,
    "memory": _memory_event,
    "host": _host_event,
    "dropped": _dropped_event,
    "exit": _exit_event,
}
