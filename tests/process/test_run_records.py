"""No record is silently lost or doubled: under floods and kills, or with a full, missing or damaged history."""

from __future__ import annotations

import sqlite3
from collections import Counter

import pytest

from support.ring_writers import (
    WRITE_RUN,
    calls_and_steps_in,
    calls_and_steps_of_writer,
)
from support.run_harness import Dpmon, wait_until_unsupervised

pytestmark = pytest.mark.slow


def test_every_record_is_exported_once_and_in_order(dpmon: Dpmon) -> None:
    assert dpmon.run(*WRITE_RUN, 6000, 6000).status == 0
    records = dpmon.records()
    assert calls_and_steps_in(records) == calls_and_steps_of_writer(6000)
    assert records[-2:-1] == [{"kind": "dropped", "count": 0, "pruned": 0}]
    assert (records[-1]["kind"], records[-1]["status"]) == ("exit", 0)
    assert Counter(r["kind"] for r in records)["exit"] == 1


def test_the_schema_can_be_queried_by_people(dpmon: Dpmon) -> None:
    dpmon.run(*WRITE_RUN, 200, 10_000, 3)
    wait_until_unsupervised(dpmon.info())
    with sqlite3.connect(f"file:{dpmon.last() / 'history.sqlite'}?mode=ro", uri=True) as db:
        query = "SELECT mode, sum(calls) FROM steps GROUP BY mode"
        assert db.execute(query).fetchall() == [("dp", 100)]
        steps = db.execute("SELECT wall_ns, data_ns, forward_ns, backward_ns, optimizer_ns, other_ns FROM steps")
        for wall, *phases in steps:
            assert sum(phases) == wall
        times = [start for (start,) in db.execute("SELECT start_ns FROM steps ORDER BY id")]
        assert times == sorted(times)
        assert 0 < times[0] < 60e9
        assert db.execute("SELECT kind FROM events WHERE kind = 'exit'").fetchall() == [("exit",)]
        assert db.execute("SELECT value FROM meta WHERE key = 'run'").fetchone() == (dpmon.last().name,)
    db.close()
    assert not list(dpmon.last().glob("history.sqlite-*"))
