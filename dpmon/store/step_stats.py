"""Defines all statistics of a mode's steps in one place: medians, tails, means, shares and rates. Pure.

A rate is a number of steps, samples or tokens divided by the elapsed training time. That time runs from the start of
the first step to the end of the last one, without pauses, evaluations, stalls and input waits
(dpmon.store.time_accounting). The time between two steps counts, for example to start workers, write a checkpoint or
log an epoch, and so do evaluations before nearly every update, which generate its data. Statistics exclude steps in
which the run stalled, and a first step that waits long.

Statistics come from tallies (dpmon.store.tally), which the store adds up for any time range. Each kind of step
(dpmon.record.schema.STEP_KINDS) has its own. The main kind of a run is training, or the most frequent kind if it never
trains.

A `StatsWindow` reads the tallies and times between two seconds once. All statistics of that time range come from it, so
a number has the same digits everywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import (
    PHASES,
    QUANTITIES,
    REST,
    SECOND,
    STEP,
    STEP_KINDS,
    STEP_PHASES,
    TRAINING,
    WARM_UP,
    Quantity,
    device_series,
    step_kind,
)
from dpmon.record.shared_names import CALL_PHASES
from dpmon.store.activity_times import TimeRow, read_times
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import read_tallies, read_tally_rows
from dpmon.store.time_accounting import ACTIVITIES, union_of_intervals

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

SAME_RATE = 0.03
"""If the two rates of a `Rate` differ by at most this share, only the first one is shown."""
_AFTER_FORWARD = STEP_PHASES.index("forward") + 1
_OUTER_FIRST = (*STEP_PHASES[:_AFTER_FORWARD], *CALL_PHASES, *STEP_PHASES[_AFTER_FORWARD:])
Counted = tuple[tuple[Quantity, SeriesStats], ...]
"""Quantities with their sums over the steps with a known value."""


class Rate(NamedTuple):
    """Steps, samples and tokens per second of elapsed training time, and per second within steps.

    The rates of samples and tokens are estimates if some steps have no count of them, and None if most have none.
    """

    steps_per_s: float
    samples_per_s: float | None
    steps_per_s_within: float
    samples_per_s_within: float | None
    uncounted_steps: int = 0
    """Number of steps without a sample count."""
    tokens_per_s: float | None = None

    @property
    def differs_within_steps(self) -> bool:
        """Whether the rate within steps differs so much that it must be shown, too."""
        return abs(self.steps_per_s_within / self.steps_per_s - 1) > SAME_RATE


def rate_to_json(rate: Rate | None) -> dict[str, float | None]:
    """Return the members of a rate for JSON, by name. Without a rate, all values are None."""
    rates = "steps_per_s", "samples_per_s", "steps_per_s_within_steps", "samples_per_s_within_steps"
    names = (*rates, "uncounted_steps", "tokens_per_s")
    return dict(zip(names, rate or (None,) * len(names), strict=True))


class PhaseStats(NamedTuple):
    """One phase: its times in the steps in which it ran, and its share of the time of all steps (0 to 1)."""

    name: str
    """Name in dpmon.record.schema; REST for the forward without the phases of the calls."""
    ran: int
    """Number of steps in which it ran."""
    median_ns: float | None
    p95_ns: float | None
    mean_ns: float | None
    share: float | None
    device_ns: float | None = None
    """Median device time on the slowest device (ns), over the steps with a known device time."""
    device_count: int = 0
    """Number of steps with a known device time."""
    device_share: float | None = None
    """Estimated share of device time in the time of all steps (0 to 1), from the mean of the known device times."""


@dataclass(frozen=True)
class StepStats:
    """Statistics of the steps of one mode and kind."""

    mode: str
    kind: int
    """A key of STEP_KINDS."""
    steps: int
    calls: int
    median_ns: float | None
    p95_ns: float | None
    mean_ns: float | None
    rate: Rate | None
    tally: Tally
    """The tally that the statistics were computed from."""
    process: int = 0
    """The process that the steps are of, in a report."""
    process_name: str | None = None
    """The name of that process, such as "rank 0"; None if it is the only one."""
    other_kind: str = ""
    """Word for the kind of the steps if it is not the main kind of the run."""
    virtual: bool = False
    distributed: str | None = None
    """How ranks called one model together in these steps (a key of RANK_MODES); None if they did not."""
    early: Tally | None = None
    """The first third of the steps; None with too few steps."""
    late: Tally | None = None
    """The last third."""
    settled: StepStats | None = None
    """The statistics without warm-up steps; None if they are not separate."""
    warm_up_steps: int = 0
    """In `settled`: the number of steps that are left out."""

    @property
    def settled_stats(self) -> StepStats:
        """The statistics without warm-up steps if they are known, or else these statistics."""
        return self.settled or self

    @property
    def ran_phases(self) -> tuple[PhaseStats, ...]:
        """The phases that ran, those of calls after the forward that they are part of, without REST."""
        ran = {phase.name: phase for phase in self.phases if phase.ran}
        return tuple(ran[name] for name in _OUTER_FIRST if name in ran)

    def phase_share(self, *names: str) -> float:
        """Return the share of all step time (0 to 1) that these phases took together."""
        return sum(phase.share or 0.0 for phase in self.phases if phase.name in names)

    @cached_property
    def phases(self) -> tuple[PhaseStats, ...]:
        """All phases, and REST after the forward; computed only when they are needed."""
        names = [phase.name for phase in PHASES]
        names.insert(names.index("forward") + 1, REST)
        return tuple(compute_phase_stats(name, self.tally) for name in names)

    @property
    def disjoint_phases(self) -> tuple[PhaseStats, ...]:
        """The phases that add up to the step, under their names on the screen. Forward excludes its calls' phases."""
        stats_by_name = {phase.name: phase for phase in self.phases}
        stats_by_name["forward"] = stats_by_name[REST]
        return tuple(stats_by_name[phase.name]._replace(name=phase.display_name) for phase in PHASES)

    @property
    def known_quantities(self) -> Counted:
        """The quantities known in at least one step, without those that are listed elsewhere."""
        sums = ((quantity, self.tally.stat(quantity.name)) for quantity in QUANTITIES if not quantity.listed_elsewhere)
        return tuple(
            (quantity, SeriesStats(self.steps, known.total) if quantity.absent_is_zero else known)
            for quantity, known in sums
            if known.count
        )

    def phase(self, name: str) -> PhaseStats | None:
        """Return the statistics of one phase; None if it did not run."""
        return next((phase for phase in self.phases if phase.name == name and phase.ran), None)


