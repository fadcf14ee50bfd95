"""Defines every figure in one place: medians, tails, means, shares and rates of a mode's steps. Pure.

A rate is a number of steps or samples divided by the elapsed training time. That time runs from the start of the first
step to the end of the last one, without pauses, evaluations, stalls and waits for input
(dpmon.store.time_accounting). The time between two steps counts, for example to start workers, write a checkpoint or
log an epoch. Steps in which the run stalled, and a first step that waits long, are in no figure.

Figures come from tallies (dpmon.store.tally), which the store adds up for any time. Evaluation steps are separate from
training steps. A mode that never trains has the figures of its evaluation steps.

One `StatsWindow` reads the tallies and times between two seconds once. All figures of that time come from it, so a
figure has the same digits everywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import EVALUATION, PHASES, QUANTITIES, REST, SECOND, STEP, WARM_UP, Quantity, device_series
from dpmon.store.query_results import TimeRow
from dpmon.store.tally import WIDTHS, IncrementalTallies, QuantitySum, Tally, TallyKey
from dpmon.store.time_accounting import ACTIVITIES, union_of_intervals

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

SAME_RATE = 0.03
"""Up to this relative difference of the two rates, only the first one is shown."""
Counted = tuple[tuple[Quantity, QuantitySum], ...]
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
    def differs_within_steps(self) -> bool:
        """Whether the two rates differ so much that both must be shown."""
        return abs(self.steps_within / self.steps_per_s - 1) > SAME_RATE


def rate_as_fields(rate: Rate | None) -> dict[str, float | None]:
    """Return the values of the rate by their names in JSON; all are None without a rate."""
    names = ("steps_per_s", "samples_per_s", "steps_per_s_within_steps", "samples_per_s_within_steps")
    return dict(zip(names, rate or (None,) * len(names), strict=True))


class PhaseStats(NamedTuple):
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


@dataclass(frozen=True)
class StepStats:
    """The steps of one mode: training, or evaluation."""

    mode: str
    evaluation: bool
    steps: int
    calls: int
    median_ns: float | None
    p95_ns: float | None
    mean_ns: float | None
    rate: Rate | None
    phases: tuple[PhaseStats, ...]
    tally: Tally
    """The tally from which the figures come."""

    @property
    def disjoint_phases(self) -> tuple[PhaseStats, ...]:
        """The phases that add up to the step, with their names on the screen; forward excludes its calls' phases."""
        named = {phase.name: phase for phase in self.phases}
        found = ((phase, named[REST if phase.name == "forward" else phase.name]) for phase in PHASES)
        return tuple(figures._replace(name=phase.display_name) for phase, figures in found)

    @property
    def known_quantities(self) -> Counted:
        """The quantities known in at least one step, without the quantities that rates show."""
        sums = ((quantity, self.tally.sum(quantity.name)) for quantity in QUANTITIES if not quantity.in_rates)
        return tuple(
            (quantity, QuantitySum(self.steps, known.total) if quantity.absent_is_zero else known)
            for quantity, known in sums
            if known.count
        )

    def phase(self, name: str) -> PhaseStats | None:
        """One phase; None if it did not run."""
        return next((phase for phase in self.phases if phase.name == name and phase.ran), None)


def counted_as_fields(counted: Counted) -> dict[str, dict[str, int]]:
    """Return quantities for JSON by name: the sum, and the number of steps with a known value."""
    return {quantity.name: {"sum": known.total, "steps": known.count} for quantity, known in counted}


def training_modes(kinds: Iterable[tuple[str, int]]) -> set[str]:
    """Return the modes with training steps. `kinds`: (mode, kind) of a run's steps."""
    return {mode for mode, kind in kinds if not kind & EVALUATION}


def modes_of(kinds: Iterable[tuple[str, int]]) -> list[tuple[str, bool]]:
    """Return pairs (mode, evaluation) in display order; evaluation steps are separate if the mode also trains."""
    there = set(kinds)
    training = training_modes(there)
    return sorted({(mode, bool(kind & EVALUATION) and mode in training) for mode, kind in there})


