"""The statistics of comparisons: intervals of a median step, of a ratio of medians, and of a ratio of groups.

The interval of a median comes from the order statistics of the steps (the usual one, for any distribution). If steps
depend on earlier ones, it is widened by the method of batch means: consecutive tallies form batches, and the factor
follows from how much more the share of steps above the median varies between the batches than it would by chance. MOVER
on the logarithms (Zou and Donner, 2008) combines the intervals of two medians to that of their ratio.

Between two small groups of values (of runs, or of parts of one run), the interval of the ratio inverts the
Mann-Whitney test, which is a permutation test of ranks. It is exact if the two distributions differ only by this ratio,
and one outlier hardly moves it. It is widened to include the ratio itself, so that both agree. Groups of unequal sizes
that also spread unequally give more false alarms. Parts of one run are correlated. The interval is widened by the
correlation of neighbors: it makes the variance of a mean of such a series (1 + r) / (1 - r) times as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import comb, exp, log, sqrt
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from dpmon.record.schema import STEP
from dpmon.store.quantile_sketch import RELATIVE_WIDTH, Counts, bin_bounds, bin_middle
from dpmon.store.quantile_sketch import median as middle_of
from dpmon.store.tally import Tally

ERROR_CHANCE = 0.05
"""Chance that an interval misses the true ratio: half on each side, or all of it at a one-sided bound."""
MAX_UNCERTAINTY = 1.25
"""Two speeds count as equal only if both ends of the interval of their ratio are within this factor of 1."""
_MAX_CORRELATION = 0.8
"""Largest correlation of neighbors: the parts are too few to measure a larger one."""
_MIN_BATCHES = 4
"""Fewest batches (groups of tallies) from which the dependence between steps is estimated."""
_HALF_WIDTH_SIGMAS = 1.96
"""Half the width of a 95% interval of a normal distribution, in standard deviations."""


class Interval(NamedTuple):
    """An estimate with its confidence interval, of 95% if nothing else is said."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """For a ratio: 1 if the interval lies above 1, -1 if below; 0 if it includes 1."""
        return (self.low > 1) - (self.high < 1)

    @property
    def is_close_to_1(self) -> bool:
        """For a ratio: whether both ends are so close to 1 that an interval around 1 shows equality."""
        return self.low >= 1 / MAX_UNCERTAINTY and self.high <= MAX_UNCERTAINTY


def share_interval(share: float, count: float) -> Interval:
    """Return a share (0 to 1) of `count` independent samples with its interval (Wilson, 1927)."""
    spread = _HALF_WIDTH_SIGMAS**2 / count
    half_width = sqrt(spread * (share * (1 - share) + spread / 4))
    return Interval(share, *((share + spread / 2 + side * half_width) / (1 + spread) for side in (-1, 1)))


class Change(NamedTuple):
    """The ratio of the values after to the values before; without bounds if there are too few values."""

    ratio: float
    low: float | None = None
    high: float | None = None
    """The 95% interval."""
    least: float | None = None
    most: float | None = None
    """One-sided 95% bounds: the ratio is at least `least`; the ratio is at most `most`."""

    @property
    def interval(self) -> Interval | None:
        """The 95% interval, or else the 90% interval between the one-sided bounds; None if there is neither."""
        for low, high in ((self.low, self.high), (self.least, self.most)):
            if low is not None and high is not None:
                return Interval(self.ratio, low, high)
        return None

    @property
    def sign(self) -> int:
        """The sign of the interval; 0 without one."""
        return 0 if self.interval is None else self.interval.sign


def estimate_change(
    before: Sequence[float],
    after: Sequence[float],
    ratio: float | None = None,
    *,
    in_order: bool = False,
    is_exact: bool = True,
) -> Change:
    """Return the change by `ratio`, by default that of the medians, with its bounds from positive values.

    `in_order`: they are parts of two runs, in order of time. `is_exact`: they are not from sketches, which cannot
    distinguish values closer than RELATIVE_WIDTH.
    """
    center = median(after) / median(before) if ratio is None else ratio
    before, after = [log(value) for value in before], [log(value) for value in after]
    differences = sorted(b - a for a in before for b in after)
    variance_factor = _autocorrelation_factor(before, after) if in_order else 1.0
    resolution = 1.0 if is_exact else 1 + RELATIVE_WIDTH

    def ends(error_chance: float) -> tuple[float | None, float | None]:
        rank = _interval_ranks(len(before), len(after), error_chance, variance_factor)
        if not rank:
            return None, None
        return min(exp(differences[rank - 1]), center / resolution), max(exp(differences[-rank]), center * resolution)

    return Change(center, *ends(ERROR_CHANCE / 2), *ends(ERROR_CHANCE))


def _interval_ranks(before: int, after: int, error_chance: float, variance_factor: float) -> int:
    """Return the rank, from 1, of both ends of an interval in the sorted differences, from outside; 0: no interval."""
    chances = _mann_whitney_cdf(before, after)
    rank = sum(chance <= error_chance for chance in chances)
    if variance_factor > 1 and rank:
        pairs = before * after
        half_width = NormalDist().inv_cdf(1 - error_chance) * sqrt(variance_factor * pairs * (before + after + 1) / 12)
        rank = min(rank, max(int(pairs / 2 - half_width), 1))
    return rank


@lru_cache(64)
def _mann_whitney_cdf(before: int, after: int) -> list[float]:
    """Return the chances, for equal groups, that the value before is larger in at most 0, 1, 2 ... of the pairs."""
    pairs = before * after
    ways = [1] + [0] * pairs  # coefficients of the Gaussian binomial
    for size in range(1, before + 1):
        for index in range(pairs, after + size - 1, -1):
            ways[index] -= ways[index - after - size]
        for index in range(size, pairs + 1):
            ways[index] += ways[index - size]
    return [cumulative / comb(before + after, before) for cumulative in accumulate(ways)]


def _autocorrelation_factor(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the factor (at least 1) by which the correlation of neighbors increases the variance of a mean."""
    count = (len(before) + len(after)) / 2
    correlation = sum(_lag1_correlation(series) * len(series) for series in (before, after)) / count / 2
    # Corrects the bias of the estimate (Marriott and Pope, 1954).
    correlation = (correlation + 1 / count) / max(1 - 4 / count, 0.5)
    correlation = min(max(correlation, 0.0), _MAX_CORRELATION)
    return (1 + correlation) / (1 - correlation)


