"""A run's figures as a file in Prometheus' text format, for node_exporter's textfile collector. Off by default.

The file is replaced in one step, so that a collector never reads half of it. Everybody may read it, because the
collector is another user.

Growing values are counters, or the histogram of step times, so that Prometheus can compute rates over any time. The
gauges of steps cover the whole run, with the figures of the summary and the report. Unknown values are absent, never 0.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from dpmon.errors import HistoryError
from dpmon.record.record_specs import RECORDS
from dpmon.record.schema import (
    EVALUATION,
    EXPOSED,
    PHASES,
    QUANTITIES,
    STEP,
    STRAGGLER_DELAY,
    WAIT,
    Phase,
    device_series,
)
from dpmon.run.lifecycle import outcome_word
from dpmon.run.output_target import replace_file
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import short_name
from dpmon.sanitize import strip_control_chars
from dpmon.stalls.run_state import ENDED, StateInputs, decide_state
from dpmon.store.loader_loops import estimate_epoch_time_left
from dpmon.store.quantile_sketch import count_between
from dpmon.store.step_stats import PhaseStats, StatsWindow, StepStats, elapsed_by_process
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store
from dpmon.store.tally import Tally
from dpmon.store.time_accounting import ACTIVITIES

EVERY_S = 5.0
"""Seconds between two writes; Prometheus reads every 15 to 60 s."""
_SHARE = 0.01
"""Largest share of the time for writing: a file that takes long to write is written less often."""
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
MAX_PROCESSES = 1024
MAX_SAMPLES, _OF_NODE = 512, 32
"""Most samples of devices and hosts to read, in all and per machine: there is one per device and second."""
MAX_LABEL = 200


_OF_RANKS = (
    (EXPOSED, 1e9, "step_exposed_seconds_total", "Communication of the steps that no computation hid."),
    (WAIT, 1e9, "step_wait_seconds_total", "Time of the steps in which a rank waited for the slowest one."),
    (WAIT, 0, "step_wait_known_total", "Steps in which the exposed communication and the wait of a rank are known."),
    (STRAGGLER_DELAY, 1e9, "step_held_seconds_total", "Delay of the slowest rank relative to the second slowest."),
    (STRAGGLER_DELAY, 0, "step_slowest_total", "Steps in which the other ranks waited for this one."),
)
"""Series of a step, the divisor of its sum (0: take its count instead), and the name and text of the metric."""


def metrics_path(asked: str, info: RunInfo) -> Path:
    """The path of the file: under the run's own name in a directory, or exactly the path in `asked`."""
    path = Path(asked)
    return path / f"dpmon-{short_name(info)}.prom" if path.is_dir() else path


_Labels = Mapping[str, str]


class MetricsText:
    """Metrics in Prometheus' text format, written from its description (prometheus.io, "Exposition formats", 0.0.4)."""

    def __init__(self, highest: dict[tuple[str, ...], float]) -> None:
        """`highest`: counters as last written. A time shrinks when dpmon learns of a wait for input in it.

        A counter must not.
        """
        self._highest = highest
        self._metrics: dict[str, list[str]] = {}

    def __str__(self) -> str:
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)

    def gauge(self, name: str, text: str, labels: _Labels, value: float | None) -> None:
        """Add a value, if it is known."""
        if value is not None:
            self._add(name, "gauge", text, "", labels, value)

    def counter(self, name: str, text: str, labels: _Labels, value: float) -> None:
        """Add a growing value."""
        self._add(name, "counter", text, "", labels, self._monotonic_value(name, labels, value))

    def histogram(self, name: str, text: str, labels: _Labels, counts: Mapping[int, int], total_ns: float) -> None:
        """Add the durations of a sketch, with their sum."""
        below = 0
        bounds = (*map(_number, BOUNDS_S), "+Inf")
        for bound, count in zip(bounds, count_between(counts, [bound * 1e9 for bound in BOUNDS_S]), strict=True):
            limited = {**labels, "le": bound}
            below += int(self._monotonic_value(name, limited, count))
            self._add(name, "histogram", text, "_bucket", limited, below)
        self._add(name, "histogram", text, "_sum", labels, self._monotonic_value(name, labels, total_ns / 1e9))
        self._add(name, "histogram", text, "_count", labels, below)

    def _add(self, name: str, kind: str, text: str, suffix: str, labels: _Labels, value: float) -> None:
        about = [f"# HELP dpmon_{name} {text}", f"# TYPE dpmon_{name} {kind}"]
        each = ",".join(f'{label}="{_escaped(word)}"' for label, word in labels.items())
        self._metrics.setdefault(name, about).append(f"dpmon_{name}{suffix}{{{each}}} {_number(value)}")

    def _monotonic_value(self, name: str, labels: _Labels, value: float) -> float:
        key = (name, *labels.values())
        self._highest[key] = max(value, self._highest.get(key, value))
        return self._highest[key]