def merge_mode_tallies(
    tallies: Mapping[TallyKey, Tally],
    mode: str,
    evaluation: bool,
    trained: bool,
    *,
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
        if not (settled and key.kind & WARM_UP) and (batch is None or key.batch == batch):
            found.merge(tally)
    return found


def tallies_by_process(tallies: Mapping[TallyKey, Tally]) -> dict[int, dict[TallyKey, Tally]]:
    """Return the tallies of each process."""
    found: dict[int, dict[TallyKey, Tally]] = {}
    for key, tally in tallies.items():
        found.setdefault(key.process, {})[key] = tally
    return found


def compute_step_stats(mode: str, evaluation: bool, tally: Tally, speed: Rate | None) -> StepStats:
    """The figures of a mode's steps."""
    step = tally.stat(STEP)
    names = [phase.name for phase in PHASES]
    names.insert(names.index("forward") + 1, REST)
    return StepStats(
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


def _phase(name: str, tally: Tally, total: int) -> PhaseStats:
    if name not in tally.stats:
        return PhaseStats(name, 0, None, None, None, None)
    stat, device = tally.stat(name), tally.stat(device_series(name))
    share = stat.total / total if stat.count and total else None
    known = device.mean
    return PhaseStats(
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


def elapsed_by_process(
    rows: Iterable[TimeRow], mode: str, evaluation: bool, trained: bool
) -> dict[int, tuple[int, int]]:
    """Return the time of a mode's steps by process (ns): (within and between steps, only within steps)."""
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if row.mode != mode:
            continue
        spent = row.spent
        within = spent["evaluation"] if evaluation else spent["training"]
        between = 0 if evaluation else spent["between"]
        if not trained:
            within, between = spent["training"] + spent["evaluation"], spent["between"]
        found[row.process][0] += within + between
        found[row.process][1] += within
    return {process: (whole, within) for process, (whole, within) in found.items() if whole > 0}


def compute_rate(
    tallies: Mapping[int, Tally], times: Mapping[int, tuple[int, int]], *, together: float = 0.0
) -> Rate | None:
    """Return the rate of processes that train together or one after the other; None if no time has passed.

    `tallies` and `times` (see `elapsed_by_process`) are by process. Samples of processes that train at the same time
    add up; their steps do not: the step rate is per process. `together`: if the processes are known to train at the
    same time, the number of processes that each of them stands for; else 0.
    """
    there = [process for process, tally in tallies.items() if tally.steps and times.get(process, (0, 0))[0] > 0]
    if not there:
        return None
    steps = sum(tallies[process].steps for process in there)
    knowing = [tallies[process].sum("samples") for process in there]
    samples = sum(each.total for each in knowing) if sum(each.count for each in knowing) == steps else None
    whole, within = (sum(times[process][part] for process in there) for part in (0, 1))
    at_once = len(there) * together if together else _mean_concurrency([tallies[process] for process in there])
    within = within or whole
    return Rate(
        steps * 1e9 / whole,
        None if samples is None else samples * 1e9 / whole * at_once,
        steps * 1e9 / within,
        None if samples is None else samples * 1e9 / within * at_once,
    )


def _mean_concurrency(tallies: Sequence[Tally]) -> float:
    """Return the mean number of processes that trained at the same time; all processes if the times are unknown."""
    spans = sorted((t.first_ns, t.last_ns) for t in tallies if t.first_ns is not None and t.last_ns is not None)
    covered, reach = 0, 0
    for begin, end in spans:
        covered += max(end - max(begin, reach), 0)
        reach = max(reach, end)
    if len(spans) < len(tallies) or not covered:
        return float(len(tallies))
    return sum(end - begin for begin, end in spans) / covered


# ------------------------------------------------------------------------------------------------ windows


class StatsWindow:
    """All figures of the time between two seconds."""

    def __init__(
        self,
        source: Store,
        begin_s: int = 0,
        end_s: int = 1 << 40,
        process: int | None = None,
        kept: IncrementalTallies | None = None,
    ) -> None:
        """`process`: use only its steps; None for all processes. `kept`: of the last such window of this process."""
        self._kept = kept
        self._source = source
        self._process = process
        self.processes = source.processes if process is None else [process]
        """Processes with steps at any time."""
        self._begin_s, self._end_s = begin_s, end_s
        self._kinds = source.kinds()
        self._trained = training_modes(self._kinds)
        self._times_of: dict[tuple[str, bool], dict[int, tuple[int, int]]] = {}
        self._whole: dict[tuple[str, bool], tuple[int, Rate | None]] = {}

    @cached_property
    def by_process(self) -> dict[TallyKey, Tally]:
        """Tallies of each process."""
        if self._kept is not None and self._process is not None:
            return self._source.tallies_incremental(self._kept, self._begin_s, self._end_s, self._process)
        return self._source.tallies(self._begin_s, self._end_s, process=self._process)

    @cached_property
    def of_each(self) -> dict[int, dict[TallyKey, Tally]]:
        """The tallies of each process with steps in this window."""
        return tallies_by_process(self.by_process)

    @cached_property
    def left_out(self) -> dict[TallyKey, Tally]:
        """Tallies of the steps that no figure includes (dpmon.record.schema.EXCLUDED)."""
        return self._source.tallies(self._begin_s, self._end_s, process=self._process, sketches=False, left_out=True)

    @cached_property
    def times(self) -> list[TimeRow]:
        """The activities of each process by mode, in order of time."""
        return self._source.time_rows(self._begin_s, self._end_s, process=self._process)

    def rows(self, process: int, begin_s: int = 0, widest: int = WIDTHS[-1]) -> Iterator[tuple[TallyKey, Tally]]:
        """Key and tally of each row of one process from `begin_s` on, in order of time."""
        begin_s = max(begin_s, self._begin_s)
        for _, _, key, tally in self._source.tally_rows(begin_s, self._end_s, process=process, widest=widest):
            yield key, tally

    @cached_property
    def modes(self) -> list[tuple[str, bool]]:
        """The modes in this window as (mode, evaluation); a mode that trains has a separate pair for its evaluation."""
        there = {(key.mode, key.kind) for key in self.by_process}
        now = {(mode, bool(kind & EVALUATION) and mode in self._trained) for mode, kind in there}
        return [each for each in modes_of(self._kinds) if each in now]

    def ever_trains(self, mode: str) -> bool:
        """Whether a mode ever trains in this run; if not, its figures come from its evaluation steps."""
        return mode in self._trained

    def figures(self, mode: str, evaluation: bool = False, process: int | None = None) -> StepStats:
        """The figures of a mode's steps: of all processes together, or of one."""
        return compute_step_stats(
            mode, evaluation, self.tally(mode, evaluation, process), self.rate(mode, evaluation, process)
        )

    def tally(
        self,
        mode: str,
        evaluation: bool = False,
        process: int | None = None,
        *,
        settled: bool = False,
        batch: int | None = None,
    ) -> Tally:
        """The tally of a mode's steps; parameters as in dpmon.store.step_stats.merge_mode_tallies."""
        tallies = self.by_process if process is None else self.of_each.get(process, {})
        return merge_mode_tallies(tallies, mode, evaluation, self.ever_trains(mode), settled=settled, batch=batch)

    def steps_and_rate(self, mode: str, evaluation: bool) -> tuple[int, Rate | None]:
        """Return the steps of all processes in a mode, and their rate."""
        found = self._whole.get((mode, evaluation))
        if found is None:
            found = self._whole[mode, evaluation] = self.tally(mode, evaluation).steps, self.rate(mode, evaluation)
        return found

    def rate(self, mode: str | None = None, evaluation: bool = False, process: int | None = None) -> Rate | None:
        """Steps and samples of a mode per elapsed time; None if no time has passed. `mode` None: of all modes."""
        there = self.processes if process is None else [process]
        tallies: dict[int, Tally] = {}
        times = dict.fromkeys(there, (0, 0))
        for each in {mode for mode, _ in self._kinds} if mode is None else [mode]:
            spent = self._elapsed(each, evaluation)
            for who in there:
                found = self.tally(each, evaluation, who)
                if tallies.setdefault(who, found) is not found:
                    tallies[who].merge(found)
                (whole, within), (more, inside) = times[who], spent.get(who, (0, 0))
                times[who] = whole + more, within + inside
        return compute_rate(tallies, times)

    def _elapsed(self, mode: str, evaluation: bool) -> dict[int, tuple[int, int]]:
        """The time of a mode's steps by process (dpmon.store.step_stats.elapsed_by_process)."""
        found = self._times_of.get((mode, evaluation))
        if found is None:
            found = elapsed_by_process(self.times, mode, evaluation, self.ever_trains(mode))
            self._times_of[mode, evaluation] = found
        return found

    def of_process(self, process: int) -> tuple[Tally, Rate | None]:
        """Return the tally and the rate of a process over all modes, without evaluation steps of modes that train."""
        whole = Tally()
        for mode in {mode for mode, _ in self._kinds}:
            whole.merge(self.tally(mode, process=process))
        return whole, self.rate(process=process)

    def evaluation_steps(self, process: int) -> int:
        """Return the number of evaluation steps of a process, in modes that also train."""
        return sum(self.tally(mode, True, process).steps for mode, evaluation in self.modes if evaluation)

    @cached_property
    def time_by_activity(self) -> dict[str, int]:
        """The time of this window by activity (ns). The sum is the time with at least one process."""
        return divide_concurrent_time(self.times, self.alive_intervals)

    @cached_property
    def alive_intervals(self) -> list[tuple[int, int]]:
        """The times with at least one process, from its start-up to its last step, as (begin, end) in ns."""
        startup: Counter[int] = Counter()
        for row in self.times:
            startup[row.process] += row.spent["startup"]
        return union_of_intervals(
            (begin - startup[process], end) for process, (begin, end) in self.step_intervals.items()
        )

    @cached_property
    def step_intervals(self) -> dict[int, tuple[int, int]]:
        """By process: the time from its first step to its last, as (begin, end) in ns."""
        found: dict[int, tuple[int, int]] = {}
        for key, tally in (*self.by_process.items(), *self.left_out.items()):
            if tally.first_ns is not None and tally.last_ns is not None:
                begin, end = found.get(key.process, (tally.first_ns, tally.last_ns))
                found[key.process] = min(begin, tally.first_ns), max(end, tally.last_ns)
        return found


def divide_concurrent_time(rows: Iterable[TimeRow], lives: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the time of a run by activity (ns). Simultaneous activities of several processes share the time.

    `lives`: (begin, end) of the times with at least one process, in order.
    """
    found = dict.fromkeys(ACTIVITIES, 0.0)
    stretches: dict[tuple[int, int], list[TimeRow]] = defaultdict(list)
    for row in rows:
        stretches[row.start_s, row.width_s].append(row)
    for (start_s, width_s), together in stretches.items():
        begin, end = start_s * SECOND, (start_s + width_s) * SECOND
        lived = sum(max(min(end, until) - max(begin, since), 0) for since, until in lives)
        own: Counter[int] = Counter()
        for row in together:
            own[row.process] += sum(row.spent.values())
        spent = {name: max(sum(row.spent[name] for row in together), 0) for name in ACTIVITIES}
        # The longest may exceed the width: a long pause counts in its first second (ActivityInterval.split_by_second).
        covered, whole = max(lived, *own.values()), sum(spent.values())
        scale = min(1.0, covered / whole) if whole else 0.0
        for activity, ns in spent.items():
            found[activity] += ns * scale
    return {activity: round(ns) for activity, ns in found.items()}


def account_for_elapsed(spent: Mapping[str, int], elapsed_ns: int, lives: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Divide a run's elapsed time by activity (ns); the parts add up to it. `lives`: as in StatsWindow.alive_intervals.

    Time before a process is traced has no activity. It counts as start-up: also where a process follows another one,
    with the time that the other one took to end. Time after the last step of all processes is the run's end.
    """
    left = max(elapsed_ns - sum(spent.values()), 0)
    begins, ends = [begin for begin, _ in lives], [0, *(end for _, end in lives)]
    before = min(sum(max(begin - end, 0) for begin, end in zip(begins, ends, strict=False)), left) if lives else left
    return {**spent, "startup": spent["startup"] + before, "ending": left - before}


def first_and_last_third(rows: Sequence[tuple[int, Tally]], steps: int) -> tuple[Tally, Tally]:
    """Return the first and the last third of the steps, as exactly as the rows of tallies (in order of time) allow."""
    first, last = Tally(), Tally()
    for _, tally in rows:
        if first.steps + tally.steps > steps / 3:
            break
        first.merge(tally)
    for _, tally in reversed(rows):
        if last.steps + tally.steps > steps / 3:
            break
        last.merge(tally)
    return first, last
