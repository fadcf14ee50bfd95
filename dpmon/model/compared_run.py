"""What a comparison needs of one run: its set-up, its comparable steps, and its figures. Pure."""

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

_MAX_STRETCHES = 20
"""Most stretches into which the steps of a run are divided."""
_MIN_SAMPLED_STRETCHES = 3
"""Fewest stretches for a processor time: it is sampled once a second."""


class Metric(NamedTuple):
    """What is compared: its name in JSON, its name in a table, its unit (ns, bytes or "/s"), its series in tallies.

    Of a series, the quantile at `fraction` is compared.
    """

    name: str
    label: str
    unit: str = "ns"
    series: str | None = None
    fraction: float = 0.5

    def value_over(self, steps: Tally) -> float | None:
        """Its value over steps; None if they have none, or if it has no series."""
        if self.series is None:
            return None
        return steps.median(self.series) if self.fraction == 0.5 else steps.quantile(self.series, self.fraction)

    def as_fields(self, **values: Sequence[float | None]) -> dict[str, object]:
        """The unit and lists of values for JSON, with times in ms."""
        if self.unit != "ns":
            return {"unit": self.unit, **values}
        return {"unit": "ms", **{name: [ms(value) for value in each] for name, each in values.items()}}

    def format(self, value: float | None) -> str:
        """A value in words."""
        return (
            format_duration(value)
            if self.unit == "ns"
            else format_bytes(value)
            if self.unit == "bytes"
            else format_compact(value)
        )


def _step_metrics() -> list[Metric]:
    found = [Metric(STEP, STEP, series=STEP)]
    for name in STEP_PHASES:
        parts = [phase.name for phase in PHASES if phase.of_call] if name == "forward" else []
        for each in (name, *parts):
            indent = "  " * (1 + (each != name))
            found.append(Metric(each, indent + each, series=each))
            found.append(Metric(f"{each}_device", f"{indent}  on device", series=device_series(each)))
    return [*found, Metric("fast_step", "fast step", series=STEP, fraction=0.05)]


STEP_METRICS = tuple(_step_metrics())
"""Medians of times; one step in twenty is faster than the fast step, which other work disturbs least."""
RUN_METRICS = (
    Metric("mean_step", "mean step"),
    Metric("cpu_step", "processor time a step"),
    Metric("samples_per_s", "samples/s", "/s"),
    Metric("steps_per_s", "steps/s", "/s"),
    Metric("memory", "peak memory of torch", "bytes"),
    Metric("host_memory", "peak memory of the host", "bytes"),
    Metric("exposed", "exposed communication"),
    Metric("wait", "wait for the slowest rank"),
    Metric("evaluation_step", "step of evaluation"),
    Metric("evaluation", "evaluation in all"),
    Metric("startup", "start-up"),
)
"""A number for each run, all of its steps included."""
_SERIES = (REST, *(figure.series for figure in STEP_METRICS if figure.series is not None))


@dataclass(frozen=True)
class ComparedRun:
    """What a comparison needs of one run."""

    id: str
    name: str
    directory: str
    started_unix: float
    set_up: Mapping[str, str | None]
    """What was run, and on what; None if unknown."""
    measured: Mapping[str, float]
    """The known ones of dpmon.model.run_comparison.MEASURED_CONDITIONS."""
    bins: Sequence[Bin]
    """Its steps over time."""
    mode: str | None
    """The mode with most steps; None without steps."""
    rows: Sequence[tuple[StepKind, Tally]]
    """The tallies of the steps of its representative process, without those left out, in order of time."""
    kinds: Counter[StepKind]
    """Number of these steps by kind."""
    stretch_s: int
    """Seconds in each of `rows`."""
    interrupted_steps: int
    """Steps left out because of a pause or a stall in the same stretch."""
    values: Mapping[str, float]
    """The known ones of RUN_METRICS."""
    straggler: str | None
    """The rank that the others wait for, in a sentence."""

    @property
    def ranks_seen(self) -> str | None:
        """How many of the ranks it has ("2 of 4"), if it has not all."""
        ranks = self.set_up["ranks"]
        return ranks if ranks is not None and " of " in ranks else None

    def steps(self, kind: StepKind | None) -> Tally:
        """All steps of one kind; None: no step."""
        whole = Tally()
        for each, tally in self.rows:
            if each == kind:
                whole.merge(tally)
        return whole

    def stretches(self, kind: StepKind) -> list[Tally]:
        """The steps of one kind in order of time: up to _MAX_STRETCHES tallies with about as many steps each."""
        found: list[Tally] = []
        for tally in (tally for each, tally in self.rows if each == kind):
            if not found or found[-1].steps >= self.kinds[kind] / _MAX_STRETCHES:
                found.append(Tally())
            found[-1].merge(tally)
        if len(found) > 1 and found[-1].steps < self.kinds[kind] / _MAX_STRETCHES:
            last = found.pop()
            found[-1].merge(last)
        return found


