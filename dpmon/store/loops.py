"""The table `loops`: the loops over the loaders of the processes, which of them are epochs, and the time left in these.

A loader loop is one iteration over a DataLoader. An epoch is a loop with training steps. A loop is not an epoch if the
script reads it in turn with the loop of the current epoch, or leaves it after a single batch. The number of an epoch
counts the epochs over the same dataset; or all epochs, while each has a dataset of its own.

The time left follows from the mean time of the recent batches. The time of a batch runs from the end of the previous
batch to its own end, so it includes waits for data, logging and the like. These times are divided into up to MAX_BLOCKS
consecutive blocks. A block that is much longer than all others is left out, because something happened only once, such
as an evaluation or a pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from operator import attrgetter, truediv
from statistics import stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.record.record_types import Batches
from dpmon.store.steps import StepRow, read_loop_steps
from dpmon.store.table import CHANGING, StoreTable

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.database import HistoryConnection
    from dpmon.store.store_queries import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS loops (
    process INTEGER NOT NULL, loop INTEGER NOT NULL, dataset INTEGER NOT NULL,
    length        INTEGER,           -- batches of the loader; NULL: unknown
    begin_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,  -- start of its first step, end of its last one
    last_step     INTEGER NOT NULL,  -- number of its last training step
    fetched       INTEGER NOT NULL,
    ahead         INTEGER,           -- fetched batches that no step has used yet; NULL until its second step
    steps         INTEGER NOT NULL,
    trained       INTEGER NOT NULL,  -- its training steps
    epoch         INTEGER,           -- number of the epoch; NULL if it is not an epoch
    evaluation_ns INTEGER NOT NULL,  -- evaluation between its first and its last step
    after_ns      INTEGER NOT NULL,  -- evaluation after its last step, up to the next epoch
    seq           INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (process, loop)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_loops ON loops (seq);
"""
MAX_LOOPS = 10_000
"""How many loops of a process are kept in a history that has reached its size limit."""
MAX_AHEAD = 8
"""A loop prefetches at most this many batches. If more were fetched before its second step, the script skipped them."""
MAX_DATASETS = 128
"""How many datasets are remembered. A script may make a new one every few steps."""
_MAX_RECENT = 8
"""Number of loops to which a new step may belong: the current epoch, and the loops with the newest steps."""
MAX_STEPS_READ = 256
"""How many steps are read to estimate the time left."""
MAX_BLOCKS = 16
OUTLIER_RATIO = 2.0
"""The longest block is left out if its batches took more than this many times as long as in the second longest."""
MIN_BATCHES = 3
"""With fewer batches or blocks, the time left is not estimated."""
WINDOW_NS = 60_000_000_000
"""If steps are short, only one in several is read, so that MAX_STEPS_READ of them reach back this far."""
MAX_TIME_LEFT_NS = 100 * 86_400_000_000_000
"""A longer time left is not shown: with billions of batches in a sampler, the training stops for another reason."""
MAX_STEP_INTERVAL = 32
"""If steps are short, at least one in this many is read."""


