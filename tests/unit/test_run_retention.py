"""Old runs: the oldest go when there are too many or too much; running, kept and current ones never."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.run import proc
from dpmon.run.lock import take_lock
from dpmon.run.retention import Limits, is_kept, keep, limits, prune_runs, remove
from dpmon.run.rundir import RunError, RunInfo, create_run, list_runs, load_info


def a_run(number: int, size: int = 0, pid: int | None = None) -> Path:
    info = RunInfo("", f"n{number}", ("c",), "s", "/", None, 1000.0 + number, 0, proc.boot_id(), False)
    info = RunInfo(**{**info.__dict__, "command_pid": pid, "command_started": pid and proc.started(pid)})
    directory, _ = create_run(info)
    (directory / "output.log").write_bytes(b"x" * size)
    (directory / "exit.json").write_text("{}")
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
def test_the_oldest_go_when_there_are_too_many() -> None:
    runs = [a_run(number) for number in range(8)]
    assert prune_runs(Limits(5, 1 << 40), runs[-1]) == runs[:3]
    assert names() == ["n3", "n4", "n5", "n6", "n7"]
    assert prune_runs(Limits(5, 1 << 40), runs[-1]) == []


@pytest.mark.usefixtures("state")
def test_the_oldest_go_when_they_take_too_much() -> None:
    runs = [a_run(number, size=100_000) for number in range(6)]
    prune_runs(Limits(100, 350_000), runs[-1])
    assert names() == ["n3", "n4", "n5"]


@pytest.mark.usefixtures("state")
def test_running_kept_and_current_ones_stay(sleeper: int) -> None:
    current = a_run(0)
    a_run(1, pid=sleeper)
    kept, started = a_run(2), a_run(3)
    keep(kept)
    lock = take_lock(started)
    assert lock is not None
    gone = a_run(4)
    assert prune_runs(Limits(0, 0), current) == [gone]
    os.close(lock)
    keep(kept, False)
    assert prune_runs(Limits(0, 0), current) == [kept, started]
    assert names() == ["n0", "n1"]


@pytest.mark.usefixtures("state")
def test_what_runs_is_not_removed_by_hand_either(sleeper: int) -> None:
    directory = a_run(1, pid=sleeper)
    with pytest.raises(RunError, match="is running"):
        remove(directory, load_info(directory))
    other = a_run(2)
    keep(other)
    assert is_kept(other)
    remove(other, load_info(other))
    assert names() == ["n1"]


@pytest.mark.usefixtures("state")
def test_a_link_in_a_run_leads_nowhere(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("data")
    old, new = a_run(1), a_run(2)
    (old / "link").symlink_to(precious)
    (new.parent / ".gone-link").symlink_to(precious)
    (new.parent / ".gone-half").mkdir()
    assert prune_runs(Limits(1, 1 << 40), new) == [old]
    assert (precious / "file").read_text() == "data"
    assert not (new.parent / ".gone-half").exists()


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
    assert limits(environ) == expected
