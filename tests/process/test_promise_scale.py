"""P5, P6, P8, P16: floods, kills at any instant, many attaches, long runs; `DPMON_LONG=1` for the full figures."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from dpmon.run import lifecycle, proc
from dpmon.run.run_directory import RunInfo, write_info
from dpmon.run.run_reader import RunReader
from dpmon.store.ring_drain import RingDrain
from dpmon.store.rings import read_rings
from dpmon.store.store_opening import open_store
from dpmon.store.tally_tables import read_tallies
from support.history_builders import snapshot_of_directory
from support.record_builders import step_row
from support.ring_writers import (
    SPANS_PER_STEP,
    TESTS,
    WRITE_RUN,
    WRITE_RUN_AND_STAY,
    RowRing,
    calls_and_steps_in,
    calls_and_steps_of_writer,
    has_written,
    use_row_rings,
)
from support.run_harness import Dpmon, report_measured, scaled_size, wait_for

pytestmark = pytest.mark.slow

MIB = 1 << 20
SECOND = 1_000_000_000
LINES = """\
import sys, threading
sys.path.insert(0, {tests!r})
from support.ring_writers import write_run
def chat():
    for start in range(0, {lines}, 1000):
        print(*(f"line {{n}} of the script's own output" for n in range(start, start + 1000)), sep="\\n")
