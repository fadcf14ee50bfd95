"""A run's figures as a file in Prometheus' text format, for node_exporter's textfile collector. Off unless asked for.

The file is replaced in one step, so that whoever collects it never sees half of it; everybody may read it, since the
collector is another user.

What only ever grows is a counter (or the histogram of step times): rates and quantiles are for Prometheus to make. What
is not known is not there; it is never 0.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpmon.rates import Paces
from dpmon.record.codec import Call, Event, Record, Step
from dpmon.record.wire import CALL_PHASES, STEP_PHASES
from dpmon.run.destination import remove_parts, replaced
from dpmon.run.exposition import histogram, metric
from dpmon.run.files import read_file
from dpmon.run.inputs import Inputs
from dpmon.run.pauses import Pauses
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunInfo, short_name

__all__ = ["EVERY_S", "Metrics", "is_of_run", "metrics_path"]

EVERY_S = 5.0
"""Seconds between two files; Prometheus asks every 15 to 60."""
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_HEAD_BYTES = 1 << 14
MAX_PROCESSES = 1024
MAX_DEVICES = 256

# Field of a sample, name, what it is multiplied by, what it says.
_DEVICE = (
    ("util_pct", "device_utilization_ratio", 0.01, "Share of the time in which a kernel ran on the GPU."),
    ("mem_used_bytes", "device_memory_used_bytes", 1, "Memory in use on the GPU, other programs included."),
    ("mem_run_bytes", "device_memory_run_bytes", 1, "Memory that the run's processes hold on the GPU."),
    ("mem_total_bytes", "device_memory_total_bytes", 1, "Memory of the GPU."),
    ("temperature_c", "device_temperature_celsius", 1, "Temperature of the GPU."),
    ("power_w", "device_power_watts", 1, "Power the GPU draws."),
    ("sm_clock_mhz", "device_sm_clock_hertz", 1e6, "Clock of the GPU's multiprocessors."),
)
_HOST = (
    ("cpu_pct", "host_cpu_ratio", 0.01, "Share of the host's processors in use."),
    ("mem_used_bytes", "host_memory_used_bytes", 1, "Memory in use on the host."),
    ("mem_total_bytes", "host_memory_total_bytes", 1, "Memory of the host."),
    ("cpus", "host_cpus", 1, "Processors of the host."),
    ("load_1m", "host_load", 1, "Threads that run or want to run on the host, mean of a minute."),
    ("run_cpu_pct", "run_cpu_cores", 0.01, "Processors that the run's processes use."),
    (
        "run_mem_bytes",
        "run_memory_bytes",
        1,
        "Memory of the run's processes; a shared page is divided among its processes.",
    ),
)


def metrics_path(asked: str, info: RunInfo) -> Path:
    """Where the file goes: under the run's own name into a directory, or exactly where it was asked for."""
    path = Path(asked)
    return path / f"dpmon-{short_name(info)}.prom" if path.is_dir() else path