@dataclass(slots=True)
class LoaderLoop:
    """A row of `loops`."""

    process: int
    loop: int
    dataset: int
    length: int | None
    begin_ns: int
    end_ns: int = 0
    last_step: int = 0
    fetched: int = 0
    ahead: int | None = None
    steps: int = 0
    trained: int = 0
    epoch: int | None = None
    evaluation_ns: int = 0
    after_ns: int = 0

    @property
    def batches_used(self) -> int | None:
        """The number of batches that its steps have used; None until it is known how many it prefetches."""
        return None if self.ahead is None else self.fetched - self.ahead

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches were fetched."""
        return self.length is not None and self.fetched >= self.length


LOOPS = StoreTable("loops", LoaderLoop, SCHEMA, insertion="INSERT OR REPLACE", sent=CHANGING)


def prune_loops(db: sqlite3.Connection) -> None:
    """Delete the oldest loops of each process."""
    newest_loop = "SELECT max(other.loop) FROM loops AS other WHERE other.process = loops.process"
    db.execute(f"DELETE FROM loops WHERE loop <= ({newest_loop}) - ?", (MAX_LOOPS,))


def read_loops(connection: HistoryConnection, process: int) -> list[LoaderLoop]:
    """Return the loader loops of a process, in order. Raises HistoryError."""
    return list(LOOPS.select(connection, "WHERE process = ? ORDER BY loop", (process,)))


def read_epochs(store: Store, process: int, limit: int) -> list[LoaderLoop]:
    """Return the newest `limit` epochs of a process, in order."""
    condition = "WHERE process = ? AND epoch IS NOT NULL AND begin_ns <= ? ORDER BY loop DESC LIMIT ?"
    return list(LOOPS.select(store.connection, condition, (process, store.until_ns, limit)))[::-1]


def find_epoch(store: Store, process: int, loop: int | None) -> tuple[int | None, int | None]:
    """Return the epoch of a loader loop and the number of batches of its loader; each None if unknown."""
    rows = store.query("SELECT epoch, length FROM loops WHERE process = ? AND loop = ?", (process, loop))
    return next(iter(rows), (None, None))


# ------------------------------------------------------------------------------------------------ tracking


class LoaderLoopTracker:
    """Assigns the steps of one process to loader loops, and finds the epochs among these."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._recent: dict[int, LoaderLoop] = {}
        self._epochs: dict[int, LoaderLoop] = {}
        """By number of a dataset: the last epoch over it; without the current epoch."""
        self._datasets_return = False
        """Whether a dataset has had two epochs."""
        self._epoch: LoaderLoop | None = None
        """The loop of the current epoch, or of the last one."""
        self._may_prefetch = True
        """Whether loops may prefetch. False after a loop that had no further step once its last batch was fetched."""
        self._first_fetches: dict[int, tuple[int, int]] = {}
        """By number of a dataset: batches fetched by the first step of its last loop, and how many were prefetched."""
        self._left_after_one_batch = False
        """Whether the script left the last training loop after one batch."""
        self.changed: dict[int, LoaderLoop] = {}
        """The loops that have changed since the last write, by number."""

    def resume(self, loops: Iterable[LoaderLoop]) -> None:
        """Continue after the loops in a history, in order."""
        for loop in loops:
            self._remember_loop(loop)
            if loop.epoch is not None:
                if self._epoch is not None:
                    _remember(self._epochs, self._epoch.dataset, self._epoch)
                self._datasets_return |= loop.dataset in self._epochs
                self._epoch = loop

    def add_step(
        self, step: int, batches: Batches | None, start_ns: int, end_ns: int, evaluation: bool, evaluation_ns: int
    ) -> LoaderLoop | None:
        """Add a step. Return its loop, or None if it used no batch.

        `evaluation_ns`: time of evaluation since the previous step, if this is an evaluation step; else 0. A
        correction is negative.
        """
        if evaluation_ns and self._epoch is not None:
            self._epoch.after_ns = max(self._epoch.after_ns + evaluation_ns, 0)
            self.changed[self._epoch.loop] = self._epoch
        loop = None if batches is None else self._find_or_start_loop(batches, start_ns, evaluation)
        if loop is None:
            return None
        assert batches is not None
        loop.steps += 1
        loop.fetched += batches.fetched
        if loop.length is not None and loop.fetched > loop.length:
            loop.length = None  # it was not the length, or has changed
        if batches.is_exhausted:
            loop.ahead = 0
        elif loop.steps == 1:
            loop.ahead = self._guess_prefetched(loop)
        elif loop.ahead is None:
            first_fetched = loop.fetched - batches.fetched
            batches_ahead = first_fetched - batches.fetched
            loop.ahead = batches_ahead if self._may_prefetch and 0 < batches_ahead <= MAX_AHEAD else 0
            _remember(self._first_fetches, loop.dataset, (first_fetched, loop.ahead))
        loop.end_ns = end_ns
        self.changed[loop.loop] = loop
        if not evaluation:
            loop.trained += 1
            loop.last_step = step
            if loop is self._epoch:
                loop.evaluation_ns += loop.after_ns
                loop.after_ns = 0
            elif loop.epoch is None:
                self._promote_to_epoch(loop)
        return loop

    def _guess_prefetched(self, loop: LoaderLoop) -> int | None:
        """Return how many batches a loop has prefetched after its first step; None if that is not known yet."""
        usual_fetched, batches_ahead = self._first_fetches.get(loop.dataset, (1, 0))
        if loop.fetched == usual_fetched:
            return batches_ahead
        return 0 if loop.fetched == 1 else None

    def _find_or_start_loop(self, batches: Batches, start_ns: int, evaluation: bool) -> LoaderLoop | None:
        """Return the loop of a step that fetched these batches; None if the step used none."""
        loop = self._recent.get(batches.loop)
        if not batches.fetched:  # the step may use a prefetched batch
            if loop is None or loop.ahead == 0 or evaluation == (loop.trained > 0):
                return None
            return loop
        if loop is None:
            previous = next(reversed(self._recent.values()), None)
            if previous is not None and previous.is_exhausted and previous.ahead != 0:
                if previous.ahead:
                    self._may_prefetch, self._first_fetches = False, {}
                previous.ahead = 0
                self.changed[previous.loop] = previous
            loop = LoaderLoop(self._process, batches.loop, batches.dataset, batches.length, start_ns)
            self._remember_loop(loop)
        return loop

    def _remember_loop(self, loop: LoaderLoop) -> None:
        """Remember a loop and evict the least recently used one: an epoch may contain many evaluation loops."""
        if len(self._recent) >= _MAX_RECENT:
            evictable = (other for other in self._recent.values() if other is not self._epoch)
            del self._recent[min(evictable, key=attrgetter("end_ns")).loop]
        self._recent[loop.loop] = loop

    def _promote_to_epoch(self, loop: LoaderLoop) -> None:
        """Make a loop with a training step the current epoch, unless it is not an epoch."""
        previous = self._epoch
        has_several_batches = loop.fetched > 1 or loop.is_exhausted
        if previous is not None:
            if previous.end_ns > loop.begin_ns:
                return  # the script reads both in turn, and the earlier loop drives the training
            if previous.fetched == 1 and not previous.is_exhausted:
                previous.epoch, self._epoch, self._left_after_one_batch = None, None, True
                self.changed[previous.loop] = previous
            elif not (has_several_batches or previous.is_exhausted or previous.dataset == loop.dataset):
                return  # the earlier loop may continue
            else:
                _remember(self._epochs, previous.dataset, previous)
        if self._left_after_one_batch and not has_several_batches:
            return
        self._left_after_one_batch = False
        if loop.dataset in self._epochs and not self._datasets_return:
            self._datasets_return = True
            for epoch in self._epochs.values():
                epoch.epoch = 1
                self.changed[epoch.loop] = epoch
        newest = next(reversed(self._epochs.values()), None)
        last = self._epochs.get(loop.dataset) if self._datasets_return else newest
        loop.epoch = 1 if last is None else (last.epoch or 0) + 1
        self._epoch = loop


