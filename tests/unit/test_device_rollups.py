"""Sums of device samples per minute, and what remains of them when a history is full."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from dpmon.run.rundir import RunInfo
from dpmon.store.batch import Batch
from dpmon.store.drain import Drain
from dpmon.store.tables import BEFORE_S
from dpmon.store.writer import History

SECOND = 1_000_000_000


def minutes_in(directory: Path) -> list[tuple[Any, ...]]:
    """Return start, device, name, count, total, low and high of every row."""
    with closing(sqlite3.connect(directory / "history.sqlite")) as db:
        return db.execute("SELECT * FROM device_rollups ORDER BY start_s, device, name").fetchall()


def test_the_drain_sums_up_samples(tmp_path: Path) -> None:
    drain = Drain(tmp_path, RunInfo("id", "n", ("c",), "s", "/", None, 0.0, 0, "", False))
    for second in range(90):
        drain.emit("device", {"t_s": float(second), "index": 1, "name": "x", "util_pct": second, "absent": {}})
        drain.emit("host", {"t_s": float(second), "cpu_pct": 50.0, "run_cpu_pct": None})
    drain.flush()
    drain.close()
    assert minutes_in(tmp_path) == [
        (0, -1, "cpu_pct", 60, 3000.0, 50.0, 50.0),
        (0, 1, "util_pct", 60, sum(range(60)), 0.0, 59.0),
        (60, -1, "cpu_pct", 30, 1500.0, 50.0, 50.0),
        (60, 1, "util_pct", 30, sum(range(60, 90)), 60.0, 89.0),
    ]


def test_minutes_of_devices_that_are_deleted_are_left_as_one_sum(tmp_path: Path) -> None:
    """A device's figures over five days under a bound of 256 KiB: the first days are sums, the last are minutes."""
    history, batch, minutes = History.open(tmp_path, {}, 1 << 18), Batch(), 5 * 24 * 60
    for minute in range(minutes):
        heat = 91.0 if minute == 7 else 20.0 if minute == 9 else 60.0
        for second in (0, 30):
            batch.device((60 * minute + second) * SECOND, 0, "temperature_c", heat)
        if minute % 100 == 99:
            history.write(batch)
            batch = Batch()
    history.write(batch)
    history.close()
    whole, *left = minutes_in(tmp_path)
    assert whole[0] == BEFORE_S
    assert 0 < len(left) < minutes
    assert min(row[0] for row in left) >= 60 * (minutes - len(left))
    assert whole[1:3] == (0, "temperature_c")
    assert whole[3] + sum(row[3] for row in left) == 2 * minutes
    assert whole[4] + sum(row[4] for row in left) == 2 * (60 * (minutes - 2) + 91 + 20)
    assert whole[5:] == (20.0, 91.0)
    assert (tmp_path / "history.sqlite").stat().st_size < 3 << 18