def is_of_run(path: Path, info: RunInfo) -> bool:
    """Whether the file exists and is the metrics file of this run."""
    try:
        head = read_file(path, _HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(b"# HELP dpmon_run_info ") and f'id="{info.id}"'.encode() in head


class _OnDevice:
    """What devices took for each phase, in ms, over so many steps or calls: those in which it was known."""

    __slots__ = ("known", "ms")

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.known: dict[str, int] = {}

    def add(self, name: str, took: float | None) -> None:
        """Of one more step or call; None: not known."""
        if took is not None:
            self.ms[name] = self.ms.get(name, 0.0) + took
            self.known[name] = self.known.get(name, 0) + 1


@dataclass(slots=True)
class _Steps:
    """What is counted of the steps of one process in one mode."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    count: int = 0
    wall_ns: int = 0
    samples: int = 0
    unknown: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    on_device: _OnDevice = field(default_factory=_OnDevice)


@dataclass(slots=True)
class _Calls:
    """The phases of the calls of one process in one mode."""

    phases: dict[str, int] = field(default_factory=dict)
    """On the host, ns."""
    on_device: _OnDevice = field(default_factory=_OnDevice)


class Metrics:
    """Reads the run's rings and writes the file; `tick` is to be called a few times a second."""

    def __init__(self, path: Path, directory: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        remove_parts(path)  # a supervisor that was killed while it wrote has left one
        self._reader = RunReader(directory)
        self._warn = warn
        self._failing = self._over = False
        self._due = 0.0
        self._steps: dict[tuple[int, int | None, str], _Steps] = {}
        self._calls: dict[tuple[int, int | None, str], _Calls] = {}
        """By process, rank and mode."""
        self._paces: dict[int, Paces] = {}
        self._trained_ns: dict[tuple[int, str], int] = {}
        """By process and mode, as last written: a late wait for input must not make a counter decrease."""
        self._inputs, self._pauses = Inputs(), Pauses()
        self._last: dict[int, tuple[int, float]] = {}
        """By process: number of its newest step, and when it ended (s since 1970)."""
        self._devices: dict[int, Mapping[str, Any]] = {}
        self._host: Mapping[str, Any] = {}
        self._warnings = 0

    def tick(self, now: float) -> None:
        """Take what is new; write the file if it is due. `now`: monotonic s. Never raises."""
        if self._over:
            return
        try:
            self._take()
            if now >= self._due:
                self._due = now + EVERY_S
                self._write(None)
        except Exception as error:  # noqa: BLE001 - the record goes on without its metrics
            self._over = True
            self._warn(f"no more metrics: {type(error).__name__}: {error}")

    def end(self, how: ExitInfo) -> None:
        """Write the file for the last time: the run is over. Never raises."""
        with contextlib.suppress(Exception):  # what can be said of it was said by `tick`
            self._take()
            self._write(how)
        self._reader.close()

    # ------------------------------------------------------------------------------------------ taking

    def _take(self) -> None:
        for record in self._reader.poll():
            self._add(record)

    def _add(self, record: Record) -> None:
        if isinstance(record, Step):
            self._step(record)
        elif isinstance(record, Call):
            self._call(record)
        elif isinstance(record, Event):
            index = record.data.get("index")
            if record.kind == "host":
                self._host = record.data
            elif record.kind == "warning":
                self._warnings += 1
            elif record.kind in ("process", "pause", "input"):
                self._apart(record)
            elif record.kind == "device" and type(index) is int and len(self._devices.keys() | {index}) <= MAX_DEVICES:
                self._devices[index] = record.data

    def _apart(self, record: Event) -> None:
        """Note pauses and waits for input, which training time leaves out."""
        process = record.data.get("process")
        if record.kind == "input" or (record.kind == "process" and type(process) is int):
            take = self._inputs.event if record.kind == "input" else self._inputs.process
            for wait in take(record.data):
                self._paces.setdefault(wait.process, Paces()).wait(wait.begin_ns, wait.end_ns)
        elif type(process) is int:
            pause = self._pauses.event(record.data)
            if pause is not None and process in self._paces:
                self._paces[process].pause(*pause)

    def _step(self, step: Step) -> None:
        key = (step.process, step.rank, step.mode)
        if step.wall_ns < 0 or (key not in self._steps and len(self._steps) >= 2 * MAX_PROCESSES):
            return
        found = self._steps.setdefault(key, _Steps())
        self._paces.setdefault(step.process, Paces()).record(step)
        found.buckets[bisect_left(BOUNDS_S, step.wall_ns / 1e9)] += 1
        found.count += 1
        found.wall_ns += step.wall_ns
        if step.samples is None:
            found.unknown += 1
        else:
            found.samples += step.samples
        for name, took in step.phases.items():
            found.phases[name] = found.phases.get(name, 0) + took
        for name, spent in (step.device_ms or {}).items():
            found.on_device.add(name, spent)
        ended = self._reader.info.started_unix + (step.start_ns + step.wall_ns) / 1e9
        self._last[step.process] = (step.step, ended)

    def _call(self, call: Call) -> None:
        key = (call.process, call.rank, call.mode)
        if not call.phases or (key not in self._calls and len(self._calls) >= 2 * MAX_PROCESSES):
            return
        found = self._calls.setdefault(key, _Calls())
        for name, phase in call.phases.items():
            if phase.host_ns >= 0:
                found.phases[name] = found.phases.get(name, 0) + phase.host_ns
                found.on_device.add(name, phase.device_ms)

    # ------------------------------------------------------------------------------------------ writing

    def _write(self, how: ExitInfo | None) -> None:
        try:
            # Everybody may read it. "?" replaces invalid text, because a backslash is special in this format.
            text = self.text(how).encode("utf-8", "replace").decode("utf-8")
            with replaced(self._path, 0o644) as file:
                file.write(text)
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._warn(f"the metrics file {self._path} cannot be written: {error.strerror or error}")
            return
        self._failing = False

    def text(self, how: ExitInfo | None) -> str:
        """The file's text."""
        info = self._reader.info
        run = {"run": short_name(info)}
        about = {**run, "id": info.id, "name": info.name, "script": info.script}
        lines: list[str] = []
        lines += metric("run_info", "gauge", "The run that the others are of.", [(about, 1)])
        started = [(run, info.started_unix)]
        lines += metric("run_start_time_seconds", "gauge", "When the run began, since 1970.", started)
        lines += metric(
            "run_running", "gauge", "1 while the run goes on, 0 when it has ended.", [(run, int(how is None))]
        )
        if how is not None and how.status is not None:
            lines += metric("run_exit_status", "gauge", "The status the run ended with.", [(run, how.status)])
        lines += self._step_lines(run)
        lines += metric(
            "records_dropped_total", "counter", "Records that were lost before they were read.",
            [(run, self._reader.missed)],
        )  # fmt: skip
        lines += metric("warnings_total", "counter", "Warnings in the record.", [(run, self._warnings)])
        for source, name, scale, help_text in _DEVICE:
            values = [
                ({**run, **_device_labels(index, data)}, data.get(source)) for index, data in self._devices.items()
            ]
            lines += metric(name, "gauge", help_text, _known(values, scale))
        for source, name, scale, help_text in _HOST:
            lines += metric(name, "gauge", help_text, _known([(run, self._host.get(source))], scale))
        return "\n".join(lines) + "\n"

    def _step_lines(self, run: Mapping[str, str]) -> list[str]:
        series = [
            ({**run, **_process_labels(process, rank), "mode": mode or "unknown"}, found)
            for (process, rank, mode), found in self._steps.items()
        ]
        steps = [(labels, found.buckets, found.wall_ns / 1e9) for labels, found in series]
        lines = histogram("step_duration_seconds", "Time of a step.", BOUNDS_S, steps)
        lines += metric(
            "step_phase_seconds_total", "counter", "Time of the steps by phase.",
            [({**labels, "phase": name}, found.phases[name] / 1e9)
             for labels, found in series for name in STEP_PHASES if name in found.phases],
        )  # fmt: skip
        lines += _on_device_lines("step", [(labels, found.on_device) for labels, found in series])
        calls = [
            ({**run, **_process_labels(process, rank), "mode": mode or "unknown"}, found)
            for (process, rank, mode), found in self._calls.items()
        ]
        lines += metric(
            "call_phase_seconds_total", "counter", "Time of the calls by phase; it lies within the steps' forward.",
            [({**labels, "phase": name}, found.phases[name] / 1e9)
             for labels, found in calls for name in CALL_PHASES if name in found.phases],
        )  # fmt: skip
        lines += _on_device_lines("call", [(labels, found.on_device) for labels, found in calls])
        lines += metric(
            "samples_total", "counter", "Samples of the steps that knew them.",
            [(labels, found.samples) for labels, found in series if found.count > found.unknown],
        )  # fmt: skip
        lines += self._training_lines(run)
        last = [({**run, "process": str(process)}, number) for process, (number, _) in self._last.items()]
        lines += metric("last_step", "gauge", "Number of the newest step.", last)
        ended = [({**run, "process": str(process)}, at) for process, (_, at) in self._last.items()]
        return lines + metric("last_step_time_seconds", "gauge", "When the newest step ended, since 1970.", ended)

    def _training_lines(self, run: Mapping[str, str]) -> list[str]:
        """The sums from which the training rate is computed (`dpmon.rates`), by process and mode."""
        ranks = {process: rank for process, rank, _ in self._steps}
        found = [
            ({**run, **_process_labels(process, ranks.get(process)), "mode": mode or "unknown"}, (process, mode), pace)
            for process, paces in self._paces.items()
            for mode, pace in paces.modes.items()
            if pace.training.steps
        ]
        for _, key, pace in found:
            self._trained_ns[key] = max(self._trained_ns.get(key, 0), pace.training.elapsed_ns)
        return [
            *metric(
                "training_seconds_total", "counter",
                "Elapsed training time: steps and time between them, without pauses, evaluations, waits for input.",
                [(labels, self._trained_ns[key] / 1e9) for labels, key, _ in found],
            ),
            *metric(
                "training_steps_total", "counter", "Steps in that time.",
                [(labels, pace.training.steps) for labels, _, pace in found],
            ),
            *metric(
                "training_samples_total", "counter", "Samples of these steps, if each of them has a sample count.",
                [(labels, pace.training.samples) for labels, _, pace in found if not pace.training.unknown],
            ),
        ]  # fmt: skip


def _process_labels(process: int, rank: int | None) -> dict[str, str]:
    return {"process": str(process), "rank": "" if rank is None else str(rank)}


def _device_labels(index: int, data: Mapping[str, Any]) -> dict[str, str]:
    said = {key: str(data[key]) for key in ("uuid", "name") if data.get(key) is not None}
    return {"index": str(index), **said}


def _known(values: Iterable[tuple[Mapping[str, str], Any]], scale: float) -> list[tuple[Mapping[str, str], float]]:
    return [
        (labels, value * scale)
        for labels, value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    ]


def _on_device_lines(what: str, series: Iterable[tuple[Mapping[str, str], _OnDevice]]) -> list[str]:
    """Time on the devices of the steps or calls, and of how many it is: without these there is no mean of it."""
    known = [({**labels, "phase": name}, found, name) for labels, found in series for name in found.ms]
    return [
        *metric(
            f"{what}_phase_device_seconds_total", "counter",
            f"Time of the slowest device by phase of the {what}s, of those in which it is known.",
            [(labels, found.ms[name] / 1e3) for labels, found, name in known],
        ),
        *metric(
            f"{what}_phase_device_known_total", "counter",
            f"Phases of {what}s of which the time on the device is known.",
            [(labels, found.known[name]) for labels, found, name in known],
        ),
    ]  # fmt: skip
