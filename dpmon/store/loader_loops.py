"""Follows the loops over the loaders of one process, finds its epochs, and the time left in one. Pure.

A loop is one start of a DataLoader. An epoch is a loop with training steps; its number counts the epochs over the same
dataset. A loop that is read in turn with the loop of the current epoch is not an epoch. Nor is a loop that is left
after a single batch.

The time left follows from the mean time of the recent batches. The time of a batch runs from the end of the one before
to its own end, so waits for data, logging and the like count. These times are divided into up to BLOCKS consecutive
blocks. If one block is much longer than all others, it is left out: something happened only once, such as an evaluation
or a pause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import sqrt
from statistics import stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.record.record_types import Batches
from dpmon.store.query_results import LoopStep

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

MAX_AHEAD = 8
"""Most batches that a loop prefetches. If more were fetched before its second step, the script skipped them."""
MAX_DATASETS = 128
"""Most datasets to remember: a script may make a new one every few steps."""
_RECENT = 8
"""Number of loops to which a new step may belong: the current epoch, and those with the newest steps."""
STEPS_READ = 256
"""Most steps to read for the time left."""
BLOCKS = 16
LONGER = 2.0
"""The longest block is left out if its batches took more than this many times as long as in the second longest."""
FEWEST = 3
"""Fewest batches, and blocks, for the time left."""
WINDOW_NS = 60_000_000_000
"""If steps are short, only one in several is read, so that STEPS_READ of them reach back this far."""
LONGEST_NS = 100 * 86_400_000_000_000
"""A longer time left is not shown: with billions of batches in a sampler, the training stops for another reason."""
MOST_SKIPPED = 32
"""If steps are short, at least one in this many is read."""


@dataclass(slots=True)
class LoaderLoop:
    """A row of the table `loops`: one loop over a loader. Times in ns since the run's start."""

    process: int
    loop: int
    dataset: int
    length: int | None
    """Number of batches of the loader; None if unknown."""
    begin_ns: int
    """Start of its first step."""
    end_ns: int = 0
    """End of its last step."""
    first_step: int = 0
    last_step: int = 0
    fetched: int = 0
    ahead: int | None = None
    """Number of fetched batches that no step has used yet; None until its second step."""
    steps: int = 0
    trained: int = 0
    """Number of its training steps."""
    epoch: int | None = None
    """Number of the epoch; None if it is not an epoch."""
    evaluation_ns: int = 0
    """Evaluation between its first and its last step."""
    after_ns: int = 0
    """Evaluation after its last step, up to the next epoch."""

    @property
    def batches_used(self) -> int | None:
        """Number of batches that its steps have used; None until it is known how many it prefetches."""
        return None if self.ahead is None else self.fetched - self.ahead

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches were fetched."""
        return self.length is not None and self.fetched >= self.length


LOOP_COLUMNS = tuple(field.name for field in fields(LoaderLoop))


class LoaderLoopTracker:
    """The loops of one process."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._recent: dict[int, LoaderLoop] = {}
        self._epochs: dict[int, int] = {}
        """By number of a dataset: the last epoch over it."""
        self._epoch: LoaderLoop | None = None
        """The loop of the current epoch, or of the last one."""
        self._reads_ahead = True
        """Whether loops may prefetch: False after a loop that had no step after it had fetched its last batch."""
        self._ahead: dict[int, tuple[int, int]] = {}
        """By number of a dataset: batches that the first step of its last loop fetched, and how many of them ahead."""
        self._single = False
        """Whether the script left the last training loop after one batch."""
        self.changed: dict[int, LoaderLoop] = {}
        """The loops that have changed since the last write."""

    def resume(self, loops: Iterable[LoaderLoop]) -> None:
        """Continue after the loops in a history, in order."""
        for loop in loops:
            self._remember_loop(loop)
            if loop.epoch is not None:
                _remember(self._epochs, loop.dataset, loop.epoch)
                self._epoch = loop

    def add_step(
        self, number: int, batches: Batches | None, begin_ns: int, end_ns: int, evaluation: bool, evaluated_ns: int
    ) -> LoaderLoop | None:
        """Add a step; return its loop, or None if it used no batch. `evaluated_ns`: evaluation up to its end."""
        if evaluated_ns and self._epoch is not None:
            self._epoch.after_ns += evaluated_ns
            self.changed[self._epoch.loop] = self._epoch
        loop = None if batches is None else self._find_or_start_loop(batches, begin_ns, evaluation)
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
            before, ahead = self._ahead.get(loop.dataset, (1, 0))
            loop.ahead = ahead if batches.fetched == before else 0 if batches.fetched == 1 else None
        elif loop.ahead is None:
            first = loop.fetched - batches.fetched
            ahead = first - batches.fetched
            loop.ahead = ahead if self._reads_ahead and 0 < ahead <= MAX_AHEAD else 0
            _remember(self._ahead, loop.dataset, (first, loop.ahead))
        loop.first_step = loop.first_step or number
        loop.last_step, loop.end_ns = number, end_ns
        self.changed[loop.loop] = loop
        if not evaluation:
            loop.trained += 1
            if loop is self._epoch:
                loop.evaluation_ns += loop.after_ns
                loop.after_ns = 0
            elif loop.epoch is None:
                self._promote_to_epoch(loop)
        return loop

    def _find_or_start_loop(self, batches: Batches, begin_ns: int, evaluation: bool) -> LoaderLoop | None:
        """Return the loop of a step with these batches."""
        loop = self._recent.get(batches.loop)
        if not batches.fetched:  # it may use a batch that was read ahead
            return None if loop is None or loop.ahead == 0 or evaluation == (loop.trained > 0) else loop
        if loop is None:
            before = next(reversed(self._recent.values()), None)
            if before is not None and before.is_exhausted and before.ahead != 0:
                if before.ahead:
                    self._reads_ahead, self._ahead = False, {}
                before.ahead = 0
                self.changed[before.loop] = before
            loop = LoaderLoop(self._process, batches.loop, batches.dataset, batches.length, begin_ns)
            self._remember_loop(loop)
        return loop

    def _remember_loop(self, loop: LoaderLoop) -> None:
        """Keep a loop, and forget the one that went on the longest ago: evaluations may start many within an epoch."""
        if len(self._recent) >= _RECENT:
            others = (one for one in self._recent.values() if one is not self._epoch)
            del self._recent[min(others, key=lambda one: one.last_step).loop]
        self._recent[loop.loop] = loop

    def _promote_to_epoch(self, loop: LoaderLoop) -> None:
        """Make a loop with a training step the current epoch, if it is an epoch."""
        before = self._epoch
        several = loop.fetched > 1 or loop.is_exhausted
        if before is not None:
            if before.last_step > loop.first_step:
                return  # both are read in turn, and the earlier one drives the training
            if before.fetched == 1 and not before.is_exhausted:
                self._epochs[before.dataset] -= 1
                before.epoch, self._epoch, self._single = None, None, True
                self.changed[before.loop] = before
            elif not (several or before.is_exhausted or before.dataset == loop.dataset):
                return  # the earlier one may go on
        if self._single and not several:
            return
        self._single = False
        loop.epoch = self._epochs.get(loop.dataset, 0) + 1
        _remember(self._epochs, loop.dataset, loop.epoch)
        self._epoch = loop


