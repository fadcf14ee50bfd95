"""The same steps give the same tallies, however they come: in any order, late, in any batches, by any writer."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from dpmon.errors import HistoryError
from dpmon.store.database import HISTORY_FILE
from dpmon.store.history_writer import HistoryWriter, WriteBatch
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.time_accounting import ACTIVITIES, ActivityInterval
from dpmon.store.time_buckets import WIDTHS
from support.history_builders import StoredStep, expected_tallies, random_steps
from support.record_builders import SECOND

pytestmark = pytest.mark.slow

HOURS = 2.6 * 3600


def a_batch(steps: Sequence[StoredStep]) -> WriteBatch:
    batch = WriteBatch()
    for step in steps:
        step.add_to(batch)
    return batch


def in_batches(chance: random.Random, steps: Sequence[StoredStep], most: int) -> list[WriteBatch]:
    found, at = [], 0
    while at < len(steps):
        size = chance.randrange(1, most)
        found.append(a_batch(steps[at : at + size]))
        at += size
    return found


def write(directory: Path, batches: Sequence[WriteBatch], *, writers: int = 1) -> None:
    """Write batches by several writers, one after the other."""
    part = -(-len(batches) // writers)
    for begin in range(0, len(batches), part):
        history = HistoryWriter.open(directory, {})
        for batch in batches[begin : begin + part]:
            history.write(batch)
        history.close()


def stored(directory: Path) -> tuple[dict[int, dict[tuple[int, TallyKey], Tally]], dict[int, int]]:
    """Return, by width, all tallies by start and key, and the second up to which they were made."""
    found: dict[int, dict[tuple[int, TallyKey], Tally]] = {width: {} for width in WIDTHS}
    with closing(sqlite3.connect(directory / HISTORY_FILE)) as db:
        rows = db.execute("SELECT number, process, mode, kind, batch FROM keys")
        keys = {number: TallyKey(*values) for number, *values in rows}
        for width, start_s, number, *plain, _ in db.execute("SELECT * FROM tallies"):
            found[width][start_s, keys[number]] = Tally(*plain)
        for width, start_s, number, name, *values in db.execute("SELECT * FROM series"):
            found[width][start_s, keys[number]].stats[name] = SeriesStats(*values)
        made = dict(db.execute("SELECT width, made_s FROM widths"))
    return found, {width: made.get(width, 0) for width in WIDTHS[1:]}


def check(directory: Path, steps: Sequence[StoredStep]) -> None:
    """Compare every width with sums over the steps."""
    (found, whole), wanted = stored(directory), expected_tallies(steps)
    for width in WIDTHS:
        upto = whole.get(width, 1 << 40)
        made = {place: tally for place, tally in wanted[width].items() if place[0] + width <= upto}
        assert found[width].keys() == made.keys(), width
        for place, tally in made.items():
            assert found[width][place] == tally, (width, place)
    last = max(step.end for step in steps) // SECOND
    assert all(last - 2 - width < upto <= last for width, upto in whole.items())


@pytest.mark.parametrize("seed", range(6))
def test_any_batches_and_writers(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    steps = random_steps(chance, 600, HOURS, processes=range(1 + seed % 3))
    write(tmp_path, in_batches(chance, steps, (2, 10, 100)[seed % 3]), writers=(1, 3, 7)[seed % 3])
    check(tmp_path, steps)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_late_steps_too(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    steps = random_steps(chance, 300, HOURS, processes=range(1 + seed % 3))
    late = list(steps)
    chance.shuffle(late)
    write(tmp_path, in_batches(chance, late, 20), writers=3)
    check(tmp_path, steps)


def test_a_day_is_made_of_hours(tmp_path: Path) -> None:
    chance = random.Random(1)
    steps = random_steps(chance, 400, 2.1 * 86_400, processes=(0, 1))
    write(tmp_path, in_batches(chance, steps, 30), writers=2)
    check(tmp_path, steps)
    assert stored(tmp_path)[1][86_400] == 2 * 86_400


def test_a_write_that_failed_changes_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(4)
    steps = random_steps(chance, 300, HOURS, processes=(0, 1))
    history = HistoryWriter.open(tmp_path, {})
    for number, batch in enumerate(in_batches(chance, steps, 20)):
        if number % 3 == 1:
            with monkeypatch.context() as patched:
                patched.setattr(history, "_used_bytes", lambda: history._db.execute("SELECT no_such"))
                for _ in range(chance.randrange(1, 4)):
                    with pytest.raises(HistoryError):
                        history.write(batch)
        history.write(batch)
    history.close()
    check(tmp_path, steps)


@pytest.mark.parametrize("seed", range(4))
def test_times_add_up_at_every_width(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    steps = random_steps(chance, 200, HOURS, processes=(0, 1))
    wanted: dict[tuple[int, int, int, str, str], int] = defaultdict(int)
    batches = in_batches(chance, steps, 10)
    for batch in batches:
        for _ in range(5):
            begin = int(chance.random() * HOURS * SECOND)
            end = begin + min(int(chance.lognormvariate(20, 2)), 599 * SECOND)
            process, mode = chance.choice((0, 1)), chance.choice(("dp", ""))
            spent = ActivityInterval(chance.choice(ACTIVITIES), mode, begin, end, chance.choice((1, -1)))
            batch.add_activity_time(process, [spent])
            for width in WIDTHS:
                first, last = begin // SECOND // width, (end - 1) // SECOND // width
                for number in range(first, last + 1):
                    low, high = number * width * SECOND, (number + 1) * width * SECOND
                    ns = min(end, high) - max(begin, low)
                    wanted[width, number * width, process, mode, spent.activity] += spent.sign * ns
    write(tmp_path, batches, writers=3)
    _, whole = stored(tmp_path)
    found = {}
    with closing(sqlite3.connect(tmp_path / HISTORY_FILE)) as db:
        for *place, ns, _ in db.execute("SELECT * FROM times"):
            found[tuple(place)] = ns
    made = {place: ns for place, ns in wanted.items() if place[0] == 1 or place[1] + place[0] <= whole[place[0]]}
    assert {place: ns for place, ns in found.items() if ns} == {place: ns for place, ns in made.items() if ns}


def test_a_time_beyond_reason_is_bounded_work() -> None:
    hour = 3600 * SECOND
    century = ActivityInterval("between", "dp", 5, 100 * 365 * 24 * hour + 7)
    pieces = list(century.split_by_second())
    assert len(pieces) < 50_000
    assert sum(ns for _, ns in pieces) == century.end - century.begin
    assert dict(pieces)[3600] == hour
    assert dict(pieces)[86_400] == 24 * hour


def test_a_long_pause_is_few_rows_and_right_by_the_minute() -> None:
    begin, end = 100 * SECOND + 7, (8 * 3600 + 333) * SECOND + 5
    pieces = list(ActivityInterval("paused", "dp", begin, end, -1).split_by_second())
    assert len(pieces) < 250
    minutes: Counter[int] = Counter()
    for second, ns in pieces:
        for minute in range(second // 60, second // 60 + max(-ns // (60 * SECOND), 1)):
            minutes[minute] -= ns // max(-ns // (60 * SECOND), 1)
    for minute, ns in minutes.items():
        assert ns == min(end, (minute + 1) * 60 * SECOND) - max(begin, minute * 60 * SECOND)
    assert sum(minutes.values()) == end - begin
    short = ActivityInterval("between", "dp", 5, 599 * SECOND, -1)
    assert len(list(short.split_by_second())) == 599
