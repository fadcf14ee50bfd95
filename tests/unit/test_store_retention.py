"""The history of a run of days stays below its limit, and no figure of the whole run changes when rows are deleted."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpmon.store.database import HISTORY_FILE
from dpmon.store.history_writer import HistoryWriter, WriteBatch
from dpmon.store.step_stats import StatsWindow
from dpmon.store.tally_keys import TallyKey
from dpmon.store.time_accounting import ActivityInterval
from dpmon.store.time_buckets import WIDTHS, note_deleted
from support.history_builders import open_history, random_quantities
from support.record_builders import SECOND

pytestmark = pytest.mark.slow

DAY = 86_400


def modes_and_kinds(window: StatsWindow) -> list[tuple[str, int]]:
    """Return the modes of a window with the kinds of their steps."""
    return [*((mode, window.main_kind) for mode in window.modes), *window.other_modes]


def figures(directory: Path) -> dict[str, Any]:
    """Return all figures of the run."""
    with open_history(directory) as store:
        window = StatsWindow(store)
        found: dict[str, Any] = {"spent": window.time_by_activity, "modes": window.modes, "processes": store.processes}
        for mode, kind in modes_and_kinds(window):
            for process in (None, *store.processes):
                one = window.step_stats(mode, kind, process)
                found[f"{mode} {kind} {process}"] = one
        return found


def deleted(directory: Path) -> dict[int, int]:
    """Return, by width, the second up to which tallies were deleted."""
    with closing(sqlite3.connect(directory / HISTORY_FILE)) as db:
        deleted = dict(db.execute("SELECT width, deleted_s FROM widths"))
    return {width: deleted.get(width, 0) for width in WIDTHS[:-1]}


def batches(ranks: int, seconds: int, every_s: int, seed: int) -> Iterator[WriteBatch]:
    """Yield steps of some ranks, one per rank every `every_s`, in batches of a minute, with rows and events."""
    chance = random.Random(seed)
    pool = [random_quantities(chance, 1, int(chance.lognormvariate(19, 0.3)), 8) for _ in range(50)]
    number, at, batch = 0, 0, WriteBatch()
    for second in range(0, seconds, every_s):
        for process in range(ranks):
            number += 1
            facts = chance.choice(pool)._replace(number=number)
            key = TallyKey(process, "single", 1 if second % 1000 > 900 else 0, 8)
            start = second * SECOND
            batch.add_step(key, facts.row(start, key, number), facts.series)
            took = ActivityInterval("training", "single", start, start + facts.wall)
            rest = ActivityInterval("between", "single", start + facts.wall, start + 2 * SECOND)
            batch.add_activity_time(process, [took, rest])
        if second - at >= 60:
            at = second
            yield batch
            batch = WriteBatch()
    yield batch


def write(directory: Path, source: Iterator[WriteBatch], limit: int, slack: float = 1.1) -> int:
    """Write all batches; return the largest size of the database in bytes, which must stay near the limit."""
    directory.mkdir(exist_ok=True)
    history, most = HistoryWriter.open(directory, {}, limit), 0
    for batch in source:
        history.write(batch)
        most = max(most, history._used_bytes())
        assert most < slack * limit
    history.close()
    return most


@pytest.mark.parametrize(("ranks", "limit", "every_s"), [(1, 600 << 10, 10), (3, 2 << 20, 60)])
def test_figures_of_the_whole_run_outlive_its_rows(tmp_path: Path, ranks: int, limit: int, every_s: int) -> None:
    """After rows and tallies up to hours are deleted, the remaining days give the same figures."""
    seconds = 2 * DAY + 5000
    write(tmp_path / "all", batches(ranks, seconds, every_s, 1), 1 << 40)
    write(tmp_path / "few", batches(ranks, seconds, every_s, 1), limit)
    assert set(deleted(tmp_path / "all").values()) == {0}
    assert all(deleted(tmp_path / "few")[width] > 0 for width in (1, 10, 60)), deleted(tmp_path / "few")
    before, after = figures(tmp_path / "all"), figures(tmp_path / "few")
    assert before.keys() == after.keys()
    for name, figure in before.items():
        assert after[name] == figure, name


def test_tallies_of_each_width_can_be_deleted_without_changing_the_totals(tmp_path: Path) -> None:
    """Delete the tallies of one width after another, except days."""
    write(tmp_path, batches(2, DAY + 4000, 120, 2), 1 << 40)
    before = figures(tmp_path)
    for width, wider in pairwise(WIDTHS):
        with closing(sqlite3.connect(tmp_path / HISTORY_FILE)) as db:
            (whole,) = db.execute("SELECT made_s FROM widths WHERE width = ?", (wider,)).fetchone()
            for table in ("tallies", "series", "times"):
                assert db.execute(f"DELETE FROM {table} WHERE width = ? AND start_s < ?", (width, whole)).rowcount
            note_deleted(db, width, whole)
            db.execute("DELETE FROM steps")
            db.commit()
        assert figures(tmp_path) == before, width


def steps_of(window: StatsWindow) -> int:
    """Return the number of steps of all kinds in a window."""
    return sum(window.step_stats(mode, kind).steps for mode, kind in modes_and_kinds(window))


@pytest.mark.slow
def test_64_ranks_over_days_stay_below_the_limit(tmp_path: Path) -> None:
    """With one step per rank every three minutes, and a limit smaller in proportion."""
    limit = 6 << 20
    most = write(tmp_path, batches(64, int(1.3 * DAY), 180, 3), limit)
    assert most > limit / 2, "nothing had to be deleted"
    assert (tmp_path / HISTORY_FILE).stat().st_size < 1.2 * limit
    gone = deleted(tmp_path)
    assert gone[1] > DAY / 2
    with open_history(tmp_path) as store:
        window = StatsWindow(store)
        assert steps_of(window) == 64 * len(range(0, int(1.3 * DAY), 180))
        assert len(store.processes) == 64
        recent = StatsWindow(store, int(1.3 * DAY) - 1800)
        assert steps_of(recent) == pytest.approx(640, abs=64)