def quantities_to_json(counted: Counted) -> dict[str, dict[str, int]]:
    """Return quantities for JSON, by name: the sum and the number of steps with a known value."""
    return {quantity.name: {"sum": known.total, "steps": known.count} for quantity, known in counted}


def merge_mode_tallies(
    tallies: Mapping[TallyKey, Tally],
    mode: str | None,
    kind: int,
    *,
    without_warmup: bool = False,
    batch: int | None = None,
) -> Tally:
    """Return the tally of the steps of one kind in a mode, or in all modes if `mode` is None.

    `without_warmup`: without warm-up steps. `batch`: only this batch size.
    """
    merged = Tally()
    for key, tally in tallies.items():
        if mode not in (None, key.mode) or step_kind(key.kind) != kind:
            continue
        if not (without_warmup and key.kind & WARM_UP) and (batch is None or key.batch == batch):
            merged.merge(tally)
    return merged


def split_tallies_by_process(tallies: Mapping[TallyKey, Tally]) -> dict[int, dict[TallyKey, Tally]]:
    """Return the tallies of each process."""
    found: dict[int, dict[TallyKey, Tally]] = {}
    for key, tally in tallies.items():
        found.setdefault(key.process, {})[key] = tally
    return found


def compute_step_stats(mode: str, *, tally: Tally, rate: Rate | None, kind: int = TRAINING) -> StepStats:
    """Compute the statistics of the steps of a mode and kind from their tally and rate."""
    return StepStats(
        mode,
        kind,
        tally.steps,
        tally.calls,
        tally.median(STEP),
        tally.quantile(STEP, 0.95),
        tally.stat(STEP).mean,
        rate,
        tally,
    )


def compute_phase_stats(name: str, tally: Tally) -> PhaseStats:
    """Compute the statistics of one phase (a name in dpmon.record.schema, or REST) from a tally."""
    series_stats, device_stats = tally.stat(name), tally.stat(device_series(name))
    step_total = tally.stat(STEP).total
    share = series_stats.total / step_total if series_stats.count and step_total else None
    mean_device_ns = device_stats.mean
    return PhaseStats(
        name,
        series_stats.count,
        series_stats.median,
        series_stats.quantile(0.95),
        series_stats.mean,
        share,
        device_stats.median,
        device_stats.count,
        mean_device_ns * series_stats.count / step_total if mean_device_ns is not None and step_total else None,
    )


# ------------------------------------------------------------------------------------------------ rates


