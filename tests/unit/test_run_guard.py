"""The foreground of a run records how the command ended if no supervisor does."""

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

from dpmon.cli import launch
from dpmon.run import lifecycle, proc
from dpmon.run.lifecycle import build_exit_info, build_unknown_exit
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, write_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import create_run
from dpmon.supervise import foreground_guard as guards
from dpmon.supervise.command_process import find_command
from dpmon.supervise.foreground_guard import SupervisorGuard
from dpmon.supervise.start_supervisor import SupervisorTakeover
from support.run_harness import wait_for


@pytest.fixture
def run(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SupervisorGuard, Path]]:
    """A guard of a supervisor that was killed before it wrote anything; no other one is started."""
    monkeypatch.setattr(SupervisorTakeover, "start_if_needed", lambda self: None)
    info = RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True)
    directory, _ = create_run(info)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        supervisor.kill()
        supervisor.wait()
        yield SupervisorGuard(RunReader(directory), supervisor), directory


def started(directory: Path, info: RunInfo, code: str) -> tuple[subprocess.Popen[bytes], RunInfo]:
    """Start a command, and write it into run.json."""
    command = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    info = replace(info, command_pid=command.pid, command_started=proc.start_time_s(command.pid))
    write_info(directory, info)
    return command, info


def looked(guard: SupervisorGuard) -> ExitInfo | None:
    guard.poll()
    return guard.exit_info()


