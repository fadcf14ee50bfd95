"""A supervisor is killed after it started the command, but before it recorded that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import wait_for

from dpmon.cli.headless import Follower
from dpmon.cli.launch import _detached
from dpmon.gpu.sampler import DeviceSampler
from dpmon.run import proc
from dpmon.run.ending import exit_info, unknown_exit
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunError, RunInfo, create_run, load_exit, save
from dpmon.supervise import guard as guards
from dpmon.supervise.guard import Guard, Successors
from dpmon.supervise.outcome import open_pipe, send_outcome
from dpmon.supervise.start import Started

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
    """Ignore children of this process that other tests have left."""
    others, everything = set(proc.every_process()), proc.every_process
    monkeypatch.setattr(
        proc, "every_process", lambda: {pid: each for pid, each in everything().items() if pid not in others}
    )


@pytest.fixture
def run(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Guard, Path]]:
    """A guard of a supervisor that was killed before it wrote anything; no other one is started."""
    monkeypatch.setattr(Successors, "start_if_needed", lambda *_: None)
    info = RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True)
    directory, _ = create_run(info)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        supervisor.kill()
        supervisor.wait()
        yield Guard(RunReader(directory), Started(supervisor, -1)), directory


def test_a_forked_command_is_waited_for_until_it_executes(run: tuple[Guard, Path], tmp_path: Path) -> None:
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
        guard = Guard(RunReader(directory), Started(supervisor, -1))
        guard.look()
        guard.look()
        assert (guard.outcome, load_exit(directory)) == (None, None)
        supervisor.stdin.close()
        wait_for(lambda: not proc.alive(forked, None))
        wait_for(lambda: guard.look() or guard.outcome)
        assert guard.outcome is not None
        assert guard.outcome.status == 2


def test_a_command_that_never_started_is_reported_after_a_while(
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


def test_the_command_is_reaped_only_after_its_status_is_recorded(
    run: tuple[Guard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a new supervisor that looks in between finds neither the process nor its status."""
    guard, directory = run
    command = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    save(directory, replace(guard.info, command_pid=command.pid, command_started=proc.started(command.pid)))
    seen = []
    record = Guard._record

    def records(self: Guard, how: ExitInfo) -> None:
        seen.append(Path(f"/proc/{command.pid}/stat").read_text().rpartition(")")[2].split()[0])
        record(self, how)

    monkeypatch.setattr(Guard, "_record", records)
    wait_for(lambda: guard.look() or guard.outcome)
    command.returncode = -9  # the guard has reaped it
    assert seen == ["Z"]
    assert not Path(f"/proc/{command.pid}").exists()
    how = load_exit(directory)
    assert how is not None
    assert (how.status, how.signal) == (137, "SIGKILL")


def test_a_status_wins_over_an_unknown_end_that_a_new_supervisor_recorded_first(
    run: tuple[Guard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, directory = run
    command = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    info = replace(guard.info, command_pid=command.pid, command_started=proc.started(command.pid))
    save(directory, info)
    waitid = os.waitid

    def looks(*which: int) -> Any:
        found = waitid(*which)
        if found is not None:
            save(directory, unknown_exit(info, "supervisor", "nobody knows", 1))
        return found

    monkeypatch.setattr(os, "waitid", looks)
    wait_for(lambda: guard.look() or guard.outcome)
    monkeypatch.undo()
    command.returncode = 3  # the guard has reaped it
    for how in (guard.exit(), load_exit(directory)):
        assert how is not None
        assert how.status == 3


class Ends:
    """A supervisor that is alive at the first checks and has ended at the next one, after it has called `last`."""

    pid = 0

    def __init__(self, last: Callable[[], None], lives: int = 1) -> None:
        self.looks, self._last, self._lives = 0, last, lives

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks == self._lives + 1:
            self._last()
        return None if self.looks <= self._lives else 0


def ended(status: int) -> ExitInfo:
    return exit_info(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True), status, "supervisor")


def test_a_detached_command_that_cannot_be_started_is_reported_however_late(state: Path) -> None:
    """The supervisor records that and ends between two checks."""
    directory, info = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True))
    why = exit_info(info, 2, "supervisor", "it cannot be started")
    for lives in (0, 1):
        (directory / "exit.json").unlink(missing_ok=True)
        supervisor: Any = Ends(lambda: save(directory, why), lives)
        with pytest.raises(RunError, match="it cannot be started"):
            _detached(directory, info, Started(supervisor, -1))