thread = threading.Thread(target=chat)
thread.start()
write_run({records}, {rate}, 2)
thread.join()
"""


def resident(pid: int, what: str = "VmHWM") -> int:
    """Return the resident bytes of a process (VmRSS), or their maximum (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    return 0


def test_promise_5_floods(dpmon: Dpmon) -> None:
    records, lines = scaled_size(40_000, 6_000_000), scaled_size(20_000, 6_000_000)
    dpmon.script(LINES.format(tests=str(TESTS), records=records, rate=scaled_size(0, 100_000), lines=lines))
    dpmon.run("--detach", "script.py")
    info, peak = dpmon.info(), 0
    while proc.is_alive(info["supervisor_pid"], info["supervisor_started"]):
        with contextlib.suppress(OSError):
            peak = max(peak, resident(info["supervisor_pid"]))
        time.sleep(0.05)
    assert dpmon.exit()["status"] == 0
    output = (dpmon.last() / "output.log").read_text()
    assert output.count("of the script's own output") == lines
    # Two threads print, so text of one may be inside a line of the other.
    (sent,) = map(int, re.findall(r"sent ([0-9]+)", output))
    with open_store(dpmon.last()) as store:
        (row,) = (ring for ring in read_rings(store.connection).values() if ring.process == 0)
        tallied = read_tallies(store, process=0).values()
    summed = sum(tally.steps for tally in tallied), sum(tally.calls for tally in tallied)
    assert row.position == sent == records // 2 * SPANS_PER_STEP
    assert summed[0] == row.steps
    assert summed[1] <= row.calls
    whole = (sent - row.missed) // SPANS_PER_STEP
    assert 0.95 * whole <= row.steps <= row.calls <= 1.05 * whole  # what was overwritten may end within a step
    assert peak < 90 * MIB
    seen = row.steps + row.calls
    report_measured(
        "P5", f"{sent:,} spans sent, {seen:,} calls and steps seen, {row.missed:,} spans dropped; {peak >> 20} MiB"
    )


def test_promise_6_killed_at_any_instant(dpmon: Dpmon) -> None:
    chance, times = random.Random(6), scaled_size(3, 200)
    for _ in range(times):
        process = dpmon.start(*WRITE_RUN_AND_STAY)
        info = dpmon.info()
        count = chance.randrange(1, 3000)
        wait_for(lambda count=count: has_written(dpmon, count))
        os.kill(info["command_pid"], signal.SIGKILL)
        assert process.wait(100) == 137
        records = dpmon.records()
        found = calls_and_steps_in(records)
        assert found == calls_and_steps_of_writer(len(found))
        assert next(r["count"] for r in records if r["kind"] == "dropped") == 0
        dpmon.run("rm", "last")
    report_measured("P6", f"killed at {times} random instants: every finished record read, none twice")


def newest_step(directory: Path) -> int:
    """Return the step that a screen of this run shows."""
    process = snapshot_of_directory(directory).representative
    return process.last_step.step if process is not None and process.last_step is not None else 0


def test_promise_8_attach_and_leave(dpmon: Dpmon) -> None:
    """Many screens, several in parallel: each shows everything, and neither descriptors nor memory grow."""
    cycles = scaled_size(9, 1000)
    dpmon.run("--detach", *WRITE_RUN, 12_000, 6000, 2)
    wait_for(lambda: has_written(dpmon, 5000))
    directory = dpmon.last()
    wait_for(lambda: newest_step(directory) >= 1500)
    with ThreadPoolExecutor(10) as at_once:
        seen = list(at_once.map(newest_step, [directory] * 10))
    assert min(seen) >= 1500
    assert dpmon.exit()["status"] == 0
    fds, slowest, memory = 0, 0.0, 0
    for cycle in range(cycles):
        began = time.monotonic()
        reader = RunReader(directory)
        newest = newest_step(directory)
        assert reader.exit_info() is not None
        reader.close()
        slowest = max(slowest, time.monotonic() - began)
        assert newest == 6000
        if cycle == cycles // 3:
            fds, memory = len(os.listdir("/proc/self/fd")), resident(os.getpid(), "VmRSS")
    grown = resident(os.getpid(), "VmRSS") - memory
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert grown < 16 * MIB
    screens = [dpmon.start("attach") for _ in range(3)]
    assert [screen.wait(100) for screen in screens] == [0, 0, 0]
    report_measured("P8", f"{cycles} times: complete after {slowest:.2f} s at most, memory {grown / MIB:+.1f} MiB")


def test_promise_16_a_long_run_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated day with a step and samples of eight devices per second, drained continuously."""
    seconds, limit = scaled_size(2400, 86_400), scaled_size(1, 48) * MIB
    use_row_rings(monkeypatch)
    ring = RowRing(tmp_path / "process-0.ring", 100)
    info = RunInfo("id", "n", ("c",), "s", "/", None, 0.0, 0, "", False)
    drain = RingDrain(tmp_path, info, limit)
    drain.warn = pytest.fail  # type: ignore[method-assign, assignment]
    memory = 0
    for second in range(1, seconds + 1):
        ring.write(step_row("dp", second, second * SECOND, SECOND // 2 + second, 8, (1000, 50_000, 40_000, 5000)))
        for index in range(8):
            sample = {
                "t_s": float(second),
                "index": index,
                "util_pct": second % 100,
                "power_w": 300.5,
                "uuid": "u" * 40,
            }
            drain.emit("device", sample)
        if second % 20 == 0:
            drain.flush()
        if second == seconds // 3:
            memory = resident(os.getpid(), "VmRSS")
    drain.flush()
    drain.close()
    grown = resident(os.getpid(), "VmRSS") - memory
    with closing(sqlite3.connect(tmp_path / "history.sqlite")) as db:
        query = "SELECT sum(count) FROM device_rollups WHERE device = 7 AND name = 'util_pct'"
        assert db.execute(query).fetchone() == (seconds,)
        assert db.execute("SELECT value > 0 FROM meta WHERE key = 'pruned'").fetchone() == (1,)
    write_info(tmp_path, info)
    with open_store(tmp_path) as store:
        assert sum(tally.steps for tally in read_tallies(store, sketches=False).values()) == seconds
    on_disk = (tmp_path / "history.sqlite").stat().st_size
    assert on_disk < 1.6 * limit
    assert grown < 16 * MIB
    report_measured("P16", f"{seconds:,} s: {on_disk / MIB:.1f} MiB on the disk, memory {grown / MIB:+.1f} MiB")


def test_promise_16_a_clock_that_is_set_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    info = RunInfo("id", "n", ("c",), "s", "/", None, time.time(), time.monotonic_ns(), "", False)
    real = time.time()
    for hours in (-1, 1):
        monkeypatch.setattr(time, "time", lambda hours=hours: real + hours * 3600)
        assert 0 <= lifecycle.build_exit_info(info, 0, "x").seconds < 600