def test_a_command_that_may_have_been_started_is_left_to_the_new_supervisor(
    run: tuple[SupervisorGuard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor was killed before it recorded the command, or before it started it."""
    guard, directory = run
    monkeypatch.setattr(proc, "read_process_table", dict)  # children that another test left behind are no command
    with monkeypatch.context() as patch:
        patch.setattr(SupervisorTakeover, "is_running", True)
        assert looked(guard) is None
    assert looked(guard) == load_exit(directory)
    how = load_exit(directory)
    assert how is not None
    assert (how.status, how.error, how.drained) == (2, "the supervisor ended before it started the command", False)


def test_the_command_is_reaped_only_after_its_status_is_recorded(
    run: tuple[SupervisorGuard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a new supervisor that looks in between finds neither the process nor its status."""
    guard, directory = run
    command, _ = started(directory, guard.info, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    seen = []

    def records(place: Path, how: ExitInfo) -> None:
        seen.append(Path(f"/proc/{command.pid}/stat").read_text().rpartition(")")[2].split()[0])
        write_info(place, how)

    monkeypatch.setattr(guards, "write_info", records)
    wait_for(lambda: looked(guard))
    command.returncode = -9  # the guard has reaped it
    assert seen == ["Z"]
    assert not Path(f"/proc/{command.pid}").exists()
    how = load_exit(directory)
    assert how is not None
    assert (how.status, how.signal) == (137, "SIGKILL")


@pytest.mark.parametrize("complete", [False, True])
def test_a_status_wins_over_an_unknown_end_and_a_complete_record_over_both(
    run: tuple[SupervisorGuard, Path], monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """A new supervisor records the end while this process looks for the status."""
    guard, directory = run
    command, info = started(directory, guard.info, "raise SystemExit(3)")
    recorded = (
        build_exit_info(info, 3, "supervisor")
        if complete
        else build_unknown_exit(info, "supervisor", "nobody knows", 1)
    )
    exit_status = proc.exit_status

    def looks(pid: int, start_s: float | None) -> int | None:
        found = exit_status(pid, start_s)
        if found is not None:
            write_info(directory, recorded)
        return found

    monkeypatch.setattr(proc, "exit_status", looks)
    wait_for(lambda: looked(guard))
    command.returncode = 3  # the guard has reaped it
    for how in (guard.exit_info(), load_exit(directory)):
        assert how is not None
        assert how.status == 3
    assert (load_exit(directory) == recorded) is complete


def test_the_end_of_a_command_that_another_process_reaped_is_unknown(run: tuple[SupervisorGuard, Path]) -> None:
    guard, directory = run
    command, _ = started(directory, guard.info, "")
    command.wait()
    how = wait_for(lambda: looked(guard))
    assert how == load_exit(directory)
    assert (how.status, how.unknown) == (None, "the supervisor was killed, and another process had reaped the command")


def test_a_process_that_an_unrecorded_command_left_behind_is_not_the_command(
    run: tuple[SupervisorGuard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, directory = run
    env, every_process = {**os.environ, "DPMON_RUN": str(directory)}, proc.read_process_table
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); sys.exit(3)"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env=env) as command:
        os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
        left = wait_for(lambda: find_command(directory))
        ours = (command.pid, left.pid)  # not the zombies of other tests
        monkeypatch.setattr(
            proc, "read_process_table", lambda: {pid: each for pid, each in every_process().items() if pid in ours}
        )
        try:
            assert wait_for(lambda: looked(guard)).status == 3
        finally:
            os.kill(left.pid, signal.SIGKILL)
            command.returncode = 3  # the guard has reaped it


STARTS = """
import os, subprocess, sys
env = {**os.environ, "DPMON_RUN": sys.argv[2]}
command = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, env=env)
input()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_signal_reaches_a_command_that_could_not_be_recorded(
    state: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The supervisor lives, but run.json cannot be rewritten."""
    directory, _ = create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, proc.boot_id(), True))
    monkeypatch.setattr(guards, "STUCK_SUPERVISOR_S", 0.0)
    code = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    code += "; print(os.getpid(), flush=True); time.sleep(60)"
    words = [sys.executable, "-c", STARTS, code, str(directory)]
    with subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        command = int(supervisor.stdout.readline())
        guard = SupervisorGuard(RunReader(directory), supervisor)  # type: ignore[arg-type]  # its pipes are not read
        wait_for(lambda: guard.send(number))
        wait_for(lambda: not proc.is_alive(command, None))
        assert not guard.send(number)
        assert wait_for(lambda: looked(guard)).status == 128 + number, "the supervisor does not record it"
        supervisor.kill()


def test_an_end_counts_when_the_last_records_are_written_or_nobody_writes_them(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, "", True)
    directory, info = create_run(info)
    now = build_exit_info(info, 5, "supervisor", drained=False)
    earlier = replace(now, end_ns=now.end_ns - 2000 * 10**9)
    monkeypatch.setattr(lifecycle, "STUCK_SUPERVISOR_S", 1000.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as supervisor:
        started_s = proc.start_time_s(supervisor.pid)
        info = replace(info, boot_id=proc.boot_id(), supervisor_pid=supervisor.pid, supervisor_started=started_s)
        write_info(directory, info)
        guard = SupervisorGuard(RunReader(directory), supervisor)
        write_info(directory, now)
        assert guard.exit_info() is None, "the supervisor is writing them"
        write_info(directory, earlier)
        assert guard.exit_info() == earlier, "the supervisor is stopped or stuck"
        write_info(directory, replace(now, drained=True))
        assert guard.exit_info() == replace(now, drained=True)
        supervisor.kill()
        supervisor.wait()
        write_info(directory, now)
        assert SupervisorGuard(RunReader(directory), supervisor).exit_info() == now, "it was killed"


def test_an_end_that_was_recorded_while_this_process_was_stopped_is_seen(
    run: tuple[SupervisorGuard, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped, as by Ctrl-Z, until the limit of its wait had passed."""
    guard, directory = run
    clock, asleep_s = time.monotonic, 0.0

    def stopped(_: float) -> None:
        nonlocal asleep_s
        asleep_s = 60.0
        write_info(directory, build_exit_info(guard.info, 3, "supervisor"))

    monkeypatch.setattr(time, "sleep", stopped)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + asleep_s)
    how = launch._wait_for_exit_record(guard)
    assert how is not None
    assert how.status == 3
