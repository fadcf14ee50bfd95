"""Tallies: parts add up."""

from __future__ import annotations

import random

import pytest

from dpmon.store.tally import SeriesStats, Tally
from support.history_builders import StoredStep, random_steps


def of_steps(steps: list[StoredStep]) -> Tally:
    found = Tally()
    for step in steps:
        found.merge(step.tally)
    return found


def cut(steps: list[StoredStep], chance: random.Random) -> list[Tally]:
    places = sorted(chance.randrange(len(steps) + 1) for _ in range(3))
    return [of_steps(steps[begin:end]) for begin, end in zip([0, *places], [*places, len(steps)], strict=True)]


@pytest.mark.parametrize("seed", range(10))
def test_parts_add_up_in_any_order_and_grouping(seed: int) -> None:
    chance = random.Random(seed)
    steps = random_steps(chance, 60, 100)
    whole = of_steps(steps)
    chance.shuffle(steps)
    one, two, three, four = cut(steps, chance)
    left = Tally()
    for part in (one, two, three, four):
        left.merge(part)
    right = Tally()
    right.merge(three)
    right.merge(four)
    first = Tally()
    first.merge(two)
    first.merge(one)
    first.merge(right)
    assert left == first == whole
    for series in whole.stats:
        assert left.quantile(series, 0.95) == whole.quantile(series, 0.95)
        assert left.median(series) == whole.median(series)


def test_merging_does_not_change_the_merged_tally() -> None:
    steps = random_steps(random.Random(1), 20, 10)
    part, read = of_steps(steps), of_steps(steps)
    assert read.stat("step").median
    whole = Tally()
    for _ in range(3):
        whole.merge(read)
        whole.merge(part)
    assert whole.stat("step").count == sum(whole.stat("step").counts.values()) == 120
    assert read == part == of_steps(steps)


def test_nothing_has_no_median() -> None:
    assert Tally().median("step") is None
    assert (SeriesStats().mean, SeriesStats().median, SeriesStats() == 5) == (None, None, False)
