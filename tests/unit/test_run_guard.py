"""A supervisor that is killed between the start of the command and the moment in which it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import wait_for

from dpmon.run import guard as guards
from dpmon.run import proc
from dpmon.run.guard import Guard, Successors
from dpmon.run.rundir import RunInfo, create_run, load_exit
from dpmon.run.start import Started

COMMAND = """
import os, pathlib, time
def until(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.005)
until("session")
os.setsid()
pathlib.Path("made").touch()
until("end")
raise SystemExit(3)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have left behind in this process is no child of a guard's."""
    others, everything = set(proc.every_process()), proc.every_process
    monkeypatch.setattr(
        proc, "every_process", lambda: {pid: each for pid, each in everything().items() if pid not in others}
    )


@pytest.fixture
def run(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Guard, Path]]:
    """A guard whose supervisor was killed before it wrote anything; no other one is started."""
    monkeypatch.setattr(Successors, "start_if_needed", lambda *_: None)
    info = RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True)
    directory, _ = create_run(info)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        supervisor.kill()
        supervisor.wait()
        yield Guard(directory, Started(supervisor, -1)), directory


def test_a_command_that_was_only_forked_is_waited_for(run: tuple[Guard, Path], tmp_path: Path) -> None:
    guard, directory = run
    command = subprocess.Popen([sys.executable, "-c", COMMAND], cwd=tmp_path)
    try:
        guard.look()
        assert (guard.outcome, load_exit(directory)) == (None, None)
        (tmp_path / "session").touch()
        wait_for((tmp_path / "made").exists)
        guard.look()
        assert guard.command_pid() == command.pid
        assert guard.outcome is None
        (tmp_path / "end").touch()
        wait_for(lambda: guard.look() or guard.outcome)
        command.returncode = 3  # the guard has reaped it
    finally:
        command.kill()
        command.wait()
    assert guard.outcome is not None
    assert (guard.outcome.status, guard.outcome.by) == (3, "foreground")


FORKS = """
import os
pid = os.fork()
if not pid:
    input()
    os._exit(0)
os.write(1, b"%d" % pid)
os.waitpid(pid, 0)
"""


def test_a_child_that_has_not_made_its_session_is_waited_for_however_long(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Successors, "start_if_needed", lambda *_: None)
    monkeypatch.setattr(guards, "UNSTARTED_S", 0.0)
    directory, _ = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True))
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdin is not None
        forked = int(os.read(supervisor.stdout.fileno(), 20))
        supervisor.kill()
        supervisor.wait()
        guard = Guard(directory, Started(supervisor, -1))
        guard.look()
        guard.look()
        assert (guard.outcome, load_exit(directory)) == (None, None)
        supervisor.stdin.close()
        wait_for(lambda: not proc.alive(forked, None))
        wait_for(lambda: guard.look() or guard.outcome)
        assert guard.outcome is not None
        assert guard.outcome.status == 2


def test_one_that_was_never_started_is_told_after_a_while(
    run: tuple[Guard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, directory = run
    guard.look()
    assert guard.outcome is None
    monkeypatch.setattr(guards, "UNSTARTED_S", 0.0)
    guard.look()
    how = load_exit(directory)
    assert how is not None
    assert (how.status, how.error) == (2, "the supervisor ended before it started the command")