def _lag1_correlation(series: Sequence[float]) -> float:
    """Return the correlation of values with their successors; 0 for equal values."""
    mean = fmean(series)
    squares = sum((value - mean) ** 2 for value in series)
    return sum((a - mean) * (b - mean) for a, b in pairwise(series)) / squares if squares else 0.0


# ------------------------------------------------------------------------------------------------ medians of many steps


def median_interval(tally: Tally, parts: Iterable[Tally] = ()) -> Interval | None:
    """Return the median step and its interval; None without steps. `parts`: the same steps in order of time.

    The ends of the interval are the ends of their bins, so it includes values that the sketch cannot distinguish.
    """
    counts, value = tally.stat(STEP).counts, tally.median(STEP)
    count = sum(counts.values())
    if value is None or not count:
        return None
    variance_factor = _batch_means_factor(counts, [part.stat(STEP).counts for part in parts])
    half_width = _HALF_WIDTH_SIGMAS * sqrt(count * variance_factor) / 2
    rank = max(int((count - 1) / 2 - half_width), 0)
    low, _ = bin_bounds(_bin_at_rank(counts, rank))
    _, high = bin_bounds(_bin_at_rank(counts, count - 1 - rank))
    low, high = max(low, tally.low_ns or 0), min(high, high if tally.high_ns is None else tally.high_ns)
    return Interval(value, min(low, value), max(high, value))


def _bin_at_rank(counts: Counts, rank: int) -> int:
    """Return the bin of the value at a rank, counted from 0."""
    ordered = sorted(counts)
    sums = accumulate(counts[bin_index] for bin_index in ordered)
    return next(bin_index for bin_index, cumulative in zip(ordered, sums, strict=True) if cumulative > rank)


def _batch_means_factor(counts: Counts, parts: Sequence[Counts]) -> float:
    """Return the factor (at least 1) by which dependence on earlier values increases the variance of a median.

    Joins parts into batches of at least the square root of the number of values. Divides the variance of the batches'
    shares above the median by the variance in random batches of the same sizes.
    """
    center, count = middle_of(counts), sum(counts.values())
    if center is None:
        return 1.0
    batches: list[tuple[int, float]] = []
    size, above = 0, 0.0
    for part in parts:
        size += sum(part.values())
        above += _count_above_median(part, center)
        if size >= sqrt(count):
            batches.append((size, above))
            size, above = 0, 0.0
    if len(batches) < _MIN_BATCHES:
        return 1.0
    last_size, last_above = batches[-1]
    batches[-1] = last_size + size, last_above + above
    total = sum(size for size, _ in batches)
    mean = sum(above for _, above in batches) / total
    median_share = sum(in_bin for bin_index, in_bin in counts.items() if bin_middle(bin_index) == center) / count
    variance = mean - median_share / 4 - mean * mean  # of scores 0, 1/2 and 1
    squares = sum((above - size * mean) ** 2 for size, above in batches)
    freedom = 1 - sum((size / total) ** 2 for size, _ in batches)
    return max(squares / (total * variance * freedom), 1.0) if variance > 0 else 1.0


def _count_above_median(counts: Counts, center: float) -> float:
    """Return the number of values above the median; values in its bin count half."""
    middles = ((bin_middle(bin_index), count) for bin_index, count in counts.items())
    return sum(count / 2 if middle == center else count for middle, count in middles if middle >= center)


def ratio_of_estimates(above: Interval | None, below: Interval | None) -> Interval | None:
    """Return the ratio of two independent estimates; None unless both are known and all values are positive."""
    if above is None or below is None or min(*above, *below) <= 0:
        return None
    log_ratio = log(above.value) - log(below.value)
    down = sqrt(log(above.value / above.low) ** 2 + log(below.high / below.value) ** 2)
    up = sqrt(log(above.high / above.value) ** 2 + log(below.value / below.low) ** 2)
    return Interval(exp(log_ratio), exp(log_ratio - down), exp(log_ratio + up))