def build_compared_run(facts: RunAnalysis, given: Mapping[str, str | None], **about: Any) -> ComparedRun:
    """Read a run while its store is open. `given`: the set-up that is not in the store; `about`: id to started_unix."""
    there = [mode for mode, evaluation in facts.window.modes if not evaluation]
    usual = max(there, key=lambda mode: facts.window.tally(mode, settled=True).steps, default=None)
    rows: list[tuple[StepKind, Tally]] = []
    kinds: Counter[StepKind] = Counter()
    trained: Counter[tuple[int, int]] = Counter()
    interrupted = 0
    if usual is not None:
        until = facts.until_ns
        # A step ends, and counts, up to a second after its stall.
        apart = [
            (one.since_ns, (until if one.end_ns is None else one.end_ns) + SECOND) for one in facts.announced.stalls
        ]
        apart += any_paused_intervals(facts.pauses, until)
        read = facts.store.tally_rows(
            process=facts.representative_process(usual, False), widest=facts.stretch_s, series=_SERIES
        )
        for at, width, key, tally in read:
            kind = comparable_kind(key)
            if kind is None or key.mode != usual:
                continue
            if kind.trains:
                trained[at * SECOND, (at + width) * SECOND] += tally.steps
            if any(begin < (at + width) * SECOND and at * SECOND < end for begin, end in apart):
                interrupted += tally.steps
            else:
                rows.append((kind, tally))
                kinds[kind] += tally.steps
    slow = None if facts.communication is None else facts.communication.straggler
    told = None if slow is None else straggler_sentence(slow, lately=False)
    bins = [one for one in facts.stretches.bins if one.mode == usual and not one.evaluation]
    return ComparedRun(
        **about,
        set_up={**given, **_setup_labels(facts, usual, kinds)},
        measured=_hardware_conditions(facts),
        bins=bins,
        mode=usual,
        rows=rows,
        kinds=kinds,
        stretch_s=facts.stretch_s,
        interrupted_steps=interrupted,
        values={**_mean_step(rows, kinds), **_cpu_ns_per_step(facts, trained), **_whole_run_values(facts, usual)},
        straggler=told,
    )


def _mean_step(rows: Sequence[tuple[StepKind, Tally]], kinds: Counter[StepKind]) -> dict[str, float]:
    """The mean of the most frequent kind of step; nothing without steps."""
    whole = Tally()
    for kind, tally in rows:
        if kind == max(kinds, key=kinds.__getitem__):
            whole.merge(tally)
    mean = whole.stat(STEP).mean
    return {} if mean is None else {"mean_step": mean}


def _cpu_ns_per_step(facts: RunAnalysis, trained: Mapping[tuple[int, int], int]) -> dict[str, float]:
    """The processor time of all processes for each training step; nothing if unknown.

    `trained`: the steps that ended in each stretch of time. The first and the last one are not full of them.
    """
    spent = [
        (after - before, steps)
        for (begin, end), steps in sorted(trained.items())[1:-1]
        if (before := facts.samples.cpu_time_until(begin)) is not None
        and (after := facts.samples.cpu_time_until(end)) is not None
    ]
    if len(spent) < _MIN_SAMPLED_STRETCHES:
        return {}
    return {"cpu_step": sum(ns for ns, _ in spent) / sum(steps for _, steps in spent)}


def _whole_run_values(facts: RunAnalysis, mode: str | None) -> dict[str, float]:
    rate = None if mode is None else facts.window.rate(mode)
    peaks = [row.peak for row in facts.memory if row.peak is not None]
    communicated = facts.communication
    hosts = [one.mem_run_max for one in facts.samples.hosts if one.mem_run_max is not None]
    steps = [one.median_ns for one in facts.evaluations if one.mode == mode]
    found = {
        "samples_per_s": None if rate is None else rate.samples_per_s,
        "steps_per_s": None if rate is None or rate.samples_per_s is not None else rate.steps_per_s,
        "memory": max(peaks, default=None),
        "host_memory": max(hosts, default=None),
        "exposed": None if communicated is None else communicated.exposed_ns,
        "wait": None if communicated is None else communicated.wait_ns,
        "evaluation_step": next(iter(steps), None),
        "evaluation": facts.time_by_activity.get("evaluation") or None,
        "startup": facts.time_by_activity.get("startup"),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _setup_labels(facts: RunAnalysis, mode: str | None, kinds: Counter[StepKind]) -> dict[str, str | None]:
    process, by = next(iter(facts.announced.info.values()), ProcessInfo(0)), facts.layouts.distributed
    seen, world = len({one.rank for one in facts.announced.info.values()}), process.world or 1
    began = next((one for one in facts.announced.changes if one.refused is None and one.mode == mode), None)
    names = [device.name or "GPU" for device in facts.devices if device.of_run]
    gpus = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    usual = kinds.most_common(1)[0][0].batch if kinds else NO_SAMPLES
    processors = None if facts.host is None else format_count_with_noun(facts.host.cpus, "processor")
    if facts.host is not None and facts.host.machines > 1:
        processors = f"{processors} on one of {facts.host.machines} machines"
    return {
        "mode": RANK_MODES[by] if by and mode == "single" else mode,
        "ranks": str(world) if seen >= world else f"{seen} of {world}",
        "devices": None if began is None else " ".join(began.devices),
        "hardware": None if processors is None else ", ".join([*gpus, processors]),
        "samples a step": {NO_SAMPLES: "unknown", OTHER_SIZES: "changing"}.get(usual, str(usual)),
        "Python": process.python,
        "torch": process.torch,
        "record": facts.store.damaged or "complete",
    }


def _hardware_conditions(facts: RunAnalysis) -> dict[str, float]:
    own = [device for device in facts.devices if device.of_run]
    clocks = [clock for device in own for clock in device.clocks]
    seen = sum(device.throttle_samples for device in own)
    found = {
        "clock of the GPUs": median(clocks) if clocks else None,
        "throttled": sum(device.throttled.total() for device in own) / seen if seen else None,
        "processors busy with other work": None if facts.host is None else facts.host.others,
    }
    return {name: value for name, value in found.items() if value is not None}
