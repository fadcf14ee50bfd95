"""Sketches of durations: precision, and sums of parts."""

from __future__ import annotations

import random
import statistics
from math import ceil

import pytest

from dpmon.store.quantile_sketch import (
    Counts,
    add_values,
    bin_middle,
    bin_of,
    median,
    merge,
    pack,
    pack_values,
    quantile,
    quantiles,
    unpack,
)

LARGEST = (1 << 63) - 1
LAST_BIN = bin_of(LARGEST)
ERROR = 0.004


def some_values(seed: int) -> list[int]:
    """Return random values of several kinds: even and odd counts, narrow and wide ranges, small and large."""
    chance = random.Random(seed)
    count = chance.randrange(1, 400)
    kinds = (
        lambda: chance.randrange(300),
        lambda: int(chance.lognormvariate(15, 2)),
        lambda: int(chance.gauss(50_000_000, 1_000_000)),
        lambda: chance.randrange(LARGEST),
        lambda: chance.choice((0, 255, 256, 257, LARGEST, 1000)),
    )
    kind = kinds[seed % len(kinds)]
    return [max(kind(), 0) for _ in range(count)]


def sketch(values: list[int]) -> Counts:
    counts: Counts = {}
    add_values(counts, values)
    return counts


def test_the_middle_of_a_bucket_is_close_to_all_its_values() -> None:
    chance = random.Random(1)
    edges = {edge + off for shift in range(63) for edge in (1 << shift,) for off in (-1, 0, 1)}
    before = -1
    for value in sorted({*range(2000), *edges, *(chance.randrange(LARGEST) for _ in range(5000)), LARGEST}):
        number = bin_of(value)
        assert before <= number <= LAST_BIN
        before = number
        assert abs(bin_middle(number) - value) <= (value * ERROR if value >= 256 else 0)
        assert sketch([value]) == {number: 1}
    assert bin_of(LARGEST) == LAST_BIN
    assert sketch([-5, 0]) == {0: 2}


@pytest.mark.parametrize("seed", range(25))
def test_quantiles_are_those_of_the_values(seed: int) -> None:
    values = sorted(some_values(seed))
    counts = sketch(values)
    fractions = (0.0, 0.05, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0)
    for fraction, found in zip(fractions, quantiles(counts, fractions), strict=True):
        true = values[max(ceil(fraction * len(values)), 1) - 1]
        assert found == pytest.approx(true, rel=ERROR)
        assert quantile(counts, fraction) == found
    assert median(counts) == pytest.approx(statistics.median(values), rel=ERROR)


def test_without_values_there_are_no_quantiles() -> None:
    assert median({}) is None
    assert quantiles({}, (0.5, 0.9)) == [None, None]


@pytest.mark.parametrize("seed", range(25))
def test_parts_add_up_packed_or_not(seed: int) -> None:
    values = some_values(seed)
    cut = random.Random(seed).randrange(len(values) + 1)
    first, second = sketch(values[:cut]), sketch(values[cut:])
    together = dict(first)
    merge(together, second)
    assert together == sketch(values)
    read: Counts = {}
    unpack(read, pack(first))
    unpack(read, pack(second))
    assert read == sketch(values)
    at_once: Counts = {}
    unpack(at_once, pack(first) + pack(second))
    assert at_once == read
    assert pack_values(values) == pack(read)


def test_large_counts_are_packed_too() -> None:
    counts = {7: 200_000, 9: 65_535, 12: 65_536, LAST_BIN: 1}
    read: Counts = {}
    unpack(read, pack(counts))
    assert read == counts
    assert pack({}) == b""
