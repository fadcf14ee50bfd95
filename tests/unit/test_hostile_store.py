"""Rows that dpmon never wrote end an answer and are named, and no query takes forever."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.history_rows import Row
from dpmon.run.run_directory import RunError
from dpmon.store.history_schema import HISTORY_FILE
from dpmon.store.step_stats import StatsWindow, account_for_elapsed
from dpmon.store.store_opening import open_store
from dpmon.store.store_queries import Store
from support.history_builders import snapshot_of_directory, write_run_directory
from support.record_builders import Training, host_event
from support.ring_writers import make_row_ring, use_row_rings
from support.run_harness import LONG

pytestmark = pytest.mark.slow

TABLES = ("meta", "rings", "definitions", "calls", "steps", "events", "series", "tallies", "times", "gaps", "shapes")
SELECTING = ("width", "start_s", "process", "start_ns", "wall_ns", "t_ns", "begin_ns", "end_ns", "value", "kind")
"""Columns that queries compare: rows with other types may not be found."""
VALUES = ("'x'", "x'ff00'", "NULL", "-1", "1e999", "0.5", str((1 << 63) - 1), str(-(1 << 63)), "'[[],1e999,{}]'")


@pytest.fixture
def directory(state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two processes with both modes."""
    use_row_rings(monkeypatch)
    records: dict[int, list[Row]] = {-1: [host_event(1.0)]}
    for process in (0, 1):
        training = Training(process=process)
        records[process] = [*training.begin(), *training.run(30)]
        training.now += 1 << 30
        records[process] += [*training.switch("single"), *training.run(30)]
    return write_run_directory(records)


def answers(store: Store) -> list[Any]:
    """Return the answers to all queries of a store and its windows."""
    found: list[Any] = [
        store.dropped,
        list(store.tally_rows(process=0)),
        store.tallies(),
        store.tallies(process=0),
        store.time_rows(0, 10),
        store.time_rows(process=1, widest=60),
        store.gaps(10),
        store.longest_steps(10, "dp"),
        store.steps(100, process=0),
        store.steps(100),
        store.next_step_ns(0, 5),
        store.calls(100, process=0),
        store.events("process", "mode", "host"),
        store.device_minutes(),
        store.shapes(),
    ]
    for begin, end in ((0, 1 << 40), (2, 4)):
        window = StatsWindow(store, begin, end)
        for mode, kind in [*((mode, window.main_kind) for mode in window.modes), *window.other_modes]:
            for process in (None, *store.processes):
                found.append(window.step_stats(mode, kind, process))
        found.append(account_for_elapsed(window.time_by_activity, 10**10, window.alive_intervals))
    return [*found, list(store.records())]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("complete", [True, False], ids=["whole", "with more in its rings"])
def test_a_row_with_a_value_of_another_type_is_noticed(directory: Path, table: str, complete: bool) -> None:
    path = directory / HISTORY_FILE
    if not complete:
        for process in (0, 1):
            more = Training(process=process)
            rows = [*more.begin(), *more.run(40), *more.switch("single"), *more.run(40)]
            make_row_ring(directory / f"process-{process}.ring", rows)
    whole = path.read_bytes()
    with closing(sqlite3.connect(path)) as db:
        columns = [(row[1], row[2]) for row in db.execute(f"PRAGMA table_info({table})")]
    for number, (name, declared) in enumerate(columns):
        for value in VALUES if LONG else VALUES[number % 3 :: 3]:
            path.write_bytes(whole)
            with closing(sqlite3.connect(path)) as db:
                try:
                    db.execute(f"UPDATE OR REPLACE {table} SET {name} = {value}")
                    db.commit()
                except sqlite3.Error:
                    continue  # a column that cannot hold it
                ((kind,),) = db.execute(f"SELECT DISTINCT typeof({name}) FROM {table}")
            try:
                with open_store(directory) as store:
                    assert answers(store), (name, value)
                    mended = table == "shapes" and not complete  # by the sum with the rings' calls
                    if name not in SELECTING and kind not in (declared.lower(), "null") and not mended:
                        assert store.damaged, (table, name, value)
            except RunError:
                assert table == "meta", name  # its version


@pytest.mark.parametrize("damage", ["'x'", "x'00'", "NULL"])
def test_what_was_read_before_a_damaged_row_remains(directory: Path, damage: str) -> None:
    with open_store(directory) as store:
        whole = sum(tally.steps for tally in store.tallies().values())
    with closing(sqlite3.connect(directory / HISTORY_FILE)) as db:
        (last,) = db.execute("SELECT max(start_s) FROM tallies WHERE width = 1").fetchone()
        db.execute(f"UPDATE tallies SET sketches = {damage} WHERE start_s = ?", (last,))
        db.commit()
    with open_store(directory) as store:
        assert 0 < sum(tally.steps for tally in store.tallies().values()) < whole
        assert str(store.damaged).startswith("the history cannot be read to its end: ")
    assert snapshot_of_directory(directory).warnings[-1].text.startswith("the history cannot be read to its end: ")


@pytest.mark.timeout(120)
def test_many_queries_on_one_connection_are_not_taken_for_an_endless_one(directory: Path) -> None:
    with open_store(directory) as store:
        for _ in range(100):
            answers(store)
        assert store.damaged is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("whole", [1 << 62, 315_360_000, 1000])
@pytest.mark.parametrize("names", ["whole_10 whole_60 pruned_60", "whole_10 pruned_10", "whole_60 pruned_1 pruned_60"])
@pytest.mark.parametrize("newest", [None, 315_360_000, (1 << 63) - 1])
def test_inconsistent_widths_do_not_slow_down_queries(
    directory: Path, names: str, whole: int, newest: int | None
) -> None:
    with closing(sqlite3.connect(directory / HISTORY_FILE)) as db:
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(name, whole) for name in names.split()])
        if newest is not None:
            for table in ("tallies", "times"):
                db.execute(f"UPDATE OR IGNORE {table} SET start_s = ? WHERE width = 1 AND process = 1", (newest,))
        db.commit()
    with open_store(directory) as store:
        assert answers(store)
