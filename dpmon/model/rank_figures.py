"""The figures of each rank in a picture: its last minutes, and its mean times beside those of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dpmon.model.pace import figures_end_s
from dpmon.model.state import Process
from dpmon.model.stragglers import MIN_STEPS, RankTimes, rank_times, sums_of
from dpmon.model.stragglers import SERIES as STRAGGLER_SERIES
from dpmon.record.schema import EVALUATION, SECOND, SETTLING, STEP, WAIT
from dpmon.store.answers import RankSums
from dpmon.store.figures import figures, merged, trains
from dpmon.store.tally import Key, Tally

if TYPE_CHECKING:
    from dpmon.store.queries import Store

Seconds = tuple[range, ...]
"""Seconds of stalls, in order of time."""
RANK_STEPS, RANK_S = 50, 5
"""Fewest steps and seconds for a comparison of the ranks."""
RANKS_A_SECOND = 32
"""The times and the rate of this many ranks are read in a second; those of more ranks are read less often."""
_SAMPLED_S = 40
"""Most seconds for a comparison of ranks with few known waits."""
_SERIES = (STEP, "forward", "backward")
_MINUTE_S = 60


@dataclass(slots=True)
class RankTimesReader:
    """Reads the mean times of ranks that train together; of many ranks, they may be some seconds old."""

    _of: tuple[int, ...] = ()
    """The processes of the last times, and when they were read (s)."""
    _end_s: int = 0
    _times: tuple[RankTimes, ...] = ()
    _kept: KeptSums = field(default_factory=lambda: KeptSums())

    def read(
        self, rows: Store, focus: Process, others: Sequence[Process], stalled: Seconds = ()
    ) -> tuple[RankTimes, ...]:
        """The times as of the newest step of `focus`, one of the ranks; of several machines, without `stalled`."""
        if focus.last_step is None:
            return ()
        if rows.mirrored:  # what is kept is of now, not of a time that is looked back to
            return (self._kept if rows.until_s is None else KeptSums()).read(rows, focus, others, stalled)
        end_s, processes = figures_end_s(rows, focus), (focus.process, *(one.process for one in others))
        age_s = end_s - self._end_s
        if processes != self._of or not 0 <= age_s < len(processes) // RANKS_A_SECOND:
            self._of, self._end_s, self._times = processes, end_s, _rank_times(rows, focus, others)
        return self._times


def _rank_times(rows: Store, focus: Process, others: Sequence[Process]) -> tuple[RankTimes, ...]:
    """The mean times of all ranks over about RANK_STEPS steps, in whole seconds."""
    assert focus.last_step is not None
    ranks = sorted((one.rank, one.process, one.node) for one in (focus, *others) if one.rank is not None)
    end_s = max(figures_end_s(rows, one) for one in (focus, *others) if one.last_step is not None)
    step_ns = focus.recent.step_ns or focus.last_step.wall_ns
    begin_s = max(end_s - max(-(-RANK_STEPS * step_ns // SECOND), RANK_S), 0)
    numbers = tuple(process for _, process, _ in ranks)
    found = rows.tallies(begin_s, end_s, process=numbers, sketches=False, series=STRAGGLER_SERIES)
    mode = focus.last_step.mode
    trained = mode in trains((key.mode, key.kind) for key in found)
    own = _by_process(found)
    return tuple(
        rank_times(process, rank, sums_of(merged(own.get(process, {}), mode, False, trained, settled=True)), node)
        for rank, process, node in ranks
    )


class KeptSums:
    """The sums of the ranks of several machines, of which only the rows of seconds that changed are read.

    A thousand ranks have a thousand new rows each second. Of such ranks, only the waits of some steps are known, so
    that more seconds are needed.
    """

    def __init__(self) -> None:
        self._width_s, self._begin_s, self._last, self._mode = RANK_S, 1 << 40, 0, ""
        self._rows: dict[int, dict[Key, RankSums]] = {}
        """By second."""
        self._sums: dict[int, RankSums] = {}
        """By process."""
        self._stalled: Seconds = ()

    def read(self, rows: Store, focus: Process, others: Sequence[Process], stalled: Seconds) -> tuple[RankTimes, ...]:
        """The times as of the newest step of any of these ranks."""
        assert focus.last_step is not None
        together = [one for one in (focus, *others) if one.rank is not None]
        end_s = max(figures_end_s(rows, one) for one in together if one.last_step is not None)
        step_ns = focus.recent.step_ns or focus.last_step.wall_ns
        while self._width_s * SECOND < RANK_STEPS * step_ns:
            self._width_s *= 2
        mode = focus.last_step.mode
        left_out = SETTLING | (EVALUATION if mode in trains(rows.kinds()) else 0)
        begin_s = end_s - self._width_s
        for each in reversed(stalled):
            begin_s -= max(min(each.stop, end_s) - each.start, 0) if each.stop > begin_s else 0
        if stalled != self._stalled:
            self._begin_s, self._stalled = 1 << 40, stalled
        self._update(rows, max(begin_s, 0), end_s, mode, left_out)
        first = self._sums.get(focus.process, RankSums())
        joined = first.series.get(WAIT, (0, 0))[0]
        if 0 < joined < min(first.steps, MIN_STEPS) and self._width_s < _SAMPLED_S:
            self._width_s *= 2
            return self.read(rows, focus, others, stalled)
        ranks = sorted((one.rank or 0, one.process, one.node) for one in together)
        none = RankSums()
        return tuple(rank_times(process, rank, self._sums.get(process, none), node) for rank, process, node in ranks)

    def _update(self, rows: Store, begin_s: int, end_s: int, mode: str, left_out: int) -> None:
        """Read what changed, and let the sums be those of the seconds from `begin_s` to `end_s`."""
        if begin_s < self._begin_s or mode != self._mode:
            self._rows, self._sums, self._last = {}, {}, 0
        none = RankSums()
        for number, start, key, sums in rows.changed_seconds(begin_s, end_s, STRAGGLER_SERIES, self._last):
            self._last = max(self._last, number)
            if key.mode != mode or key.kind & left_out or any(start in each for each in self._stalled):
                continue
            of_second = self._rows.setdefault(start, {})
            whole = self._sums.get(key.process, none)
            if key in of_second:
                whole = whole.plus(of_second[key], -1)
            of_second[key], self._sums[key.process] = sums, whole.plus(sums)
        for second in [second for second in self._rows if second < begin_s]:
            for key, sums in self._rows.pop(second).items():
                self._sums[key.process] = self._sums[key.process].plus(sums, -1)
        self._begin_s, self._mode = begin_s, mode


def rank_figures(rows: Store, processes: Iterable[Process]) -> Iterator[Process]:
    """The processes with their figures over the current minute and the one before."""
    alike: dict[int, list[Process]] = {}
    for process in processes:
        if process.last_step is not None:
            alike.setdefault(figures_end_s(rows, process), []).append(process)
    for end_s, those in alike.items():
        begin_s = max(end_s // _MINUTE_S - 1, 0) * _MINUTE_S  # each minute has its own tally
        numbers = tuple(process.process for process in those)
        found = rows.tallies(begin_s, end_s, process=numbers, series=_SERIES)
        trained, own = trains((key.mode, key.kind) for key in found), _by_process(found)
        for process in those:
            mode = process.last_step.mode if process.last_step is not None else ""
            tally = merged(own.get(process.process, {}), mode, False, mode in trained)
            yield replace(process, figures=figures(mode, False, tally, None))


def _by_process(tallies: Mapping[Key, Tally]) -> dict[int, dict[Key, Tally]]:
    """The tallies of each process."""
    found: dict[int, dict[Key, Tally]] = {}
    for key, tally in tallies.items():
        found.setdefault(key.process, {})[key] = tally
    return found