def _remember(values_by_dataset: dict[int, Any], dataset: int, value: object) -> None:
    """Set the value of a dataset, and forget the oldest value if there are more than MAX_DATASETS."""
    values_by_dataset.pop(dataset, None)
    values_by_dataset[dataset] = value
    if len(values_by_dataset) > MAX_DATASETS:
        del values_by_dataset[next(iter(values_by_dataset))]


# ------------------------------------------------------------------------------------------------ time left


class TimeLeft(NamedTuple):
    """The time left in an epoch, and its standard deviation."""

    left_ns: float
    error_ns: float


def estimate_epoch_time_left(store: Store, epochs: Sequence[LoaderLoop], batch: int | None) -> TimeLeft | str:
    """Return the time left in the last of `epochs` after `batch` batches, or the reason why it is unknown."""
    current = epochs[-1]
    previous = epochs[-2] if len(epochs) > 1 else None
    if current.length is None:
        return "the length of the loader is unknown"
    if batch is None:
        return "the batch is unknown"
    if batch >= current.length:
        return "the epoch has used all batches"
    if (
        previous is not None
        and previous.dataset == current.dataset
        and previous.length == current.length
        and not previous.is_exhausted
    ):
        return f"the previous epoch ended after {previous.fetched:,} of {previous.length:,} batches"
    loops = [loop for loop in (previous, current) if loop is not None]
    steps = sum(loop.steps for loop in loops)
    duration_ns = max(sum(loop.end_ns - loop.begin_ns for loop in loops), 1)
    interval = WINDOW_NS * steps // (MAX_STEPS_READ * duration_ns)
    interval = max(1, min(interval, MAX_STEP_INTERVAL, steps // (2 * MAX_BLOCKS)))
    loop_steps = read_loop_steps(store, current.process, [loop.loop for loop in loops], MAX_STEPS_READ, interval)
    time_left = estimate_time_left(loop_steps, current.length - batch)
    if time_left is None:
        return "too few batches yet"
    return "more than 100 days" if time_left.left_ns > MAX_TIME_LEFT_NS else time_left


def estimate_time_left(steps: Iterable[StepRow], batches: int) -> TimeLeft | None:
    """Return the time that `batches` more batches will take; None with too few `steps` (newest first)."""
    differences = [
        (later.end_ns - earlier.end_ns, (later.loop_batch or 0) - (earlier.loop_batch or 0))
        for later, earlier in pairwise(steps)
        if later.loop == earlier.loop
    ]
    cycles = [(ns, count) for ns, count in differences if count > 0]
    batches_read = sum(count for _, count in cycles)
    block_count = min(len(cycles), MAX_BLOCKS)
    if min(batches_read, block_count) < MIN_BATCHES:
        return None
    edges = [index * len(cycles) // block_count for index in range(block_count + 1)]
    blocks = [cycles[first:end] for first, end in pairwise(edges)]
    sums = [(sum(ns for ns, _ in block), sum(count for _, count in block)) for block in blocks]
    sums.sort(key=lambda block_sums: truediv(*block_sums))
    means = [ns / count for ns, count in sums]
    if means[-1] > OUTLIER_RATIO * means[-2]:
        del sums[-1], means[-1]
    ns, count = sum(ns for ns, _ in sums), sum(count for _, count in sums)
    # The batches to come vary as the blocks do, and the mean itself is uncertain.
    error = stdev(means) * sqrt(batches * count / len(means) + batches**2 / len(means))
    return TimeLeft(batches * ns / count, error)
