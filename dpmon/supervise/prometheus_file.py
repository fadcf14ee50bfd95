"""A run's metrics as a file in Prometheus' text format, for node_exporter's textfile collector. Off by default.

The file is replaced atomically, so that a collector never reads half of it. All users may read it, because the
collector usually runs as another user.

Growing values are counters, or the histogram of step times, so that Prometheus can compute means, rates and quantiles
over any time. Unknown values are absent, never 0.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from dpmon.record.record_specs import RECORDS
from dpmon.record.schema import (
    EXPOSED,
    PHASES,
    QUANTITIES,
    STEP,
    STRAGGLER_DELAY,
    TRAINING,
    WAIT,
    Phase,
    device_series,
    step_kind,
)
from dpmon.run.lifecycle import outcome_word
from dpmon.run.output_target import replace_file
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import short_name
from dpmon.sanitize import strip_control_chars
from dpmon.stalls.run_state import ENDED, StateInputs, decide_state
from dpmon.store.events import count_events, read_events, read_job
from dpmon.store.loops import estimate_epoch_time_left, read_epochs
from dpmon.store.loss_table import read_loss_sites, read_newest_losses
from dpmon.store.node_table import read_node_rows
from dpmon.store.quantile_sketch import count_between
from dpmon.store.step_stats import StatsWindow
from dpmon.store.steps import read_newest_activity, read_steps
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store
from dpmon.store.tally import Tally
from dpmon.store.time_accounting import ACTIVITIES

MIN_WRITE_INTERVAL_S = 5.0
"""Shortest time between two writes. Prometheus reads every 15 to 60 s."""
_MAX_TIME_SHARE = 0.01
"""Largest share of the time spent on writing. A file that takes long to write is written less often."""
BUCKET_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
MAX_PROCESSES = 1024
MAX_SAMPLES, _MAX_NODE_SAMPLES = 512, 32
"""Most samples of devices and hosts to read, total and per node. There is one sample per device and second."""


_RANK_METRICS = (
    (EXPOSED, 1e9, "step_exposed_seconds_total", "Communication of the steps that no computation hid."),
    (WAIT, 1e9, "step_wait_seconds_total", "Time of the steps in which a rank waited for the slowest one."),
    (WAIT, 0, "step_wait_known_total", "Steps in which the exposed communication and the wait of a rank are known."),
    (STRAGGLER_DELAY, 1e9, "step_held_seconds_total", "Delay of the slowest rank relative to the second slowest."),
    (STRAGGLER_DELAY, 0, "step_slowest_total", "Steps in which the other ranks waited for this one."),
)
"""Series of a step, the divisor of its sum (0: use its count instead), and name and help text of the metric."""


def metrics_path(target: str, run_info: RunInfo) -> Path:
    """Return the path of the metrics file: `target`, or a file named after the run if `target` is a directory."""
    path = Path(target)
    return path / f"dpmon-{short_name(run_info)}.prom" if path.is_dir() else path


_Labels = Mapping[str, str]


class MetricsText:
    """Metrics in Prometheus' text format (prometheus.io, "Exposition formats", 0.0.4)."""

    def __init__(self, highest_values: dict[tuple[str, ...], float]) -> None:
        """`highest_values`: the highest value of each counter so far.

        A time shrinks when dpmon learns that the script waited for input in it, but a counter must never shrink.
        """
        self._highest_values = highest_values
        self._metrics: dict[str, list[str]] = {}

    def __str__(self) -> str:
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)

    def add_gauge(self, name: str, help_text: str, labels: _Labels, value: float | None) -> None:
        """Add a value; do nothing if it is None."""
        if value is not None:
            self._add(name, "gauge", help_text, "", labels, value)

    def add_counter(self, name: str, help_text: str, labels: _Labels, value: float) -> None:
        """Add a value that grows."""
        self._add(name, "counter", help_text, "", labels, self._monotonic_value(name, labels, value))

    def add_histogram(
        self, name: str, help_text: str, labels: _Labels, counts: Mapping[int, int], total_ns: float
    ) -> None:
        """Add durations, counted in the bins of a sketch, and their sum."""
        cumulative = 0
        bounds = (*map(_format_number, BUCKET_BOUNDS_S), "+Inf")
        for bound, count in zip(bounds, count_between(counts, [bound * 1e9 for bound in BUCKET_BOUNDS_S]), strict=True):
            bucket_labels = {**labels, "le": bound}
            cumulative += int(self._monotonic_value(name, bucket_labels, count))
            self._add(name, "histogram", help_text, "_bucket", bucket_labels, cumulative)
        self._add(name, "histogram", help_text, "_sum", labels, self._monotonic_value(name, labels, total_ns / 1e9))
        self._add(name, "histogram", help_text, "_count", labels, cumulative)

    def _add(self, name: str, metric_type: str, help_text: str, suffix: str, labels: _Labels, value: float) -> None:
        header = [f"# HELP dpmon_{name} {help_text}", f"# TYPE dpmon_{name} {metric_type}"]
        label_text = ",".join(f'{label}="{_escape_label(label_value)}"' for label, label_value in labels.items())
        self._metrics.setdefault(name, header).append(f"dpmon_{name}{suffix}{{{label_text}}} {_format_number(value)}")

    def _monotonic_value(self, name: str, labels: _Labels, value: float) -> float:
        key = (name, *labels.values())
        self._highest_values[key] = max(value, self._highest_values.get(key, value))
        return self._highest_values[key]


