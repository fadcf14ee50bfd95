"""Rollups: exact sums and counts, medians within the width of a bucket, and what they survive."""

from __future__ import annotations

import random
import sqlite3
import struct
from pathlib import Path

import pytest
from writer import _define

from dpmon.model.stats import median, percentile
from dpmon.record.wire import pack_call, pack_event, pack_step
from dpmon.ring import Ring
from dpmon.run.drain import Drain
from dpmon.run.history import Batch, History
from dpmon.run.kept import Kept
from dpmon.run.rollup import SERIES, Gathered, Rollup, bucket, bucket_middle
from dpmon.run.rundir import RunInfo
from dpmon.run.tables import BEFORE_S, HistoryError

SECOND = 1_000_000_000


def test_buckets_are_narrow_and_in_order() -> None:
    previous = -1
    for ns in sorted({*range(200), *(random.Random(1).randrange(1 << 50) for _ in range(5000)), (1 << 62) + 5}):
        number = bucket(ns)
        assert previous <= number <= 0xFFFF
        previous = number
        assert abs(bucket_middle(number) - ns) <= max(ns / 32, 0.5)
    assert bucket(-5) == 0


@pytest.mark.parametrize("seed", range(4))
def test_quantiles_are_within_three_per_cent(seed: int) -> None:
    chance = random.Random(seed)
    walls = [int(chance.lognormvariate(14, 1.5)) + 1 for _ in range(2000)]
    rollup = Rollup(0, 0, "dp")
    gathered = Gathered()
    gathered.steps = [
        (n, 0, n, "dp", 0, wall, 8, None, wall // 2, None, None, wall - wall // 2) for n, wall in enumerate(walls)
    ]
    rollup.add(gathered)
    for fraction in (0.5, 0.95):
        true = percentile(walls, fraction)
        assert true is not None
        assert rollup.quantile("step", fraction) == pytest.approx(true, rel=0.032)
    assert rollup.quantile("step", 0.5) == pytest.approx(median(walls), rel=0.035)
    assert (rollup.low_ns, rollup.high_ns, rollup.sums[0]) == (min(walls), max(walls), sum(walls))
    assert (rollup.ran("data"), rollup.quantile("data", 0.5), rollup.sums[1]) == (0, None, None)
    assert (rollup.ran("forward"), rollup.samples, rollup.unknown) == (2000, 16_000, 0)


def test_a_row_comes_back_as_it_was_and_damage_is_noticed() -> None:
    rollup = Rollup(7, 3, "single")
    gathered = Gathered()
    gathered.steps = [(1, 3, 5, "single", 0, 1000, None, 1, 2, 3, 4, 983, None, 7, 4096, -30)]
    gathered.calls = [[0, 10, -1, 0, 5, 20, 30, 1]]
    rollup.add(gathered)
    row = rollup.row(1)
    assert Rollup.of_row(row) == rollup
    assert rollup.unknown == 1
    assert [rollup.ran(name) for name in SERIES[-5:]] == [1, 0, 1, 1, 1]
    assert (rollup.sums[SERIES.index("copy")], rollup.sums[SERIES.index("other")]) == (7, 983)
    assert (rollup.pace.training.elapsed_ns, rollup.pace.evaluation.elapsed_ns) == (1000, 30)
    assert Rollup.of_row(row[:-1]).pace.training.elapsed_ns == 1000, (
        "written by a version without the time between steps"
    )
    older = Rollup.of_row(row[:-2])  # written by a version without copies
    assert older.sums == [*rollup.sums[:-1], None]
    beyond = struct.pack("<BHI", 0, 0xFFFF, 5)
    for at, wrong in (
        (1, "x"), (3, 4), (3, "m7"), (4, None), (11, 1.5), (-2, "text"), (-3, b"12345"), (-3, "text"),
        (-3, beyond), (-1, "text"), (-1, "1 2 3"), (-1, b"1 2 3 4 5"),
    ):  # fmt: skip
        damaged = list(row)
        damaged[at] = wrong
        with pytest.raises(ValueError, match=r"damaged|invalid literal"):
            Rollup.of_row(damaged)


def steps(count: int, per_second: int = 10) -> list[tuple[int, tuple[object, ...]]]:
    """Rows of steps with when they ended."""
    found = []
    for n in range(1, count + 1):
        start, wall = n * SECOND // per_second, 1000 * n
        found.append((start + wall, (n, 0, n, "dp", start, wall, 4, None, None, None, None, wall, None, None, None, 0)))
    return found


def test_they_grow_over_several_writes_and_writers(tmp_path: Path) -> None:
    """As after a takeover: the row of a second is added to, not replaced."""
    for part in range(6):
        history = History(tmp_path, {})
        for end, row in steps(300)[part * 50 : part * 50 + 50]:
            batch = Batch(steps=[row])
            batch.rollup(end, 0, "dp").steps.append(row)
            history.write(batch)
        history.close()
    kept = Kept(tmp_path)
    seconds, minutes = list(kept.rollups(1)), list(kept.rollups(60))
    kept.close()
    assert sum(rollup.steps for rollup in seconds) == sum(rollup.steps for rollup in minutes) == 300
    assert len(seconds) == 31
    assert [rollup.start_s for rollup in minutes] == [0]
    assert minutes[0].sums[0] == 1000 * 300 * 301 // 2
    assert minutes[0].last_step == 300


def test_a_write_that_failed_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path, {})
    row = steps(1)[0][1]
    batch = Batch(steps=[row])
    batch.rollup(SECOND, 0, "dp").steps.append(row)
    monkeypatch.setattr(history, "_used_bytes", lambda: history._db.execute("SELECT no_such"))
    with pytest.raises(HistoryError):
        history.write(batch)
    monkeypatch.undo()
    history.write(batch)
    history.close()
    kept = Kept(tmp_path)
    assert [rollup.steps for rollup in kept.rollups(1)] == [1]
    kept.close()


