"""Sends signals to the processes of a run, and stops it. Every signal that dpmon sends goes through this module.

A process id in run.json proves nothing: the kernel may give the id to another process, and the directory may come from
another person. A process belongs to the run if its initial environment names the run's directory (DPMON_RUN), or if it
is the command, and its parent is the run's supervisor (DPMON_SUPERVISES) or this process. Its descendants belong to the
run, too, and so does the session that the command leads, if one of these processes is in it.

If the kernel has pidfds, dpmon opens one first, then checks that the process belongs to the run, then sends the signal
through the pidfd. A pidfd never refers to another process, so the result of the check is still valid then.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from dpmon.run import proc
from dpmon.run.lifecycle import YOUNG_S, has_live_supervisor, is_command_alive, may_be_live_elsewhere, wait_until
from dpmon.run.mirror_state import MirrorState
from dpmon.run.proc import ProcessEntry
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info, record_stop_request

SUPERVISES = "DPMON_SUPERVISES"
"""The variable that names the run's directory in the environment of its supervisor."""


def belongs_to_run(pid: int, directory: Path, variable: str = "DPMON_RUN") -> bool:
    """Return whether the process was executed with a variable `variable` that names `directory`."""
    run_path = proc.environment_variable(pid, variable)
    if run_path is None:
        return False
    # The path may contain a link. Names of runs are unique, so compare the name first and resolve only a match.
    return run_path == str(directory) or (
        os.path.basename(run_path) == directory.name and os.path.realpath(run_path) == os.path.realpath(directory)
    )


def find_run_command(directory: Path, run_info: RunInfo) -> ProcessEntry | None:
    """Return the command, alive or not yet reaped; None if nothing proves that the recorded process is the command."""
    pid = run_info.command_pid
    if pid is None or pid <= 1 or run_info.boot_id != proc.boot_id():
        return None
    process = proc.read_process(pid)
    is_same = process is not None and proc.has_start_time(process, run_info.command_started)
    return process if is_same and is_member(pid, directory) else None


def is_member(pid: int, directory: Path) -> bool:
    """Return whether the process or an ancestor is proven to be the run's, or is its supervisor or this process."""
    while pid > 1:
        if pid == os.getpid() or belongs_to_run(pid, directory) or belongs_to_run(pid, directory, SUPERVISES):
            return True
        process = proc.read_process(pid)
        pid = 0 if process is None else process.parent
    return False


def find_members(
    directory: Path, run_info: RunInfo, *, run_ended: bool, known_members: Mapping[int, ProcessEntry] | None = None
) -> dict[int, ProcessEntry]:
    """Return the living processes that are proven to be the run's, except the caller and the run's supervisor.

    `run_ended`: whether the run has ended, so that its recorded command does not count. `known_members`: members found
    earlier.
    """
    table = proc.read_process_table()
    pids = {pid for pid in table if pid > 1 and belongs_to_run(pid, directory)}
    for pid, process in (known_members or {}).items():
        if pid in table and proc.has_start_time(table[pid], process.start_s):
            pids.add(pid)
    command = None if run_ended else find_run_command(directory, run_info)
    if command is not None and command.pid in table:
        pids.add(command.pid)
    root = run_info.command_pid
    if root in pids or any(root in (table[pid].group, table[pid].session) for pid in pids):
        # The kernel does not reuse a process id while a group or a session still has this id.
        pids |= {pid for pid, process in table.items() if root in (process.group, process.session)}
    pids = proc.with_descendants(pids, table)
    pids.discard(os.getpid())
    supervisor = table.get(run_info.supervisor_pid or 0)
    if supervisor is not None and proc.has_start_time(supervisor, run_info.supervisor_started):
        pids.discard(supervisor.pid)
    return {pid: table[pid] for pid in pids if not table[pid].is_dead}


def send_to_all(members: Mapping[int, ProcessEntry], root: int | None, signal_number: int) -> None:
    """Send a signal to the process group of the command `root` in one call, then to the other members, oldest first."""
    leader = members.get(root or 0)
    # The caller may be in that group: the training can call `dpmon stop`.
    group_reached = leader is not None and os.getpgrp() != root and send_signal(leader, signal_number, group=True)
    for process in sorted(members.values(), key=lambda process: process.start_s):
        if not (group_reached and process.group == root):
            send_signal(process, signal_number)


def send_signal(process: ProcessEntry, signal_number: int, *, group: bool = False) -> bool:
    """Send a signal to this very process. Return False if it has ended or may not be signaled.

    `group`: send it to the process group that it leads, in one call, as a terminal does. Return False also if it leads
    no group.
    """
    if process.pid <= 1 or (group and process.group != process.pid):
        return False
    fd = proc.open_pidfd(process.pid)
    try:
        if not proc.is_alive(process.pid, process.start_s):
            return False
        if group:
            os.killpg(process.pid, signal_number)  # the kernel does not reuse the id while the group exists
        elif fd is not None:
            signal.pidfd_send_signal(fd, signal_number)
        else:
            os.kill(process.pid, signal_number)
    except OSError:
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True


