"""Compares runs: what each figure was on both sides, how it changed, and which phase explains most of it. Pure.

With one run on each side, the stretches of the two runs are compared, so the interval is that of these two runs only:
it does not include how much equal runs differ from each other. With several runs on a side, each run counts as one
value, its median. Steps of one kind are compared, as for dp and single. The settling steps, and the stretches with a
pause or a stall, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

from dpmon.model.compare import CERTAIN, MIN_STEPS, StepKind, by_phase, common_kind, most_changed, settled_kind, unlike
from dpmon.model.compare_samples import Change, change, least_chance
from dpmon.model.json_fields import ms
from dpmon.model.pauses import any_paused
from dpmon.model.run_facts import RunFacts
from dpmon.model.stragglers import sentence as straggler_sentence
from dpmon.record.schema import PHASES, REST, SECOND, STEP, STEP_PHASES, device_series
from dpmon.store.figures import figures
from dpmon.store.quantiles import fine_median
from dpmon.store.tally import Tally
from dpmon.text.quantities import UNKNOWN, compact, count_of, duration, memory, times

SIDES = ("A", "B")
_STRETCHES = 20
"""Most stretches into which the steps of a run are divided."""


class Figure(NamedTuple):
    """What is compared: its name in JSON, its name in a table, its unit (ns, bytes or "/s"), its series in tallies."""

    name: str
    label: str
    unit: str = "ns"
    series: str | None = None

    def as_fields(self, **values: Sequence[float | None]) -> dict[str, object]:
        """The unit and lists of values for JSON, with times in ms."""
        if self.unit != "ns":
            return {"unit": self.unit, **values}
        return {"unit": "ms", **{name: [ms(value) for value in each] for name, each in values.items()}}

    def text(self, value: float | None) -> str:
        """A value in words."""
        return duration(value) if self.unit == "ns" else memory(value) if self.unit == "bytes" else compact(value)


def _of_step() -> list[Figure]:
    found = [Figure(STEP, STEP, series=STEP)]
    for name in STEP_PHASES:
        parts = [phase.name for phase in PHASES if phase.of_call] if name == "forward" else []
        for each in (name, *parts):
            indent = "  " * (1 + (each != name))
            found.append(Figure(each, indent + each, series=each))
            found.append(Figure(f"{each}_device", f"{indent}  on device", series=device_series(each)))
    return found


STEP_FIGURES = tuple(_of_step())
"""Medians of times."""
RUN_FIGURES = (
    Figure("samples_per_s", "samples/s", "/s"),
    Figure("steps_per_s", "steps/s", "/s"),
    Figure("memory", "peak memory of torch", "bytes"),
    Figure("host_memory", "peak memory of the host", "bytes"),
    Figure("exposed", "exposed communication"),
    Figure("wait", "wait for the slowest rank"),
    Figure("evaluation_step", "step of evaluation"),
    Figure("evaluation", "evaluation in all"),
    Figure("startup", "start-up"),
)
"""A number for each run, all of its steps included."""
_SERIES = (REST, *(figure.series for figure in STEP_FIGURES if figure.series is not None))


@dataclass(frozen=True)
class ComparedRun:
    """What a comparison needs of one run."""

    name: str
    mode: str | None
    """The mode with most steps; None without steps."""
    rows: Sequence[tuple[StepKind, Tally]]
    """The tallies of the steps of its representative process, without those left out, in order of time."""
    stretch_s: int
    """Seconds in each of `rows`."""
    interrupted_steps: int
    """Steps left out because of a pause or a stall in the same stretch."""
    values: Mapping[str, float]
    """The known ones of RUN_FIGURES."""
    straggler: str | None
    """The rank that the others wait for, in a sentence."""

    @cached_property
    def kinds(self) -> Counter[StepKind]:
        """Number of comparable steps by kind."""
        found: Counter[StepKind] = Counter()
        for kind, tally in self.rows:
            found[kind] += tally.steps
        return found

    def steps(self, kind: StepKind | None) -> Tally:
        """All steps of one kind; None: no step."""
        whole = Tally()
        for each, tally in self.rows:
            if each == kind:
                whole.merge(tally)
        return whole

    def stretches(self, kind: StepKind) -> list[Tally]:
        """The steps of one kind in order of time: up to _STRETCHES tallies with about as many steps each."""
        found: list[Tally] = []
        for tally in (tally for each, tally in self.rows if each == kind):
            if not found or found[-1].steps >= self.kinds[kind] / _STRETCHES:
                found.append(Tally())
            found[-1].merge(tally)
        if len(found) > 1 and found[-1].steps < self.kinds[kind] / _STRETCHES:
            last = found.pop()
            found[-1].merge(last)
        return found


def read_run(name: str, facts: RunFacts) -> ComparedRun:
    """Read a run while its store is open."""
    there = [mode for mode, evaluation in facts.window.modes if not evaluation]
    usual = max(there, key=lambda mode: facts.window.tally(mode, settled=True).steps, default=None)
    rows: list[tuple[StepKind, Tally]] = []
    interrupted = 0
    if usual is not None:
        until = facts.until_ns
        # A step ends, and counts, up to a second after its stall.
        apart = [
            (one.since_ns, (until if one.end_ns is None else one.end_ns) + SECOND) for one in facts.announced.stalls
        ]
        apart += any_paused(facts.pauses, until)
        read = facts.store.tally_rows(process=facts.shown(usual, False), widest=facts.stretch_s, series=_SERIES)
        for at, width, key, tally in read:
            kind = settled_kind(key)
            if kind is None or key.mode != usual:
                continue
            if any(begin < (at + width) * SECOND and at * SECOND < end for begin, end in apart):
                interrupted += tally.steps
            else:
                rows.append((kind, tally))
    slow = None if facts.communication is None else facts.communication.straggler
    told = None if slow is None else straggler_sentence(slow, lately=False)
    return ComparedRun(name, usual, rows, facts.stretch_s, interrupted, _values(facts, usual), told)


def _values(facts: RunFacts, mode: str | None) -> dict[str, float]:
    rate = None if mode is None else facts.window.rate(mode)
    peaks = [row.peak for row in facts.memory if row.peak is not None]
    host, communicated = facts.samples.host, facts.communication
    steps = [one.median_ns for one in facts.evaluations if one.mode == mode]
    found = {
        "samples_per_s": None if rate is None else rate.samples_per_s,
        "steps_per_s": None if rate is None or rate.samples_per_s is not None else rate.steps_per_s,
        "memory": max(peaks, default=None),
        "host_memory": None if host is None else host.mem_run_max,
        "exposed": None if communicated is None else communicated.exposed_ns,
        "wait": None if communicated is None else communicated.wait_ns,
        "evaluation_step": next(iter(steps), None),
        "evaluation": facts.spent.get("evaluation") or None,
        "startup": facts.spent.get("startup"),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


class ComparedFigure(NamedTuple):
    """One figure on both sides, with a value for each run; `missing`: why there is no ratio, or no bound for it."""

    figure: Figure
    values: tuple[Sequence[float | None], Sequence[float | None]]
    change: Change | None
    missing: str | None = None

    def typical(self, side: int) -> float | None:
        """The value of the run on a side, or the median of its runs."""
        known = [value for value in self.values[side] if value is not None]
        return median(known) if known else None


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side: "A" before, "B" after."""

    sides: tuple[Sequence[ComparedRun], Sequence[ComparedRun]]
    kind: StepKind | None
    """The compared steps."""
    missing: str | None
    """Why steps are not compared."""
    compared: Mapping[str, ComparedFigure]
    """By name, those of STEP_FIGURES and RUN_FIGURES that are known on a side."""
    reason: tuple[str, float | None, float | None] | None
    """The phase that changed most in the direction of the step, with its time (ns) on both sides."""

    @property
    def pair(self) -> bool:
        """Whether there is one run on each side."""
        return len(self.sides[0]) == len(self.sides[1]) == 1

    def spread(self, side: int) -> float | None:
        """How much slower the slowest run of a side is than its fastest (0.02: 2 %); None for a single run."""
        step = self.compared.get(STEP)
        known = [value for value in step.values[side] if value] if step is not None else []
        return max(known) / min(known) - 1 if len(known) > 1 else None