def compute_rate(
    tallies: Mapping[int, Tally],
    times: Mapping[int, tuple[int, int]],
    ranks: Mapping[int, int | None],
    *,
    together: float = 0.0,
) -> Rate | None:
    """Return the rate of processes that train together or one after the other; None if no time has passed.

    `tallies`, `times` (see `StatsWindow.elapsed`) and `ranks` are by process. The samples and tokens of processes that
    train at the same time add up, but their steps do not. The step rate is that of the slowest rank, for which the
    others wait; of processes without ranks, it is their mean. `together`: the number of processes that each of these
    stands for, if they are known to train at the same time; else 0.
    """
    active: list[Tally] = []
    steps_by_rank, whole, within = Counter[int | None](), Counter[int | None](), Counter[int | None]()
    for process, tally in tallies.items():
        process_whole, process_within = times.get(process, (0, 0))
        if tally.steps and process_whole > 0:
            active.append(tally)
            rank = ranks.get(process)
            steps_by_rank[rank] += tally.steps
            whole[rank] += process_whole
            within[rank] += process_within
    if not active:
        return None
    slowest = min(steps_by_rank, key=lambda rank: steps_by_rank[rank] / whole[rank])
    steps_per_s = steps_by_rank[slowest] * 1e9 / whole[slowest]
    steps_per_s_within = steps_by_rank[slowest] * 1e9 / (within[slowest] or whole[slowest])
    steps = sum(steps_by_rank.values())
    concurrency = steps / max(steps_by_rank.values())  # ranks in a step, as a mean
    if together or None in steps_by_rank:
        concurrency = len(active) * together or _mean_concurrency(active)

    def per_s(quantity: str, steps_per_s: float) -> float | None:
        sums = [tally.stat(quantity) for tally in active]
        counted_steps = sum(known.count for known in sums)
        if counted_steps <= steps / 2:
            return None
        return sum(known.total for known in sums) / counted_steps * concurrency * steps_per_s

    rates = steps_per_s, per_s("samples", steps_per_s), steps_per_s_within, per_s("samples", steps_per_s_within)
    uncounted_steps = steps - sum(tally.stat("samples").count for tally in active)
    return Rate(*rates, uncounted_steps, per_s("tokens", steps_per_s))


def _mean_concurrency(tallies: Sequence[Tally]) -> float:
    """Return the mean number of processes that trained at the same time, or all processes if the times are unknown."""
    intervals = sorted((t.first_ns, t.last_ns) for t in tallies if t.first_ns is not None and t.last_ns is not None)
    covered, covered_until = 0, 0
    for start, end in intervals:
        covered += max(end - max(start, covered_until), 0)
        covered_until = max(covered_until, end)
    if len(intervals) < len(tallies) or not covered:
        return float(len(tallies))
    return sum(end - start for start, end in intervals) / covered


# ------------------------------------------------------------------------------------------------ windows


