"""Computes the figures of a run between two seconds for the screen, the report, the summary and other outputs. Pure.

One `Window` reads the tallies and times once. All figures of that time come from it, so a figure has the same digits
everywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from dpmon.record.schema import EVALUATION
from dpmon.store.accounting import ACTIVITIES, union
from dpmon.store.answers import TimeRow
from dpmon.store.figures import Figures, Rate, elapsed, figures, merged, modes_of, rate, trains
from dpmon.store.tally import KeptTallies, Key, Tally

if TYPE_CHECKING:
    from dpmon.store.queries import Store

_SECOND = 1_000_000_000


class Window:
    """All figures of the time between two seconds."""

    def __init__(
        self,
        source: Store,
        begin_s: int = 0,
        end_s: int = 1 << 40,
        process: int | None = None,
        kept: KeptTallies | None = None,
    ) -> None:
        """`process`: use only its steps; None for all processes. `kept`: of the last such window of this process."""
        self._kept = kept
        self._source = source
        self._process = process
        self.processes = source.processes if process is None else [process]
        """Processes with steps at any time."""
        self._begin_s, self._end_s = begin_s, end_s
        self._kinds = source.kinds()
        self._trained = trains(self._kinds)
        self._times_of: dict[tuple[str, bool], dict[int, tuple[int, int]]] = {}

    @cached_property
    def by_process(self) -> dict[Key, Tally]:
        """Tallies of each process."""
        if self._kept is not None and self._process is not None:
            return self._source.tallies_after(self._kept, self._begin_s, self._end_s, self._process)
        return self._source.tallies(self._begin_s, self._end_s, process=self._process)

    @cached_property
    def times(self) -> list[TimeRow]:
        """The activities of each process by mode, in order of time."""
        return self._source.time_rows(self._begin_s, self._end_s, process=self._process)

    def rows(self, process: int) -> Iterator[tuple[Key, Tally]]:
        """Key and tally of each row of one process, in order of time."""
        for _, _, key, tally in self._source.tally_rows(self._begin_s, self._end_s, process=process):
            yield key, tally

    @property
    def modes(self) -> list[tuple[str, bool]]:
        """The modes in this window as (mode, evaluation); a mode that trains has a separate pair for its evaluation."""
        there = {(key.mode, key.kind) for key in self.by_process}
        known = modes_of(self._kinds)
        now = {(mode, bool(kind & EVALUATION) and mode in self._trained) for mode, kind in there}
        return [each for each in known if each in now]

    def trained(self, mode: str) -> bool:
        """Whether a mode ever trains in this run; if not, its figures come from its evaluation steps."""
        return mode in self._trained

    def figures(self, mode: str, evaluation: bool = False, process: int | None = None) -> Figures:
        """The figures of a mode's steps: of all processes together, or of one."""
        return figures(mode, evaluation, self.tally(mode, evaluation, process), self.rate(mode, evaluation, process))

    def tally(
        self,
        mode: str,
        evaluation: bool = False,
        process: int | None = None,
        *,
        settled: bool = False,
        batch: int | None = None,
    ) -> Tally:
        """The tally of a mode's steps; parameters as in dpmon.store.figures.merged."""
        trained = self.trained(mode)
        return merged(self.by_process, mode, evaluation, trained, process=process, settled=settled, batch=batch)

    def rate(self, mode: str, evaluation: bool = False, process: int | None = None) -> Rate | None:
        """Steps and samples of a mode per elapsed time; None if no time has passed."""
        trained = self.trained(mode)
        there = self.processes if process is None else [process]
        tallies = {each: merged(self.by_process, mode, evaluation, trained, process=each) for each in there}
        return rate(tallies, self._elapsed(mode, evaluation))

    def _elapsed(self, mode: str, evaluation: bool) -> dict[int, tuple[int, int]]:
        """The time of a mode's steps by process (dpmon.store.figures.elapsed)."""
        found = self._times_of.get((mode, evaluation))
        if found is None:
            found = elapsed(self.times, mode, evaluation, self.trained(mode))
            self._times_of[mode, evaluation] = found
        return found

    def of_process(self, process: int) -> tuple[Tally, Rate | None]:
        """Return the tally and the rate of a process over all modes, without evaluation steps of modes that train."""
        whole = Tally()
        for mode in {mode for mode, _ in self._kinds}:
            whole.merge(self.tally(mode, process=process))
        return whole, self.mean(process)

    def mean(self, process: int | None = None) -> Rate | None:
        """Return the rate of all processes, or of one, over all modes, without evaluation steps of modes that train."""
        tallies = {each: Tally() for each in (self.processes if process is None else [process])}
        times = dict.fromkeys(tallies, (0, 0))
        for mode in {mode for mode, _ in self._kinds}:
            spent = self._elapsed(mode, False)
            for each, tally in tallies.items():
                tally.merge(merged(self.by_process, mode, False, self.trained(mode), process=each))
                (whole, within), (more, inside) = times[each], spent.get(each, (0, 0))
                times[each] = whole + more, within + inside
        return rate(tallies, times)

    def evaluation_steps(self, process: int) -> int:
        """Return the number of evaluation steps of a process, in modes that also train."""
        if not any(kind & EVALUATION and mode in self._trained for mode, kind in self._kinds):
            return 0
        return sum(
            tally.steps
            for key, tally in self.by_process.items()
            if key.process == process and key.kind & EVALUATION and key.mode in self._trained
        )

    @cached_property
    def spent(self) -> dict[str, int]:
        """The time of this window by activity (ns). The sum is the time with at least one process."""
        return shared_out(self.times, self.lives)

    @cached_property
    def lives(self) -> list[tuple[int, int]]:
        """The times with at least one process, from its start-up to its last step, as (begin, end) in ns."""
        startup: Counter[int] = Counter()
        for row in self.times:
            startup[row.process] += row.spent["startup"]
        return union((begin - startup[process], end) for process, (begin, end) in self.spans.items())

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """By process: the time from its first step to its last, as (begin, end) in ns."""
        found: dict[int, tuple[int, int]] = {}
        for key, tally in self.by_process.items():
            if tally.first_ns is not None and tally.last_ns is not None:
                begin, end = found.get(key.process, (tally.first_ns, tally.last_ns))
                found[key.process] = min(begin, tally.first_ns), max(end, tally.last_ns)
        return found


