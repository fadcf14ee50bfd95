"""The statistics of comparisons: intervals of a median step, of a ratio of medians, and of a ratio of groups. Pure.

The interval of a median comes from the order statistics of the steps (the usual one, for any distribution). If steps
depend on earlier ones, it is widened by the method of batch means: consecutive tallies form batches, and the factor
follows from how much more the share of steps above the median varies between the batches than it would by chance. MOVER
on the logarithms (Zou and Donner, 2008) combines the intervals of two medians to that of their ratio.

Between two small groups of values (of runs, or of stretches of one run), the ratio is the Hodges-Lehmann estimate: the
median of the ratios of all pairs. Its interval inverts the Mann-Whitney test, which is a permutation test of ranks. It
is exact if the two distributions differ only by this ratio, and one outlier hardly moves it. Groups of unequal sizes
that also spread unequally give more false alarms. Stretches of one run are correlated. The interval is widened by the
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
_MAX_CORRELATION = 0.8
"""Largest correlation of neighbors: the stretches are too few to measure a larger one."""
_MIN_BATCHES = 4
"""Fewest batches (groups of tallies) that show how steps depend on each other."""
_HALF_WIDTH_SIGMAS = 1.96
"""Half the width of a 95% interval of a normal distribution, in standard deviations."""


class Interval(NamedTuple):
    """An estimate with its 95% confidence interval."""

    value: float
    low: float
    high: float


class Change(NamedTuple):
    """The ratio of the values after to those before; no bounds if the values are too few."""

    ratio: float
    low: float | None = None
    high: float | None = None
    """The 95% interval."""
    least: float | None = None
    most: float | None = None
    """One-sided 95% bounds: the ratio is at least `least`; the ratio is at most `most`."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval, or without it the 90% interval between the one-sided bounds."""
        for low, high in ((self.low, self.high), (self.least, self.most)):
            if low is not None and high is not None:
                return low, high
        return None

    @property
    def sign(self) -> int:
        """1 if the interval lies above a ratio of 1, -1 if below; 0 if it includes 1 or is unknown."""
        low, high = self.interval or (1.0, 1.0)
        return (low > 1) - (high < 1)


def estimate_change(
    before: Sequence[float], after: Sequence[float], *, in_order: bool = False, exact: bool = True
) -> Change:
    """How positive values changed. `in_order`: they are stretches of two runs, in order of time.

    `exact`: they are not from sketches, which cannot distinguish values closer than RELATIVE_WIDTH.
    """
    before, after = [log(value) for value in before], [log(value) for value in after]
    apart = sorted(b - a for a in before for b in after)
    middle, spread = median(apart), _autocorrelation_factor(before, after) if in_order else 1.0
    blur = 0.0 if exact else log(1 + RELATIVE_WIDTH)

    def ends(doubt: float) -> tuple[float | None, float | None]:
        outside = _interval_ranks(len(before), len(after), doubt, spread)
        if not outside:
            return None, None
        return exp(min(apart[outside - 1], middle - blur)), exp(max(apart[-outside], middle + blur))

    return Change(exp(middle), *ends(ERROR_CHANCE / 2), *ends(ERROR_CHANCE))


def _interval_ranks(before: int, after: int, doubt: float, spread: float) -> int:
    """The place, from 1, of each end of an interval in the sorted differences, from outside; 0: no end."""
    chances = _mann_whitney_cdf(before, after)
    outside = sum(chance <= doubt for chance in chances)
    if spread > 1 and outside:
        pairs = before * after
        reach = NormalDist().inv_cdf(1 - doubt) * sqrt(spread * pairs * (before + after + 1) / 12)
        outside = min(outside, max(int(pairs / 2 - reach), 1))
    return outside


@lru_cache(64)
def _mann_whitney_cdf(before: int, after: int) -> list[float]:
    """The chance, for equal groups, that the value before is the larger one in at most 0, 1, 2 ... pairs."""
    pairs = before * after
    ways = [1] + [0] * pairs  # coefficients of the Gaussian binomial
    for one in range(1, before + 1):
        for at in range(pairs, after + one - 1, -1):
            ways[at] -= ways[at - after - one]
        for at in range(one, pairs + 1):
            ways[at] += ways[at - one]
    return [upto / comb(before + after, before) for upto in accumulate(ways)]