def _escaped(value: str) -> str:
    return strip_control_chars(value[:MAX_LABEL]).replace("\\", "\\\\").replace('"', '\\"')  # as the format requires


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


class PrometheusFile:
    """Queries the store of a run and writes the file; call `tick` a few times a second."""

    def __init__(self, path: Path, directory: Path, warn: Callable[[str], None]) -> None:
        """`warn`: called with a warning, in another thread."""
        self._path = path
        self._directory = directory
        self._info = load_info(directory)
        self._run = {"run": short_name(self._info)}
        self._ranks: Mapping[int, int | None] = {}
        """Rank by process."""
        self._nodes: Mapping[int, str] = {}
        """Name of the machine by process; empty on one machine."""
        self._warn = warn
        self._failing = self._over = False
        self._due = 0.0
        self._thread: threading.Thread | None = None
        self._recorded = ""
        """The text about the record when it was last readable."""
        self._highest: dict[tuple[str, ...], float] = {}

    def tick(self, now: float) -> None:
        """If the file is due, write it in a thread, because 1,000 ranks take seconds. Never raises.

        `now`: monotonic s.
        """
        if not self._over and now >= self._due and not (self._thread is not None and self._thread.is_alive()):
            thread = threading.Thread(target=self._work, args=(now,), name="dpmon metrics", daemon=True)
            with contextlib.suppress(RuntimeError):  # too many threads: the next call tries again
                thread.start()
                self._thread = thread

    def _work(self, now: float) -> None:
        began = time.monotonic()
        try:
            self._write(None)
        except Exception as error:  # noqa: BLE001 - the record goes on without its metrics
            self._over = True
            self._warn(f"no more metrics: {type(error).__name__}: {error}")
        self._due = now + max(EVERY_S, (time.monotonic() - began) / _SHARE)

    def wait(self) -> None:
        """Wait until the file that is being written is complete."""
        if self._thread is not None:
            self._thread.join()

    def write_final(self, how: ExitInfo) -> None:
        """Write the file for the last time, because the run is over. Never raises."""
        self.wait()
        with contextlib.suppress(Exception):  # the thread has already reported the error
            self._write(how)

    def _write(self, how: ExitInfo | None) -> None:
        try:
            # Everybody may read it. "?" replaces invalid text, because a backslash is special in this format.
            text = self.text(how).encode("utf-8", "replace").decode("utf-8")
            with replace_file(self._path, 0o644) as file:
                file.write(text)
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._warn(f"the metrics file {self._path} cannot be written: {error.strerror or error}")
            return
        self._failing = False

    def text(self, how: ExitInfo | None) -> str:
        """The text of the file."""
        info, run, text = self._info, self._run, MetricsText(self._highest)
        about = {**run, "id": info.id, "name": info.name, "script": info.script}
        text.gauge("run_info", "The run that the other metrics describe.", about, 1)
        text.gauge("run_start_time_seconds", "When the run began, since 1970.", run, info.started_unix)
        text.gauge("run_running", "1 while the run is live, 0 when it has ended.", run, int(how is None))
        if how is not None:
            end = outcome_word(load_exit(self._directory) or how)
            text.gauge("run_exit_status", "The run's exit status.", {**run, "end": end}, how.status)
        # A history that is unreadable now may be readable later.
        with contextlib.suppress(HistoryError), open_store(self._directory, as_written=True) as store:
            record = MetricsText(self._highest)
            state = ENDED if how is not None else self._state(store)
            record.gauge("run_state", "1 for the state that the run is in.", {**run, "state": state}, 1)
            self._add_record(record, store)
            self._add_progress(record, store, live=how is None)
            self._recorded = str(record)
        return f"{text}{self._recorded}"

    def _state(self, store: Store) -> str:
        """The state of the live run in a word."""
        start, step = self._info.start_ns, next(iter(store.steps(1)), None)
        calls = [] if step is not None else [call for one in store.ranks for call in store.call_rows(one, 1)]
        seen = [call.end for call in calls] if step is None else [step.start_ns + step.wall_ns]
        stalls = [event.data for event in store.events("stall", newest=1) if "lasted_s" not in event.data]
        with contextlib.closing(RunReader(self._directory)) as reader:
            paused, reads, activities = reader.pause_state().since_ns, reader.input_wait_start_ns(), reader.activities()
        doing, since = activities.get(step.process if step is not None else 0, ("", 0))
        now = StateInputs(
            time.monotonic_ns() - start,
            paused_ns=None if paused is None else paused - start,
            input_ns=None if reads is None else reads - start,
            stalled_ns=0 if stalls else None,
            step=step,
            seen_ns=max(seen, default=-1),
            calls=store.open_calls,
            activity=(doing, max(since - start, 0)),
        )
        return decide_state(now).word

    def _add_record(self, text: MetricsText, store: Store) -> None:
        window, run, (job, node) = StatsWindow(store), self._run, store.job()
        names = {machine.number: machine.name for machine in store.nodes()}
        if job is not None and not names:  # else the machines may have files of their own, with the same ranks
            about = {**run, "by": job["by"], "job_id": job["id"], "node": "" if node is None else str(node)}
            text.gauge("run_job_info", "The job of the run's ranks, with the same id on all its machines.", about, 1)
        self._ranks = {ring.process: ring.rank for ring in store.rings.values()}
        self._nodes = {ring.process: names[ring.node] for ring in store.rings.values() if ring.node in names}
        for machine in store.nodes():
            where, sends = {"node": machine.name}, "1 while a machine sends its records, else 0."
            text.gauge("node_connected", sends, {**run, **where}, int(machine.state == "connected"))
        self._add_steps(text, window)
        self._add_figures(text, window)
        self._add_times(text, window)
        text.counter("records_dropped_total", "Records that were lost before they were read.", run, store.dropped)
        text.counter("warnings_total", "Warnings in the record.", run, store.event_count("warning"))
        found = store.events("device", "host", newest=max(MAX_SAMPLES, _OF_NODE * len(names)))
        samples = {(event.kind, event.data.get("node"), event.data.get("index")): event.data for event in found}
        for (kind, number, _), data in samples.items():
            about = {key: str(data[key]) for key in ("index", "uuid", "name") if data.get(key) is not None}
            where = {"node": names[number]} if number in names else {}
            _add_gauges(text, kind, {**run, **where, **about}, data)
        for number in sorted(self._ranks)[:MAX_PROCESSES]:
            for definition, line in store.loss_places(number).items():
                newest, _ = store.newest_losses(number, definition)
                if newest is not None and line.why is None:
                    labels = {**self._of_process(number), "place": line.place}
                    _add_gauges(text, "loss", labels, {"loss": newest.loss})
        wrappers: dict[tuple[int, int], Mapping[str, object]] = {}
        for event in store.events("ddp"):
            process, wrapper = event.data.get("process"), event.data.get("wrapper")
            if type(process) is int and type(wrapper) is int:
                wrappers[process, wrapper] = event.data
        for (process, number), data in sorted(wrappers.items(), key=lambda item: item[0])[:MAX_PROCESSES]:
            _add_gauges(text, "ddp", {**self._of_process(process), "wrapper": str(number)}, data)

    def _of_process(self, process: int, *, ranked: bool = True) -> dict[str, str]:
        rank, node = self._ranks.get(process), self._nodes.get(process)
        return {
            **self._run,
            **({} if node is None else {"node": node}),
            "process": str(process),
            **({"rank": "" if rank is None else str(rank)} if ranked else {}),
        }

    def _add_steps(self, text: MetricsText, window: StatsWindow) -> None:
        """Durations, phases, ranks' communication and quantities of the steps, evaluations included."""
        for labels, _, _, tally in self._by_mode(window):
            steps = tally.stat(STEP)
            about = "Time of a step; the bounds of the buckets are at most 0.4% off."
            text.histogram("step_duration_seconds", about, labels, steps.counts, steps.total)
            for phase in PHASES:
                _add_phase(text, phase, {**labels, "phase": phase.name}, tally)
            for series, unit, name, about in _OF_RANKS:
                if (stat := tally.stats.get(series)) is not None:
                    text.counter(name, about, labels, stat.total / unit if unit else stat.count)
            for quantity in QUANTITIES:
                known = tally.sum(quantity.name)
                if known.count:
                    about = f"Sum over the steps with a value: {quantity.meaning}."
                    text.counter(quantity.metric, about, labels, known.total)

    def _add_times(self, text: MetricsText, window: StatsWindow) -> None:
        """Each process's time by activity, its steps and samples, and its newest step."""
        by_mode = [one for one in self._by_mode(window, evaluation=False) if window.ever_trains(one[2])]
        times = {
            mode: elapsed_by_process(window.times, mode, False, True) for mode in {mode for _, _, mode, _ in by_mode}
        }
        for labels, process, mode, tally in by_mode:
            about = "Elapsed training time: steps and time between them, without pauses, evaluations, waits for input."
            whole, _ = times[mode].get(process, (0, 0))
            text.counter("training_seconds_total", about, labels, whole / 1e9)
            text.counter("training_steps_total", "Steps in training time.", labels, tally.steps)
            samples = tally.sum("samples")
            if samples.count == tally.steps:
                about = "Samples of these steps, if each step has a sample count."
                text.counter("training_samples_total", about, labels, samples.total)
        spent: dict[int, Counter[str]] = {}
        for row in window.times:
            spent.setdefault(row.process, Counter()).update(row.spent)
        for process in sorted(spent)[:MAX_PROCESSES]:
            for activity in ACTIVITIES:
                if (ns := spent[process][activity]) > 0:
                    labels = {**self._of_process(process), "activity": activity}
                    about = "Time of a process by activity, since it began to record."
                    text.counter("time_seconds_total", about, labels, ns / 1e9)
        last: dict[int, tuple[int, int]] = {}
        for key, tally in (*window.by_process.items(), *window.left_out.items()):
            last[key.process] = max(last.get(key.process, (0, 0)), (tally.last_ns or 0, tally.last_step or 0))
        for process, (at_ns, number) in sorted(last.items())[:MAX_PROCESSES]:
            labels = self._of_process(process, ranked=False)
            ended = self._info.started_unix + at_ns / 1e9
            text.gauge("last_step", "Number of the newest step.", labels, number)
            text.gauge("last_step_time_seconds", "When the newest step ended, since 1970.", labels, ended)

    def _add_progress(self, text: MetricsText, store: Store, *, live: bool) -> None:
        """The current or last epoch of each process."""
        for process in store.processes[:MAX_PROCESSES]:
            if not (epochs := store.epochs(process, 2)):
                continue
            labels, now = self._of_process(process), epochs[-1]
            text.gauge("epoch", "Number of the current or the last epoch.", labels, now.epoch)
            text.gauge("epoch_batch", "Batches that the steps of this epoch have used.", labels, now.batches_used)
            text.gauge("epoch_batches", "Batches of the loader of this epoch.", labels, now.length)
            left = estimate_epoch_time_left(store, epochs, now.batches_used) if live else ""
            if not isinstance(left, str):
                text.gauge("epoch_left_seconds", "Time left in this epoch.", labels, left.left_ns / 1e9)

    def _by_mode(self, window: StatsWindow, *, evaluation: bool = True) -> list[tuple[_Labels, int, str, Tally]]:
        """The steps of each process and mode, with or without evaluations: labels, process, mode, tally."""
        found: dict[tuple[int, str], Tally] = {}
        for key, tally in window.by_process.items():
            if evaluation or not key.kind & EVALUATION:
                found.setdefault((key.process, key.mode), Tally()).merge(tally)
        return [
            ({**self._of_process(process), "mode": mode or "unknown"}, process, mode, tally)
            for (process, mode), tally in sorted(found.items(), key=lambda item: item[0])[: 2 * MAX_PROCESSES]
        ]

    def _add_figures(self, text: MetricsText, window: StatsWindow) -> None:
        """The figures of each mode as in summary and report: the times of each process, the rate of all."""
        for mode, evaluation in window.modes:
            kind = "evaluation" if evaluation or not window.ever_trains(mode) else "training"
            of_mode = {"mode": mode or "unknown", "kind": kind}
            for process in window.processes[:MAX_PROCESSES]:
                figures = window.figures(mode, evaluation, process)
                if not figures.steps:
                    continue
                labels = {**self._of_process(process), **of_mode}
                _add_duration_metrics(text, "step", "step times over the whole run", labels, figures)
                for phase in PHASES:
                    if (part := figures.phase(phase.name)) is not None:
                        _add_duration_metrics(
                            text, "phase", "a phase over steps that ran it", {**labels, "phase": phase.name}, part
                        )
            if (rate := window.rate(mode, evaluation)) is not None:
                labels, about = {**self._run, **of_mode}, "per second of elapsed training time over the whole run."
                text.gauge("steps_per_second", f"Steps {about}", labels, rate.steps_per_s)
                text.gauge("samples_per_second", f"Samples {about}", labels, rate.samples_per_s)