def test_a_supervisor_that_ends_between_two_checks_was_not_killed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not write exit.json, so only its pipe has the outcome."""
    directory, _ = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True))
    ours, theirs = open_pipe()
    supervisor = Ends(lambda: send_outcome(theirs, ended(5)))
    reader = RunReader(directory)
    follower = Follower(reader)
    said: list[str] = []
    monkeypatch.setattr(follower, "say", said.append)
    monkeypatch.setattr(Successors, "start_if_needed", lambda *_: None)
    monkeypatch.setattr(Follower, "_handle_signals", lambda *_: None)
    how = follower.follow(Guard(reader, Started(supervisor, ours)))  # type: ignore[arg-type]
    assert how is not None
    assert (how.status, said) == (5, [])
    os.close(ours)


def test_an_outcome_sent_by_a_supervisor_counts_if_it_then_stalls(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stalls after it has reaped the command, before it writes exit.json."""
    directory, _ = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True))
    ours, theirs = open_pipe()
    send_outcome(theirs, ended(5))
    guard = Guard(RunReader(directory), Started(Ends(lambda: None, lives=1 << 30), ours))  # type: ignore[arg-type]
    guard.look()
    assert guard.exit() is None, "it may be about to write exit.json"
    monkeypatch.setattr(guards, "STALLED_S", 0.0)
    assert wait_for(lambda: guard.look() and guard.outcome, 10).status == 5
    how = load_exit(directory)
    assert how is not None
    assert (how.status, how.drained) == (5, False)
    os.close(ours)


def test_an_end_that_only_the_ring_has_is_written_to_exit_json(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed between the foreground's check and its query of the outcome."""
    directory, _ = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True))
    monkeypatch.setattr(Successors, "start_if_needed", lambda *_: None)
    sampler = DeviceSampler(directory / "gpu.ring", 0, lambda: None)
    sampler.emit("exit", {"status": 5, "signal": None, "t_s": 1.0})
    guard = Guard(RunReader(directory), Started(Ends(lambda: None, lives=1), -1))  # type: ignore[arg-type]
    assert guard.look(), "it lived then"
    how = guard.exit()
    assert how is not None
    assert (how.status, load_exit(directory)) == (5, how)
    sampler.stop()


HALF_DEAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_an_end_that_only_the_ring_of_a_half_dead_supervisor_has(state: Path) -> None:
    """It is being killed: the kernel has ended its main thread and not yet the others, so nobody can wait for it.

    Until then it holds its lock, so no other supervisor can be started.
    """
    directory, _ = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True))
    sampler = DeviceSampler(directory / "gpu.ring", 0, lambda: None)
    sampler.emit("exit", {"status": 5, "signal": None, "t_s": 1.0})
    supervisor = subprocess.Popen([sys.executable, "-c", HALF_DEAD])
    try:
        wait_for(lambda: not proc.alive(supervisor.pid, None))
        assert supervisor.poll() is None
        guard = Guard(RunReader(directory), Started(supervisor, -1))
        guard.look()
        how = guard.exit()
    finally:
        supervisor.kill()
        supervisor.wait()
    assert how is not None
    assert (guard.lost, guard._successors.newest) == (None, None)
    assert (how.status, load_exit(directory)) == (5, how)
    sampler.stop()


def test_an_outcome_read_from_the_pipe_counts_after_the_supervisor_has_ended(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe can be read only once."""
    directory, _ = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True))
    monkeypatch.setattr(Successors, "start_if_needed", lambda *_: None)
    ours, theirs = open_pipe()
    send_outcome(theirs, ended(5))
    guard = Guard(RunReader(directory), Started(Ends(lambda: None, lives=2), ours))  # type: ignore[arg-type]
    wait_for(lambda: not guard.look(), 10)
    assert guard.outcome is not None
    assert guard.outcome.status == 5
    os.close(ours)
