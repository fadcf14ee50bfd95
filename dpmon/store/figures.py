"""Defines every figure in one place: medians, tails, means, shares and rates of a mode's steps. Pure.

A rate is a number of steps or samples divided by the elapsed training time. That time runs from the start of the first
step to the end of the last one, without pauses, evaluations and waits for input (dpmon.store.accounting). The time
between two steps counts, for example to start workers, write a checkpoint or log an epoch.

Figures come from tallies (dpmon.store.tally), which the store adds up for any time. Evaluation steps are separate from
training steps. A mode that never trains has the figures of its evaluation steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dpmon.record.schema import EVALUATION, PHASES, QUANTITIES, REST, SETTLING, STEP, Quantity, device_series
from dpmon.store.answers import TimeRow
from dpmon.store.tally import Key, Sum, Tally

SAME_RATE = 0.03
"""Up to this relative difference of the two rates, only the first one is shown."""
Counted = tuple[tuple[Quantity, Sum], ...]
"""Quantities with their sums over the steps with a known value."""


class Rate(NamedTuple):
    """Steps and samples per second of elapsed training time, and per second within steps.

    Samples are None if a step has no sample count.
    """

    steps_per_s: float
    samples_per_s: float | None
    steps_within: float
    samples_within: float | None

    @property
    def apart(self) -> bool:
        """Whether the two rates differ so much that both must be shown."""
        return abs(self.steps_within / self.steps_per_s - 1) > SAME_RATE


def rate_as_fields(rate: Rate | None) -> dict[str, float | None]:
    """Return the values of the rate by their names in JSON; all are None without a rate."""
    names = ("steps_per_s", "samples_per_s", "steps_per_s_within_steps", "samples_per_s_within_steps")
    return dict(zip(names, rate or (None,) * len(names), strict=True))


class PhaseFigures(NamedTuple):
    """One phase: times (ns) over the steps in which it ran, and its share of the time of all steps (0 to 1)."""

    name: str
    """Name in dpmon.record.schema; REST for the forward without the phases of the calls."""
    ran: int
    median_ns: float | None
    p95_ns: float | None
    mean_ns: float | None
    share: float | None
    device_ns: float | None = None
    """Median time of the slowest device (ns), over the steps with a known device time."""
    device_count: int = 0
    device_share: float | None = None
    """Estimated share of the time of all steps (0 to 1), from the mean of the known device times."""


class Figures(NamedTuple):
    """The steps of one mode: training, or evaluation."""

    mode: str
    evaluation: bool
    steps: int
    calls: int
    median_ns: float | None
    p95_ns: float | None
    mean_ns: float | None
    rate: Rate | None
    phases: tuple[PhaseFigures, ...]
    tally: Tally
    """The tally from which the figures come."""

    @property
    def parts(self) -> tuple[PhaseFigures, ...]:
        """The phases that add up to the step, with their names on the screen; forward excludes its calls' phases."""
        named = {phase.name: phase for phase in self.phases}
        found = ((phase, named[REST if phase.name == "forward" else phase.name]) for phase in PHASES)
        return tuple(figures._replace(name=phase.shown) for phase, figures in found)

    @property
    def counted(self) -> Counted:
        """The quantities known in at least one step, without the quantities that rates show."""
        sums = ((quantity, self.tally.sum(quantity.name)) for quantity in QUANTITIES if not quantity.in_rates)
        return tuple(
            (quantity, Sum(self.steps, known.total) if quantity.absent_is_zero else known)
            for quantity, known in sums
            if known.count
        )

    def phase(self, name: str) -> PhaseFigures | None:
        """One phase; None if it did not run."""
        return next((phase for phase in self.phases if phase.name == name and phase.ran), None)


def counted_as_fields(counted: Counted) -> dict[str, dict[str, int]]:
    """Return quantities for JSON by name: the sum, and the number of steps with a known value."""
    return {quantity.name: {"sum": known.total, "steps": known.count} for quantity, known in counted}


def trains(kinds: Iterable[tuple[str, int]]) -> set[str]:
    """Return the modes with training steps. `kinds`: (mode, kind) of a run's steps."""
    return {mode for mode, kind in kinds if not kind & EVALUATION}


