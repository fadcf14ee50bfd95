"""Tallies: parts add up, and a stored tally is read back unchanged."""

from __future__ import annotations

import random

import pytest

from dpmon.store.tally import SeriesNames, SeriesStats, Tally
from support.history_builders import StoredStep, random_steps


def of_steps(steps: list[StoredStep]) -> Tally:
    found = Tally()
    found.add([step.facts.row(step.start) for step in steps], [one for step in steps for one in step.facts.series])
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


@pytest.mark.parametrize("seed", range(10))
def test_a_row_comes_back_as_it_was(seed: int) -> None:
    chance = random.Random(seed)
    tally, names = of_steps(random_steps(chance, 30, 100)), SeriesNames()
    row = tally.row(names)
    back = Tally.from_row(row, names.by_number)
    assert back == tally
    back.merge(Tally.from_row(row, names.by_number))
    tally.merge(Tally.from_row(row, names.by_number))
    assert back == tally
    slim = Tally.from_row(row, names.by_number, sketches=False)
    assert slim.median("step") is None
    assert {name: (stat.count, stat.total) for name, stat in slim.stats.items()} == {
        name: (stat.count / 2, stat.total / 2) for name, stat in tally.stats.items()
    }


def test_merging_does_not_change_the_merged_tally() -> None:
    steps = random_steps(random.Random(1), 20, 10)
    part, names = of_steps(steps), SeriesNames()
    stored = Tally.from_row(part.row(names), names.by_number)
    whole = Tally()
    for _ in range(3):
        whole.merge(stored)
        whole.merge(part)
    assert whole.stat("step").count == sum(whole.stat("step").counts.values()) == 120
    assert stored == part == of_steps(steps)


def test_an_empty_tally_is_an_empty_row() -> None:
    row = Tally().row(SeriesNames())
    assert Tally.from_row(row, {}) == Tally()
    assert Tally().median("step") is None
    assert (SeriesStats().mean, SeriesStats().median, SeriesStats() == 5) == (None, None, False)


def test_sums_beyond_reason_are_cut() -> None:
    largest = (1 << 63) - 1
    stat = SeriesStats()
    for _ in range(3):
        stat.add([largest, largest])
    assert (stat.count, stat.total) == (6, largest)
    below = SeriesStats()
    for _ in range(2):
        below.add_packed(1, -largest, None)
    assert below.total == -largest


def test_series_beyond_the_largest_number_have_no_number() -> None:
    names = SeriesNames()
    numbers = [names.number(str(index)) for index in range(70_000)]
    assert numbers[:65_536] == list(range(65_536))
    assert set(numbers[65_536:]) == {None}
    assert len(names.unwritten) == 65_536
