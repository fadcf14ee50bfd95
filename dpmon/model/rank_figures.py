"""The figures of each rank in a picture: its last minutes, and its mean times beside those of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dpmon.model.pace import figures_end_s
from dpmon.model.state import Process
from dpmon.model.stragglers import SERIES as STRAGGLER_SERIES
from dpmon.model.stragglers import RankTimes, rank_times
from dpmon.record.schema import SECOND, STEP
from dpmon.store.figures import figures, merged, trains
from dpmon.store.tally import Key, Tally

if TYPE_CHECKING:
    from dpmon.store.queries import Store

RANK_STEPS, RANK_S = 50, 5
"""Fewest steps and seconds for a comparison of the ranks."""
RANKS_A_SECOND = 32
"""The times and the rate of this many ranks are read in a second; those of more ranks are read less often."""
_SERIES = (STEP, "forward", "backward")
_MINUTE_S = 60


@dataclass(slots=True)
class RankTimesReader:
    """Reads the mean times of ranks that train together; of many ranks, they may be some seconds old."""

    _of: tuple[int, ...] = ()
    """The processes of the last times, and when they were read (s)."""
    _end_s: int = 0
    _times: tuple[RankTimes, ...] = ()

    def read(self, rows: Store, focus: Process, others: Sequence[Process]) -> tuple[RankTimes, ...]:
        """The times as of the newest step of `focus`, one of the ranks."""
        if focus.last_step is None:
            return ()
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
        rank_times(process, rank, merged(own.get(process, {}), mode, False, trained, settled=True), node)
        for rank, process, node in ranks
    )


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
