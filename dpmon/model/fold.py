"""fold(state, record): the only place where the state changes.

Pure in what it depends on: no clock, no I/O; the same records in the same order give the same state. The state that
is given is used up: its buffers are changed in place and it is returned, since a screen folds thousands of records a
second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from dpmon.model import state as kept
from dpmon.model.devices import device_event, host_event, keep_peaks
from dpmon.model.history import add_settled, add_step
from dpmon.model.members import SECOND, number_in, text_in, time_of, whole_in
from dpmon.model.phases import CALLS_AT, add_call, with_calls
from dpmon.model.state import (
    NOT_RUN,
    PHASES,
    CallTrack,
    Mark,
    ModeChange,
    ModeTrack,
    PauseChange,
    Process,
    Refusal,
    State,
    StepSample,
    Timed,
    WarningText,
)
from dpmon.model.turns import saw
from dpmon.record.codec import Call, Event, Record, Step
from dpmon.record.wire import CALL_PHASES, MODES, STEP_PHASES

__all__ = ["fold", "process_of", "refined"]

ANSWERING_STEPS = 100
"""Within which every root that is still called has answered a request."""
_Key = TypeVar("_Key", int, str)


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


def _saw(state: State, process: Process, start_ns: int, end_ns: int) -> None:
    saw(process, start_ns, end_ns)
    state.newest_ns = max(state.newest_ns, end_ns)


# ------------------------------------------------------------------------------------------------ calls


def _call(state: State, call: Call) -> None:
    if call.wall_ns < 0 or call.start_ns < 0:
        state.ignored += 1
        return
    process = process_of(state, call.process, call.rank)
    if process is None:
        return
    _saw(state, process, call.start_ns, call.start_ns + call.wall_ns)
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
    # A bare root beside one that is split (a head, a teacher) does not make the step single.
    if call.mode == "dp":
        process.dp_step = call.step
    if call.mode == "dp" or call.step > process.dp_step + 1 or call.step < process.dp_step:
        process.mode, process.virtual = call.mode or process.mode, call.virtual
    if call.devices:
        process.devices = call.devices
        used = process.modes.get(call.mode)
        if used is not None and used.devices is not call.devices:
            used.devices, used.virtual = call.devices, call.virtual
    if call.phases:
        found = map(call.phases.get, CALL_PHASES)
        add_call(process.open_steps, call.step, [NOT_RUN if phase is None else phase.host_ns for phase in found])
        _add_device_phases(process, call)


def _add_device_phases(process: Process, call: Call) -> None:
    """Add what the devices took for a call's phases to the other calls of its step."""
    if process.open_device[0] != call.step:
        process.open_device = call.step, {}
    sums = process.open_device[1]
    for name, shown in zip(CALL_PHASES, PHASES[CALLS_AT], strict=True):
        phase = call.phases.get(name)
        if phase is not None:
            before = sums.get(shown, 0.0)
            sums[shown] = None if before is None or phase.device_ms is None else before + phase.device_ms


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
    if before.evaluates != call.evaluates:  # an evaluation's times are of other work, often of other batches
        here = Timed(track.replica_ns, track.stage_ns, track.device_ms)
        track.replica_ns, track.stage_ns, track.device_ms = track.aside or Timed([], {}, {})
        track.aside = here
    moved = before.mode != call.mode or before.devices != call.devices
    if moved:
        track.aside = None
    if moved or len(track.replica_ns) > wanted:
        track.replica_ns.clear()
        track.device_ms.clear()
    while len(track.replica_ns) < wanted:
        track.replica_ns.append(deque(maxlen=kept.CALLS_TIMED))
    if call.failed:
        return
    for times, replica in zip(track.replica_ns, call.replicas, strict=False):
        if replica.host_ns >= 0:
            times.append(replica.host_ns)
    _time_devices(track, [replica.device_ms for replica in call.replicas])


def _time_stages(track: CallTrack, call: Call) -> None:
    seen = {(stage.stage, stage.device, stage.parts): stage.host_ns for stage in call.stages[: kept.REPLICAS_TIMED]}
    track.stage_ns = {key: track.stage_ns.get(key) or deque(maxlen=kept.CALLS_TIMED) for key in seen}
    if call.failed:
        return
    for key, took in seen.items():
        if took is not None and took >= 0:
            track.stage_ns[key].append(took)
    _time_devices(track, [stage.device_ms for stage in call.stages])