def _remember(of_datasets: dict[int, Any], dataset: int, value: object) -> None:
    """Set the value of a dataset, and forget the oldest of more than MAX_DATASETS."""
    of_datasets.pop(dataset, None)
    of_datasets[dataset] = value
    if len(of_datasets) > MAX_DATASETS:
        del of_datasets[next(iter(of_datasets))]


# ------------------------------------------------------------------------------------------------ time left


class TimeLeft(NamedTuple):
    """The time left in an epoch, and its uncertainty as a standard deviation (ns)."""

    left_ns: float
    error_ns: float


def estimate_epoch_time_left(rows: Store, epochs: Sequence[LoaderLoop], batch: int | None) -> TimeLeft | str:
    """Return the time left after `batch` of the last of `epochs`, or why it is unknown."""
    now, before = epochs[-1], epochs[-2] if len(epochs) > 1 else None
    if now.length is None:
        return "the length of the loader is unknown"
    if batch is None:
        return "the batch is unknown"
    if batch >= now.length:
        return "the epoch has used all batches"
    if before is not None and before.dataset == now.dataset and before.length == now.length and not before.is_exhausted:
        return f"the epoch before ended after {before.fetched:,} of {before.length:,} batches"
    read = [one for one in (before, now) if one is not None]
    steps = sum(one.steps for one in read)
    often = WINDOW_NS * steps // (STEPS_READ * max(sum(one.end_ns - one.begin_ns for one in read), 1))
    one_in = max(1, min(often, MOST_SKIPPED, steps // (2 * BLOCKS)))
    found = estimate_time_left(
        rows.loop_steps(now.process, [one.loop for one in read], STEPS_READ, one_in), now.length - batch
    )
    if found is None:
        return "too few batches yet"
    return "more than 100 days" if found.left_ns > LONGEST_NS else found


def estimate_time_left(steps: Iterable[LoopStep], batches: int) -> TimeLeft | None:
    """Return the time that `batches` more batches take, from steps (newest first); None with too few steps."""
    cycles = [
        (later.end_ns - sooner.end_ns, later.batch - sooner.batch)
        for later, sooner in pairwise(steps)
        if later.loop == sooner.loop and later.batch > sooner.batch
    ]
    seen = sum(count for _, count in cycles)
    blocks = min(len(cycles), BLOCKS)
    if min(seen, blocks) < FEWEST:
        return None
    parts = [cycles[at * len(cycles) // blocks : (at + 1) * len(cycles) // blocks] for at in range(blocks)]
    sums = [(sum(took for took, _ in part), sum(count for _, count in part)) for part in parts]
    sums.sort(key=lambda block: block[0] / block[1])
    means = [took / count for took, count in sums]
    if means[-1] > LONGER * means[-2]:
        del sums[-1], means[-1]
    took, count = sum(took for took, _ in sums), sum(count for _, count in sums)
    # The batches to come vary as the blocks do, and the mean itself is uncertain.
    error = stdev(means) * sqrt(batches * count / len(means) + batches**2 / len(means))
    return TimeLeft(batches * took / count, error)
