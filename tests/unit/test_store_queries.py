"""Queries cover exactly the requested seconds, and figures of a window are those of its steps."""

from __future__ import annotations

import itertools
import random
import sqlite3
import statistics
from collections.abc import Sequence
from contextlib import closing
from math import ceil
from pathlib import Path

import pytest

from dpmon.record.schema import PHASES, QUANTITIES, TRAINING, WARM_UP, step_kind
from dpmon.store.database import HISTORY_FILE
from dpmon.store.history_writer import HistoryWriter, WriteBatch
from dpmon.store.step_stats import StatsWindow, compute_rate
from dpmon.store.store_queries import Store
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.time_accounting import ACTIVITIES, ActivityInterval
from dpmon.store.time_buckets import WIDTHS
from support.history_builders import StoredStep, open_history, open_unlimited_store, random_steps
from support.record_builders import SECOND

ERROR = 0.004


def a_store(db: sqlite3.Connection, directory: Path, newest: int, slack: int, pruned: dict[int, int]) -> Store:
    """Return a store without tallies; its wide ones end `slack` seconds before the newest second."""
    HistoryWriter.open(directory, {}).close()
    widths = [(width, max(newest - slack, 0) // width * width, pruned.get(width, 0)) for width in WIDTHS]
    db.executemany("INSERT INTO widths VALUES (?, ?, ?)", widths)
    db.execute("INSERT INTO times VALUES (1, ?, 0, '', 'training', 1, 0)", (newest,))
    return open_unlimited_store(db)


@pytest.mark.parametrize("seed", range(8))
def test_deleted_tallies_are_not_queried(tmp_path: Path, seed: int) -> None:
    """Wider tallies are used instead, which extend beyond the time range as little as possible."""
    chance = random.Random(seed)
    newest = chance.choice((5000, 200_000))
    pruned: dict[int, int] = {}
    for width, wider in reversed(list(itertools.pairwise(WIDTHS))):
        upto = (newest - 2) // wider * wider
        pruned[width] = min(chance.randrange(upto + 1), upto) if upto else 0
    with closing(sqlite3.connect(tmp_path / HISTORY_FILE, isolation_level=None)) as db:
        store = a_store(db, tmp_path, newest, 2, pruned)
        for _ in range(300):
            begin = chance.randrange(newest + 1)
            end = begin + 1 + int(chance.lognormvariate(6, 3))
            found = store.buckets.cover(begin, end)
            for width, first, _ in found:
                assert first >= pruned.get(width, 0)
            for (_, _, last), (_, first, _) in itertools.pairwise(found):
                assert first == last
            assert found[0][1] <= begin
            assert found[-1][2] >= min(end, newest + 1)
            for width, first, last in found:
                if first < begin or last > end:
                    finer = [each for each in WIDTHS if each < width]
                    assert finer, "seconds never reach beyond"
                    assert all(begin // each * each < pruned[each] or end < pruned[each] for each in finer)


def written(directory: Path, steps: Sequence[StoredStep], spent: Sequence[tuple[int, ActivityInterval]] = ()) -> None:
    history = HistoryWriter.open(directory, {})
    for at in range(0, len(steps), 50):
        batch = WriteBatch()
        for step in steps[at : at + 50]:
            step.add_to(batch)
        if at == 0:
            for process, one in spent:
                batch.add_activity_time(process, [one])
        history.write(batch)
    history.close()


def nearest_rank(values: Sequence[int], fraction: float) -> int:
    return sorted(values)[max(ceil(fraction * len(values)), 1) - 1]


@pytest.mark.parametrize("seed", range(6))
def test_figures_of_a_window_are_those_of_its_steps(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    processes = range(1 + seed % 3)
    steps = random_steps(chance, 1500, 3 * 3600, processes)
    written(tmp_path, steps)
    with open_history(tmp_path) as store:
        for begin, end in ((0, 1 << 40), (17, 9000), (3599, 3601), (600, 1200), (chance.randrange(5000), 8123)):
            window = StatsWindow(store, begin, end)
            within = [step for step in steps if begin <= step.end // SECOND < end]
            pairs = [*((mode, TRAINING) for mode in window.modes), *window.other_modes]
            assert sorted(pairs) == sorted({(one.key.mode, step_kind(one.key.kind)) for one in within})
            for mode, kind in pairs:
                for process in (None, *processes):
                    check_figures(window, within, mode, kind, process)


def check_figures(window: StatsWindow, steps: Sequence[StoredStep], mode: str, kind: int, process: int | None) -> None:
    mine = [
        step for step in steps
        if step.key.mode == mode and step_kind(step.key.kind) == kind
        and process in (None, step.key.process)
    ]  # fmt: skip
    figures = window.step_stats(mode, kind, process)
    assert (figures.steps, figures.calls) == (len(mine), sum(step.facts.calls for step in mine))
    if not mine:
        assert (figures.median_ns, figures.mean_ns) == (None, None)
        return
    walls = [step.facts.wall for step in mine]
    assert figures.median_ns == pytest.approx(statistics.median(walls), rel=ERROR)
    assert figures.p95_ns == pytest.approx(nearest_rank(walls, 0.95), rel=ERROR)
    assert figures.mean_ns == pytest.approx(statistics.fmean(walls), rel=1e-12)
    for index, quantity in enumerate(QUANTITIES):
        known = [count for step in mine if (count := step.facts.quantities[index]) is not None]
        total = figures.tally.stat(quantity.name)
        assert (total.count, total.total) == (len(known), sum(known))
    assert figures.tally.last_step == max(step.facts.number for step in mine)
    for index, phase in enumerate(PHASES):
        took = [ns for step in mine if (ns := step.facts.phases[index]) is not None]
        found = figures.phase(phase.name)
        assert (found is None) == (not took)
        if found is None:
            continue
        assert found.ran == len(took)
        assert found.median_ns == pytest.approx(statistics.median(took), rel=ERROR)
        assert found.p95_ns == pytest.approx(nearest_rank(took, 0.95), rel=ERROR)
        assert found.share == pytest.approx(sum(took) / sum(walls), rel=1e-12)
        device = [step.facts.device[phase.name] for step in mine if phase.name in step.facts.device]
        assert found.device_count == len(device)
        if device:
            assert found.device_ns == pytest.approx(statistics.median(device), rel=ERROR)
    settled = window.tally(mode, kind, process, without_warmup=True)
    assert settled.steps == sum(1 for step in mine if not step.key.kind & WARM_UP)
    eights = window.tally(mode, kind, process, batch=8)
    assert eights.steps == sum(1 for step in mine if step.key.batch == 8)


def test_ranks_train_as_fast_as_the_slowest_of_them() -> None:
    """Rank 1 waits while rank 0 evaluates, so it needs 20 s for the same steps. Its process was replaced after 10 s."""

    def tally(steps: int, first_s: int, last_s: int) -> Tally:
        own = Tally(steps, steps, first_ns=first_s * SECOND, last_ns=last_s * SECOND)
        own.stats["samples"] = SeriesStats(steps, 16 * steps)
        own.stats["tokens"] = SeriesStats(steps, 1024 * steps)
        return own

    tallies = {0: tally(1000, 0, 20), 1: tally(600, 0, 10), 2: tally(400, 10, 20)}
    times = {0: (8 * SECOND, 7 * SECOND), 1: (10 * SECOND, 9 * SECOND), 2: (10 * SECOND, 9 * SECOND)}
    rate = compute_rate(tallies, times, {0: 0, 1: 1, 2: 1})
    assert rate is not None
    samples, within = 2 * 16 * 1000 / 20, 2 * 16 * 1000 / 18
    assert rate == pytest.approx((1000 / 20, samples, 1000 / 18, within, 0, 64 * samples))
    independent = compute_rate(tallies, times, {})
    assert independent is not None
    assert independent.steps_per_s == pytest.approx(2000 / 28), "a mean: they do not wait for each other"


def test_rates_and_parts_of_a_window_are_those_of_its_time(tmp_path: Path) -> None:
    chance = random.Random(9)
    steps = [step._replace(key=step.key._replace(mode="dp")) for step in random_steps(chance, 800, 5000, (0, 1))]
    spent = []
    for process in (0, 1):
        at = process * SECOND // 2
        while at < 5000 * SECOND:
            end = min(at + int(chance.lognormvariate(22, 1)), 5000 * SECOND)
            spent.append((process, ActivityInterval(chance.choice(ACTIVITIES), "dp", at, end)))
            at = end
    written(tmp_path, steps, spent)
    with open_history(tmp_path) as store:
        for begin, end in ((0, 1 << 40), (100, 4321), (333, 855)):
            window = StatsWindow(store, begin, end)
            elapsed = {name: [0, 0] for name in ACTIVITIES}
            for process, one in spent:
                inside = min(one.end, end * SECOND) - max(one.begin, begin * SECOND)
                elapsed[one.activity][process] += max(inside, 0)
            mine = [
                step for step in steps
                if begin <= step.end // SECOND < end and step_kind(step.key.kind) == TRAINING
            ]  # fmt: skip
            rate = window.rate("dp")
            training = sum(elapsed["training"]) + sum(elapsed["between"])
            assert rate is not None
            assert rate.steps_per_s == pytest.approx(len(mine) / training * SECOND)
            assert rate.steps_per_s_within == pytest.approx(len(mine) / sum(elapsed["training"]) * SECOND)
            own = window.rate("dp", process=1)
            assert own is not None
            seconds = (elapsed["training"][1] + elapsed["between"][1]) / SECOND
            assert own.steps_per_s == pytest.approx(sum(1 for step in mine if step.key.process == 1) / seconds)
            assert sum(window.time_by_activity.values()) == pytest.approx((min(end, 5000) - begin) * SECOND, rel=1e-3)
            assert window.time_by_activity == pytest.approx(
                {name: sum(both) / 2 for name, both in elapsed.items()}, abs=1.5 * SECOND
            )


def test_processes_that_begin_within_a_second_share_the_time_that_they_were_there(tmp_path: Path) -> None:
    """Three ranks train from 0.6 s on: all this time is training, and no second has more than one second."""
    begin, end, step = 600_000_000, 3 * SECOND, random_steps(random.Random(1), 1, 2.5)[0]
    trained = [(process, ActivityInterval("training", "dp", begin, end)) for process in range(3)]
    written(tmp_path, [step], [*trained, (0, ActivityInterval("missed", "dp", end, end + SECOND // 4))])
    with open_history(tmp_path) as store:
        spent = StatsWindow(store).time_by_activity
    assert spent == {**dict.fromkeys(ACTIVITIES, 0), "training": end - begin, "missed": SECOND // 4}