class StatsWindow:
    """The statistics of the steps between two seconds."""

    def __init__(
        self,
        store: Store,
        begin_s: int = 0,
        end_s: int = 1 << 40,
        process: int | None = None,
        series: Collection[str] | None = None,
    ) -> None:
        """`process`: use only its steps; None for all processes. `series`: only these are needed; None: all."""
        self.ranks: Mapping[int, int | None] = store.ranks
        """Rank by process. A reader may know more of them than the store."""
        self._store = store
        self._process = process
        self._read = partial(read_tallies, store, begin_s, end_s, process=process, series=series)
        self.processes = store.processes if process is None else [process]
        """Processes that have steps, in this window or not."""
        self._begin_s, self._end_s = begin_s, end_s
        self.main_kind = store.main_kind
        """The kind of steps that describes the run: see `Store.main_kind`."""
        self._all_modes = {mode for mode, _ in store.mode_kinds}
        self._elapsed: dict[tuple[str | None, int], dict[int, tuple[int, int]]] = {}
        self._rates: dict[tuple[str | None, int, int | None], Rate | None] = {}

    @cached_property
    def tallies(self) -> dict[TallyKey, Tally]:
        """The tallies of all processes."""
        return self._read()

    @cached_property
    def tallies_by_process(self) -> dict[int, dict[TallyKey, Tally]]:
        """By process: its tallies, if it has steps in this window."""
        return split_tallies_by_process(self.tallies)

    @cached_property
    def left_out(self) -> dict[TallyKey, Tally]:
        """Tallies of the steps that statistics exclude (dpmon.record.schema.EXCLUDED)."""
        return self._read(sketches=False, left_out=True)

    def step_counts(self, kind: int, mode: str | None = None) -> tuple[int, int]:
        """Return the number of steps of a kind and of their updates; of a mode, without those that statistics exclude.

        Ranks step together, so these are the steps of the rank with the most; those of other processes add up.
        """
        steps, updates = Counter[int | None](), Counter[int | None]()
        for key, tally in (*self.tallies.items(), *(self.left_out.items() if mode is None else ())):
            if step_kind(key.kind) == kind and mode in (None, key.mode):
                steps[self.ranks.get(key.process)] += tally.steps
                updates[self.ranks.get(key.process)] += tally.updates
        rank = max(steps, key=steps.__getitem__, default=None)
        return steps[rank], updates[rank]

    @cached_property
    def times(self) -> list[TimeRow]:
        """The activities of each process by mode, in order of time."""
        return list(read_times(self._store, self._begin_s, self._end_s, process=self._process))

    def rows(self, process: int) -> Iterator[tuple[TallyKey, Tally]]:
        """Yield the key and the tally of each row of one process, in order of time."""
        for _, _, key, tally in read_tally_rows(self._store, self._begin_s, self._end_s, process=process):
            yield key, tally

    @cached_property
    def modes(self) -> list[str]:
        """The modes with steps of the main kind in this window."""
        return sorted({key.mode for key in self.tallies if step_kind(key.kind) == self.main_kind})

    @cached_property
    def other_modes(self) -> list[tuple[str, int]]:
        """Mode and kind of the steps of other kinds in this window."""
        pairs = {(key.mode, step_kind(key.kind)) for key in self.tallies}
        return sorted(pair for pair in pairs if pair[1] != self.main_kind)

    def step_stats(self, mode: str, kind: int | None = None, process: int | None = None) -> StepStats:
        """Return the statistics of a mode's steps, of all processes together or of one process.

        `kind`: a key of STEP_KINDS; None for the main kind, as in the other methods.
        """
        kind = self.main_kind if kind is None else kind
        tally, rate = self.tally(mode, kind, process), self.rate(mode, kind, process)
        return compute_step_stats(mode, tally=tally, rate=rate, kind=kind)

    def tally(
        self,
        mode: str | None,
        kind: int | None = None,
        process: int | None = None,
        *,
        without_warmup: bool = False,
        batch: int | None = None,
    ) -> Tally:
        """Return the tally of a mode's steps, or of all modes together. Parameters as in `merge_mode_tallies`."""
        tallies = self.tallies if process is None else self.tallies_by_process.get(process, {})
        kind = self.main_kind if kind is None else kind
        return merge_mode_tallies(tallies, mode, kind, without_warmup=without_warmup, batch=batch)

    def rate(self, mode: str | None = None, kind: int | None = None, process: int | None = None) -> Rate | None:
        """Return the rate of a mode, or of all modes together if `mode` is None; None if no time has passed."""
        key = mode, self.main_kind if kind is None else kind, process
        if key not in self._rates:
            self._rates[key] = self._compute_rate(*key)
        return self._rates[key]

    def _compute_rate(self, mode: str | None, kind: int, process: int | None) -> Rate | None:
        processes = self.processes if process is None else [process]
        tallies = {number: self.tally(mode, kind, number) for number in processes}
        return compute_rate(tallies, self.elapsed(mode, kind), self.ranks)

    def elapsed(self, mode: str | None, kind: int) -> dict[int, tuple[int, int]]:
        """Return the time of the steps of a mode and kind by process, as (whole, within the steps) in ns.

        `mode`: None for all modes. The whole includes the time between steps of the main kind.
        """
        if (mode, kind) not in self._elapsed:
            between = self._store.between_activities if kind == self.main_kind else ()
            modes = self._all_modes if mode is None else {mode}
            whole, within = Counter[int](), Counter[int]()
            for row in self.times:
                if row.mode in modes:
                    within[row.process] += row.spent[STEP_KINDS[kind]]
                    whole[row.process] += sum(row.spent[name] for name in (STEP_KINDS[kind], *between))
            self._elapsed[mode, kind] = {process: (ns, within[process]) for process, ns in whole.items() if ns > 0}
        return self._elapsed[mode, kind]

    def process_totals(self, process: int) -> tuple[Tally, Rate | None]:
        """Return the tally and the rate of a process over all modes, without steps of other kinds.

        The step rate of a rank is that of the slowest rank.
        """
        merged, common = self.tally(None, process=process), self.rate()
        if common is None or self.ranks.get(process) is None:
            return merged, self.rate(process=process)
        whole, within = (round(merged.steps * 1e9 / rate) for rate in (common.steps_per_s, common.steps_per_s_within))
        return merged, compute_rate({process: merged}, {process: (whole, within)}, {})

    @cached_property
    def time_by_activity(self) -> dict[str, int]:
        """The time of this window by activity (ns).

        It adds up to the time in which at least one process lived, without the time for which ranks that have taken
        their last step wait for the others to end.
        """
        ended_intervals = [
            (end, alive_end)
            for process, (_, end) in self.step_intervals.items()
            for alive_start, alive_end in self.alive_intervals
            if self.ranks.get(process) is not None and alive_start <= end < alive_end
        ]
        return divide_concurrent_time(self.times, self.alive_intervals, ended_intervals)

    @cached_property
    def alive_intervals(self) -> list[tuple[int, int]]:
        """The times in which at least one process lived, from start-up to its last step, as (start, end) in ns."""
        startup_ns: Counter[int] = Counter()
        for row in self.times:
            first_ns, _ = self.step_intervals.get(row.process, (0, 0))
            startup_ns[row.process] += max(min(row.spent["startup"], first_ns - row.start_s * SECOND), 0)
        steps = self.step_intervals.items()
        return union_of_intervals((start - startup_ns[process], end) for process, (start, end) in steps)

    @cached_property
    def step_intervals(self) -> dict[int, tuple[int, int]]:
        """By process: the time from its first step to its last, as (start, end) in ns."""
        intervals: dict[int, tuple[int, int]] = {}
        for key, tally in (*self.tallies.items(), *self.left_out.items()):
            if tally.first_ns is not None and tally.last_ns is not None:
                start, end = intervals.get(key.process, (tally.first_ns, tally.last_ns))
                intervals[key.process] = min(start, tally.first_ns), max(end, tally.last_ns)
        return intervals