def test_they_survive_what_is_pruned_and_stay_bounded(tmp_path: Path) -> None:
    """Ten hours of ten steps a second under a bound of 1 MB: the steps of the first hours go, their minutes stay."""
    limit = 1 << 20
    history = History(tmp_path, {}, limit)
    total = 36_000
    batch = Batch()
    for end, row in steps(total, per_second=1):
        batch.steps.append(row)
        batch.rollup(end, 0, "dp").steps.append(row)
        if row[0] % 500 == 0:
            history.write(batch)
            batch = Batch()
    history.close()
    kept = Kept(tmp_path)
    assert kept.pruned > 10_000
    minutes = list(kept.rollups(60))
    assert sum(rollup.steps for rollup in minutes) == total
    assert minutes[-1].start_s // 60 + 1 == len(minutes)
    seconds = list(kept.rollups(1))
    assert 0 < len(seconds) < total
    kept.close()
    assert (tmp_path / "history.sqlite").stat().st_size < 1.5 * limit


def test_minutes_that_are_deleted_are_left_as_one_sum(tmp_path: Path) -> None:
    history, batch, total = History(tmp_path, {}, 1 << 18), Batch(), 6000
    for number, (_, row) in enumerate(steps(total), start=1):
        end, row = 20 * number * SECOND + 1000 * number, (*row[:4], 20 * number * SECOND, *row[5:])  # three a minute
        batch.steps.append(row)
        batch.rollup(end, 0, "dp").steps.append(row)
        if number % 200 == 0:
            history.write(batch)
            batch = Batch()
    history.close()
    kept = Kept(tmp_path)
    minutes, (whole,) = list(kept.rollups(60)), kept.whole()
    oldest = min(row[6] for row in kept.rows() if row[1] == "steps")
    kept.close()
    assert whole.steps > total // 2
    assert whole.start_s == minutes[0].start_s <= oldest // SECOND
    assert whole.last_step == whole.steps
    assert whole.steps + sum(rollup.steps for rollup in minutes) == total
    assert (whole.sums[0] or 0) + sum(rollup.sums[0] or 0 for rollup in minutes) == 1000 * total * (total + 1) // 2
    assert (tmp_path / "history.sqlite").stat().st_size < 1 << 19, "a write adds more here than an eighth of the sums"


