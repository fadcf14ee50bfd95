"""Databases that are made to run code."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpmon.errors import HistoryError
from dpmon.export import iter_records
from dpmon.store.history_writer import HistoryWriter
from dpmon.store.step_stats import StatsWindow
from dpmon.store.steps import read_longest_steps, read_steps
from dpmon.store.store_opening import open_store
from support.history_builders import write_run_directory
from support.record_builders import Training, host_event

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
STEP = "0 AS process, i AS step, 'dp' AS mode, i AS start_ns, 1 AS wall_ns"
VIEWS = {
    "steps": f"CREATE VIEW steps AS {ENDLESS} SELECT i AS id, {STEP}, 1, 1, 1, 1, 1, 1, NULL, NULL, NULL FROM n",
    "meta": f"CREATE VIEW meta AS {ENDLESS} SELECT 'schema' AS key, i AS value FROM n WHERE i < 0",
}


@pytest.fixture
def directory(state: Path) -> Path:
    training = Training()
    return write_run_directory({0: [*training.begin(), *training.run(200)], -1: [host_event(1.0)]}, status=0)


def altered(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def read_all(directory: Path) -> None:
    """Read a history in every way that dpmon does."""
    list(iter_records(directory))
    with open_store(directory) as store:
        StatsWindow(store).step_stats("dp")
        read_steps(store, 1 << 30)
        read_longest_steps(store, 10, "dp")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("table", VIEWS)
def test_a_view_is_not_accepted_as_a_table(directory: Path, table: str) -> None:
    altered(directory, f"DROP TABLE {table}", VIEWS[table])
    why = f"it holds {table}, which is not dpmon's"
    with pytest.raises(HistoryError, match=f"the history is damaged: {why}"):
        read_all(directory)
    with pytest.raises(HistoryError, match=why):
        HistoryWriter.open(directory, {})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER more AFTER INSERT ON events BEGIN INSERT INTO events (kind) SELECT '' FROM events; END",
        "CREATE VIEW beside AS SELECT 1",
        "CREATE VIRTUAL TABLE beside USING fts5(x)",
    ],
)
def test_a_schema_that_computes_something_is_refused(directory: Path, statement: str) -> None:
    try:
        altered(directory, statement)
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite has none of these: {error}")
    with pytest.raises(HistoryError, match="not dpmon's"):
        read_all(directory)
    with pytest.raises(HistoryError, match="not dpmon's"):
        HistoryWriter.open(directory, {})