def divide_concurrent_time(
    rows: Iterable[TimeRow], alive_intervals: Sequence[tuple[int, int]], ended_intervals: Sequence[tuple[int, int]]
) -> dict[str, int]:
    """Return the time of a run by activity (ns). Activities of several processes at the same time share that time.

    `alive_intervals`: (start, end) of the times in which at least one process lived, in order. `ended_intervals`: those
    in which a rank has ended and another has not; its share of them is left out.
    """
    ns_by_activity = dict.fromkeys(ACTIVITIES, 0.0)
    rows_by_bucket: dict[tuple[int, int], list[TimeRow]] = defaultdict(list)
    for row in rows:
        rows_by_bucket[row.start_s, row.width_s].append(row)
    for (start_s, width_s), bucket_rows in rows_by_bucket.items():
        start_ns, end_ns = start_s * SECOND, (start_s + width_s) * SECOND
        alive_ns, ended_ns = (
            sum(max(min(end_ns, end) - max(start_ns, start), 0) for start, end in intervals)
            for intervals in (alive_intervals, ended_intervals)
        )
        ns_by_process: Counter[int] = Counter()
        for row in bucket_rows:
            ns_by_process[row.process] += sum(row.spent.values())
        activity_ns = {name: max(sum(row.spent[name] for row in bucket_rows), 0) for name in ACTIVITIES}
        # The time of a process may exceed the width: a long pause counts in its first second (see split_by_second).
        covered_ns, total_ns = max(alive_ns, *ns_by_process.values()), sum(activity_ns.values())
        if ended_ns:
            total_ns += round(covered_ns * ended_ns / alive_ns)
        scale = min(1.0, covered_ns / total_ns) if total_ns else 0.0
        for activity, ns in activity_ns.items():
            ns_by_activity[activity] += ns * scale
    return {activity: round(ns) for activity, ns in ns_by_activity.items()}


def account_for_elapsed(
    time_by_activity: Mapping[str, int], elapsed_ns: int, alive_intervals: Sequence[tuple[int, int]]
) -> dict[str, int]:
    """Return a run's elapsed time by activity (ns), in parts that add up to it.

    `time_by_activity`, `alive_intervals`: as in StatsWindow. Time before a process is traced has no activity, and
    counts as start-up. Where one process follows another, that includes the time that the other took to exit. Time
    after the last step of all processes is "ending", and so is that of each rank after its own.
    """
    remaining_ns = max(elapsed_ns - sum(time_by_activity.values()), 0)
    startup_ns = remaining_ns
    if alive_intervals:
        ends = [0, *(end for _, end in alive_intervals)]
        idle_ns = sum(max(start - end, 0) for (start, _), end in zip(alive_intervals, ends, strict=False))
        startup_ns = min(idle_ns, remaining_ns)
    return {
        **time_by_activity,
        "startup": time_by_activity["startup"] + startup_ns,
        "ending": remaining_ns - startup_ns,
    }
