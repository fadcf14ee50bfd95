"""After a supervisor is killed, the training goes on, displays stay correct, and another supervisor takes over."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpmon.run import proc
from dpmon.store.store_opening import open_store
from dpmon.supervise.start_supervisor import ensure_supervisor
from support.ring_writers import WRITE_RUN, calls_and_steps_in, calls_and_steps_of_writer, has_written
from support.run_harness import (
    Dpmon,
    find_new_supervisor,
    wait_for,
    write_slow_script,
)

pytestmark = pytest.mark.slow

PR_SET_CHILD_SUBREAPER = 36


def gone(info: dict[str, Any]) -> bool:
    return not proc.is_alive(info["command_pid"], info["command_started"])


@pytest.fixture
def reaper() -> Iterator[None]:
    """This process adopts orphans and reaps them like an init process, so their status is lost."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reaped(info: dict[str, Any]) -> bool:
    """Reap the command if it has ended; return whether it has."""
    try:
        return os.waitpid(info["command_pid"], os.WNOHANG)[0] != 0
    except ChildProcessError:  # a thread of the killed supervisor is still at its end
        return False


def listed_state(dpmon: Dpmon) -> str:
    """Return the state of the only run in `dpmon ls`."""
    (listed,) = map(json.loads, dpmon.run("ls", "--json").text.splitlines())
    return str(listed["state"])


def test_attach_starts_a_new_supervisor_and_no_record_is_doubled(dpmon: Dpmon) -> None:
    dpmon.run("--detach", *WRITE_RUN, 9000, 1500, 8, 4000)
    wait_for(lambda: has_written(dpmon, 2000))
    wait_for(lambda: any(r["kind"] == "host" for r in dpmon.records()))
    old = dpmon.kill_supervisor()
    killed_at = time.time() - old["started_unix"]
    assert listed_state(dpmon) == "unsupervised"
    screen = dpmon.start("attach")
    new = wait_for(lambda: find_new_supervisor(dpmon, old), what="a new supervisor")
    assert proc.is_alive(new["supervisor_pid"], new["supervisor_started"])
    assert (new["command_pid"], new["command_started"]) == (old["command_pid"], old["command_started"])
    # It waits for `go`. On a busy machine, it waits so long that it counts as stalled.
    assert listed_state(dpmon) in ("training", "waiting", "quiet", "stalled")
    dpmon.go()
    _, err = screen.communicate(timeout=100)
    how = dpmon.exit()
    assert how["status"] == 0 or how["unknown"], how
    assert screen.returncode == (2 if how["status"] is None else 0), err
    wait_for(lambda: not proc.is_alive(new["supervisor_pid"], new["supervisor_started"]))
    records = dpmon.records()
    found = calls_and_steps_in(records)
    assert found == calls_and_steps_of_writer(len(found))
    assert len(found) in (8998, 9000), "the step that was open may be missing"
    assert next(r for r in records if r["kind"] == "dropped")["count"] == 0
    assert (
        next(r["t_s"] for r in records if r["kind"] == "host") < killed_at
    )  # its ring was deleted, but not its samples
    assert any("no device samples in between" in r["text"] for r in records if r["kind"] == "warning")


@pytest.mark.parametrize("end", ["sys.exit(5)", "os.kill(os.getpid(), 9)"])
def test_the_status_of_an_adopted_command_is_true_or_unknown(dpmon: Dpmon, end: str) -> None:
    dpmon.waiting(f"print('end of the training', flush=True)\n{end}")
    dpmon.run("--detach", "script.py")
    dpmon.begun()
    old = dpmon.kill_supervisor()
    screen = dpmon.start("attach")
    wait_for(lambda: find_new_supervisor(dpmon, old))
    dpmon.go()
    out, _ = screen.communicate(timeout=100)
    assert out == b"end of the training\n"
    how = dpmon.exit()
    known = (5, None) if "exit" in end else (137, "SIGKILL")
    assert (how["status"], how["signal"]) == known or (how["status"] is None and "killed before" in how["unknown"])
    # Known since Linux 6.15; before, only to a process that reads it just before the command is reaped.
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert how["status"] is not None or release < (6, 15)


