"""Sketches of durations, for quantiles that are at most 0.4% off. Sketches can be merged.

A sketch counts values by bin. Below 256, each value has a bin of its own; above, each power of two has 128 bins. So the
middle of a bin is within 1/256 of every value in it. HdrHistogram and DDSketch use the same idea.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain

Counts = dict[int, int]
"""Number of values by bin."""
_BITS = 7
_EXACT = 1 << _BITS + 1
RELATIVE_WIDTH = 1 / (1 << _BITS)
"""Largest relative difference of two values in one bin."""
_MASK = (1 << _BITS) - 1
MAX_PAIR_COUNT = 0xFFFF
"""Largest count in one pair of a packed sketch."""
SKETCH_PAIR_BYTES = 4
"""Bytes of a pair."""


def bin_of(value: int) -> int:
    """Return the bin of a value. Negative values count as 0."""
    if value < _EXACT:
        return max(value, 0)
    shift = value.bit_length() - _BITS - 1
    return (shift << _BITS) + (value >> shift)


def bin_middle(bin_number: int) -> float:
    """Return the middle of a bin."""
    lowest, highest = bin_bounds(bin_number)
    return (lowest + highest) / 2


def bin_bounds(bin_number: int) -> tuple[int, int]:
    """Return the lowest and the highest value of a bin."""
    if bin_number < _EXACT:
        return bin_number, bin_number
    shift = (bin_number >> _BITS) - 1
    lowest = (1 << _BITS) + (bin_number & _MASK) << shift
    return lowest, lowest + (1 << shift) - 1


def add_values(counts: Counts, values: Iterable[int]) -> None:
    """Add values to a sketch."""
    get = counts.get
    for value in values:
        # A copy of `bin_of`: a call per value would be too slow.
        if value >= _EXACT:
            shift = value.bit_length() - _BITS - 1
            bin_number = (shift << _BITS) + (value >> shift)
        else:
            bin_number = value if value > 0 else 0
        counts[bin_number] = get(bin_number, 0) + 1


def merge(counts: Counts, other: Mapping[int, int]) -> None:
    """Add the counts of another sketch to `counts`."""
    get = counts.get
    for bin_number, count in other.items():
        counts[bin_number] = get(bin_number, 0) + count


def count_between(counts: Mapping[int, int], limits: Sequence[float]) -> list[int]:
    """Return the number of values up to the first limit, between adjacent limits, and above the last limit.

    Each limit is at most 0.4% off.
    """
    counts_between = [0] * (len(limits) + 1)
    for bin_number, count in counts.items():
        counts_between[bisect_left(limits, bin_middle(bin_number))] += count
    return counts_between


def pack(counts: Mapping[int, int]) -> bytes:
    """Return a sketch as bytes: pairs (bin, count) of 16 bits each, in order. A large count takes several pairs."""
    items = sorted(counts.items())
    try:
        return array("H", chain.from_iterable(items)).tobytes()
    except OverflowError:  # a count has more than 16 bits
        pairs = array("H")
    for bin_number, count in items:
        while count > MAX_PAIR_COUNT:
            pairs.extend((bin_number, MAX_PAIR_COUNT))
            count -= MAX_PAIR_COUNT
        if count > 0:
            pairs.extend((bin_number, count))
    return pairs.tobytes()


def pack_values(values: Sequence[int]) -> bytes:
    """Return the packed sketch of some values."""
    if len(values) == 1:
        return array("H", (bin_of(values[0]), 1)).tobytes()
    counts: Counts = {}
    add_values(counts, values)
    return pack(counts)


def unpack(counts: Counts, sketch: bytes) -> None:
    """Add the counts of a packed sketch, or of several one after the other, to `counts`."""
    pairs = array("H", sketch)
    get = counts.get
    for bin_number, count in zip(pairs[::2], pairs[1::2], strict=True):
        counts[bin_number] = get(bin_number, 0) + count


def quantile(counts: Mapping[int, int], fraction: float) -> float | None:
    """Return the quantile at `fraction` (nearest rank); None without values."""
    (result,) = quantiles(counts, (fraction,))
    return result


def quantiles(counts: Mapping[int, int], fractions: Sequence[float]) -> list[float | None]:
    """Return the quantiles at several fractions; all are None without values."""
    bins = sorted(counts)
    cumulative = list(accumulate(counts[bin_number] for bin_number in bins))
    if not cumulative or cumulative[-1] <= 0:
        return [None] * len(fractions)
    ranks = (min(max(-int(-fraction * cumulative[-1] // 1), 1), cumulative[-1]) for fraction in fractions)
    return [bin_middle(bins[bisect_left(cumulative, rank)]) for rank in ranks]


def median(counts: Mapping[int, int]) -> float | None:
    """Return the middle value, or the mean of the two middle values; None without values."""
    total = sum(counts.values())
    below, above = quantiles(counts, (0.5, 0.5 + 0.5 / total if total else 0.5))
    if total % 2 or below is None or above is None:
        return below
    return (below + above) / 2