def test_the_drain_rolls_up_calls_steps_and_samples(tmp_path: Path) -> None:
    ring = Ring(str(tmp_path / "process-0.ring"), process=0, start_ns=0)
    _define(ring, 2)
    for step in range(1, 101):
        start = step * SECOND // 2
        phases = [0, 5000, -1, 0, 25_000, 60_000, 85_000, 5000]
        ring.write(pack_call(1, 7, 1, step, step, start, 90_000, 2, 4, phases, [3, 4, 1000, 90_000] * 2))
        ring.write(pack_step(1, step, start, 100_000, 16, (1000, 50_000, -1, 5000)))
    gpu = Ring(str(tmp_path / "gpu.ring"), process=-1, start_ns=0)
    for second in range(90):
        gpu.write(
            pack_event("device", {"t_s": float(second), "index": 1, "name": "x", "util_pct": second, "absent": {}})
        )
        gpu.write(pack_event("host", {"t_s": float(second), "cpu_pct": 50.0, "run_cpu_pct": None}))
    info = RunInfo("id", "n", ("c",), "s", "/", None, 0.0, 0, "", False)
    drain = Drain(tmp_path, info, pytest.fail)
    drain.flush()
    drain.close()
    kept = Kept(tmp_path)
    minutes = list(kept.rollups(60))
    assert [(m.mode, m.steps, m.calls, m.samples) for m in minutes] == [("dp", 100, 100, 1600)]
    assert [minutes[0].ran(name) for name in SERIES] == [100, 100, 100, 0, 100, 100, 100, 0, 100, 100, 0]
    assert minutes[0].quantile("gather", 0.5) == pytest.approx(5000, rel=0.032)
    assert list(kept.device_rollups()) == [
        (0, -1, "cpu_pct", 60, 3000.0, 50.0, 50.0),
        (0, 1, "util_pct", 60, sum(range(60)), 0.0, 59.0),
        (60, -1, "cpu_pct", 30, 1500.0, 50.0, 50.0),
        (60, 1, "util_pct", 30, sum(range(60, 90)), 60.0, 89.0),
    ]
    kept.close()


def test_a_history_of_before_has_none(tmp_path: Path) -> None:
    History(tmp_path, {}).close()
    with sqlite3.connect(tmp_path / "history.sqlite") as db:
        db.execute("DROP TABLE rollups")
        db.execute("DROP TABLE device_rollups")
    db.close()
    kept = Kept(tmp_path)
    assert list(kept.rollups(1)) == list(kept.device_rollups()) == []
    kept.close()


def test_numbers_beyond_reason_do_not_stop_the_record(tmp_path: Path) -> None:
    """A damaged or hostile ring: sums that no database holds are cut off, and what follows is still written."""
    ring = Ring(str(tmp_path / "process-0.ring"), process=0, start_ns=0)
    for step in range(4):
        ring.write(pack_step(1, step, (1 << 62) + step, (1 << 63) - 1, (1 << 31) - 1, ((1 << 62), 1, 1, 1)))
    ring.write(pack_step(1, 9, SECOND, 1000, 1, (1, 1, 1, 1)))
    info = RunInfo("id", "n", ("c",), "s", "/", None, 0.0, 0, "", False)
    drain = Drain(tmp_path, info, pytest.fail)
    drain.flush()
    drain.close()
    kept = Kept(tmp_path)
    assert sum(rollup.steps for rollup in kept.rollups(60)) == kept.rings["process-0.ring"].steps >= 1
    kept.close()


def test_minutes_of_devices_that_are_deleted_are_left_as_one_sum(tmp_path: Path) -> None:
    """A device's figures over five days under a bound of 256 KiB: the first days are sums, the last are minutes."""
    history, batch, minutes = History(tmp_path, {}, 1 << 18), Batch(), 5 * 24 * 60
    for minute in range(minutes):
        heat = 91.0 if minute == 7 else 20.0 if minute == 9 else 60.0
        for second in (0, 30):
            batch.device((60 * minute + second) * SECOND, 0, "temperature_c", heat)
        if minute % 100 == 99:
            history.write(batch)
            batch = Batch()
    history.write(batch)
    history.close()
    kept = Kept(tmp_path)
    left = list(kept.device_rollups())
    (whole,) = (row for row in kept.device_rollups(BEFORE_S) if row[0] == BEFORE_S)
    kept.close()
    assert 0 < len(left) < minutes
    assert min(row[0] for row in left) >= 60 * (minutes - len(left))
    assert whole[1:3] == (0, "temperature_c")
    assert whole[3] + sum(row[3] for row in left) == 2 * minutes
    assert whole[4] + sum(row[4] for row in left) == 2 * (60 * (minutes - 2) + 91 + 20)
    assert whole[5:] == (20.0, 91.0)
    assert (tmp_path / "history.sqlite").stat().st_size < 3 << 18
