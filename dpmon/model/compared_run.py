"""One run as a comparison needs it: its setup, its comparable steps, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from dpmon.model.mode_comparison import is_compared
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import ProcessInfo
from dpmon.model.stragglers import straggler_sentence
from dpmon.record.schema import (
    EVALUATION,
    PHASES,
    REST,
    SECOND,
    STEP,
    STEP_KINDS,
    STEP_PHASES,
    device_series,
    step_kind,
)
from dpmon.record.shared_names import RANK_MODES
from dpmon.store.activity_times import read_times
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES
from dpmon.store.tally_tables import read_tally_rows
from dpmon.text.fact_table import ms
from dpmon.text.formatting import format_bytes, format_compact, format_count_with_noun, format_duration, format_percent

BETWEEN = "between"
"""The series of the time between steps, such as the start of a loader's workers. It is in no tally of the store."""
_MAX_PARTS = 20
"""Most parts into which the steps of a run are divided."""
_MIN_SAMPLED_PARTS = 3
"""Fewest parts for a CPU time, which is sampled once a second."""
_CLOCK, _THROTTLED, _BUSY = "clock of the GPUs", "throttled", "processors busy with other work"
CONDITIONS: Mapping[str, tuple[float, Callable[[float], str]]] = {
    _CLOCK: (30.0, "{:.0f} MHz".format),
    _THROTTLED: (0.05, format_percent),
    _BUSY: (0.5, "{:.1f}".format),
}
"""Measured conditions: the smallest difference to show, and how to format a value."""


class Metric(NamedTuple):
    """A compared value: its name in JSON, its label in a table, its unit (ns, bytes or "/s"), its series in tallies.

    A metric with series is the mean of their sum per step, or the quantile at `fraction` of a single series.
    """

    name: str
    label: str
    unit: str = "ns"
    series: tuple[str, ...] = ()
    fraction: float | None = None

    def value_over(self, steps: Tally) -> float | None:
        """Return its value over steps. None if the steps have none, or if it has no series."""
        stats = [steps.stats[name] for name in self.series if name in steps.stats]
        if not stats:
            return None
        if self.fraction is not None:
            return steps.quantile(self.series[0], self.fraction)
        # A phase takes no time in a step without it. A device time may be unknown.
        count = stats[0].count if self.name.endswith("_device") else steps.steps
        return sum(stat.total for stat in stats) / count

    def as_fields(self, **values: Sequence[float | None]) -> dict[str, object]:
        """Return the unit and lists of values for JSON, with times in ms."""
        if self.unit != "ns":
            return {"unit": self.unit, **values}
        return {"unit": "ms", **{name: [ms(value) for value in items] for name, items in values.items()}}

    def format(self, value: float | None) -> str:
        """Return a value in words."""
        if self.unit == "ns":
            return format_duration(value)
        return {"bytes": format_bytes, "share": format_percent}.get(self.unit, format_compact)(value)


def _step_metrics() -> list[Metric]:
    metrics = [Metric(STEP, STEP, series=(STEP, BETWEEN))]
    for name in STEP_PHASES:
        parts = [phase.name for phase in PHASES if phase.of_call] if name == "forward" else []
        for phase_name in (name, *parts):
            indent = "  " * (1 + (phase_name != name))
            metrics.append(Metric(phase_name, indent + phase_name, series=(phase_name,)))
            metrics.append(Metric(f"{phase_name}_device", f"{indent}  on device", series=(device_series(phase_name),)))
    return [
        *metrics,
        Metric(BETWEEN, "  gaps between steps", series=(BETWEEN,)),
        Metric("median_step", "median step", series=(STEP,), fraction=0.5),
        Metric("fast_step", "fast step", series=(STEP,), fraction=0.05),
        Metric("cpu_step", "CPU time"),
    ]


STEP_METRICS = tuple(_step_metrics())
"""Times per step or per sample. `step` is the elapsed training time, with the time between steps; it and its phases are
means. 1 in 20 steps is faster than the fast step, which other work on the machine disturbs least. `cpu_step` has one
value per run."""
RUN_METRICS = (
    Metric("samples_per_s", "samples/s", "/s"),
    Metric("tokens_per_s", "tokens/s", "/s"),
    Metric("steps_per_s", "steps/s", "/s"),
    Metric("mfu", "MFU", "share"),
    Metric("flops_per_s", "FLOP/s", "/s"),
    Metric("memory", "peak memory of torch", "bytes"),
    Metric("host_memory", "host memory of the run", "bytes"),
    Metric("exposed", "exposed communication per step"),
    Metric("wait", "wait for the slowest rank per step"),
    Metric("evaluation_step", "step of evaluation"),
    Metric("evaluation", "total evaluation"),
    Metric("startup", "start-up"),
)
"""Metrics with one value per run, over all of its steps."""
_SERIES = (REST, "samples", *(name for metric in STEP_METRICS for name in metric.series if name != BETWEEN))


