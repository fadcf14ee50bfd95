"""Writes a trace for ui.perfetto.dev and chrome://tracing in the array form of Chrome's trace event format.

Sources: the format's description ("Trace Event Format", the Catapult project) and Perfetto's notes on the part that it
supports. Readers accept an array without its closing bracket, as a killed export leaves it.

- A training process is a process of the trace. It has tracks for its steps, for its calls (with their phases below
  them), and for each replica or stage. Calls that ran at the same time, on several threads, have separate tracks.
- The phases of a step are slices below it. Among them, an instant marks that a bucket of gradients became ready.
  Counters show the phases' device times, and the quantities that only some steps have.
- The calls that launched the collectives of sampled steps are slices on separate tracks. Sampled steps have a track,
  too.
- A GPU and the host are processes with counters. An instant marks that a value became unknown, because the counter
  would keep its last value.
- Mode switches, warnings and the exit are instants.

Times are µs since the run's start, with a precision of 1 ns. Perfetto multiplies them by 1000 and truncates. It drops
a slice that then ends 1 ns after the enclosing slice (json_utils and slice_tracker in its source).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from dpmon.record.jsonl import as_json
from dpmon.record.record_types import Call, Collective, Event, Record, Sampled, Step
from dpmon.record.safe_json import int_member, number_member, replace_nonfinite
from dpmon.record.schema import EXPOSED, WAIT
from dpmon.run.run_directory import RunInfo
from dpmon.run.run_registry import short_name
from dpmon.sanitize import to_safe_json

_SUPERVISOR = "dpmon"


def write_trace(run_info: RunInfo, records: Iterable[Record], file: TextIO) -> None:
    """Write `records` as one JSON array with one event per line. Close the array even after an exception."""
    trace = _Trace(file)
    try:
        trace.write_run(run_info)
        for record in records:
            trace.add(record)
    finally:
        trace.end()


def _to_us(ns: int) -> float:
    """Return a time in µs that gives exactly `ns` when it is multiplied by 1000 and truncated."""
    us = ns / 1000
    return us if int(us * 1000.0) >= ns else math.nextafter(us, math.inf)


class _TraceProcess:
    """One process of the trace: its id in the trace, and its tracks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.tracks: dict[tuple[object, ...], int] = {}
        self.busy_until_ns: dict[str, list[int]] = {}
        """End of the last slice on each track (ns), for calls, collectives and sampled steps."""
        self.known_counters: set[str] = set()
        """Names of the counters whose last value is known."""


