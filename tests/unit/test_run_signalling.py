"""A signal reaches only processes that are proven to belong to the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.run import proc, run_signals
from dpmon.run.run_directory import RunError, RunInfo, write_info
from dpmon.run.run_registry import create_run
from dpmon.run.run_signals import NOTHING_RUNS, stop_run
from support.run_harness import wait_for

SLEEPER = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]


def sleeper(**more: Any) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, **more)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


@pytest.fixture
def one() -> Iterator[subprocess.Popen[bytes]]:
    process = sleeper(start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def run(state: Path) -> tuple[Path, RunInfo]:
    return create_run(RunInfo("", "n", ("c",), "s", "/", None, 1e9, 0, proc.boot_id(), True))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The signals that would be sent; none is sent."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *words: calls.append(words))
    monkeypatch.setattr(os, "kill", lambda *words: calls.append(words))
    monkeypatch.setattr(os, "killpg", lambda *words: calls.append(words))
    return calls


def own(process: subprocess.Popen[bytes]) -> proc.ProcessEntry:
    found = proc.read_process(process.pid)
    assert found is not None
    return found


NUMBERS = [1, 0, -1, -(1 << 40), 1 << 22, 1 << 31, 1 << 64, 10**400, 10**5000]


@pytest.mark.parametrize("number", NUMBERS, ids=range(len(NUMBERS)))
@pytest.mark.parametrize("since", [None, 0.0, "its own"])
def test_numbers_that_no_command_has(
    run: tuple[Path, RunInfo], sent: list[object], number: int, since: float | str | None
) -> None:
    directory, info = run
    start = proc.start_time_s(number) if since == "its own" else since
    info = replace(info, command_pid=number, command_started=start)  # type: ignore[arg-type]
    assert run_signals.find_run_command(directory, info) is None
    assert run_signals.find_members(directory, info, run_ended=False) == {}
    if 1 << 63 <= number < 10**4300:  # Python writes no number of more digits
        write_info(directory, info)
        with pytest.raises(RunError):  # a run.json that cannot be read
            list(stop_run(directory))
    elif number < 1 << 63:
        write_info(directory, info)
        assert list(stop_run(directory))[-1] == NOTHING_RUNS
    assert sent == []


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_numbers_that_mean_more_than_one_process_are_never_sent_to(sent: list[object], number: int) -> None:
    everybody = proc.ProcessEntry(number, "S", 0, number, number, proc.start_time_s(number) or 0.0, None)
    assert not run_signals.send_signal(everybody, signal.SIGTERM)
    assert not run_signals.send_signal(everybody, signal.SIGTERM, group=True)
    assert sent == []


def test_another_start_is_another_process(one: subprocess.Popen[bytes]) -> None:
    found = own(one)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    for other in (found.start_s - tick, found.start_s + tick, found.start_s + 1e6):
        assert not run_signals.send_signal(replace(found, start_s=other), signal.SIGKILL)
        assert not run_signals.send_signal(replace(found, start_s=other), signal.SIGKILL, group=True)
    assert one.poll() is None
    assert run_signals.send_signal(found, signal.SIGKILL)
    assert one.wait() == -signal.SIGKILL
    assert not run_signals.send_signal(found, signal.SIGKILL)


def test_a_group_is_signalled_only_through_its_leader() -> None:
    leader = sleeper(preexec_fn=lambda: os.setpgid(0, 0))
    member = sleeper(preexec_fn=lambda: os.setpgid(0, leader.pid))
    try:
        assert own(member).group == leader.pid
        assert not run_signals.send_signal(own(member), signal.SIGKILL, group=True)
        assert run_signals.send_signal(own(leader), signal.SIGTERM, group=True)
        assert leader.wait() == member.wait() == -signal.SIGTERM
    finally:
        for process in (leader, member):
            process.kill()
            process.wait()


def test_the_environment_names_the_run(run: tuple[Path, RunInfo], tmp_path: Path) -> None:
    directory, info = run
    link = tmp_path / "link"
    link.symlink_to(directory.parent)
    values = (str(directory), str(link / directory.name), f"{directory}x", str(directory.parent), directory.name, "")
    children = [sleeper(env={"DPMON_RUN": value}) for value in values]
    try:
        named = [run_signals.belongs_to_run(child.pid, directory) for child in children]
        assert named == [True, True, False, False, False, False]
        found = run_signals.find_members(directory, info, run_ended=True)
        assert set(found) == {child.pid for child in children[:2]}
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_the_supervisor_and_the_caller_are_no_members(
    run: tuple[Path, RunInfo], one: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, info = run
    supervisor = sleeper(env={"DPMON_RUN": str(directory)})
    try:
        info = replace(info, supervisor_pid=supervisor.pid, supervisor_started=proc.start_time_s(supervisor.pid))
        assert run_signals.find_members(directory, info, run_ended=False) == {}
        info = replace(info, command_pid=one.pid, command_started=own(one).start_s)
        assert set(run_signals.find_members(directory, info, run_ended=False)) == {one.pid}
        monkeypatch.setattr(os, "getpid", lambda: one.pid)
        assert run_signals.find_members(directory, info, run_ended=False) == {}
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who may read the environments of other users' processes")
def test_the_process_of_another_user_proves_nothing(run: tuple[Path, RunInfo]) -> None:
    directory, info = run
    process = subprocess.Popen(["/bin/sleep", "600"], env={"DPMON_RUN": str(directory)}, user=65534, cwd="/")
    try:
        wait_for(
            lambda: proc.read_proc_bytes(process.pid, "cmdline").startswith(b"/bin/sleep"),
            what="the other user's process",
        )
        assert run_signals.find_members(directory, info, run_ended=False) == {}
    finally:
        process.kill()
        process.wait()