def _escape_label(value: str) -> str:
    return strip_control_chars(value[:200]).replace("\\", "\\\\").replace('"', '\\"')


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


class PrometheusFile:
    """The metrics file of a run, written from its store by a thread, because 1,000 ranks take seconds."""

    def __init__(self, path: Path, directory: Path, warn: Callable[[str], None]) -> None:
        """`warn`: called with the text of a warning, on another thread."""
        self._path = path
        self._directory = directory
        self._run_info = load_info(directory)
        self._run_labels = {"run": short_name(self._run_info)}
        self._ranks_by_process: Mapping[int, int | None] = {}
        self._nodes_by_process: Mapping[int, str] = {}
        """Name of the node by process; empty if the run has only one node."""
        self._warn = warn
        self._has_warned = False
        self._should_stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_stop, name="dpmon metrics", daemon=True)
        self._highest_values: dict[tuple[str, ...], float] = {}

    def start(self) -> None:
        """Start to write the file again and again."""
        self._thread.start()

    def stop(self) -> None:
        """Stop. If the file is being written now, wait until it is complete."""
        self._should_stop.set()
        self._thread.join()

    def _write_until_stop(self) -> None:
        interval_s = 0.0
        while not self._should_stop.wait(interval_s):
            start_s = time.monotonic()
            self.write()
            interval_s = max(MIN_WRITE_INTERVAL_S, (time.monotonic() - start_s) / _MAX_TIME_SHARE)

    def write(self, exit_info: ExitInfo | None = None) -> None:
        """Write the file. Never raises: the first failure is a warning. `exit_info`: how the run ended."""
        try:
            # All users may read it. "?" replaces invalid text, because a backslash is special in this format.
            text = self.build_text(exit_info).encode("utf-8", "replace").decode("utf-8")
            with replace_file(self._path, 0o644) as file:
                file.write(text)
        except Exception as error:  # noqa: BLE001 - the run is recorded without metrics
            if not self._has_warned:
                self._has_warned = True
                reason = error.strerror if isinstance(error, OSError) else None
                self._warn(f"the metrics file {self._path} cannot be written: {reason or error}")

    def build_text(self, exit_info: ExitInfo | None) -> str:
        """Return the text of the file. `exit_info`: how the run ended; None while it is live."""
        run_info, base, metrics = self._run_info, self._run_labels, MetricsText(self._highest_values)
        info_labels = {**base, "id": run_info.id, "name": run_info.name, "script": run_info.script}
        metrics.add_gauge("run_info", "The run that the other metrics describe.", info_labels, 1)
        metrics.add_gauge("run_start_time_seconds", "When the run began, since 1970.", base, run_info.started_unix)
        metrics.add_gauge("run_running", "1 while the run is live, 0 when it has ended.", base, int(exit_info is None))
        if exit_info is not None:
            outcome = outcome_word(load_exit(self._directory) or exit_info)
            metrics.add_gauge("run_exit_status", "The run's exit status.", {**base, "end": outcome}, exit_info.status)
        with open_store(self._directory) as store:
            state = ENDED if exit_info is not None else self._state(store)
            metrics.add_gauge("run_state", "1 for the state that the run is in.", {**base, "state": state}, 1)
            self._add_store_metrics(metrics, store)
            self._add_progress(metrics, store, is_live=exit_info is None)
        return str(metrics)

    def _state(self, store: Store) -> str:
        """Return the word for the state of a live run."""
        start_ns, step = self._run_info.start_ns, next(iter(read_steps(store, 1)), None)
        if step is not None:
            ends_ns = [step.start_ns + step.wall_ns]
        else:
            ends_ns = [end_ns for _, end_ns in read_newest_activity(store, [*store.ranks]).values()]
        stalls = [event.data for event in read_events(store, "stall", limit=1) if "lasted_s" not in event.data]
        with contextlib.closing(RunReader(self._directory)) as reader:
            paused_ns, input_ns = reader.pause_state().since_ns, reader.input_wait_start_ns()
            activities = reader.activities()
        activity, since_ns = activities.get(step.process if step is not None else 0, ("", 0))
        inputs = StateInputs(
            time.monotonic_ns() - start_ns,
            paused_ns=None if paused_ns is None else paused_ns - start_ns,
            input_ns=None if input_ns is None else input_ns - start_ns,
            stalled_ns=0 if stalls else None,
            step=step,
            seen_ns=max(ends_ns, default=-1),
            calls=store.open_calls,
            activity=(activity, max(since_ns - start_ns, 0)),
            step_word="" if step is None else store.kind_words[step.kind],
        )
        return decide_state(inputs).word

    def _add_store_metrics(self, metrics: MetricsText, store: Store) -> None:
        window, base, (job, own_node) = StatsWindow(store), self._run_labels, read_job(store)
        names = {node.number: node.name for node in read_node_rows(store.connection)}
        if job is not None and not names:  # otherwise, other nodes may write files with the same ranks
            node_text = "" if own_node is None else str(own_node)
            job_labels = {**base, "by": job["by"], "job_id": job["id"], "node": node_text}
            help_text = "The job of the run's ranks, with the same id on all its nodes."
            metrics.add_gauge("run_job_info", help_text, job_labels, 1)
        self._ranks_by_process = {ring.process: ring.rank for ring in store.rings.values()}
        self._nodes_by_process = {ring.process: names[ring.node] for ring in store.rings.values() if ring.node in names}
        for node in read_node_rows(store.connection):
            node_labels, help_text = {"node": node.name}, "1 while a node sends its records, otherwise 0."
            metrics.add_gauge("node_connected", help_text, {**base, **node_labels}, int(node.state == "connected"))
        self._add_steps(metrics, window)
        self._add_times(metrics, window)
        help_text = "Records that were lost before they were read."
        metrics.add_counter("records_dropped_total", help_text, base, store.dropped)
        metrics.add_counter("warnings_total", "Warnings in the record.", base, count_events(store, "warning"))
        events = read_events(store, "device", "host", limit=max(MAX_SAMPLES, _MAX_NODE_SAMPLES * len(names)))
        samples = {(event.kind, event.data.get("node"), event.data.get("index")): event.data for event in events}
        for (kind, node_number, _), data in samples.items():
            device_labels = {key: str(data[key]) for key in ("index", "uuid", "name") if data.get(key) is not None}
            node_labels = {"node": names[node_number]} if node_number in names else {}
            _add_gauges(metrics, kind, {**base, **node_labels, **device_labels}, data)
        for process in sorted(self._ranks_by_process)[:MAX_PROCESSES]:
            for definition, losses in read_loss_sites(store, process).items():
                if losses.why is not None:
                    continue
                labels = {**self._process_labels(process), "place": losses.place}
                for newest in read_newest_losses(store, process, definition, 1):
                    _add_gauges(metrics, "loss", labels, {"loss": newest.value})
        wrappers = {(event.data["process"], event.data["wrapper"]): event.data for event in read_events(store, "ddp")}
        for process, wrapper in sorted(wrappers)[:MAX_PROCESSES]:
            labels = {**self._process_labels(process), "wrapper": str(wrapper)}
            _add_gauges(metrics, "ddp", labels, wrappers[process, wrapper])

    def _process_labels(self, process: int) -> dict[str, str]:
        rank, node = self._ranks_by_process.get(process), self._nodes_by_process.get(process)
        labels = dict(self._run_labels)
        if node is not None:
            labels["node"] = node
        return {**labels, "process": str(process), "rank": "" if rank is None else str(rank)}

    def _add_steps(self, metrics: MetricsText, window: StatsWindow) -> None:
        """Add durations, phases, ranks' communication and quantities of the steps, including evaluations."""
        for process, mode, tally in self._tallies_by_mode(window):
            labels = {**self._process_labels(process), "mode": mode or "unknown"}
            steps = tally.stat(STEP)
            help_text = "Time of a step; the bounds of the buckets are at most 0.4% off."
            metrics.add_histogram("step_duration_seconds", help_text, labels, steps.counts, steps.total)
            for phase in PHASES:
                _add_phase(metrics, phase, {**labels, "phase": phase.name}, tally)
            for series, divisor, name, help_text in _RANK_METRICS:
                if (stats := tally.stats.get(series)) is not None:
                    metrics.add_counter(name, help_text, labels, stats.total / divisor if divisor else stats.count)
            for quantity in QUANTITIES:
                total = tally.stat(quantity.name)
                if total.count:
                    help_text = f"Sum over the steps with a value: {quantity.meaning}."
                    metrics.add_counter(quantity.metric, help_text, labels, total.total)

    def _add_times(self, metrics: MetricsText, window: StatsWindow) -> None:
        """Add each process's time by activity, its steps and samples."""
        for process, mode, tally in self._tallies_by_mode(window, only_training=True):
            labels = {**self._process_labels(process), "mode": mode or "unknown"}
            help_text = "Elapsed training time: steps and time between them, without pauses, evaluations, input waits."
            elapsed_ns, _ = window.elapsed(mode, TRAINING).get(process, (0, 0))
            metrics.add_counter("training_seconds_total", help_text, labels, elapsed_ns / 1e9)
            metrics.add_counter("training_steps_total", "Steps in training time.", labels, tally.steps)
            samples = tally.stat("samples")
            if samples.count:
                help_text = "Samples of these steps, without steps that have no sample count."
                metrics.add_counter("training_samples_total", help_text, labels, samples.total)
        spent_ns: dict[int, Counter[str]] = {}
        for row in window.times:
            spent_ns.setdefault(row.process, Counter()).update(row.spent)
        for process in sorted(spent_ns)[:MAX_PROCESSES]:
            for activity in ACTIVITIES:
                if (ns := spent_ns[process][activity]) > 0:
                    labels = {**self._process_labels(process), "activity": activity}
                    help_text = "Time of a process by activity, since it began to record."
                    metrics.add_counter("time_seconds_total", help_text, labels, ns / 1e9)

    def _add_progress(self, metrics: MetricsText, store: Store, *, is_live: bool) -> None:
        """Add the current or last epoch of each process."""
        for process in store.processes[:MAX_PROCESSES]:
            if not (epochs := read_epochs(store, process, 2)):
                continue
            labels, epoch = self._process_labels(process), epochs[-1]
            metrics.add_gauge("epoch", "Number of the current or the last epoch.", labels, epoch.epoch)
            help_text = "Batches that the steps of this epoch have used."
            metrics.add_gauge("epoch_batch", help_text, labels, epoch.batches_used)
            metrics.add_gauge("epoch_batches", "Batches of the loader of this epoch.", labels, epoch.length)
            estimate = estimate_epoch_time_left(store, epochs, epoch.batches_used) if is_live else ""
            if not isinstance(estimate, str):
                metrics.add_gauge("epoch_left_seconds", "Time left in this epoch.", labels, estimate.left_ns / 1e9)

    def _tallies_by_mode(self, window: StatsWindow, *, only_training: bool = False) -> list[tuple[int, str, Tally]]:
        """Return the steps of each process and mode, of all kinds or only training, at most 2 * MAX_PROCESSES."""
        tallies: dict[tuple[int, str], Tally] = {}
        for key, tally in window.tallies.items():
            if not only_training or step_kind(key.kind) == TRAINING:
                tallies.setdefault((key.process, key.mode), Tally()).merge(tally)
        return [(process, mode, tallies[process, mode]) for process, mode in sorted(tallies)[: 2 * MAX_PROCESSES]]