def modes_of(kinds: Iterable[tuple[str, int]]) -> list[tuple[str, bool]]:
    """Return pairs (mode, evaluation) in display order; evaluation steps are separate if the mode also trains."""
    there = set(kinds)
    training = trains(there)
    found = {(mode, bool(kind & EVALUATION) and mode in training) for mode, kind in there}
    return sorted(found)


def merged(
    tallies: Mapping[Key, Tally],
    mode: str,
    evaluation: bool,
    trained: bool,
    *,
    process: int | None = None,
    settled: bool = False,
    batch: int | None = None,
) -> Tally:
    """Return the tally of one mode: its evaluation or its training steps, or all steps if it never trains.

    `trained`: whether the mode ever trains. `settled`: leave out settling steps. `batch`: only this batch size.
    """
    found = Tally()
    for key, tally in tallies.items():
        if key.mode != mode or (trained and bool(key.kind & EVALUATION) != evaluation):
            continue
        if (settled and key.kind & SETTLING) or (batch is not None and key.batch != batch):
            continue
        if process is None or key.process == process:
            found.merge(tally)
    return found


def figures(mode: str, evaluation: bool, tally: Tally, speed: Rate | None) -> Figures:
    """The figures of a mode's steps."""
    step = tally.stat(STEP)
    names = [phase.name for phase in PHASES]
    names.insert(names.index("forward") + 1, REST)
    return Figures(
        mode,
        evaluation,
        tally.steps,
        tally.calls,
        tally.median(STEP),
        tally.quantile(STEP, 0.95),
        step.mean,
        speed,
        tuple(_phase(name, tally, step.total) for name in names),
        tally,
    )


def _phase(name: str, tally: Tally, total: int) -> PhaseFigures:
    stat, device = tally.stat(name), tally.stat(device_series(name))
    share = stat.total / total if stat.count and total else None
    known = device.mean
    return PhaseFigures(
        name,
        stat.count,
        stat.median,
        stat.quantile(0.95),
        stat.mean,
        share,
        device.median,
        device.count,
        known * stat.count / total if known is not None and total else None,
    )


# ------------------------------------------------------------------------------------------------ rates


def elapsed(rows: Iterable[TimeRow], mode: str | None, evaluation: bool, trained: bool) -> dict[int, tuple[int, int]]:
    """Return the time of a mode's steps by process (ns): (within and between steps, only within steps)."""
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if mode is not None and row.mode != mode:
            continue
        spent = row.spent
        within = spent["evaluation"] if evaluation else spent["training"]
        between = 0 if evaluation else spent["between"]
        if not trained:
            within, between = spent["training"] + spent["evaluation"], spent["between"]
        found[row.process][0] += within + between
        found[row.process][1] += within
    return {process: (whole, within) for process, (whole, within) in found.items() if whole > 0}


def rate(tallies: Mapping[int, Tally], times: Mapping[int, tuple[int, int]], *, together: bool = False) -> Rate | None:
    """Return the rate of processes that train together or one after the other; None if no time has passed.

    `tallies` and `times` (see `elapsed`) are by process. Samples of processes that train at the same time add up; their
    steps do not: the step rate is per process. `together`: all processes are known to train at the same time.
    """
    there = [process for process, tally in tallies.items() if tally.steps and times.get(process, (0, 0))[0] > 0]
    if not there:
        return None
    steps = sum(tallies[process].steps for process in there)
    knowing = [tallies[process].sum("samples") for process in there]
    samples = sum(each.total for each in knowing) if sum(each.count for each in knowing) == steps else None
    whole, within = (sum(times[process][part] for process in there) for part in (0, 1))
    at_once = float(len(there)) if together else _at_once([tallies[process] for process in there])
    within = within or whole
    return Rate(
        steps * 1e9 / whole,
        None if samples is None else samples * 1e9 / whole * at_once,
        steps * 1e9 / within,
        None if samples is None else samples * 1e9 / within * at_once,
    )


def _at_once(tallies: Sequence[Tally]) -> float:
    """Return the mean number of processes that trained at the same time; all processes if the times are unknown."""
    spans = sorted((t.first_ns, t.last_ns) for t in tallies if t.first_ns is not None and t.last_ns is not None)
    covered, reach = 0, 0
    for begin, end in spans:
        covered += max(end - max(begin, reach), 0)
        reach = max(reach, end)
    if len(spans) < len(tallies) or not covered:
        return float(len(tallies))
    return sum(end - begin for begin, end in spans) / covered