class _Trace:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._processes: dict[object, _TraceProcess] = {}
        self._tracks = 0
        self._newest_us = 0.0
        self._is_first = True

    # ------------------------------------------------------------------------------------------ events

    def _write_event(self, **event: object) -> None:
        text = to_safe_json(event, separators=(",", ":"), allow_nan=False)
        self._file.write(("[\n" if self._is_first else ",\n") + text)
        self._is_first = False

    def _write_slice(
        self, process: _TraceProcess, tid: int, name: str, start_ns: int, duration_ns: int, args: object = None
    ) -> None:
        self._newest_us = max(self._newest_us, (start_ns + duration_ns) / 1e3)
        ts, dur = _to_us(start_ns), _to_us(duration_ns)
        self._write_event(ph="X", name=name, ts=ts, dur=dur, pid=process.pid, tid=tid, args=args or {})

    def _write_counter(self, process: _TraceProcess, name: str, time_us: float, values: Mapping[str, float]) -> None:
        if values:
            self._write_event(ph="C", name=name, ts=time_us, pid=process.pid, tid=0, args=dict(values))

    def _write_instant(
        self, process: _TraceProcess, name: str, time_us: float, scope: str, args: object, tid: int = 0
    ) -> None:
        """Write a mark in a thread, a process or the whole trace (`scope` t, p or g)."""
        tid = tid or self._track(process, ("marks",), "marks", 0)
        self._write_event(ph="i", s=scope, name=name, ts=time_us, pid=process.pid, tid=tid, args=args)

    def _event_time_us(self, data: Mapping[str, object]) -> float:
        """Return the time of an event (µs); if it has none, the newest time so far."""
        if (seconds := number_member(data, "t_s")) is None:
            return round(self._newest_us, 3)
        self._newest_us = max(self._newest_us, seconds * 1e6)
        return round(seconds * 1e6, 3)

    # ------------------------------------------------------------------------------------------ tracks

    def _process(self, key: object, name: str) -> _TraceProcess:
        process = self._processes.get(key)
        if process is None:
            process = self._processes[key] = _TraceProcess(len(self._processes) + 1)
            self._write_event(ph="M", name="process_name", pid=process.pid, tid=0, args={"name": name})
            self._write_event(
                ph="M", name="process_sort_index", pid=process.pid, tid=0, args={"sort_index": process.pid}
            )
        return process

    def _training_process(self, process: int, rank: int | None) -> _TraceProcess:
        return self._process(process, f"process {process}" if rank is None else f"rank {rank} (process {process})")

    def _track(self, process: _TraceProcess, key: tuple[object, ...], name: str, order: int) -> int:
        """Return the thread id of a track. Ids are unique in the whole trace, because Perfetto confuses equal ones."""
        tid = process.tracks.get(key)
        if tid is None:
            self._tracks += 1
            tid = process.tracks[key] = self._tracks
            self._write_event(ph="M", name="thread_name", pid=process.pid, tid=tid, args={"name": name})
            self._write_event(ph="M", name="thread_sort_index", pid=process.pid, tid=tid, args={"sort_index": order})
        return tid

    def _free_track(self, process: _TraceProcess, track_kind: str, start_ns: int, end_ns: int) -> int:
        """Return the index of a track that is free from `start_ns` on, as slices must not overlap."""
        ends_ns = process.busy_until_ns.setdefault(track_kind, [])
        index = next((index for index, busy_ns in enumerate(ends_ns) if busy_ns <= start_ns), len(ends_ns))
        if index == len(ends_ns):
            ends_ns.append(0)
        ends_ns[index] = end_ns
        return index

    # ------------------------------------------------------------------------------------------ records

    def write_run(self, run_info: RunInfo) -> None:
        """Write the run itself, as a process that has only marks."""
        run = self._process(_SUPERVISOR, f"dpmon run {short_name(run_info)}")
        args = {
            "id": run_info.id,
            "script": run_info.script,
            "command": list(run_info.command),
            "versions": dict(run_info.versions),
        }
        self._write_instant(run, "start", 0.0, "g", args)

    def end(self) -> None:
        """Close the array."""
        self._file.write("\n]\n" if not self._is_first else "[]\n")

    def add(self, record: Record) -> None:
        """Write the events of one record."""
        if isinstance(record, Call):
            self._write_call(record)
        elif isinstance(record, Step):
            self._write_step(record)
        elif isinstance(record, Collective):
            self._write_collective(record)
        elif isinstance(record, Sampled):
            self._write_sample_window(record)
        else:
            self._write_record(record)

    def _write_step(self, step: Step) -> None:
        process = self._training_process(step.process, step.rank)
        tid = self._track(process, ("steps",), "steps", 1)
        phases = {name: duration / 1e6 for name, duration in step.phases.items()}
        args: dict[str, object] = {"mode": step.mode or None, "samples": step.samples, "phases_ms": phases}
        args |= step.quantities
        if step.missing_spans:
            args["missing_spans"] = step.missing_spans
        args |= _waits(step)
        if step.device_ms is not None:
            args["device_ms"] = dict(step.device_ms)
        self._write_slice(process, tid, f"step {step.step}", step.start_ns, step.wall_ns, args)
        for name, start, duration in step.spans:
            waits = _waits(step) if name == "sync" else {}
            self._write_slice(process, tid, name, step.start_ns + start, duration, waits)
        for number, offset in enumerate(step.buckets, start=1):
            self._write_instant(process, f"bucket {number} ready", _to_us(step.start_ns + offset), "t", {}, tid)
        end_us = (step.start_ns + step.wall_ns) / 1e3
        device_ms = {name: duration for name, duration in (step.device_ms or {}).items() if duration is not None}
        self._write_counter(process, "step phases on the device (ms)", end_us, device_ms)
        for name, count in step.quantities.items():
            self._write_counter(process, f"step {name}", end_us, {"value": count})

    def _write_call(self, call: Call) -> None:
        process = self._training_process(call.process, call.rank)
        track = self._free_track(process, "calls", call.start_ns, call.start_ns + call.wall_ns)
        suffix = f" (concurrent {track})" if track else ""
        tid = self._track(process, ("calls", track), f"calls{suffix}", 10 + track)
        members = as_json(call)
        keys = ("step", "call", "via", "mode", "virtual", "training", "grad", "devices", "inputs", "outputs", "absent")
        self._write_slice(process, tid, call.root, call.start_ns, call.wall_ns, {key: members[key] for key in keys})
        for name, phase in call.phases.items():
            args: dict[str, object] = {} if phase.device_ms is None else {"device_ms": phase.device_ms}
            self._write_slice(process, tid, name, call.start_ns + phase.offset_ns, phase.host_ns, args)
        for replica in call.replicas:
            key = ("replica", track, replica.replica, replica.device)
            title = f"replica {replica.replica} {replica.device}{suffix}"
            tid = self._track(process, key, title, 100 + replica.replica)
            args = {"step": call.step, "device_ms": replica.device_ms} | {
                what: members["replicas"][replica.replica][what] for what in ("inputs", "outputs")
            }
            self._write_slice(process, tid, call.root, call.start_ns + replica.offset_ns, replica.host_ns, args)
        for stage in call.stages:
            key = ("stage", track, stage.stage, stage.device)
            tid = self._track(process, key, f"stage {stage.stage} {stage.device}{suffix}", 100 + stage.stage)
            names = ("parts", "device_ms", "inputs", "outputs", "crossed_bytes")
            args = {name: members["stages"][stage.stage][name] for name in names}
            if stage.host_ns is not None:
                title, start_ns = " ".join(stage.parts), call.start_ns + stage.offset_ns
                self._write_slice(process, tid, title, start_ns, stage.host_ns, args)

    def _write_collective(self, collective: Collective) -> None:
        process = self._training_process(collective.process, collective.rank)
        duration_ns = collective.host_ns
        track = self._free_track(process, "collectives", collective.start_ns, collective.start_ns + duration_ns)
        suffix = f" (concurrent {track})" if track else ""
        tid = self._track(process, ("collectives", track), f"communication{suffix}", 80 + track)
        members = as_json(collective)
        for key in ("kind", "process", "rank", "operation", "start_s", "host_ms"):
            del members[key]
        self._write_slice(process, tid, collective.operation, collective.start_ns, duration_ns, members)

    def _write_sample_window(self, window: Sampled) -> None:
        process = self._training_process(window.process, window.rank)
        tid = self._track(process, ("sampled",), "collectives sampled", 79)
        members = as_json(window)
        args = {key: members[key] for key in ("step", "collectives", "absent")}
        self._write_slice(process, tid, "sampled", window.start_ns, window.wall_ns, args)

    def _write_record(self, event: Event) -> None:
        data = event.data
        process_index = int_member(data, "process")
        if event.kind == "host" or (event.kind == "device" and int_member(data, "index") is not None):
            self._write_device_sample(event)
            return
        if process_index is not None:
            process, scope = self._training_process(process_index, int_member(data, "rank")), "p"
        else:
            process, scope = self._process(_SUPERVISOR, _SUPERVISOR), "g"
        time_us = self._event_time_us(data)
        if event.kind == "memory":
            self._write_memory(process, data, time_us)
            return
        self._write_instant(process, _event_title(event), time_us, scope, replace_nonfinite(dict(data)))

    def _write_device_sample(self, event: Event) -> None:
        data = event.data
        if event.kind == "host":
            process = self._process("host", "host")
        else:
            name = " ".join(str(data[key]) for key in ("index", "name", "uuid") if data.get(key) is not None)
            process = self._process(("device", data.get("index")), f"GPU {name}")
        time_us = self._event_time_us(data)
        for key, value in data.items():
            if key in ("t_s", "index", "absent", "of_run"):
                continue
            if _is_number(value):
                process.known_counters.add(key)
                self._write_counter(process, key, time_us, {"value": value})
            elif value is None and key in process.known_counters:
                process.known_counters.discard(key)
                reason = data["absent"].get(key)
                self._write_instant(process, f"{key} is unknown from here on", time_us, "p", {"reason": reason})

    def _write_memory(self, process: _TraceProcess, data: Mapping[str, Any], time_us: float) -> None:
        for device in data["devices"]:
            values = {key: value for key, value in device.items() if _is_number(value) and key.endswith("_bytes")}
            self._write_counter(process, f"memory {device['device']}", time_us, values)


def _waits(step: Step) -> dict[str, float]:
    """Return the step's exposed communication and rank wait (ms), if known, by name."""
    waits = ((f"{EXPOSED}_ms", step.exposed_ns), (f"{WAIT}_ms", step.wait_ns))
    return {name: ns / 1e6 for name, ns in waits if ns is not None}


def _event_title(event: Event) -> str:
    data = event.data
    if event.kind == "mode":
        refused = data.get("refused")
        return f"mode {data.get('mode')}" if refused is None else f"mode refused: {refused}"
    if event.kind == "warning":
        return f"warning: {data.get('text')}"
    if event.kind == "exit":
        return f"exit status {data.get('status')}"
    if event.kind == "dropped":
        return f"{data.get('count')} records were lost"
    return event.kind


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