def _autocorrelation_factor(before: Sequence[float], after: Sequence[float]) -> float:
    """The factor (at least 1) by which the correlation of neighbors increases the variance of a mean."""
    count = (len(before) + len(after)) / 2
    correlated = sum(_lag1_correlation(series) * len(series) for series in (before, after)) / count / 2
    # Corrects the bias of the estimate (Marriott and Pope, 1954).
    correlated = (correlated + 1 / count) / max(1 - 4 / count, 0.5)
    correlated = min(max(correlated, 0.0), _MAX_CORRELATION)
    return (1 + correlated) / (1 - correlated)


def _lag1_correlation(series: Sequence[float]) -> float:
    """The correlation of values with their successors; 0 for equal values."""
    mean = fmean(series)
    squares = sum((value - mean) ** 2 for value in series)
    return sum((a - mean) * (b - mean) for a, b in pairwise(series)) / squares if squares else 0.0


# ------------------------------------------------------------------------------------------------ medians of many steps


def median_interval(tally: Tally, parts: Iterable[Tally] = ()) -> Interval | None:
    """The median step and its interval; None without steps. `parts`: the same steps in order of time.

    The ends of the interval are the ends of their buckets, so it includes values that the sketch cannot distinguish.
    """
    counts, value = tally.stat(STEP).counts, tally.median(STEP)
    count = sum(counts.values())
    if value is None or not count:
        return None
    reach = (
        _HALF_WIDTH_SIGMAS * sqrt(count * _batch_means_factor(counts, [part.stat(STEP).counts for part in parts])) / 2
    )
    rank = max(int((count - 1) / 2 - reach), 0)
    low, high = bin_bounds(_bucket_at_rank(counts, rank))[0], bin_bounds(_bucket_at_rank(counts, count - 1 - rank))[1]
    low = max(low, tally.low_ns if tally.low_ns is not None else low)
    high = min(high, tally.high_ns if tally.high_ns is not None else high)
    return Interval(value, min(low, value), max(high, value))


def _bucket_at_rank(counts: Counts, rank: int) -> int:
    """The bucket of the value at a rank, counted from 0."""
    ordered = sorted(counts)
    sums = accumulate(counts[number] for number in ordered)
    return next(number for number, upto in zip(ordered, sums, strict=True) if upto > rank)


def _batch_means_factor(counts: Counts, parts: Sequence[Counts]) -> float:
    """The factor (at least 1) by which the dependence of values on earlier ones increases the variance of a median.

    Joins parts into batches of at least the square root of the number of values. Divides the variance of
    the batches' shares above the median by the variance in random batches of the same sizes.
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
    if size and batches:
        batches[-1] = batches[-1][0] + size, batches[-1][1] + above
    if len(batches) < _MIN_BATCHES:
        return 1.0
    whole = sum(size for size, _ in batches)
    mean = sum(above for _, above in batches) / whole
    equal = sum(number for bucket, number in counts.items() if bin_middle(bucket) == center) / count
    variance = mean - equal / 4 - mean * mean  # of scores 0, 1/2 and 1
    spread = sum((above - size * mean) ** 2 for size, above in batches)
    free = 1 - sum((size / whole) ** 2 for size, _ in batches)
    return max(spread / (whole * variance * free), 1.0) if variance > 0 else 1.0


def _count_above_median(counts: Counts, center: float) -> float:
    """Number of values above the median; values in its bucket count half."""
    return sum(
        number if bin_middle(bucket) > center else number / 2 if bin_middle(bucket) == center else 0
        for bucket, number in counts.items()
    )


def ratio_of_estimates(above: Interval, below: Interval) -> Interval | None:
    """The ratio of two independent estimates; None unless all values are positive."""
    if min(*above, *below) <= 0:
        return None
    middle = log(above.value) - log(below.value)
    down = sqrt(log(above.value / above.low) ** 2 + log(below.high / below.value) ** 2)
    up = sqrt(log(above.high / above.value) ** 2 + log(below.value / below.low) ** 2)
    return Interval(exp(middle), exp(middle - down), exp(middle + up))