def compare_runs(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> RunComparison:
    """Compare the runs of two sides."""
    runs = (*before, *after)
    kind = common_kind(run.kinds for run in runs)
    missing = _missing(runs, kind)
    stretches = [run.stretches(kind) if kind is not None and missing is None else [] for run in runs]
    wholes = [run.steps(None if missing else kind) for run in runs]
    pair, split = len(runs) == 2, len(before)
    groups = stretches if pair else (wholes[:split], wholes[split:])
    found: dict[str, ComparedFigure] = {}
    for figure, values in known_figures(runs, wholes):
        medians = None if figure.series is None else [_medians(each, figure.series) for each in groups]
        sides = values[:split], values[split:]
        found[figure.name] = _compared(figure, sides, medians, runs[0].stretch_s if pair else None)
    reason = _reason(found.get(STEP), wholes[:split], wholes[split:])
    return RunComparison((before, after), kind, missing, found, reason)


def known_figures(
    runs: Sequence[ComparedRun], wholes: Sequence[Tally]
) -> Iterator[tuple[Figure, Sequence[float | None]]]:
    """Each figure that is known of a run, with its value for each run. `wholes`: the steps of each run."""
    for figure in (*STEP_FIGURES, *RUN_FIGURES):
        if figure.series is None:
            values = [run.values.get(figure.name) for run in runs]
        else:
            values = [whole.median(figure.series) for whole in wholes]
        if any(value is not None for value in values):
            yield figure, values


def _missing(runs: Sequence[ComparedRun], kind: StepKind | None) -> str | None:
    for run in runs:
        if not run.kinds:
            return f"{run.name} has no step to compare"
    if kind is None:
        return unlike({run.name: run.kinds for run in runs})
    few = min(runs, key=lambda run: run.kinds[kind])
    if few.kinds[kind] < MIN_STEPS:
        return f"{few.name} has only {count_of(few.kinds[kind], 'step')} to compare, fewer than {MIN_STEPS}"
    return None


def _medians(tallies: Sequence[Tally], series: str) -> list[float]:
    return [value for tally in tallies if (value := fine_median(tally.stat(series).counts)) is not None]


def _compared(
    figure: Figure,
    values: tuple[Sequence[float | None], Sequence[float | None]],
    medians: Sequence[Sequence[float]] | None,
    stretch_s: int | None,
) -> ComparedFigure:
    """`medians`: the values to compare, if they are medians of runs, or of stretches of `stretch_s` of single runs."""
    for side, each in zip(SIDES, values, strict=True):
        unknown = sum(value is None for value in each)
        if unknown:
            which = "" if len(each) == 1 else f" of {unknown} of {len(each)} runs"
            return ComparedFigure(figure, values, None, f"unknown{which} in {side}")
    before, after = medians or [[value or 0.0 for value in side] for side in values]
    if min(*before, *after) <= 0:
        return ComparedFigure(figure, values, None, "there is no ratio to nothing")
    stretched = medians is not None and stretch_s is not None
    found = change(before, after, in_order=stretched, exact=medians is None)
    missing = None
    if found.least is None:
        counts = f"{len(before)} against {len(after)}"
        if stretched:
            missing = f"the runs are too short: {counts} stretches of {stretch_s} s"
        elif len(before) == len(after) == 1:
            missing = "one value a side has no interval"
        else:
            often = round(1 / least_chance(len(before), len(after)))
            missing = f"{counts} runs are too few: by chance alone, one order in {often} puts a whole side on top"
    return ComparedFigure(figure, values, found, missing)


def _reason(
    step: ComparedFigure | None, before: Sequence[Tally], after: Sequence[Tally]
) -> tuple[str, float | None, float | None] | None:
    if step is None or step.change is None or not step.change.sign:
        return None
    took = []
    for side in (before, after):
        each = [by_phase(figures("", False, tally, None), lambda phase: phase.median_ns) for tally in side]
        names = {name for phases in each for name in phases}
        took.append({name: median(phases.get(name, 0.0) for phases in each) for name in names})
    name = most_changed(*took, slower=step.change.sign > 0)
    return None if name is None else (name, took[0].get(name), took[1].get(name))


# ------------------------------------------------------------------------------------------------ words


def signed(ratio: float | None) -> str:
    """A ratio as a change: "+4.2 %", "-12 %", "2.40×"."""
    if ratio is None:
        return UNKNOWN
    part = (ratio - 1) * 100
    if abs(part) < 0.05:
        return "0.0 %"
    return times(ratio) if part >= 100 else f"{part:+.0f} %" if abs(part) >= 9.95 else f"{part:+.1f} %"


def range_of(found: Change) -> str:
    """The 95 % interval: "+1.2 % to +3.4 %"; if there is none, that of 90 %, with this addition."""
    if found.low is not None:
        return f"{signed(found.low)} to {signed(found.high)}"
    return "no interval" if found.least is None else f"{signed(found.least)} to {signed(found.most)} (90 %)"


def sentence(found: RunComparison) -> str:
    """The result, in one or two sentences."""
    step = found.compared.get(STEP)
    if found.missing is not None or step is None:
        return f"inconclusive: {found.missing or 'no step was timed'}"
    told = step.change
    if told is None or told.low is None:
        why = step.missing or " against ".join(str(len(side)) for side in found.sides) + " runs have no 95 % interval"
        return f"inconclusive: {why}" + (
            "" if told is None else f"; B's step takes {signed(told.ratio)}, {range_of(told)}"
        )
    a, b = (step.figure.text(step.typical(side)) for side in (0, 1))
    if not told.sign:
        wide = told.low < 1 / CERTAIN or (told.high or 0) > CERTAIN
        head = "inconclusive, the interval is too wide" if wide else "no difference shows"
        return f"{head}: {b} against {a} a step (95 % interval {range_of(told)})"
    text = f"B is {'slower' if told.sign > 0 else 'faster'}: {b} against {a} a step, {signed(told.ratio)}"
    text += f" (95 % interval {range_of(told)})"
    if found.reason is not None:
        name, old, new = found.reason
        text += f"; most of the change is in {name}: {duration(new)} against {duration(old)}"
    return text


def scope(found: RunComparison) -> list[str]:
    """For what the interval speaks, and how much equal runs differ."""
    if found.pair:
        return [
            "One run on each side: this speaks for this pair only. Equal runs differ from each other, and the interval"
            " does not include that; give several runs a side (A1 A2 A3 -- B1 B2 B3)."
        ]
    known = [(side, found.spread(place)) for place, side in enumerate(SIDES)]
    texts = [f"{side} by {part * 100:.{int(part < 0.1)}f} %" for side, part in known if part is not None]
    return [f"Equal runs differ (slowest against fastest median step): {', '.join(texts)}."] if texts else []