@pytest.mark.usefixtures("reaper")
def test_a_run_that_ended_without_a_supervisor(dpmon: Dpmon) -> None:
    dpmon.run("--detach", *WRITE_RUN, 4000, 4000, 8, 3999)
    wait_for(lambda: has_written(dpmon, 100))
    info = dpmon.kill_supervisor()
    dpmon.go()
    wait_for(lambda: reaped(info))
    assert listed_state(dpmon) == "lost"
    last_line = (dpmon.last() / "output.log").stat().st_mtime - info["started_unix"]
    result = dpmon.run("attach")
    assert result.status == 2
    assert ": the command's supervisor was killed before the command ended" in result.errors
    how = dpmon.exit()
    assert how["status"] is None
    assert how["drained"]
    assert listed_state(dpmon) == "ended"
    records = dpmon.records()
    found = calls_and_steps_in(records)
    assert found == calls_and_steps_of_writer(len(found))
    assert len(found) in (3998, 4000), "the step that was open may be missing"
    assert records[-1]["absent"]["status"] == how["unknown"]
    assert records[-1]["t_s"] == pytest.approx(last_line, abs=0.05)
    before = (dpmon.last() / "exit.json").read_bytes()
    dpmon.run("attach")
    assert (dpmon.last() / "exit.json").read_bytes() == before


def test_stop_finishes_the_record_of_a_run_without_supervisor(dpmon: Dpmon) -> None:
    dpmon.script("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(100)\n")
    dpmon.run("--detach", "script.py")
    dpmon.begun()
    info = dpmon.kill_supervisor()
    result = dpmon.stop("last")
    assert result.status == 0, result.errors
    assert "stopped by SIGINT" in result.text
    assert gone(info)
    assert dpmon.exit()["drained"]


def test_supervisors_killed_one_after_the_other(dpmon: Dpmon) -> None:
    """The foreground starts one; a further one would probably be killed as well."""
    write_slow_script(dpmon, 6)
    process = dpmon.start("script.py")
    dpmon.begun()
    info = dpmon.info()
    os.kill(info["supervisor_pid"], signal.SIGKILL)
    info = wait_for(lambda: find_new_supervisor(dpmon, info), what="a new supervisor")
    os.kill(info["supervisor_pid"], signal.SIGKILL)
    assert process.stderr is not None
    assert any(b"nothing is recorded until dpmon attach" in line for line in process.stderr)
    dpmon.go()
    process.communicate(timeout=100)
    assert process.returncode == 6
    assert dpmon.exit()["status"] == 6


def restart(directory: Path) -> None:
    """Let the run be one of an earlier boot of this machine."""
    path = directory / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))


def test_a_power_cut_is_the_end_of_the_run(dpmon: Dpmon) -> None:
    """The end is at the newest record, although the script has printed nothing for a while."""
    dpmon.waiting(begin="print('up', flush=True)")
    dpmon.run("--detach", "script.py")
    info, directory = dpmon.info(), dpmon.last()

    def newest_s() -> float:
        with open_store(directory) as store:
            ((found,),) = store.query("SELECT max(t_ns) FROM events WHERE kind = 'host'")
        return (found or 0) / 1e9

    dpmon.begun()
    printed_s = (directory / "output.log").lstat().st_mtime - info["started_unix"]
    wait_for(lambda: newest_s() > printed_s + 1, what="samples")
    dpmon.kill_supervisor()
    os.killpg(info["command_pid"], signal.SIGKILL)
    wait_for(lambda: gone(info), what="the end")
    restart(directory)
    dpmon.run("attach")
    how = dpmon.exit()
    assert "restarted" in how["unknown"]
    assert how["seconds"] == pytest.approx(newest_s())
    assert how["end_ns"] == info["start_ns"] + round(how["seconds"] * 1e9)


def test_a_run_of_another_machine_is_left_to_it(dpmon: Dpmon) -> None:
    """Two nodes share a home directory on a file system without locks between them."""
    dpmon.script("pass\n")
    dpmon.run("script.py")
    old = dpmon.info()
    wait_for(lambda: not proc.is_alive(old["supervisor_pid"], old["supervisor_started"]))
    (dpmon.last() / "exit.json").unlink()
    info = old | {"host": "another-node", "boot_id": "another-boot", "command_pid": 1, "supervisor_pid": 1}
    (dpmon.last() / "run.json").write_text(json.dumps(info))
    assert listed_state(dpmon) == "elsewhere"
    stopped = dpmon.run("stop", "last")
    assert stopped.status == 2
    assert "another node" in stopped.errors
    attached = dpmon.run("attach")
    assert attached.status == 2
    assert "another node" in attached.errors
    assert "on another node" in dpmon.run("report").text.splitlines()[0]
    ensure_supervisor(dpmon.last())
    assert not (dpmon.last() / "exit.json").exists()
    assert json.loads((dpmon.last() / "run.json").read_text()) == info
