"""One run as a comparison needs it: its setup, its comparable steps, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from dpmon.model.json_fields import ms
from dpmon.model.mode_comparison import StepKind, comparable_kind
from dpmon.model.pauses import any_paused_intervals
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_snapshot import ProcessInfo
from dpmon.model.step_history import Bin
from dpmon.model.stragglers import straggler_sentence as straggler_sentence
from dpmon.record.schema import PHASES, REST, SECOND, STEP, STEP_PHASES, device_series
from dpmon.record.shared_names import RANK_MODES
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES, Tally
from dpmon.text.formatting import format_bytes, format_compact, format_count_with_noun, format_duration

_MAX_PARTS = 20
"""Most parts into which the steps of a run are divided."""
_MIN_SAMPLED_STRETCHES = 3
"""Fewest parts for a CPU time, which is sampled once a second."""


class Metric(NamedTuple):
    """A compared value: its name in JSON, its label in a table, its unit (ns, bytes or "/s"), its series in tallies.

    For a series, the quantile at `fraction` is compared.
    """

    name: str
    label: str
    unit: str = "ns"
    series: str | None = None
    fraction: float = 0.5

    def value_over(self, steps: Tally) -> float | None:
        """Return its value over steps; None if the steps have none, or if it has no series."""
        if self.series is None:
            return None
        return steps.median(self.series) if self.fraction == 0.5 else steps.quantile(self.series, self.fraction)

    def as_fields(self, **values: Sequence[float | None]) -> dict[str, object]:
        """Return the unit and lists of values for JSON, with times in ms."""
        if self.unit != "ns":
            return {"unit": self.unit, **values}
        return {"unit": "ms", **{name: [ms(value) for value in items] for name, items in values.items()}}

    def format(self, value: float | None) -> str:
        """Return a value in words."""
        if self.unit == "ns":
            return format_duration(value)
        return format_bytes(value) if self.unit == "bytes" else format_compact(value)


def _step_metrics() -> list[Metric]:
    metrics = [Metric(STEP, STEP, series=STEP)]
    for name in STEP_PHASES:
        parts = [phase.name for phase in PHASES if phase.of_call] if name == "forward" else []
        for phase_name in (name, *parts):
            indent = "  " * (1 + (phase_name != name))
            metrics.append(Metric(phase_name, indent + phase_name, series=phase_name))
            metrics.append(Metric(f"{phase_name}_device", f"{indent}  on device", series=device_series(phase_name)))
    return [*metrics, Metric("fast_step", "fast step", series=STEP, fraction=0.05)]


STEP_METRICS = tuple(_step_metrics())
"""Medians of times. 1 in 20 steps is faster than the fast step, which other work on the machine disturbs least."""
RUN_METRICS = (
    Metric("mean_step", "mean step"),
    Metric("cpu_step", "CPU time per step"),
    Metric("samples_per_s", "samples/s", "/s"),
    Metric("steps_per_s", "steps/s", "/s"),
    Metric("memory", "peak memory of torch", "bytes"),
    Metric("host_memory", "peak memory of the host", "bytes"),
    Metric("exposed", "exposed communication"),
    Metric("wait", "wait for the slowest rank"),
    Metric("evaluation_step", "step of evaluation"),
    Metric("evaluation", "total evaluation"),
    Metric("startup", "start-up"),
)
"""Metrics with one value per run, over all of its steps."""
_SERIES = (REST, *(figure.series for figure in STEP_METRICS if figure.series is not None))


@dataclass(frozen=True)
class ComparedRun:
    """One run as a comparison needs it."""

    id: str
    name: str
    directory: str
    started_unix: float
    set_up: Mapping[str, str | None]
    """The command, its settings and the hardware, by label; None if unknown."""
    measured: Mapping[str, float]
    """The known values of dpmon.model.run_comparison.MEASURED_CONDITIONS."""
    bins: Sequence[Bin]
    """Its steps over time."""
    mode: str | None
    """The mode with most steps; None without steps."""
    rows: Sequence[tuple[StepKind, Tally]]
    """The tallies of the steps of its representative process, without those left out, in order of time."""
    steps_by_kind: Counter[StepKind]
    """Number of these steps by kind."""
    part_s: int
    """Width (s) of the tallies in `rows`."""
    interrupted_steps: int
    """Steps left out because of a pause or a stall in the same part."""
    values: Mapping[str, float]
    """The known values of RUN_METRICS."""
    straggler: str | None
    """The rank that the others wait for, in a sentence."""

    @property
    def ranks_seen(self) -> str | None:
        """How many of the ranks have records ("2 of 4"); None if all have."""
        ranks = self.set_up["ranks"]
        return ranks if ranks is not None and " of " in ranks else None

    def steps(self, kind: StepKind | None) -> Tally:
        """Return the tally of all steps of one kind; an empty one for None."""
        merged = Tally()
        for row_kind, tally in self.rows:
            if row_kind == kind:
                merged.merge(tally)
        return merged

    def parts(self, kind: StepKind) -> list[Tally]:
        """Return the steps of one kind in order of time: up to _MAX_PARTS tallies with about as many steps each."""
        parts: list[Tally] = []
        for tally in (tally for row_kind, tally in self.rows if row_kind == kind):
            if not parts or parts[-1].steps >= self.steps_by_kind[kind] / _MAX_PARTS:
                parts.append(Tally())
            parts[-1].merge(tally)
        if len(parts) > 1 and parts[-1].steps < self.steps_by_kind[kind] / _MAX_PARTS:
            last = parts.pop()
            parts[-1].merge(last)
        return parts


def build_compared_run(run: RunAnalysis, given: Mapping[str, str | None], **about: Any) -> ComparedRun:
    """Read a run while its store is open.

    `given`: the setup that is not in the store. `about`: the fields of ComparedRun from `id` to `started_unix`.
    """
    main_mode = max(run.window.modes, key=lambda mode: run.window.tally(mode, without_warmup=True).steps, default=None)
    rows: list[tuple[StepKind, Tally]] = []
    steps_by_kind: Counter[StepKind] = Counter()
    trained_steps: Counter[tuple[int, int]] = Counter()
    interrupted = 0
    if main_mode is not None:
        until_ns = run.until_ns
        # A step that stalled ends, and counts, up to a second after its stall.
        interruptions = [
            (stall.since_ns, (until_ns if stall.end_ns is None else stall.end_ns) + SECOND)
            for stall in run.announced.stalls
        ]
        interruptions += any_paused_intervals(run.pauses, until_ns)
        tally_rows = run.store.tally_rows(
            process=run.representative_process(main_mode), widest=run.bin_s, series=_SERIES
        )
        for start_s, width, key, tally in tally_rows:
            kind = comparable_kind(key)
            if kind is None or key.mode != main_mode:
                continue
            if kind.trains:
                trained_steps[start_s * SECOND, (start_s + width) * SECOND] += tally.steps
            if any(start < (start_s + width) * SECOND and start_s * SECOND < end for start, end in interruptions):
                interrupted += tally.steps
            else:
                rows.append((kind, tally))
                steps_by_kind[kind] += tally.steps
    straggler = None if run.communication is None else run.communication.straggler
    sentence = None if straggler is None else straggler_sentence(straggler, lately=False)
    bins = [time_bin for time_bin in run.binned_steps.bins if time_bin.mode == main_mode and not time_bin.other_kind]
    return ComparedRun(
        **about,
        set_up={**given, **_setup_labels(run, main_mode, steps_by_kind)},
        measured=_hardware_conditions(run),
        bins=bins,
        mode=main_mode,
        rows=rows,
        steps_by_kind=steps_by_kind,
        part_s=run.bin_s,
        interrupted_steps=interrupted,
        values={
            **_mean_step(rows, steps_by_kind),
            **_cpu_ns_per_step(run, trained_steps),
            **_whole_run_values(run, main_mode),
        },
        straggler=sentence,
    )


def _mean_step(rows: Sequence[tuple[StepKind, Tally]], steps_by_kind: Counter[StepKind]) -> dict[str, float]:
    """Return the mean of the most frequent kind of step; empty without steps."""
    merged = Tally()
    for kind, tally in rows:
        if kind == max(steps_by_kind, key=steps_by_kind.__getitem__):
            merged.merge(tally)
    mean = merged.stat(STEP).mean
    return {} if mean is None else {"mean_step": mean}


def _cpu_ns_per_step(run: RunAnalysis, trained_steps: Mapping[tuple[int, int], int]) -> dict[str, float]:
    """Return the CPU time of all processes per training step; empty if unknown.

    `trained_steps`: number of steps that ended in each interval (ns). The first and the last one may be partly empty.
    """
    spent = [
        (after - before, steps)
        for (start, end), steps in sorted(trained_steps.items())[1:-1]
        if (before := run.samples.cpu_time_until(start)) is not None
        and (after := run.samples.cpu_time_until(end)) is not None
    ]
    if len(spent) < _MIN_SAMPLED_STRETCHES:
        return {}
    return {"cpu_step": sum(ns for ns, _ in spent) / sum(steps for _, steps in spent)}


def _whole_run_values(run: RunAnalysis, mode: str | None) -> dict[str, float]:
    rate = None if mode is None else run.window.rate(mode)
    peaks = [row.peak for row in run.memory if row.peak is not None]
    communication = run.communication
    hosts = [host.mem_run_max for host in run.samples.hosts if host.mem_run_max is not None]
    steps = [mode_stats.median_ns for mode_stats in run.other_modes if mode_stats.mode == mode]
    values = {
        "samples_per_s": None if rate is None else rate.samples_per_s,
        "steps_per_s": None if rate is None or rate.samples_per_s is not None else rate.steps_per_s,
        "memory": max(peaks, default=None),
        "host_memory": max(hosts, default=None),
        "exposed": None if communication is None else communication.exposed_ns,
        "wait": None if communication is None else communication.wait_ns,
        "evaluation_step": next(iter(steps), None),
        "evaluation": run.time_by_activity.get("evaluation") or None,
        "startup": run.time_by_activity.get("startup"),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _setup_labels(run: RunAnalysis, mode: str | None, steps_by_kind: Counter[StepKind]) -> dict[str, str | None]:
    process, distributed = next(iter(run.announced.info.values()), ProcessInfo(0)), run.layouts.distributed
    seen_ranks, world = len({info.rank for info in run.announced.info.values()}), process.world or 1
    first_change = next(
        (change for change in run.announced.changes if change.refused is None and change.mode == mode), None
    )
    gpu_names = [device.name or "GPU" for device in run.devices if device.of_run]
    gpus = [f"{gpu_names.count(name)} × {name}" for name in dict.fromkeys(gpu_names)]
    batch = max(steps_by_kind, key=steps_by_kind.__getitem__).batch if steps_by_kind else NO_SAMPLES
    cores_text = None if run.host is None else format_count_with_noun(run.host.cpus, "processor")
    if run.host is not None and run.host.machines > 1:
        cores_text = f"{cores_text} on one of {run.host.machines} nodes"
    return {
        "mode": RANK_MODES[distributed] if distributed and mode == "single" else mode,
        "ranks": str(world) if seen_ranks >= world else f"{seen_ranks} of {world}",
        "devices": None if first_change is None else " ".join(first_change.devices),
        "hardware": None if cores_text is None else ", ".join([*gpus, cores_text]),
        "samples a step": {NO_SAMPLES: "unknown", OTHER_SIZES: "changing"}.get(batch, str(batch)),
        "Python": process.python,
        "torch": process.torch,
        "record": run.store.damaged or "complete",
    }


def _hardware_conditions(run: RunAnalysis) -> dict[str, float]:
    run_devices = [device for device in run.devices if device.of_run]
    clocks = [clock for device in run_devices for clock in device.clocks]
    samples = sum(device.throttle_samples for device in run_devices)
    conditions = {
        "clock of the GPUs": median(clocks) if clocks else None,
        "throttled": sum(device.throttled.total() for device in run_devices) / samples if samples else None,
        "processors busy with other work": None if run.host is None else run.host.others,
    }
    return {name: value for name, value in conditions.items() if value is not None}
