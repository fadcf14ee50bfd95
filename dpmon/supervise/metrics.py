"""A run's figures as a file in Prometheus' text format, for node_exporter's textfile collector. Off by default.

The file is replaced in one step, so that a collector never reads half of it. Everybody may read it, because the
collector is another user.

Growing values are counters, or the histogram of step times, so that Prometheus can compute rates over any time. The
gauges of steps cover the whole run, with the figures of the summary and the report. Unknown values are absent, never 0.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpmon.cleaning import harmless
from dpmon.record.fields import metrics_of
from dpmon.record.schema import EVALUATION, EXPOSED, HELD, PHASES, QUANTITIES, STEP, WAIT, device_series
from dpmon.run.destination import remove_parts, replaced
from dpmon.run.files import read_file
from dpmon.run.rundir import ExitInfo, RunInfo, load_info
from dpmon.run.runs import short_name
from dpmon.store.accounting import ACTIVITIES
from dpmon.store.figures import Window, elapsed
from dpmon.store.opened import open_store
from dpmon.store.quantiles import between
from dpmon.store.queries import Store
from dpmon.store.tables import HistoryError
from dpmon.store.tally import Tally

EVERY_S = 5.0
"""Seconds between two writes; Prometheus reads every 15 to 60 s."""
_SHARE = 0.01
"""Largest share of the time for writing: a file that takes long to write is written less often."""
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
MAX_PROCESSES = 1024
MAX_DEVICES = 256
MAX_LABEL = 200


_OF_RANKS = (
    (EXPOSED, "step_exposed_seconds_total", "Communication of the steps that no computation hid."),
    (WAIT, "step_wait_seconds_total", "Time of the steps in which a rank waited for the slowest one."),
    (HELD, "step_held_seconds_total", "Delay of the slowest rank relative to the second slowest."),
)
_COUNTED = {
    WAIT: ("step_wait_known_total", "Steps in which the exposed communication and the wait of a rank are known."),
    HELD: ("step_slowest_total", "Steps in which the other ranks waited for this one."),
}


def metrics_path(asked: str, info: RunInfo) -> Path:
    """The path of the file: under the run's own name in a directory, or exactly the path in `asked`."""
    path = Path(asked)
    return path / f"dpmon-{short_name(info)}.prom" if path.is_dir() else path


def is_of_run(path: Path, info: RunInfo) -> bool:
    """Whether the file is the metrics file of this run."""
    with contextlib.suppress(OSError):
        head = read_file(path, 1 << 14)
        return head.startswith(b"# HELP dpmon_run_info ") and f'id="{info.id}"'.encode() in head
    return False


_Labels = Mapping[str, str]
_Values = Iterable[tuple[_Labels, float]]


class _Series(NamedTuple):
    """The steps of one process in one mode, with or without evaluations."""

    labels: _Labels
    process: int
    mode: str
    tally: Tally


