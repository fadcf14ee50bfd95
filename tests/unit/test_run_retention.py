"""The oldest runs are deleted when there are too many or they are too large, but never live, kept or current ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpmon.run import proc, retention
from dpmon.run.lifecycle import SILENT_S, build_exit_info, take_lock
from dpmon.run.retention import Limits, delete_run, load_limits, prune_runs, set_protected
from dpmon.run.run_directory import RunError, RunInfo, load_info, write_info
from dpmon.run.run_registry import create_run, list_runs


def a_run(number: int, size: int = 0, pid: int | None = None, started: float | None = None) -> Path:
    when = 1000.0 + number if started is None else started
    info = RunInfo("", f"n{number}", ("c",), "s", "/", None, when, 0, proc.boot_id(), False)
    info = RunInfo(**{**info.__dict__, "command_pid": pid, "command_started": pid and proc.start_time_s(pid)})
    directory, _ = create_run(info)
    (directory / "output.log").write_bytes(b"x" * size)
    write_info(directory, build_exit_info(info, 0, "supervisor"))
    return directory


def names() -> list[str]:
    return [info.name for _, info in list_runs()]


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.usefixtures("state")
def test_the_oldest_runs_are_deleted_when_there_are_too_many() -> None:
    runs = [a_run(number) for number in range(8)]
    assert prune_runs(Limits(5, 1 << 40), runs[-1]) == runs[:3]
    assert names() == ["n3", "n4", "n5", "n6", "n7"]
    assert prune_runs(Limits(5, 1 << 40), runs[-1]) == []


@pytest.mark.usefixtures("state")
def test_the_oldest_runs_are_deleted_when_they_take_too_much_room() -> None:
    runs = [a_run(number, size=100_000) for number in range(12)]
    prune_runs(Limits(100, 850_000), runs[-1])
    assert names() == [f"n{number}" for number in range(5, 12)]


@pytest.mark.usefixtures("state")
def test_running_kept_and_current_ones_stay(sleeper: int) -> None:
    current = a_run(0)
    a_run(1, pid=sleeper)
    kept, started = a_run(2), a_run(3)
    set_protected(kept)
    lock = take_lock(started)
    assert lock is not None
    gone = a_run(4)
    assert prune_runs(Limits(0, 0), current) == [gone]
    os.close(lock)
    set_protected(kept, False)
    assert prune_runs(Limits(0, 0), current) == [kept, started]
    assert names() == ["n0", "n1"]


@pytest.mark.usefixtures("state")
def test_a_run_that_is_about_to_start_stays() -> None:
    current, young = a_run(0), a_run(1, started=time.time())
    (young / "exit.json").unlink()  # made a moment ago: no supervisor yet, and no lock
    assert prune_runs(Limits(0, 0), current) == []
    with pytest.raises(RunError, match="is in use"):
        delete_run(young, load_info(young))


@pytest.mark.usefixtures("state")
def test_a_run_is_removed_once_its_supervisor_has_finished(monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    """After the end is recorded, the supervisor still stops its threads and deletes old runs."""
    run, active = a_run(0), a_run(1)
    for directory in (run, active):
        write_info(
            directory,
            replace(load_info(directory), supervisor_pid=sleeper, supervisor_started=proc.start_time_s(sleeper)),
        )
    monkeypatch.setattr(retention, "_MAX_FINISH_S", 0.0)
    with pytest.raises(RunError, match="is running"):
        delete_run(active, load_info(active))
    monkeypatch.setattr(retention, "_MAX_FINISH_S", 60.0)
    waits = []

    def leaves(seconds: float) -> None:
        waits.append(seconds)
        os.kill(sleeper, signal.SIGKILL)

    monkeypatch.setattr(time, "sleep", leaves)
    delete_run(run, load_info(run))
    assert waits
    assert not run.exists()


@pytest.mark.usefixtures("state")
def test_a_mirror_that_goes_on_is_not_to_be_stopped_with_its_runs(
    monkeypatch: pytest.MonkeyPatch, sleeper: int
) -> None:
    """`dpmon stop` would end the training on all machines."""
    directory = a_run(1)
    started = proc.start_time_s(sleeper)
    info = replace(load_info(directory), nodes=("gpu-1",), supervisor_pid=sleeper, supervisor_started=started)
    write_info(directory, info)
    monkeypatch.setattr(retention, "_MAX_FINISH_S", 0.0)
    with pytest.raises(RunError, match=f"mirrors other runs; kill {sleeper} ends the mirror, not the training"):
        delete_run(directory, info)
    assert directory.is_dir()


@pytest.mark.usefixtures("state")
def test_a_run_of_another_machine_stays() -> None:
    current, other = a_run(0), a_run(1)
    ended = (other / "exit.json").read_text()
    (other / "exit.json").unlink()
    write_info(other, replace(load_info(other), host="elsewhere", boot_id="another", command_pid=1, supervisor_pid=1))
    assert prune_runs(Limits(0, 0), current) == []
    with pytest.raises(RunError, match="on another node"):
        delete_run(other, load_info(other))
    (other / "exit.json").write_text(ended)
    assert prune_runs(Limits(0, 0), current) == [other]


@pytest.mark.usefixtures("state")
def test_a_run_that_another_machine_left_days_ago_is_deleted() -> None:
    current, other = a_run(0), a_run(1)
    (other / "exit.json").unlink()
    write_info(other, replace(load_info(other), host="elsewhere", boot_id="another", command_pid=1, supervisor_pid=1))
    long_ago = time.time() - 2 * SILENT_S
    for path in other.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert prune_runs(Limits(0, 0), current) == [other]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Limits()),
        ({"DPMON_KEEP_RUNS": "7", "DPMON_KEEP_BYTES": "500 MiB"}, Limits(7, 500 << 20)),
        ({"DPMON_KEEP_BYTES": "2 GiB"}, Limits(bytes=2 << 30)),
        ({"DPMON_KEEP_RUNS": "-1", "DPMON_KEEP_BYTES": "much"}, Limits()),
        ({"DPMON_KEEP_RUNS": "0", "DPMON_KEEP_BYTES": "0"}, Limits(0, 0)),
    ],
)
def test_limits(environ: dict[str, str], expected: Limits) -> None:
    assert load_limits(environ) == expected