@dataclass(frozen=True)
class ComparedRun:
    """One run as a comparison needs it."""

    id: str
    name: str
    directory: str
    started_unix: float
    set_up: Mapping[str, str | None]
    """The command, its settings and the hardware, by label; None if unknown."""
    measured: Mapping[str, float | None]
    """The values of CONDITIONS."""
    mode: str | None
    """The mode with most steps; None without steps."""
    rows: Sequence[tuple[int, Tally]]
    """The samples of a step, and a tally of such steps of its slowest rank with BETWEEN, in order of time."""
    part_s: int
    """Width (s) of the tallies in `rows`."""
    values: Mapping[str, float]
    """The known values of RUN_METRICS."""
    straggler: str | None
    """The rank that the others wait for, in a sentence."""
    ranks: int = 1
    """How many ranks share a step, seen or not."""
    unread_warning: str | None = None
    """See `Store.unread_warning`."""

    @cached_property
    def steps_by_batch(self) -> Counter[int]:
        """Number of its steps by their samples."""
        counts: Counter[int] = Counter()
        for batch, tally in self.rows:
            counts[batch] += tally.steps
        return counts

    @property
    def main_batch(self) -> int | None:
        """The most frequent number of samples of its steps; None without steps."""
        return max(self.steps_by_batch, key=self.steps_by_batch.__getitem__, default=None)

    def step_tallies(self, batch: int | None) -> list[Tally]:
        """Return the tallies of the steps with this number of samples, in order of time; for None, of all steps."""
        return [tally for row_batch, tally in self.rows if batch in (None, row_batch)]

    def steps(self, batch: int | None) -> Tally:
        """Return one tally of the steps of `step_tallies`."""
        merged = Tally()
        for tally in self.step_tallies(batch):
            merged.merge(tally)
        return merged

    def parts(self, batch: int | None) -> list[Tally]:
        """Return the steps of `step_tallies`: up to _MAX_PARTS tallies with about as many steps each."""
        tallies = self.step_tallies(batch)
        min_steps = sum(tally.steps for tally in tallies) / _MAX_PARTS
        parts: list[Tally] = []
        for tally in tallies:
            if not parts or parts[-1].steps >= min_steps:
                parts.append(Tally())
            parts[-1].merge(tally)
        if len(parts) > 1 and parts[-1].steps < min_steps:
            last = parts.pop()
            parts[-1].merge(last)
        return parts

    def value(self, metric: Metric, steps: Tally, *, per_sample: bool = False) -> float | None:
        """Return a metric over steps, or of the whole run if it has no series; None if unknown.

        `per_sample`: divide the times of STEP_METRICS by the samples of a step on all ranks.
        """
        value = metric.value_over(steps) if metric.series else self.values.get(metric.name)
        if value is None or not per_sample or metric not in STEP_METRICS:
            return value
        return value * steps.steps / (steps.stat("samples").total * self.ranks)


def build_compared_run(run: RunAnalysis, given: Mapping[str, str | None], **about: Any) -> ComparedRun:
    """Read a run while its store is open.

    `given`: the setup that is not in the store. `about`: the fields of ComparedRun from `id` to `started_unix`.
    """
    mode = max(run.window.modes, key=lambda mode: run.window.tally(mode, without_warmup=True).steps, default=None)
    straggler = None if run.whole_communication is None else run.whole_communication.straggler
    tallies: list[tuple[tuple[int, int], int, Tally]] = []
    if mode is not None:
        # The others wait for the straggler in sync, so only its own phases show what takes the time.
        process = run.representative_process(mode) if straggler is None else straggler.process
        tallies += _read_compared_tallies(run, mode, process)
    compared_run = ComparedRun(
        **about,
        set_up={},
        measured=_measured_conditions(run),
        mode=mode,
        rows=[(batch, tally) for _, batch, tally in tallies],
        part_s=run.bin_s,
        values={**_cpu_ns_per_step(run, tallies), **_whole_run_values(run, mode)},
        straggler=None if straggler is None else straggler_sentence(straggler, lately=False),
        ranks=_first_process(run).world or 1,
        unread_warning=run.store.unread_warning,
    )
    switched = {"mode switched": _switched_mode(run, mode)}
    return replace(compared_run, set_up={**switched, **given, **_setup_labels(run, compared_run)})