def _time_devices(track: CallTrack, times: Sequence[float | None]) -> None:
    for index, time in enumerate(times[: kept.REPLICAS_TIMED]):
        _keep_time(track.device_ms, index, time)


def _keep_time(times: dict[_Key, deque[float | None]], key: _Key, took: float | None) -> None:
    """Keep the newest, known or not; nothing at all where none is known any more, as of a device that is lost."""
    if took is not None or key in times:
        found = times.setdefault(key, deque(maxlen=kept.CALLS_TIMED))
        found.append(took)
        if took is None and found.count(None) == len(found):
            del times[key]


# ------------------------------------------------------------------------------------------------ steps


def _step(state: State, step: Step) -> None:
    if step.wall_ns < 0 or step.start_ns < 0:
        state.ignored += 1
        return
    process = process_of(state, step.process, step.rank)
    if process is None:
        return
    end = step.start_ns + step.wall_ns
    _saw(state, process, step.start_ns, end)
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
    gap = process.paces.step(step.step, mode, step.start_ns, step.wall_ns, step.samples, step.evaluation)
    if process.marks_mode != mode:
        process.marks.clear()
        process.marks_mode = mode
        process.visit = step.step
    _mark(process, sample, step.evaluation)
    process.turn = step
    if step.device_ms is not None or track.device_ms:
        _device_phases(process, track, step, sample)
    add_settled(process, track, sample)
    add_step(process, sample, mode, gap)


def _device_phases(process: Process, track: ModeTrack, step: Step, sample: StepSample) -> None:
    """What the devices took for each phase as it is shown: the phases of the calls are taken out of forward."""
    found = dict(step.device_ms or {})
    for name in step.phases:  # what ran on the host may not be known of the devices any more
        if name in track.device_ms:
            found.setdefault(name, None)
    if "forward" in found:
        track.forward_ms.append(found["forward"])
    number, inside = process.open_device
    # Where the host's times of them could not be told apart (see with_calls), its forward is whole: so is theirs.
    if number == step.step and inside and any(took >= 0 for took in sample.phases[CALLS_AT]):
        found.update(inside)
        forward, known = found.get("forward"), [took for took in inside.values() if took is not None]
        if forward is not None:
            found["forward"] = max(0.0, forward - sum(known)) if len(known) == len(inside) else None
    for name, took in found.items():
        _keep_time(track.device_ms, name, took)


def refined(step: Step, of_calls: list[int] | None) -> tuple[int, ...]:
    """The step's phases with the calls' phases taken out of its forward, in the order of PHASES."""
    return with_calls([step.phases.get(name, NOT_RUN) for name in STEP_PHASES], of_calls)


def _mark(process: Process, sample: StepSample, evaluation: bool) -> None:
    """Keep marks at least a second apart, the newest at the end. Where training steps exist, evaluations have none."""
    marks, pace = process.marks, process.paces.of(process.marks_mode)
    if evaluation and pace.training.steps:
        return
    if not evaluation and pace.training.steps == 1:
        marks.clear()  # the steps so far turn out to have been an evaluation
    tally = pace.counted()
    mark = Mark(sample.end_ns, tally.steps, tally.samples, tally.unknown, tally.step_ns, tally.elapsed_ns)
    if len(marks) > 1 and sample.end_ns - marks[-2].end_ns < SECOND:
        marks[-1] = mark
    else:
        marks.append(mark)


# ------------------------------------------------------------------------------------------------ events


def _process_event(state: State, event: Event) -> None:
    number = whole_in(event.data, "process")
    if number is None:
        state.ignored += 1
        return
    process = process_of(state, number, whole_in(event.data, "rank"))
    if process is not None:
        process.info = event.data


