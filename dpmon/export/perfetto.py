"""A trace that ui.perfetto.dev and chrome://tracing open: Chrome's trace event format, its array form.

Written from the format's description ("Trace Event Format", the Catapult project) and Perfetto's notes on the supported
part. The array form is complete at every line: if the closing bracket is missing (a killed export), readers accept the
events so far.

- a training process is a process; its threads are the steps, the calls (with their phases below them), and one track
  per replica or stage. Calls that ran at the same time, on several threads of the script, have separate tracks.
- the phases of a step are slices below it; an instant among them marks a bucket of gradients that is ready. Counters
  show the phases' device times, and the quantities that only some steps have.
- the collectives of sampled steps are slices on separate tracks, from launch to end. The samples have a track, too.
- a GPU and the host are processes with counters. An instant marks a value that becomes unknown, because the counter
  would keep its last value.
- modes, warnings and the exit are instants.

Times are µs since the run's start, to the nanosecond. Perfetto multiplies them by 1000 and drops the fraction. If a
slice then ends one ns after the slice around it, Perfetto drops it (its json_utils and slice_tracker).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TextIO

from dpmon.record.jsonl import as_json
from dpmon.record.record_types import Call, Collective, Event, Record, Sampled, Step
from dpmon.record.safe_json import int_member, number_member, replace_nonfinite
from dpmon.record.schema import EXPOSED, WAIT
from dpmon.run.run_directory import RunInfo
from dpmon.run.run_registry import short_name
from dpmon.sanitize import to_safe_json

MAX_LANES = 64
_SUPERVISOR = "dpmon"


def write_trace(info: RunInfo, records: Iterable[Record], file: TextIO) -> None:
    """Write all `records` as one JSON array, one event per line. The array is closed even after an exception."""
    trace = _Trace(file)
    try:
        trace.begin(info)
        for record in records:
            trace.add(record)
    finally:
        trace.end()


def _to_us(ns: int) -> float:
    """A time in µs; multiplied by 1000 and truncated, it gives the same ns again."""
    us = ns / 1000
    return us if int(us * 1000.0) >= ns else math.nextafter(us, math.inf)


class _TraceProcess:
    """One process of the trace: its id there, and its tracks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.tracks: dict[tuple[object, ...], int] = {}
        self.lanes: dict[str, list[int]] = {}
        """End of the last slice (ns) on each track, for calls, collectives and samples."""
        self.known: set[str] = set()
        """Counters with a known last value."""


