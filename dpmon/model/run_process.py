"""One process of a run as of a time: every fact is queried when it is first needed.

Times are ns since the run's start; unknown values are None. The history must be open when a fact is queried.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from dpmon.model.device_usage import mode_starts, read_peaks_by_mode
from dpmon.model.epoch_progress import NO_STEP, OTHER_RANK, OVER, Progress, progress_of
from dpmon.model.loss_curves import LossCurve, read_loss_curves
from dpmon.model.mode_comparison import Comparison, compare_modes
from dpmon.model.rank_stats import RANKS_A_SECOND
from dpmon.model.recent_calls import CALLS_READ, CallTimings, RecentCalls, Root
from dpmon.model.run_events import (
    ActiveMode,
    ModeRefusal,
    ProcessInfo,
)
from dpmon.model.step_history import COLUMNS, Column, column_width_s, read_columns, subtract_input_waits
from dpmon.model.throughput import RecentRate
from dpmon.record.record_types import Call, Step
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.record.schema import SECOND, TRAINING, WARM_UP
from dpmon.record.shared_names import RANK_MODES, node_suffix, rank_name
from dpmon.store.shapes import read_wrapper_types
from dpmon.store.step_stats import Rate, StatsWindow, StepStats, compute_step_stats
from dpmon.store.tally import Tally

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis

PHASES = tuple(phase.display_name for phase in SCHEMA)
"""Names of the phases on the screen; `forward` is the part outside the phases of its calls."""
NO_STEPS = compute_step_stats("", tally=Tally(), rate=None)
"""The metrics of a time range without steps."""
MIN_CALLS_READ = 8
MAX_AGE_S = 8
"""With many processes, facts about all of them are at most this old."""
_COMPARISONS_PER_RUN = 60
"""The modes are compared again when the run has become longer by this fraction (1/60) of its duration."""


class LazyFacts:
    """Facts that are queried when first needed."""

    _derived: ClassVar[tuple[str, ...]] = ()
    """Those that follow from others without a query."""

    def with_facts(self, **facts: Any) -> Self:
        """Return a copy with other facts."""
        changed = copy(self)
        for name in self._derived:
            vars(changed).pop(name, None)
        vars(changed).update(facts)
        return changed


class NewestRecords(NamedTuple):
    """The newest records of a process."""

    step: Step | None = None
    step_number: int = 0
    mode: str = ""
    """The mode of its newest step or call."""
    seen_ns: int = -1
    began_ns: int = -1
    memory: Mapping[str, Any] = {}


NO_RECORDS = NewestRecords()


class Process(LazyFacts):
    """One training process of the run."""

    def __init__(
        self,
        process: int,
        run: RunAnalysis,
        newest: NewestRecords = NO_RECORDS,
        node: str | None = None,
    ) -> None:
        self._run, self._events, self._at_ns = run, run.events, run.at_ns
        self._newest = newest
        self.process = process
        self.has_trained = process in run.trained_processes
        """Whether it had a training step."""
        self.info = self._events.info.get(process) or ProcessInfo(process)
        rank = run.rank_by_process.get(process)
        self.rank = self.info.rank if rank is None else rank
        self.node = node
        """The name of its node; None on one machine."""
        self.began_ns = newest.began_ns
        """Start of its first step or call."""
        self.seen_ns = newest.seen_ns
        """End of its newest step or call."""
        self.last_step = newest.step
        """Its newest step, of any kind."""
        self.step_number = newest.step_number
        """Number of its newest training step; if the run never trains, of its newest step of the main kind."""
        self.memory = newest.memory
        """The newest record of the devices' memory."""

    @cached_property
    def _active_mode(self) -> ActiveMode:
        return self._events.active_mode(self.process, self.last_step, self._newest.mode)

    @cached_property
    def mode(self) -> str:
        """The mode in which it trains."""
        return self._active_mode.mode

    @cached_property
    def mode_reason(self) -> str | None:
        """Why it trains in this mode."""
        return self._active_mode.mode_reason

    @cached_property
    def refusals(self) -> Mapping[str, ModeRefusal]:
        """The refused mode by root, for the roots that refused in their last reply."""
        return self._events.refusals_by_root(self.process)

    @cached_property
    def paused_since_ns(self) -> int | None:
        """Start of its pause; None if it is not paused."""
        return self._events.paused_since(self.process, None if self.last_step is None else self.last_step.start_ns)

    @property
    def number(self) -> int:
        """Its rank, or its process index if it has no rank."""
        return self.process if self.rank is None else self.rank

    @property
    def name(self) -> str:
        """Its name: "rank 1", "rank 11 (gpu-3)", "process 1"."""
        if self.rank is None:
            return f"process {self.process}{node_suffix(self.node)}"
        return rank_name(self.rank, self.node)

    # ------------------------------------------------------------------------------------------ calls

    @property
    def _is_representative(self) -> bool:
        focus = self._run.representative
        return focus is not None and focus.process == self.process

    def _read_calls(self) -> tuple[Mapping[Root, CallTimings], tuple[Call, ...]]:
        limit, step = MIN_CALLS_READ, self.last_step
        if self._is_representative:  # the calls of one rank are interleaved with those of all others
            rank_count = max(len(self._run.rank_by_process), RANKS_A_SECOND)
            limit = max(CALLS_READ * RANKS_A_SECOND // rank_count, MIN_CALLS_READ)
        recent_calls = RecentCalls(self._run.store, self.process, limit)
        tallies = self._range.tallies if self._is_representative and step is not None else {}
        mode = self.mode if step is None else step.mode
        timings = recent_calls.timings(tallies, mode, timed=self._is_representative)
        return timings, () if step is None else recent_calls.calls_of(step)

    @cached_property
    def _newest_calls(self) -> tuple[Mapping[Root, CallTimings], tuple[Call, ...]]:
        """Its last calls, and those of its last step. Of one of many processes, they are some seconds old."""
        age_s = MAX_AGE_S * (self._run.has_many and not self._is_representative)
        return self._run.read_at_most_every(age_s, ("calls", self.process), self._read_calls)

    @cached_property
    def calls(self) -> Mapping[Root, CallTimings]:
        """The last call by root and its wrapper; the root that was called last comes first.

        Those of the process that represents the run have their times.
        """
        return self._newest_calls[0]

    @cached_property
    def last_calls(self) -> tuple[Call, ...]:
        """The calls of its last step."""
        return self._newest_calls[1]

    @cached_property
    def _last_call_in_mode(self) -> Call | None:
        calls = (timing.last for timing in self.calls.values())
        return next((call for call in calls if call.mode == self.mode and call.devices), None)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices on which it trains."""
        call = self._last_call_in_mode
        return self._active_mode.devices if call is None else call.devices

    @cached_property
    def virtual(self) -> bool:
        """Whether the replicas share one device."""
        call = self._last_call_in_mode
        return self._active_mode.virtual if call is None else call.virtual

    @cached_property
    def earlier_wrappers(self) -> Set[str]:
        """In an evaluation, which may call the bare model for long: the wrappers through which it has called models."""
        if self.last_step is None or self.last_step.kind == TRAINING:
            return frozenset()
        return read_wrapper_types(self._run.store, self.process)

    @property
    def last_called_root(self) -> CallTimings | None:
        """The timings of the root that was called last; None without a call."""
        return next(iter(self.calls.values()), None)

    @property
    def distributed(self) -> str | None:
        """How it trains one model together with other ranks (a key of RANK_MODES); None if it does not."""
        wrappers = {via for _, via in self.calls} | self.earlier_wrappers
        return next((wrapper for wrapper in RANK_MODES if wrapper in wrappers), None)

    @cached_property
    def progress(self) -> Progress:
        """Its epoch and batch; with the time left only if it represents the run."""
        if self.last_step is None:
            return NO_STEP
        if not self._is_representative:
            return progress_of(self._run.store, self.process, self.last_step, limit=1, no_time=OTHER_RANK)
        return progress_of(self._run.store, self.process, self.last_step, no_time=OVER if self._run.over else None)

    @cached_property
    def figures(self) -> StepStats:
        """Its steps in the time range, if several processes train; only step, forward and backward."""
        return self._run.range_stats_of(self.process)

    # ------------------------------------------------------------------------------------------ of the representative

    @property
    def _is_measured(self) -> bool:
        return self._is_representative and self.last_step is not None

    @cached_property
    def end_s(self) -> int:
        """The second before which its metrics end; they include its newest step.

        As of a time in the past, they include only whole seconds, unless the process has none yet.
        """
        if self.last_step is None:
            return 0
        end_s = (self.last_step.start_ns + self.last_step.wall_ns) // SECOND + 1
        until_s = end_s if self._at_ns is None else self._at_ns // SECOND
        return end_s if until_s <= self.began_ns // SECOND + 1 else min(end_s, until_s)

    @cached_property
    def _whole_run(self) -> StatsWindow:
        return StatsWindow(self._run.store, 0, self.end_s, self.process)

    @cached_property
    def _range(self) -> StatsWindow:
        start_s = max(self.end_s - self._run.selection.span_s, 0) if self._run.selection.span_s else 0
        return StatsWindow(self._run.store, start_s, self.end_s, self.process) if start_s else self._whole_run

    @cached_property
    def trained(self) -> tuple[int, int]:
        """Its numbers of training steps and of optimizer updates so far."""
        if not self._is_measured:
            return 0, 0
        return StatsWindow(self._run.store, 0, self.end_s, self.process, ("updates",)).step_counts(TRAINING)

    @cached_property
    def recent(self) -> RecentRate:
        """Its last ten seconds of training in the current mode."""
        return self._run.recent_rate if self._is_measured else RecentRate()

    @property
    def _history_s(self) -> int:
        """The length of the history, which ends at `end_s`."""
        span_s = self._run.selection.span_s
        return min(2 * span_s, COLUMNS) if span_s else self.end_s - max(self.began_ns, 0) // SECOND + self.column_s

    @cached_property
    def column_s(self) -> int:
        """Seconds per column."""
        if not self._is_measured:
            return 1
        return column_width_s(self._run.selection.span_s, self.end_s - max(self.began_ns, 0) // SECOND)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The history in the time range, oldest first."""
        if not self._is_measured:
            return ()
        begin_s = max(self.end_s - self._history_s, 0)
        columns = read_columns(self._run.store, self._run.answers, self.process, begin_s, self.end_s, self.column_s)
        return subtract_input_waits(columns, self._events.input_waits(self.process), self.column_s)

    @cached_property
    def losses(self) -> tuple[LossCurve, ...]:
        """Its losses, in points that match the columns."""
        if not self._is_measured:
            return ()
        begin_s = max(self.end_s - self._history_s, 0)
        return read_loss_curves(self._run.store, self.process, begin_s, self.end_s, self.column_s)

    @cached_property
    def _range_mode(self) -> str:
        """The current mode, or that of the last step if the range has no steps in the current one."""
        assert self.last_step is not None
        return self.mode if any(key.mode == self.mode for key in self._range.tallies) else self.last_step.mode

    @cached_property
    def ranged(self) -> StepStats:
        """The steps of the current mode in the time range; of the last step's mode if there are none.

        They are of the main kind, else of another kind.
        """
        if not self._is_measured:
            return NO_STEPS
        kinds = self._range.main_kind, *(kind for mode, kind in self._range.other_modes if mode == self._range_mode)
        stats = (self._range.step_stats(self._range_mode, kind, self.process) for kind in kinds)
        return next((kind_stats for kind_stats in stats if kind_stats.steps), NO_STEPS)

    @cached_property
    def settled(self) -> StepStats:
        """`ranged` without warm-up steps and without a rate; NO_STEPS if these steps are evaluations."""
        if not self.ranged.steps or self.ranged.kind != self._run.main_kind:
            return NO_STEPS
        if not any(key.kind & WARM_UP for key in self._range.tallies):
            return self.ranged
        tally = self._range.tally(self.ranged.mode, process=self.process, without_warmup=True)
        return compute_step_stats(self.ranged.mode, tally=tally, rate=None, kind=self.ranged.kind)

    @cached_property
    def main_tally(self) -> Tally:
        """The steps of the main kind in the time range; an evaluation may take all of it."""
        return self.ranged.tally if self.ranged.kind == self._run.main_kind else Tally()

    @cached_property
    def mean(self) -> Rate | None:
        """The rate in all modes, once the run has ended; of all processes together if it is one of several ranks."""
        if not self._is_measured or not self._run.over:
            return None
        return (self._whole_run if self.rank is None else self._run.window).rate()

    @cached_property
    def compared(self) -> Comparison | None:
        """Its dp steps against its single steps. In a long run, the verdict may be minutes old."""
        if not self._is_measured or self.distributed is not None:
            return None
        devices, virtual = self._events.devices_by_mode(self.process).get("dp", ((), False))
        if self.mode == "dp" and self.devices:
            devices, virtual = self.devices, self.virtual
        comparison = self._run.read_at_most_every(
            max(self.end_s // _COMPARISONS_PER_RUN, 1),
            ("comparison", self.process, self.mode, devices, self._run.over),
            lambda: compare_modes(self._whole_run, self.process, devices=devices, virtual=virtual),
        )
        starts = mode_starts(self._events.changes, self.process) or [(self.mode, 0)]
        return replace(comparison, memory=read_peaks_by_mode(self._run.store, self.process, starts))

    @property
    def has_used_dp(self) -> bool:
        """Whether it trains in dp, or has done so."""
        return self.mode == "dp" or (self.compared is not None and "dp" in self.compared.seen)