def _add_phase(metrics: MetricsText, phase: Phase, labels: _Labels, tally: Tally) -> None:
    """Add the time of a phase on the host and on the devices, and how many steps have a device time."""
    prefix, subject = ("call", "steps' calls") if phase.of_call else ("step", "steps")
    if (stats := tally.stats.get(phase.name)) is not None:
        call_help = "Time of the steps' calls by phase; it lies within the steps' forward."
        help_text = call_help if phase.of_call else "Time of the steps by phase."
        metrics.add_counter(f"{prefix}_phase_seconds_total", help_text, labels, stats.total / 1e9)
    if (stats := tally.stats.get(device_series(phase.name))) is not None:
        help_text = f"Time of the slowest device by phase of the {subject}, over the steps in which it is known."
        metrics.add_counter(f"{prefix}_phase_device_seconds_total", help_text, labels, stats.total / 1e9)
        help_text = f"Steps in which the device time of a phase of the {subject} is known."
        metrics.add_counter(f"{prefix}_phase_device_known_total", help_text, labels, stats.count)


def _add_gauges(metrics: MetricsText, record_kind: str, labels: _Labels, data: Mapping[str, object]) -> None:
    """Add the values of an event's fields that are metrics."""
    for field in RECORDS[record_kind].fields:
        value = data.get(field.name)
        if field.metric and isinstance(value, (int, float)):
            metrics.add_gauge(field.metric, field.help, labels, value * field.scale)