def _add_phase(text: MetricsText, phase: Phase, labels: _Labels, tally: Tally) -> None:
    """Time of a phase on the host and on the devices, and the number of steps with a device time, for means."""
    what, whose = ("call", "steps' calls") if phase.of_call else ("step", "steps")
    if (stat := tally.stats.get(phase.name)) is not None:
        within = "Time of the steps' calls by phase; it lies within the steps' forward."
        about = within if phase.of_call else "Time of the steps by phase."
        text.counter(f"{what}_phase_seconds_total", about, labels, stat.total / 1e9)
    if (stat := tally.stats.get(device_series(phase.name))) is not None:
        about = f"Time of the slowest device by phase of the {whose}, over the steps in which it is known."
        text.counter(f"{what}_phase_device_seconds_total", about, labels, stat.total / 1e9)
        about = f"Steps in which the device time of a phase of the {whose} is known."
        text.counter(f"{what}_phase_device_known_total", about, labels, stat.count)


def _add_duration_metrics(
    text: MetricsText, what: str, of: str, labels: _Labels, figures: StepStats | PhaseStats
) -> None:
    for quantile, ns in (("0.5", figures.median_ns), ("0.95", figures.p95_ns)):
        if ns is not None:
            text.gauge(f"{what}_quantile_seconds", f"Quantiles of {of}.", {**labels, "quantile": quantile}, ns / 1e9)
    if figures.mean_ns is not None:
        text.gauge(f"{what}_mean_seconds", f"Mean of {of}.", labels, figures.mean_ns / 1e9)


def _add_gauges(text: MetricsText, kind: str, labels: _Labels, data: Mapping[str, object]) -> None:
    """The values of an event."""
    for gauge in RECORDS[kind].fields:
        value = data.get(gauge.name)
        if gauge.metric and isinstance(value, (int, float)):
            text.gauge(gauge.metric, gauge.help, labels, value * gauge.scale)
