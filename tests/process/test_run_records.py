"""No record is silently lost or doubled: under floods and kills, or with a full, missing or damaged history."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import writer
from running import Dpmon, until_unsupervised, wait_for

from dpmon.record.spans import Kind
from dpmon.run import proc
from dpmon.run.rundir import load_info
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError
from dpmon.store.drain import Drain
from dpmon.store.quantiles import bucket, middle
from dpmon.text.quantities import compact, duration

pytestmark = pytest.mark.slow

WRITER = Path(__file__).resolve().parent.parent / "writer.py"


def of_training(records: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return kind and number of every call and step in order."""
    return [(r["kind"], r["step"]) for r in records if r["kind"] in ("call", "step")]


def tailed(dpmon: Dpmon, count: int) -> bool:
    """Return whether the writer has written `count` calls and steps, including overwritten ones."""
    path = dpmon.last() / "process-0.ring"
    if not path.exists():
        return False
    try:
        reader = SpanReader(str(path))
    except RingError:  # being created
        return False
    begun = 0
    while spans := reader.read(time.monotonic_ns()):
        begun = max(begun, *(span.inputs for span in spans if span.kind == Kind.FETCH), 0)
    reader.close()
    return 2 * (begun - 1) >= count


def expected(count: int) -> list[tuple[str, int]]:
    """Return the records of the writer: a call and a step for every step."""
    return [("step" if n % 2 else "call", n // 2 + 1) for n in range(count)]


def test_every_record_is_exported_once_and_in_order(dpmon: Dpmon) -> None:
    assert dpmon.run(WRITER, 6000, 6000).status == 0
    records = dpmon.records()
    assert of_training(records) == expected(6000)
    assert records[-2:-1] == [{"kind": "dropped", "count": 0, "pruned": 0}]
    assert (records[-1]["kind"], records[-1]["status"]) == ("exit", 0)
    assert Counter(r["kind"] for r in records)["exit"] == 1


STAYS = WRITER, 16_000, 6000, 8, 15_999
"""Writes no more than its ring can hold, so that no record is overwritten, and stays until it is killed."""
FLOOD = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import writer
supervisor = None
while supervisor is None:  # it starts this script first
    supervisor = json.loads((Path(os.environ["DPMON_RUN"]) / "run.json").read_text())["supervisor_pid"]
writer.main({total}, 0, 2, lambda number: number == 20_000 and os.kill(supervisor, signal.SIGSTOP))
"""


def test_a_flood_is_seen_or_counted(dpmon: Dpmon) -> None:
    """The writer writes as fast as it can, and stops the supervisor after a part of the records."""
    total = 120_000
    dpmon.run("--detach", dpmon.script(FLOOD.format(tests=str(WRITER.parent), total=total)))
    info = dpmon.info()
    wait_for(lambda: not proc.alive(info["command_pid"], info["command_started"]))
    os.kill(info["supervisor_pid"], signal.SIGCONT)
    assert dpmon.exit()["status"] == 0
    sent = int((dpmon.last() / "output.log").read_text().removeprefix("sent "))
    db = sqlite3.connect(dpmon.last() / "history.sqlite")
    row = db.execute("SELECT sequence, missed, calls, steps FROM rings WHERE process = 0").fetchone()
    sequence, missed, calls, steps = row
    kept = db.execute("SELECT (SELECT count(*) FROM calls), (SELECT count(*) FROM steps)").fetchone()
    db.close()
    assert sequence == sent
    assert (calls, steps) == kept
    assert sent == total // 2 * writer.SPANS
    whole = (sent - missed) // writer.SPANS
    assert 0.95 * whole < steps <= calls <= 1.05 * whole  # what was overwritten may begin and end within a step
    assert missed > 10_000
    records = dpmon.records()
    dropped = next(r["count"] for r in records if r["kind"] == "dropped")
    exported = of_training(records)
    assert len(exported) == calls + steps
    assert dropped == missed
    assert exported == sorted(exported, key=lambda r: (r[1], r[0]))
    numbers = [r["call"] for r in records if r["kind"] == "call"]
    assert numbers == list(range(1, calls + 1))
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, steps + 1))


def test_export_while_the_run_goes_on(dpmon: Dpmon) -> None:
    process = dpmon.start(WRITER, 200_000, 3000)
    lengths = []
    for wanted in (500, 3500):

        def enough(wanted: int = wanted) -> list[tuple[str, int]] | None:
            found = of_training(dpmon.records()) if dpmon.runs() and (dpmon.last() / "run.json").exists() else []
            return found if len(found) >= wanted else None

        found = wait_for(enough)
        assert found == expected(len(found))
        lengths.append(len(found))
    assert lengths[0] < lengths[1]
    process.send_signal(signal.SIGTERM)
    process.wait(100)


@pytest.mark.parametrize("count", [10, 4300, 9800])
def test_a_supervisor_killed_at_any_moment_loses_and_doubles_nothing(dpmon: Dpmon, count: int) -> None:
    """Writer and supervisor are killed together while the supervisor works."""
    process = dpmon.start(*STAYS)
    info = dpmon.info()
    wait_for(lambda: tailed(dpmon, count))
    os.kill(info["supervisor_pid"], signal.SIGKILL)
    os.kill(info["command_pid"], signal.SIGKILL)
    assert process.wait(100) == 137
    assert dpmon.exit()["signal"] == "SIGKILL"
    found = of_training(dpmon.records())
    assert found == expected(len(found))
    assert len(found) >= count


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run, to be copied."""
    place = tmp_path_factory.mktemp("recorded")
    runner = Dpmon(place / "state", place)
    assert runner.run(WRITER, 2000, 10_000).status == 0
    info = runner.info()
    until_unsupervised(info)
    return runner.last()


@pytest.mark.parametrize("damage", ["noise", "link"])
def test_a_damaged_history_loses_only_its_own_rows(dpmon: Dpmon, recorded: Path, damage: str, tmp_path: Path) -> None:
    shutil.copytree(recorded, dpmon.state / "dpmon" / "runs" / recorded.name)
    path = dpmon.last() / "history.sqlite"
    if damage == "noise":
        path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    result = dpmon.run("export", "last")
    assert result.status == 0, result.errors
    records = [json.loads(line) for line in result.out.splitlines()]
    assert records[-1] == {**records[-1], "kind": "exit", "status": 0}
    if damage == "link":
        assert of_training(records) == expected(2000)
    else:
        assert any(r["kind"] == "warning" and "history" in r["text"] for r in records)
    assert dpmon.run("ls").status == 0
    assert dpmon.run("attach").status == 0


def test_the_history_is_bounded_and_says_what_it_left_out(dpmon: Dpmon, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small bound; this process is supervisor and training alternately."""
    dpmon.run("--detach", "sleep", 60)
    dpmon.info()
    directory = dpmon.last()
    os.kill(dpmon.info()["supervisor_pid"], signal.SIGKILL)
    wait_for(lambda: not proc.alive(dpmon.info()["supervisor_pid"], None))
    info = load_info(directory)
    monkeypatch.setenv("DPMON_RUN", str(directory))
    monkeypatch.setenv("DPMON_START_NS", str(info.start_ns))
    for path in directory.glob("history.sqlite*"):
        path.unlink()
    limit = 2 << 20
    drain = Drain(directory, info, limit)
    # Drained after a number of records, not after a time, so that the result does not depend on the load.
    writer.main(40_000, 0, 8, lambda number: number % 400 or drain.drain(number / 40))
    drain.flush()
    drain.close()
    monkeypatch.undo()
    size = (directory / "history.sqlite").stat().st_size
    assert size < limit * 1.6
    records = dpmon.records()
    found = of_training(records)
    dropped = next(r for r in records if r["kind"] == "dropped")
    assert found == expected(40_000)[-len(found) :]
    assert dropped["pruned"] + len(found) + dropped["count"] >= 40_000
    assert dropped["pruned"] > 10_000
    assert any(r["kind"] == "process" for r in records)
    summary = dpmon.run("stop", "last")
    assert summary.status == 0


def test_the_schema_can_be_queried_by_people(dpmon: Dpmon) -> None:
    dpmon.run(WRITER, 200, 10_000, 3)
    with sqlite3.connect(f"file:{dpmon.last() / 'history.sqlite'}?mode=ro", uri=True) as db:
        query = "SELECT mode, count(*) FROM calls GROUP BY mode"
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


def sketched(ns: int) -> list[str]:
    """A duration in words, as a sketch has it: at most 0.4 % off."""
    assert middle(bucket(ns)) == pytest.approx(ns, rel=1 / 256)
    return duration(middle(bucket(ns))).split()


def test_the_summary_counts_every_step(dpmon: Dpmon) -> None:
    result = dpmon.run(WRITER, 2000, 20_000, 3)
    lines = result.errors.splitlines()
    head = next(line for line in lines if "dp (virtual replicas)" in line)
    with sqlite3.connect(f"file:{dpmon.last() / 'history.sqlite'}?mode=ro", uri=True) as db:
        steps = db.execute("SELECT start_ns, wall_ns, data_ns, backward_ns FROM steps ORDER BY id").fetchall()
    db.close()
    elapsed = steps[-1][0] + steps[-1][1] - steps[0][0]
    speed = f"{compact(1000 * 24e9 / elapsed)} samples/s"
    assert head == f"dpmon: dp (virtual replicas): 1,000 steps, 1,000 calls, {speed}"
    for place, name in ((1, "step"), (2, "data"), (3, "backward")):
        took = sorted(step[place] for step in steps)
        line = next(line for line in lines if line.split()[1] == name)
        assert line.split()[2:] in [
            ["median", *sketched(took[half]), "p95", *sketched(took[most])]
            for half in (499, 500)
            for most in (949, 950)
        ]
