"""The foreground of a run records how the command ended if no supervisor does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpmon.run import proc
from dpmon.run.lifecycle import build_exit_info, build_unknown_exit
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, write_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import create_run
from dpmon.supervise import foreground_guard as guards
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