def shared_out(rows: Iterable[TimeRow], lives: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the time of a run by activity (ns). Simultaneous activities of several processes share the time.

    `lives`: (begin, end) of the times with at least one process, in order.
    """
    found = dict.fromkeys(ACTIVITIES, 0.0)
    stretches: dict[tuple[int, int], list[TimeRow]] = defaultdict(list)
    for row in rows:
        stretches[row.start_s, row.width_s].append(row)
    for (start_s, width_s), together in stretches.items():
        begin, end = start_s * _SECOND, (start_s + width_s) * _SECOND
        lived = sum(max(min(end, until) - max(begin, since), 0) for since, until in lives)
        own: Counter[int] = Counter()
        for row in together:
            own[row.process] += sum(row.spent.values())
        spent = {name: max(sum(row.spent[name] for row in together), 0) for name in ACTIVITIES}
        # The longest may exceed the width: a long pause counts in its first second (accounting.Spent.by_second).
        covered, whole = max(lived, *own.values()), sum(spent.values())
        scale = min(1.0, covered / whole) if whole else 0.0
        for activity, ns in spent.items():
            found[activity] += ns * scale
    return {activity: round(ns) for activity, ns in found.items()}


def accounted(spent: Mapping[str, int], elapsed_ns: int, lives: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Divide a run's elapsed time by activity (ns); the parts add up to it. `lives`: as in Window.lives.

    Time before a process is traced has no activity. It counts as start-up: also where a process follows another one,
    with the time that the other one took to end. Time after the last step of all processes is the run's end.
    """
    left = max(elapsed_ns - sum(spent.values()), 0)
    begins, ends = [begin for begin, _ in lives], [0, *(end for _, end in lives)]
    before = min(sum(max(begin - end, 0) for begin, end in zip(begins, ends, strict=False)), left) if lives else left
    return {**spent, "startup": spent["startup"] + before, "ending": left - before}


def thirds(rows: Sequence[tuple[int, Tally]], steps: int) -> tuple[Tally, Tally]:
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