class _Trace:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._processes: dict[object, _TraceProcess] = {}
        self._tracks = 0
        self._newest_us = 0.0
        self._first = True

    # ------------------------------------------------------------------------------------------ events

    def _write_event(self, **event: object) -> None:
        text = to_safe_json(event, separators=(",", ":"), allow_nan=False)
        self._file.write(("[\n" if self._first else ",\n") + text)
        self._first = False

    def _slice(
        self, process: _TraceProcess, tid: int, name: str, start_ns: int, took_ns: int, args: object = None
    ) -> None:
        if start_ns >= 0 and took_ns >= 0:
            self._newest_us = max(self._newest_us, (start_ns + took_ns) / 1e3)
            began, dur = _to_us(start_ns), _to_us(took_ns)
            self._write_event(ph="X", name=name, ts=began, dur=dur, pid=process.pid, tid=tid, args=args or {})

    def _counter(self, process: _TraceProcess, name: str, at_us: float, values: Mapping[str, float]) -> None:
        if values:
            self._write_event(ph="C", name=name, ts=at_us, pid=process.pid, tid=0, args=dict(values))

    def _instant(self, process: _TraceProcess, name: str, at_us: float, scope: str, args: object, tid: int = 0) -> None:
        """A mark in a thread, a process or the whole trace (`scope` t, p or g)."""
        tid = tid or self._track(process, ("marks",), "marks", 0)
        self._write_event(ph="i", s=scope, name=name, ts=at_us, pid=process.pid, tid=tid, args=args)

    def _event_time_us(self, data: Mapping[str, object]) -> float:
        """The time of an event in µs; the newest time so far if it has none."""
        seconds = number_member(data, "t_s")
        if seconds is not None and 0 <= seconds < 1e9:
            self._newest_us = max(self._newest_us, seconds * 1e6)
            return round(seconds * 1e6, 3)
        return round(self._newest_us, 3)

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

    def _training(self, process: int, rank: int | None) -> _TraceProcess:
        return self._process(process, f"process {process}" if rank is None else f"rank {rank} (process {process})")

    def _track(self, process: _TraceProcess, key: tuple[object, ...], name: str, order: int) -> int:
        """The thread id of a track. Ids are unique in the trace: shared ones would confuse Perfetto."""
        tid = process.tracks.get(key)
        if tid is None:
            self._tracks += 1
            tid = process.tracks[key] = self._tracks
            self._write_event(ph="M", name="thread_name", pid=process.pid, tid=tid, args={"name": name})
            self._write_event(ph="M", name="thread_sort_index", pid=process.pid, tid=tid, args={"sort_index": order})
        return tid

    def _free_track(self, process: _TraceProcess, what: str, start_ns: int, end_ns: int) -> int:
        """The first track that is free from `start_ns` on, because slices must not overlap; -1 if all are taken."""
        lanes = process.lanes.setdefault(what, [])
        lane = next((lane for lane, busy_ns in enumerate(lanes) if busy_ns <= start_ns), len(lanes))
        if lane >= MAX_LANES:
            return -1
        if lane == len(lanes):
            lanes.append(0)
        lanes[lane] = end_ns
        return lane

    # ------------------------------------------------------------------------------------------ records

    def begin(self, info: RunInfo) -> None:
        """Write the run itself: a process with marks only."""
        run = self._process(_SUPERVISOR, f"dpmon run {short_name(info)}")
        args = {"id": info.id, "script": info.script, "command": list(info.command), "versions": dict(info.versions)}
        self._instant(run, "start", 0.0, "g", args)

    def end(self) -> None:
        """Close the array."""
        self._file.write("\n]\n" if not self._first else "[]\n")

    def add(self, record: Record) -> None:
        """Write the events of one record."""
        if isinstance(record, Call):
            self._call(record)
        elif isinstance(record, Step):
            self._step(record)
        elif isinstance(record, Collective):
            self._collective(record)
        elif isinstance(record, Sampled):
            self._sample_window(record)
        else:
            self._event(record)

    def _step(self, step: Step) -> None:
        process = self._training(step.process, step.rank)
        tid = self._track(process, ("steps",), "steps", 1)
        phases = {name: took / 1e6 for name, took in step.phases.items()}
        args: dict[str, object] = {"mode": step.mode or None, "samples": step.samples, "phases_ms": phases}
        args |= step.quantities
        if step.missing_spans:
            args["missing_spans"] = step.missing_spans
        args |= _waits(step)
        if step.device_ms is not None:
            args["device_ms"] = dict(step.device_ms)
        self._slice(process, tid, f"step {step.step}", step.start_ns, step.wall_ns, args)
        if step.start_ns >= 0 and step.wall_ns >= 0:
            self._spans(process, tid, step)
            for number, offset in enumerate(step.buckets, start=1):
                self._instant(process, f"bucket {number} ready", _to_us(step.start_ns + offset), "t", {}, tid)
            at = (step.start_ns + step.wall_ns) / 1e3
            on_device = {name: took for name, took in (step.device_ms or {}).items() if took is not None}
            self._counter(process, "step phases on the device (ms)", at, on_device)
            for name, count in step.quantities.items():
                self._counter(process, f"step {name}", at, {"value": count})

    def _spans(self, process: _TraceProcess, tid: int, step: Step) -> None:
        """Write a slice for each time that a phase ran.

        A slice that ends after the slice around it, or is out of order, is damaged and would break the track.
        """
        ends, latest = [step.wall_ns], 0
        for name, begin, took in step.spans:
            if begin < latest:
                continue
            latest = begin
            while len(ends) > 1 and ends[-1] <= begin:
                ends.pop()
            if begin + took <= ends[-1]:
                ends.append(begin + took)
                waits = _waits(step) if name == "sync" else {}
                self._slice(process, tid, name, step.start_ns + begin, took, waits)

    def _call(self, call: Call) -> None:
        process = self._training(call.process, call.rank)
        lane = self._free_track(process, "calls", call.start_ns, call.start_ns + call.wall_ns)
        if lane < 0 or call.wall_ns < 0:
            return
        more = f" (concurrent {lane})" if lane else ""
        tid = self._track(process, ("calls", lane), f"calls{more}", 10 + lane)
        members = as_json(call)
        keys = ("step", "call", "via", "mode", "virtual", "training", "grad", "devices", "inputs", "outputs", "absent")
        self._slice(process, tid, call.root, call.start_ns, call.wall_ns, {key: members[key] for key in keys})
        for name, phase in call.phases.items():
            args: dict[str, object] = {} if phase.device_ms is None else {"device_ms": phase.device_ms}
            self._slice(process, tid, name, call.start_ns + phase.offset_ns, phase.host_ns, args)
        for share in call.replicas:
            key = ("replica", lane, share.replica, share.device)
            tid = self._track(process, key, f"replica {share.replica} {share.device}{more}", 100 + share.replica)
            args = {"step": call.step, "device_ms": share.device_ms} | {
                what: members["replicas"][share.replica][what] for what in ("inputs", "outputs")
            }
            self._slice(process, tid, call.root, call.start_ns + share.offset_ns, share.host_ns, args)
        for stage in call.stages:
            key = ("stage", lane, stage.stage, stage.device)
            tid = self._track(process, key, f"stage {stage.stage} {stage.device}{more}", 100 + stage.stage)
            names = ("parts", "device_ms", "inputs", "outputs", "crossed_bytes")
            args = {name: members["stages"][stage.stage][name] for name in names}
            if stage.host_ns is not None:
                self._slice(process, tid, " ".join(stage.parts), call.start_ns + stage.offset_ns, stage.host_ns, args)

    def _collective(self, one: Collective) -> None:
        process = self._training(one.process, one.rank)
        took = one.host_ns or 0
        lane = self._free_track(process, "collectives", one.start_ns, one.start_ns + took)
        if lane < 0:
            return
        more = f" (concurrent {lane})" if lane else ""
        tid = self._track(process, ("collectives", lane), f"communication{more}", 80 + lane)
        members = as_json(one)
        for key in ("kind", "process", "rank", "operation", "start_s", "host_ms"):
            del members[key]
        self._slice(process, tid, one.operation, one.start_ns, took, members)

    def _sample_window(self, one: Sampled) -> None:
        process = self._training(one.process, one.rank)
        if self._free_track(process, "sampled", one.start_ns, one.start_ns + one.wall_ns):
            return  # samples that overlap are damaged
        tid = self._track(process, ("sampled",), "collectives sampled", 79)
        members = as_json(one)
        args = {key: members[key] for key in ("step", "collectives", "absent")}
        self._slice(process, tid, "sampled", one.start_ns, one.wall_ns, args)

    def _event(self, event: Event) -> None:
        data = event.data
        number = int_member(data, "process")
        if event.kind == "host" or (event.kind == "device" and int_member(data, "index") is not None):
            self._sample(event)
            return
        if number is not None:
            process, scope = self._training(number, int_member(data, "rank")), "p"
        else:
            process, scope = self._process(_SUPERVISOR, _SUPERVISOR), "g"
        at = self._event_time_us(data)
        if event.kind == "memory":
            self._memory(process, data, at)
            return
        self._instant(process, _event_title(event), at, scope, replace_nonfinite(dict(data)))

    def _sample(self, event: Event) -> None:
        data = event.data
        if event.kind == "host":
            process = self._process("host", "host")
        else:
            name = " ".join(str(data[key]) for key in ("index", "name", "uuid") if data.get(key) is not None)
            process = self._process(("device", data.get("index")), f"GPU {name}")
        at = self._event_time_us(data)
        absent = data.get("absent")
        for key, value in data.items():
            if key in ("t_s", "index", "absent", "of_run"):
                continue
            if _is_number(value):
                process.known.add(key)
                self._counter(process, key, at, {"value": value})
            elif value is None and key in process.known:
                process.known.discard(key)
                reason = absent.get(key) if isinstance(absent, Mapping) else None
                self._instant(process, f"{key} is unknown from here on", at, "p", {"reason": reason})

    def _memory(self, process: _TraceProcess, data: Mapping[str, object], at: float) -> None:
        devices = data.get("devices")
        for one in devices if isinstance(devices, list) else ():
            if isinstance(one, Mapping):
                values = {key: value for key, value in one.items() if _is_number(value) and key.endswith("_bytes")}
                self._counter(process, f"memory {one.get('device')}", at, values)


def _waits(step: Step) -> dict[str, float]:
    """The step's waits for other ranks, if known."""
    known = ((f"{EXPOSED}_ms", step.exposed_ns), (f"{WAIT}_ms", step.wait_ns))
    return {name: ns / 1e6 for name, ns in known if ns is not None}


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
        return f"{data.get('count')} records were dropped"
    return event.kind


def _is_number(value: object) -> bool:
    # Only Python's JSON accepts NaN and infinity.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