def _read_compared_tallies(run: RunAnalysis, mode: str, process: int) -> Iterator[tuple[tuple[int, int], int, Tally]]:
    """Yield the interval (start and end in ns), samples of a step, and tally of the steps of a process to compare.

    In order of time. The time between steps becomes the series BETWEEN of the tallies that begin in or after it.
    """
    gaps = [row for row in read_times(run.store, process=process, widest=run.bin_s) if row.mode == mode]
    gaps.reverse()
    tallies = read_tally_rows(run.store, process=process, widest=run.bin_s, series=_SERIES)
    gap_ns, main_kind = 0, run.window.main_kind
    for (start_s, width_s), bucket in groupby(tallies, key=itemgetter(0, 1)):
        end_s = start_s + width_s
        rows = [(key, tally) for *_, key, tally in bucket if (key.mode, step_kind(key.kind)) == (mode, main_kind)]
        while gaps and gaps[-1].start_s < end_s:
            spent = gaps.pop().spent
            gap_ns += sum(spent[name] for name in run.store.between_activities)
        steps = sum(tally.steps for _, tally in rows)
        for key, tally in rows:
            if gap_ns > 0:
                tally.stats[BETWEEN] = SeriesStats(tally.steps, gap_ns * tally.steps // steps)
            if is_compared(key, main_kind):
                yield (start_s * SECOND, end_s * SECOND), key.batch, tally
        if steps:
            gap_ns = 0


def _cpu_ns_per_step(run: RunAnalysis, tallies: Iterable[tuple[tuple[int, int], int, Tally]]) -> dict[str, float]:
    """Return the CPU time of all processes per training step; empty if unknown."""
    steps_by_interval: Counter[tuple[int, int]] = Counter()
    for interval, _, tally in tallies:
        steps_by_interval[interval] += tally.steps
    spent = [
        (after - before, steps)
        for (start, end), steps in sorted(steps_by_interval.items())[1:-1]  # the first and the last may be partly empty
        if (before := run.samples.cpu_time_until(start)) is not None
        and (after := run.samples.cpu_time_until(end)) is not None
    ]
    if len(spent) < _MIN_SAMPLED_PARTS:
        return {}
    return {"cpu_step": sum(ns for ns, _ in spent) / sum(steps for _, steps in spent)}


def _whole_run_values(run: RunAnalysis, mode: str | None) -> dict[str, float]:
    rate = None if mode is None else run.window.rate(mode)
    peaks = [row.peak for row in run.device_memory if row.peak is not None]
    communication = run.whole_communication
    rank_times = {} if communication is None else communication.mean_step_times
    hosts = [host.mem_run_max for host in run.samples.hosts if host.mem_run_max is not None]
    evaluations = [stats for stats in run.other_modes if (stats.mode, stats.kind) == (mode, EVALUATION)]
    values = {
        "samples_per_s": None if rate is None else rate.samples_per_s,
        "tokens_per_s": None if rate is None else rate.tokens_per_s,
        "steps_per_s": None if rate is None or rate.samples_per_s is not None else rate.steps_per_s,
        "mfu": run.whole_efficiency.mfu,
        "flops_per_s": run.whole_efficiency.flops_per_s,
        "memory": max(peaks, default=None),
        "host_memory": max(hosts, default=None),
        **rank_times,
        "evaluation_step": next((stats.median_ns for stats in evaluations), None),
        "evaluation": run.time_by_activity.get("evaluation") or None,
        "startup": run.time_by_activity.get("startup"),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _first_process(run: RunAnalysis) -> ProcessInfo:
    return next(iter(run.announced.info.values()), ProcessInfo(0))


def _setup_labels(run: RunAnalysis, compared: ComparedRun) -> dict[str, str | None]:
    process, mode, distributed = _first_process(run), compared.mode, run.layouts.distributed
    seen_ranks = len({info.rank for info in run.announced.info.values()})
    first_change = next(
        (change for change in run.announced.changes if change.refused is None and change.mode == mode), None
    )
    gpu_names = [device.name or "GPU" for device in run.device_usage if device.of_run]
    hardware = [f"{gpu_names.count(name)} × {name}" for name in dict.fromkeys(gpu_names)]
    if run.host_usage is not None:
        nodes_text = f" on one of {run.host_usage.machines} nodes" if run.host_usage.machines > 1 else ""
        hardware.append(f"{format_count_with_noun(run.host_usage.cpus, 'processor')}{nodes_text}")
    batch = NO_SAMPLES if compared.main_batch is None else compared.main_batch
    return {
        "kind of steps": STEP_KINDS[run.window.main_kind].replace("_", " "),
        "mode": RANK_MODES[distributed] if distributed and mode == "single" else mode,
        "ranks": str(compared.ranks) if seen_ranks >= compared.ranks else f"{seen_ranks} of {compared.ranks}",
        "devices": None if first_change is None else " ".join(first_change.devices),
        "hardware": None if run.host_usage is None else ", ".join(hardware),
        "samples a step": {NO_SAMPLES: "unknown", OTHER_SIZES: "changing"}.get(batch, str(batch)),
        "Python": process.python,
        "torch": process.torch,
    }


def _switched_mode(run: RunAnalysis, mode: str | None) -> str:
    """Return whether the mode was switched in a run, and how many of its steps are in `mode`, which is compared."""
    if mode is None or len(run.window.modes) < 2:
        return "no"
    steps, _ = run.window.step_counts(run.window.main_kind, mode)
    return f"yes: only {mode} is compared, {steps:,} of {format_count_with_noun(run.steps, 'step')}"


def _measured_conditions(run: RunAnalysis) -> dict[str, float | None]:
    run_devices = [device for device in run.device_usage if device.of_run]
    clocks = [clock for device in run_devices for clock in device.clocks]
    samples = sum(device.throttle_samples for device in run_devices)
    return {
        _CLOCK: median(clocks) if clocks else None,
        _THROTTLED: sum(device.throttled.total() for device in run_devices) / samples if samples else None,
        _BUSY: None if run.host_usage is None else run.host_usage.others,
    }