class Metrics:
    """Queries the store of a run and writes the file; call `tick` a few times a second."""

    def __init__(self, path: Path, directory: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        remove_parts(path)  # left by a supervisor that was killed during a write
        self._directory = directory
        self._info = load_info(directory)
        self._run = {"run": short_name(self._info)}
        self._ranks: Mapping[int, int | None] = {}
        """Rank by process."""
        self._warn = warn
        self._failing = self._over = False
        self._due = 0.0
        self._recorded: list[str] = []
        """The lines of the record when it was last readable."""
        self._highest: dict[tuple[str, ...], float] = {}
        """Counters as last written. A time shrinks when dpmon learns of a wait for input in it; a counter must not."""

    def tick(self, now: float) -> None:
        """Write the file if it is due. `now`: monotonic s. Never raises."""
        if self._over or now < self._due:
            return
        began = time.monotonic()
        try:
            self._write(None)
        except Exception as error:  # noqa: BLE001 - the record goes on without its metrics
            self._over = True
            self._warn(f"no more metrics: {type(error).__name__}: {error}")
        self._due = now + max(EVERY_S, (time.monotonic() - began) / _SHARE)

    def end(self, how: ExitInfo) -> None:
        """Write the file for the last time, because the run is over. Never raises."""
        with contextlib.suppress(Exception):  # `tick` has already reported the error
            self._write(how)

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
        """The text of the file."""
        info, run = self._info, self._run
        about = {**run, "id": info.id, "name": info.name, "script": info.script}
        lines: list[str] = []
        lines += metric("run_info", "gauge", "The run that the other metrics describe.", [(about, 1)])
        started = [(run, info.started_unix)]
        lines += metric("run_start_time_seconds", "gauge", "When the run began, since 1970.", started)
        lines += metric(
            "run_running", "gauge", "1 while the run is live, 0 when it has ended.", [(run, int(how is None))]
        )
        if how is not None and how.status is not None:
            lines += metric("run_exit_status", "gauge", "The run's exit status.", [(run, how.status)])
        # A history that is unreadable now may be readable later.
        with contextlib.suppress(HistoryError), open_store(self._directory, as_written=True) as store:
            self._recorded = self._record_lines(store)
        return "\n".join([*lines, *self._recorded]) + "\n"

    def _record_lines(self, store: Store) -> list[str]:
        window, run = Window(store), self._run
        self._ranks = {ring.process: ring.rank for ring in store.rings.values()}
        lines = [*self._step_lines(window), *self._figure_lines(window), *self._time_lines(window)]
        lines += self._counter(
            "records_dropped_total", "Records that were lost before they were read.", [(run, store.dropped)]
        )
        lines += self._counter("warnings_total", "Warnings in the record.", [(run, store.event_count("warning"))])
        devices = {event.data.get("index"): event.data for event in store.events("device", newest=MAX_DEVICES)}
        lines += _gauges("device", [({**run, **_device_labels(data)}, data) for data in devices.values()])
        wrappers: dict[tuple[int, int], Mapping[str, object]] = {}
        for event in store.events("ddp"):
            process, wrapper = event.data.get("process"), event.data.get("wrapper")
            if type(process) is int and type(wrapper) is int and len(wrappers) < MAX_PROCESSES:
                wrappers[process, wrapper] = event.data
        lines += _gauges(
            "ddp",
            [
                ({**self._of_process(process), "wrapper": str(number)}, data)
                for (process, number), data in sorted(wrappers.items(), key=lambda item: item[0])
            ],
        )
        return [*lines, *_gauges("host", [(run, event.data) for event in store.events("host", newest=1)])]

    def _of_process(self, process: int) -> dict[str, str]:
        rank = self._ranks.get(process)
        return {**self._run, "process": str(process), "rank": "" if rank is None else str(rank)}

    def _step_lines(self, window: Window) -> list[str]:
        found = self._by_mode(window)
        lines = self._durations(found)
        lines += self._phases("step", "steps", "Time of the steps by phase.", found)
        text = "Time of the steps' calls by phase; it lies within the steps' forward."
        lines += self._phases("call", "steps' calls", text, found)
        lines += self._joined(found)
        for quantity in QUANTITIES:
            known = [(one.labels, one.tally.sum(quantity.name)) for one in found]
            text = f"Sum over the steps with a value: {quantity.meaning}."
            lines += self._counter(
                quantity.metric, text, [(labels, sum_.total) for labels, sum_ in known if sum_.count]
            )
        return lines

    def _durations(self, found: Sequence[_Series]) -> list[str]:
        """The histogram of step times, made from sketches."""
        limits = [bound * 1e9 for bound in BOUNDS_S]
        name, series = "step_duration_seconds", []
        for one in found:
            stat = one.tally.stat(STEP)
            buckets = [
                int(self._growing((name, str(index)), one.labels, count))
                for index, count in enumerate(between(stat.counts, limits))
            ]
            series.append((one.labels, buckets, self._growing((name, "sum"), one.labels, stat.total / 1e9)))
        return histogram(name, "Time of a step; the bounds of the buckets are at most 0.4 % off.", BOUNDS_S, series)

    def _phases(self, what: str, whose: str, text: str, found: Iterable[_Series]) -> list[str]:
        """Time by phase on the host and on the devices, and the number of steps with a device time, for means."""
        phases = [phase.name for phase in PHASES if phase.of_call == (what == "call")]
        each = [({**one.labels, "phase": phase}, phase, one.tally.stats) for one in found for phase in phases]
        known = [(labels, stats[name]) for labels, phase, stats in each if (name := device_series(phase)) in stats]
        return [
            *self._counter(
                f"{what}_phase_seconds_total", text,
                [(labels, stats[phase].total / 1e9) for labels, phase, stats in each if phase in stats],
            ),
            *self._counter(
                f"{what}_phase_device_seconds_total",
                f"Time of the slowest device by phase of the {whose}, over the steps in which it is known.",
                [(labels, stat.total / 1e9) for labels, stat in known],
            ),
            *self._counter(
                f"{what}_phase_device_known_total",
                f"Steps in which the device time of a phase of the {whose} is known.",
                [(labels, stat.count) for labels, stat in known],
            ),
        ]  # fmt: skip

    def _joined(self, found: Sequence[_Series]) -> list[str]:
        """The ranks' time in communication, and the number of steps with known times."""
        lines = []
        for series, name, text in _OF_RANKS:
            known = [(one.labels, one.tally.stats[series]) for one in found if series in one.tally.stats]
            lines += self._counter(name, text, [(labels, stat.total / 1e9) for labels, stat in known])
            if series in _COUNTED:
                lines += self._counter(*_COUNTED[series], [(labels, stat.count) for labels, stat in known])
        return lines

    def _time_lines(self, window: Window) -> list[str]:
        """Each process's time by activity, its steps and samples, and its newest step."""
        by_mode = [one for one in self._by_mode(window, evaluation=False) if window.trained(one.mode)]
        times = {mode: elapsed(window.times, mode, False, True) for mode in {one.mode for one in by_mode}}
        samples = [(one, one.tally.sum("samples")) for one in by_mode]
        spent: dict[tuple[int, str], int] = {}
        for row in window.times:
            for activity, ns in row.spent.items():
                spent[row.process, activity] = spent.get((row.process, activity), 0) + ns
        processes = sorted({process for process, _ in spent})[:MAX_PROCESSES]
        last: dict[int, tuple[int, int]] = {}
        for key, tally in window.by_process.items():
            last[key.process] = max(last.get(key.process, (0, 0)), (tally.last_ns or 0, tally.last_step or 0))
        newest = [
            ({**self._run, "process": str(process)}, *one) for process, one in sorted(last.items())[:MAX_PROCESSES]
        ]
        return [
            *self._counter(
                "training_seconds_total",
                "Elapsed training time: steps and time between them, without pauses, evaluations, waits for input.",
                [(one.labels, times[one.mode].get(one.process, (0, 0))[0] / 1e9) for one in by_mode],
            ),
            *self._counter(
                "training_steps_total", "Steps in training time.", [(one.labels, one.tally.steps) for one in by_mode]
            ),
            *self._counter(
                "training_samples_total", "Samples of these steps, if each step has a sample count.",
                [(one.labels, known.total) for one, known in samples if known.count == one.tally.steps],
            ),
            *self._counter(
                "time_seconds_total", "Time of a process by activity, since it began to record.",
                [
                    ({**self._of_process(process), "activity": activity}, ns / 1e9)
                    for process in processes
                    for activity in ACTIVITIES
                    if (ns := spent[process, activity]) > 0
                ],
            ),
            *metric(
                "last_step", "gauge", "Number of the newest step.", [(labels, number) for labels, _, number in newest]
            ),
            *metric(
                "last_step_time_seconds", "gauge", "When the newest step ended, since 1970.",
                [(labels, self._info.started_unix + at / 1e9) for labels, at, _ in newest],
            ),
        ]  # fmt: skip

    def _by_mode(self, window: Window, *, evaluation: bool = True) -> list[_Series]:
        """The steps of each process and mode, with or without evaluations."""
        found: dict[tuple[int, str], Tally] = {}
        for key, tally in window.by_process.items():
            if evaluation or not key.kind & EVALUATION:
                found.setdefault((key.process, key.mode), Tally()).merge(tally)
        return [
            _Series({**self._of_process(process), "mode": mode or "unknown"}, process, mode, tally)
            for (process, mode), tally in sorted(found.items(), key=lambda item: item[0])[: 2 * MAX_PROCESSES]
        ]

    def _figure_lines(self, window: Window) -> list[str]:
        """The figures of each mode as in summary and report: the times of each process, the rate of all."""
        found, rates = [], []
        for mode, evaluation in window.modes:
            kind = "evaluation" if evaluation or not window.trained(mode) else "training"
            labels = {"mode": mode or "unknown", "kind": kind}
            if (rate := window.rate(mode, evaluation)) is not None:
                rates.append(({**self._run, **labels}, rate))
            for process in window.processes[:MAX_PROCESSES]:
                figures = window.figures(mode, evaluation, process)
                if figures.steps:
                    found.append(({**self._of_process(process), **labels}, figures))
        steps = [(labels, figures.median_ns, figures.p95_ns, figures.mean_ns) for labels, figures in found]
        phases = [
            ({**labels, "phase": phase.name}, part.median_ns, part.p95_ns, part.mean_ns)
            for labels, figures in found
            for phase in PHASES
            if (part := figures.phase(phase.name)) is not None
        ]
        samples = [(labels, rate.samples_per_s) for labels, rate in rates if rate.samples_per_s is not None]
        return [
            *metric("step_quantile_seconds", "gauge", "Quantiles of step times over the whole run.", _quantiles(steps)),
            *metric("step_mean_seconds", "gauge", "Mean step time over the whole run.", _means(steps)),
            *metric(
                "phase_quantile_seconds", "gauge", "Quantiles of a phase over steps that ran it.", _quantiles(phases)
            ),
            *metric("phase_mean_seconds", "gauge", "Mean of a phase over steps that ran it.", _means(phases)),
            *metric(
                "steps_per_second", "gauge", "Steps per second of elapsed training time over the whole run.",
                [(labels, rate.steps_per_s) for labels, rate in rates],
            ),
            *metric(
                "samples_per_second", "gauge", "Samples per second of elapsed training time over the whole run.",
                samples,
            ),
        ]  # fmt: skip

    # ------------------------------------------------------------------------------------------ counters

    def _counter(self, name: str, text: str, values: _Values) -> list[str]:
        return metric(name, "counter", text, [(labels, self._growing((name,), labels, to)) for labels, to in values])

    def _growing(self, name: tuple[str, ...], labels: _Labels, value: float) -> float:
        """The value, or the last written one if that is higher."""
        key = (*name, *labels.values())
        self._highest[key] = max(value, self._highest.get(key, value))
        return self._highest[key]


_Durations = Iterable[tuple[_Labels, float | None, float | None, float | None]]
"""Labels, median, p95 and mean in ns."""


def _quantiles(found: _Durations) -> Iterator[tuple[_Labels, float]]:
    for labels, median, tail, _ in found:
        for quantile, ns in (("0.5", median), ("0.95", tail)):
            if ns is not None:
                yield {**labels, "quantile": quantile}, ns / 1e9


def _means(found: _Durations) -> Iterator[tuple[_Labels, float]]:
    return ((labels, mean / 1e9) for labels, _, _, mean in found if mean is not None)


def _device_labels(data: Mapping[str, object]) -> dict[str, str]:
    return {key: str(data[key]) for key in ("index", "uuid", "name") if data.get(key) is not None}


def _gauges(kind: str, values: Sequence[tuple[_Labels, Mapping[str, object]]]) -> list[str]:
    """The lines of a kind of event, from labels and data of the newest events."""
    lines = []
    for gauge in metrics_of(kind):
        of_all = ((labels, data.get(gauge.name)) for labels, data in values)
        known = [(labels, value * gauge.scale) for labels, value in of_all if isinstance(value, (int, float))]
        lines += metric(gauge.metric, "gauge", gauge.help, known)
    return lines


# ------------------------------------------------------------------------------------------------ text format

# Written from Prometheus' description (prometheus.io, "Exposition formats", 0.0.4).


def metric(name: str, kind: str, text: str, values: Iterable[tuple[_Labels, float]]) -> list[str]:
    """The lines of one metric, with its help and type; empty if it has no values."""
    samples = [f"dpmon_{name}{_labels(labels)} {_number(value)}" for labels, value in values]
    return [f"# HELP dpmon_{name} {text}", f"# TYPE dpmon_{name} {kind}", *samples] if samples else []


def histogram(
    name: str, text: str, bounds: Sequence[float], series: Iterable[tuple[_Labels, Sequence[int], float]]
) -> list[str]:
    """The lines of a histogram. `series`: labels, counts of each bucket and above the last bound, sum."""
    lines = []
    for labels, buckets, total in series:
        below = 0
        for bound, count in zip((*map(_number, bounds), "+Inf"), buckets, strict=True):
            below += count
            lines.append(f"dpmon_{name}_bucket{_labels({**labels, 'le': bound})} {below}")
        lines.append(f"dpmon_{name}_sum{_labels(labels)} {_number(total)}")
        lines.append(f"dpmon_{name}_count{_labels(labels)} {below}")
    return [f"# HELP dpmon_{name} {text}", f"# TYPE dpmon_{name} histogram", *lines] if lines else []


def _labels(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return harmless(value[:MAX_LABEL]).replace("\\", "\\\\").replace('"', '\\"')  # as the format requires


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