def _mode_event(state: State, event: Event) -> None:
    data = event.data
    number, mode = whole_in(data, "process"), text_in(data, "mode")
    if number is None or mode not in MODES:
        state.ignored += 1
        return
    process = process_of(state, number, whole_in(data, "rank"))
    if process is None:
        return
    listed = data.get("devices")
    devices = tuple(str(name) for name in listed[:4096]) if isinstance(listed, list) else ()
    change = ModeChange(
        number,
        time_of(data),
        whole_in(data, "step"),
        mode,
        text_in(data, "requested_by") or "",
        devices,
        data.get("virtual") is True,
        text_in(data, "reason"),
        text_in(data, "refused"),
        text_in(data, "root") or "",
    )
    state.mode_changes.append(change)
    state.mode_change_count += 1
    process.mode = mode
    root = change.root
    if change.requested_by == "user":
        if (change.step or 0) > process.answered + ANSWERING_STEPS:
            process.refusals.clear()  # of roots that may be gone: those that are called answer anew
        process.answered = max(process.answered, change.step or 0)
    process.refusals.pop(root, None)
    if change.refused is not None and len(process.refusals) < kept.ROOTS_KEPT:
        process.refusals[root] = Refusal("single" if mode == "dp" else "dp", change.refused)
    if change.refused is None:
        process.virtual, process.mode_reason = change.virtual, change.reason
        process.devices = devices or process.devices
        track = process.modes.get(mode)
        if track is not None and not track.devices and devices:  # a late reader is not given the calls of long ago
            track.devices, track.virtual = devices, change.virtual


def _pause_event(state: State, event: Event) -> None:
    data = event.data
    number, paused, refused = whole_in(data, "process"), data.get("paused"), text_in(data, "refused")
    if number is None or not isinstance(paused, bool):
        state.ignored += 1
        return
    process = process_of(state, number, whole_in(data, "rank"))
    if process is None:
        return
    at, seconds = time_of(data), number_in(data, "paused_s")
    took = int(seconds * SECOND) if seconds is not None and 0 <= seconds < 1e9 else None
    state.pauses.append(PauseChange(number, at, whole_in(data, "step"), paused, took, text_in(data, "reason"), refused))
    state.pause_count += 1
    if refused is not None:
        return
    process.paused_since_ns = at if paused else None
    if not paused:
        process.paused_ns += took or 0
        process.marks.clear()  # the rate starts again
    process.paces.pause(paused, at, took)


def _input_event(state: State, event: Event) -> None:
    at, seconds, pid = time_of(event.data), number_in(event.data, "waited_s"), whole_in(event.data, "pid")
    if at is None or seconds is None or not 0 <= seconds < 1e9 or pid is None:
        state.ignored += 1
        return
    for process in state.processes.values():  # none of them: a launcher waited
        if whole_in(process.info, "pid") == pid:
            _wait(process, at, at + int(seconds * SECOND))


def _wait(process: Process, begin: int, end: int) -> None:
    """Take a wait for input out of the rates, also if its step has ended and was counted."""
    process.inputs.append((begin, end))
    before = process.paces.of(process.marks_mode).counted()
    elapsed, within = before.elapsed_ns, before.step_ns
    process.paces.wait(begin, end)
    after = process.paces.of(process.marks_mode).counted()
    elapsed, within = elapsed - after.elapsed_ns, within - after.step_ns
    marks = process.marks
    for index, mark in enumerate(marks):
        if mark.end_ns > begin:
            marks[index] = mark._replace(elapsed_ns=mark.elapsed_ns - elapsed, step_ns=mark.step_ns - within)


def _memory_event(state: State, event: Event) -> None:
    number = whole_in(event.data, "process")
    process = process_of(state, number, whole_in(event.data, "rank")) if number is not None else None
    if process is None or not isinstance(event.data.get("devices"), list):
        state.ignored += process is not None or number is None
        return
    process.memory = event.data
    keep_peaks(state, process, event.data)


def _warning_event(state: State, event: Event) -> None:
    text = text_in(event.data, "text")
    if text is None:
        state.ignored += 1
        return
    state.warnings.append(WarningText(whole_in(event.data, "process"), time_of(event.data), text))
    state.warning_count += 1


def _dropped_event(state: State, event: Event) -> None:
    state.dropped = max(state.dropped, whole_in(event.data, "count") or 0)


def _exit_event(state: State, event: Event) -> None:
    state.exit = event.data


_EVENTS = {
    "process": _process_event,
    "mode": _mode_event,
    "pause": _pause_event,
    "input": _input_event,
    "warning": _warning_event,
    "device": device_event,
    "memory": _memory_event,
    "host": host_event,
    "dropped": _dropped_event,
    "exit": _exit_event,
}