# ------------------------------------------------------------------------------------------------ stop

GRACE_S = 5.0
NOTHING_RUNS = "nothing runs"
STOPPED_BY = "stopped by "


def stop_run(directory: Path, last_known: RunInfo | None = None) -> Iterator[str]:
    """Send SIGINT, SIGTERM and SIGKILL in turn until no process of the run is left; wait GRACE_S seconds after each.

    Yields a line for each signal sent; the last line is the result. `last_known`: earlier contents of run.json, in case
    the directory was deleted. Sends no signal and raises RunError if the directory is not a run, or if the run is on
    another machine.
    """
    try:
        run_info = _wait_for_start(directory)
    except RunError:
        if last_known is None or directory.exists():
            raise
        run_info = last_known
    exit_info = load_exit(directory)
    if run_info.nodes:
        yield from _stop_nodes(directory, run_info)
        return
    if may_be_live_elsewhere(directory, run_info, exit_info):
        raise RunError(f"{directory.name} is on another node; stop it there")
    members = find_members(directory, run_info, run_ended=exit_info is not None)
    if not members:
        if exit_info is None and is_command_alive(run_info):
            pid = run_info.command_pid
            yield f"process {pid} is recorded as the command, but nothing proves it: no signal was sent"
        yield NOTHING_RUNS
        return
    if exit_info is None:
        record_stop_request(directory)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        yield f"{signal_number.name} to {_format_process_count(len(members))}"
        send_to_all(members, run_info.command_pid, signal_number)
        members = _wait_for_end(directory, run_info, members)
        if not members:
            yield f"{STOPPED_BY}{signal_number.name}"
            return
    yield f"{_format_process_count(len(members))} cannot be stopped: {', '.join(map(str, sorted(members)))}"


def _format_process_count(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _stop_nodes(directory: Path, run_info: RunInfo) -> Iterator[str]:
    """Ask the nodes of a mirror to stop their runs. Yield how many have ended, whenever that changes."""
    mirror = MirrorState(directory, run_info.start_ns)
    if load_exit(directory) is not None:
        yield NOTHING_RUNS
        return
    if not has_live_supervisor(run_info) or not mirror.send_request({"ask": "stop"}):
        yield "no node is connected, so the run cannot be stopped now: try again in a few seconds"
        return
    record_stop_request(directory)
    deadline_s = time.monotonic() + 60.0
    reported: set[str] = set()
    has_ended, ended, node_count = False, 0, len(run_info.nodes)
    while not has_ended and time.monotonic() < deadline_s:
        has_ended = load_exit(directory) is not None  # first: then the mirror has written its last counts
        ended, node_count = mirror.state.get("ended") or (0, node_count)
        replies = mirror.replies()
        failures = {} if replies is None else replies.failures
        lines = [f"{ended} of {node_count} nodes have ended", *(f"{name}: {text}" for name, text in failures.items())]
        yield from (line for line in lines if line not in reported)
        reported.update(lines)
        time.sleep(0.05)
    yield f"{STOPPED_BY}its nodes" if has_ended else f"{node_count - ended} of {node_count} nodes cannot be stopped"


def _wait_for_start(directory: Path) -> RunInfo:
    """Return the contents of run.json; for a starting run, as soon as they have the process id of the command.

    A mirror has no command, so there is no wait.
    """

    def has_started() -> bool:
        run_info = load_info(directory)
        is_young = 0 <= time.time() - run_info.started_unix < YOUNG_S
        return run_info.command_pid is not None or not is_young or load_exit(directory) is not None

    if not load_info(directory).nodes:
        wait_until(has_started, 10.0)
    return load_info(directory)


def wait_for_record(directory: Path) -> None:
    """Wait up to 30 s for a live supervisor to record the end of a stopped run."""
    run_info = load_info(directory)
    wait_until(lambda: load_exit(directory) is not None or not has_live_supervisor(run_info), 30.0)


def _wait_for_end(directory: Path, run_info: RunInfo, members: dict[int, ProcessEntry]) -> dict[int, ProcessEntry]:
    """Wait until all members have ended. Return those alive after GRACE_S seconds, including new children."""
    deadline_s = time.monotonic() + GRACE_S
    while members and time.monotonic() < deadline_s:
        wait_until(partial(_have_all_ended, members), 0.3)  # a search reads the whole process table
        members = find_members(directory, run_info, run_ended=load_exit(directory) is not None, known_members=members)
    return members


def _have_all_ended(members: Mapping[int, ProcessEntry]) -> bool:
    return not any(proc.is_alive(pid, process.start_s) for pid, process in members.items())
