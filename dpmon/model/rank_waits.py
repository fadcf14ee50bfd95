"""Which rank the others waited for, and how long, over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.bucket_answers import BucketAnswers
from dpmon.model.stragglers import RankTimes, Straggler, median_without
from dpmon.record.schema import STEP, TRAINING, WAIT, step_kind
from dpmon.store.tally_tables import read_tally_rows
from dpmon.store.time_buckets import WIDTHS

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

MOST_READ = 4000
"""Most tallies to read. For more ranks or a longer time, the intervals are wider."""
_SLOW_SHOWN, _OTHERS = 3, 12
"""With many ranks: most slow ranks that are shown, and most others that they are compared with."""
_SYNC = "sync"


class RankWaits(NamedTuple):
    """How much longer the others waited than each rank, in each interval: as a share of its step, 0 to 1.

    The wait of the others is their median, as for a straggler (dpmon.model.stragglers). With many ranks, it is
    that of only some others. 0: they did not wait for it.
    """

    width_s: int = 1
    """Length of an interval."""
    shares: Mapping[int, Mapping[int, float]] = {}
    """By rank and start of the interval (s). Intervals with unknown waits are left out."""


def read_rank_waits(
    store: Store,
    answers: BucketAnswers,
    ranks: Mapping[int, int],
    start_s: int,
    end_s: int,
    shown: Iterable[int] | None = None,
) -> RankWaits:
    """Return the waits between two seconds; `ranks`: rank by process; `shown`: the processes to return."""
    needed = len(ranks) * max(end_s - start_s, 1) // MOST_READ
    width = next((width for width in WIDTHS if width > needed), WIDTHS[-1])
    shares = answers.read(
        store,
        ("rank waits", *sorted(ranks.items())),
        width,
        start_s,
        end_s,
        lambda start_s, end_s: _wait_shares(store, ranks, start_s, end_s, width),
    )
    shown_ranks = [ranks[process] for process in (ranks if shown is None else shown)]
    return RankWaits(
        width,
        {
            rank: {start_s: of_ranks[rank] for start_s, of_ranks in shares.items() if rank in of_ranks}
            for rank in shown_ranks
        },
    )


def choose_ranks_to_show(
    ranks: Sequence[RankTimes], straggler: Straggler | None, chosen: int | None
) -> tuple[list[int], list[int]]:
    """Return the processes of the slow ranks and the chosen one, and some others; none if no rank is slow."""
    if straggler is None:
        return [], []
    groups = {process.process: process.group for process in ranks}
    shown = [
        process
        for process in dict.fromkeys((*straggler.processes[:_SLOW_SHOWN], chosen))
        if process in groups and process is not None
    ]
    others = [process for process in groups if process not in straggler.processes]
    spread = [process for process in others[:: max(len(others) // (2 * _OTHERS), 1)] if process not in shown]
    return shown, [process for process in spread if groups[process] == groups.get(straggler.process)][-_OTHERS:]


def _wait_shares(
    store: Store, ranks: Mapping[int, int], start_s: int, end_s: int, width: int
) -> dict[int, dict[int, float]]:
    """Return the shares by interval and rank, of training steps with known waits."""
    sums: dict[int, dict[int, list[int]]] = {}
    tally_rows = read_tally_rows(
        store, start_s, end_s, process=tuple(ranks), sketches=False, widest=width, series=(STEP, _SYNC, WAIT)
    )
    for start, _, key, tally in tally_rows:
        wait = tally.stat(WAIT)
        if wait.count and step_kind(key.kind) == TRAINING:
            whole = sums.setdefault(store.bucket_start(start, width), {}).setdefault(ranks[key.process], [0, 0, 0])
            # The waits may be known of some synchronized steps only: for ranks of several machines, of a sample.
            waited = wait.total * max(tally.stat(_SYNC).count, wait.count) // wait.count
            for at, value in enumerate((waited, tally.stat(STEP).total, tally.steps)):
                whole[at] += value
    shares: dict[int, dict[int, float]] = {}
    for start, times in sums.items():
        waits = sorted(waited / steps for waited, _, steps in times.values())
        for rank, (waited, took, steps) in times.items():
            if took and len(waits) > 1:
                longer = median_without(waits, waited / steps) - waited / steps
                shares.setdefault(start, {})[rank] = min(max(longer * steps / took, 0.0), 1.0)
    return shares
