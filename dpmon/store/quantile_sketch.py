"""Sketches of durations, for quantiles that are at most 0.4% off. Sketches can be merged.

A sketch counts values by bucket. A bucket is an integer: the value itself below 256, then 128 buckets per power of two.
So the middle of a bucket is within 1/256 of every value in it. HdrHistogram and DDSketch use the same idea.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TypeAlias

Counts = dict[int, int]
"""Number of values by bucket."""
Packed: TypeAlias = "array[int]"
"""The stored form: buckets and counts in turn (see `pack`)."""
_BITS = 7
_EXACT = 1 << _BITS + 1
RELATIVE_WIDTH = 1 / (1 << _BITS)
"""Largest relative difference of two values in one bucket."""
_MASK = (1 << _BITS) - 1
MOST = 0xFFFF
"""Most values that one pair of a packed sketch counts."""
LAST_BUCKET = (63 - _BITS << _BITS) | _MASK
"""The bucket of the largest number in a record (63 bits)."""


def bin_of(value: int) -> int:
    """The bucket of a value; negative values count as 0."""
    if value < _EXACT:
        return max(value, 0)
    shift = value.bit_length() - _BITS - 1
    return (shift << _BITS) + (value >> shift)


def bin_middle(number: int) -> float:
    """The middle of a bucket."""
    if number < _EXACT:
        return float(number)
    shift = (number >> _BITS) - 1
    return float((1 << _BITS) + (number & _MASK) << shift) + ((1 << shift) - 1) / 2


def bin_bounds(number: int) -> tuple[int, int]:
    """The lowest and the highest value of a bucket."""
    if number < _EXACT:
        return number, number
    shift = (number >> _BITS) - 1
    low = (1 << _BITS) + (number & _MASK) << shift
    return low, low + (1 << shift) - 1


def add_values(counts: Counts, values: Iterable[int]) -> None:
    """Count values."""
    get = counts.get
    for value in values:
        # A copy of `bin_of`: a call per value would be too slow.
        if value >= _EXACT:
            shift = value.bit_length() - _BITS - 1
            number = (shift << _BITS) + (value >> shift)
        else:
            number = value if value > 0 else 0
        counts[number] = get(number, 0) + 1


def merge(counts: Counts, other: Mapping[int, int]) -> None:
    """Add the counts of another sketch."""
    get = counts.get
    for number, count in other.items():
        counts[number] = get(number, 0) + count


def count_between(counts: Mapping[int, int], limits: Sequence[float]) -> list[int]:
    """Return the number of values up to the first limit, between adjacent limits, and above the last limit.

    Limits are at most 0.4% off.
    """
    found = [0] * (len(limits) + 1)
    for number, count in counts.items():
        found[bisect_left(limits, bin_middle(number))] += count
    return found


def validate_packed(data: bytes) -> Packed:
    """Return the numbers in bytes from `pack`. Raises ValueError if the bytes are damaged."""
    flat = array("H", data)
    if len(flat) % 2 or max(flat[::2], default=0) > LAST_BUCKET:
        raise ValueError("a damaged sketch")
    return flat


def pack(counts: Mapping[int, int]) -> bytes:
    """Return a sketch as bytes: (bucket, count) pairs of 16 bits each, by bucket. A large count takes several pairs."""
    ordered = sorted(counts.items())
    try:
        return array("H", chain.from_iterable(ordered)).tobytes()
    except OverflowError:  # a count has more than 16 bits
        flat = array("H")
    for number, count in ordered:
        while count > MOST:
            flat.extend((number, MOST))
            count -= MOST
        if count > 0:
            flat.extend((number, count))
    return flat.tobytes()


def unpack(counts: Counts, sketches: Iterable[Packed], sign: int = 1) -> None:
    """Add the counts of packed, checked sketches; `sign` -1: subtract them."""
    flat: Packed = array("H")
    for sketch in sketches:
        flat += sketch
    get = counts.get
    for number, count in zip(flat[::2], flat[1::2], strict=True):
        counts[number] = get(number, 0) + sign * count


def quantile(counts: Mapping[int, int], fraction: float) -> float | None:
    """Return the quantile at `fraction` (nearest rank); None without values."""
    return quantiles(counts, (fraction,))[0]


def quantiles(counts: Mapping[int, int], fractions: Sequence[float]) -> list[float | None]:
    """Return the quantiles at several fractions; None for each without values."""
    ordered = sorted(counts)
    sums = list(accumulate(counts[number] for number in ordered))
    if not sums or sums[-1] <= 0:
        return [None] * len(fractions)
    ranks = (min(max(-int(-fraction * sums[-1] // 1), 1), sums[-1]) for fraction in fractions)
    return [bin_middle(ordered[bisect_left(sums, rank)]) for rank in ranks]


def median(counts: Mapping[int, int]) -> float | None:
    """Return the middle value, or the mean of the two middle values; None without values."""
    total = sum(counts.values())
    below, above = quantiles(counts, (0.5, 0.5 + 0.5 / total if total else 0.5))
    if total % 2 or below is None or above is None:
        return below
    return (below + above) / 2


def fine_quantile(counts: Mapping[int, int], fraction: float) -> float | None:
    """Return a quantile as if the values of a bucket lay evenly in it; None without values.

    It is finer than the buckets if the values cover several of them, so it is for ratios of similar values.
    """
    rank, below = sum(counts.values()) * fraction, 0
    for number in sorted(counts):
        if below + counts[number] >= rank > 0:
            low, high = bin_bounds(number)
            return low + (rank - below) / counts[number] * (high - low + (number >= _EXACT))
        below += counts[number]
    return None
